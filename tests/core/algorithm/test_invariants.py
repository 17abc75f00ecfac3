"""Each invariant holds of sound values, and names phase and remedy where one of them is changed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from core.algorithm import invariants
from core.algorithm.advantages import AdvantageInputs, estimator, inputs_of
from core.config.sections.algorithm import AlgorithmConfig
from core.errors import BrokenInvariant
from core.learner.batching import make_batch, mini_batches
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score
from tests.padded import estimate
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
GRPO, GAE = AlgorithmConfig(adv_estimator="grpo"), AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8)


def made_groups(text: str = "ab", tool: str = "xy", scores=((1.0, 0.0, 0.5), (0.0, 2.0, 0.0))) -> list[ScoredGroup]:
    """Two prompts with three answers of two turns each, with a tool's text between them."""
    rng, groups = np.random.default_rng(0), []
    for number, values in enumerate(scores):
        trajectories = []
        for index in range(len(values)):
            first, second = TOKENIZER.encode(text * (1 + index)), [*TOKENIZER.encode("c"), TOKENIZER.eos_token_id]
            ids = [*first, *TOKENIZER.encode(tool), *second]
            mask = [True] * len(first) + [False] * len(tool) + [True] * len(second)
            logprobs = np.where(mask, -rng.random(len(ids)), 0)
            segments = (Segment("policy", text * (1 + index)), Segment("tool", tool), Segment("policy", "c"))
            trajectories.append(Trajectory([3, 5, 6], ids, mask, logprobs, segments, Stop.EOS, 0, 0, 2, 1))
        prompt = Prompt(number, f"q{number}", (3, 5, 6), (), None, "tests")
        groups.append(ScoredGroup(prompt, tuple(trajectories), tuple(map(Score, values))))
    return groups


def batch_of(groups, config=None):
    batch = make_batch(groups, 0)
    if config is None:
        return batch
    if config is GAE:
        torch.manual_seed(0)
        batch = batch.adding(values=torch.randn(batch.tokens) * batch.response_mask)
    return estimate(batch, config)


def broken(match: str):
    return pytest.raises(BrokenInvariant, match=match)


def test_sound_values_pass():
    groups = made_groups()
    batch = batch_of(groups)
    invariants.batch_is_its_groups(groups, batch)
    invariants.text_is_the_policys(groups, TOKENIZER)
    invariants.prompts_begin_once(groups, TOKENIZER)
    ids = np.array([5, TOKENIZER.eos_token_id])
    invariants.turns_end_as_reported([(ids, frozenset([TOKENIZER.eos_token_id]))])


@pytest.mark.parametrize("config", [GRPO, GAE, GRPO.replace(norm_adv_by_std_in_grpo=False)])
def test_sound_advantages_pass(config):
    batch = batch_of(made_groups(), config)
    invariants.rewards_are_on_policy_tokens(inputs_of(batch, config))
    invariants.advantages_follow(batch, None, config)


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("response_mask", lambda mask: mask & (torch.arange(len(mask)) != len(mask) - 1), "the mask of row 5 has 7"),
        ("input_ids", lambda ids: ids.roll(1), "input_ids are not the prompts and responses"),
        ("input_ids", lambda ids: torch.cat([ids[:1] + 1, ids[1:]]), "input_ids are not the prompts and responses"),
        ("rollout_log_probs", lambda value: value.roll(1), "rollout_log_probs of the policy's tokens"),
        ("reward", lambda value: value.flip(0), "rewards are not the scores of their rows"),
        ("group", lambda group: torch.arange(len(group)) % 2, "groups of other prompts"),
        ("loss_mask", lambda mask: torch.zeros_like(mask), "the loss mask is not"),
    ],
)
def test_a_batch_that_is_not_its_groups(field, change, match):
    groups = made_groups()
    batch = batch_of(groups)
    with broken(f"phase batch: .*{match}"):
        invariants.batch_is_its_groups(groups, batch.adding(**{field: change(batch.require(field))}))


def test_masked_answers_and_the_ablation_without_a_mask_are_sound():
    groups = made_groups()
    scores = (dataclasses.replace(groups[0].scores[0], masked=True), *groups[0].scores[1:])
    groups[0] = dataclasses.replace(groups[0], scores=scores)
    invariants.batch_is_its_groups(groups, make_batch(groups, 0))
    invariants.batch_is_its_groups(groups, make_batch(groups, 0, state_masking=False))


def test_texts_prompts_and_ends():
    groups = made_groups()
    heard = Segment("policy", "xy")  # a tool's text under the policy's name
    one = dataclasses.replace(groups[0].trajectories[0], segments=(*groups[0].trajectories[0].segments, heard))
    with broken("phase reward: the scorer read 'abcxy', and the policy wrote 'abc'"):
        invariants.text_is_the_policys(
            [dataclasses.replace(groups[0], trajectories=(one, *groups[0].trajectories[1:]))], TOKENIZER
        )
    twice = dataclasses.replace(groups[0].prompt, token_ids=(3, 3, 5))
    with broken("phase gen: the prompt of uid='q0' begins with token 3 twice; take it out of the chat template"):
        invariants.prompts_begin_once([dataclasses.replace(groups[0], prompt=twice)], TOKENIZER)
    with broken(r"its last tokens are \[4, 5\]"):
        invariants.turns_end_as_reported([(np.array([4, 5]), frozenset([1]))])


def test_rewards_on_other_tokens(monkeypatch):
    batch = batch_of(made_groups(), GRPO)
    with broken("phase adv: a reward stands on a token that the policy did not write"):
        invariants.rewards_are_on_policy_tokens(inputs_of(batch, GRPO, torch.ones(batch.tokens)))
    monkeypatch.setattr(AdvantageInputs, "action_rewards", lambda self: torch.zeros(int(self.actions_B.sum())))
    with broken("token rewards add up to 0, and the rows' to 3.5"):
        invariants.rewards_are_on_policy_tokens(inputs_of(batch, GRPO))


def test_advantages_follow_from_rewards_and_what_tokens_add_to_them():
    plain = batch_of(made_groups(), GAE)
    added = 0.1 * torch.randn(plain.tokens) * plain.response_mask
    for config in (GRPO, GAE):
        advantages, returns = estimator(config.adv_estimator)(inputs_of(plain, config, added))
        batch = plain.adding(advantages=advantages, returns=returns)
        invariants.advantages_follow(batch, added, config)
        with broken("other sign" if config is GRPO else "returns differ by"):
            invariants.advantages_follow(batch, -20 * added, config)


def test_advantages_of_another_comparison():
    batch = batch_of(made_groups(), GRPO)
    with broken("add up to"):
        invariants.advantages_follow(batch.adding(advantages=batch.require("advantages") + 0.5), None, GRPO)
    with broken("other sign"):
        invariants.advantages_follow(batch.adding(advantages=-batch.require("advantages")), None, GRPO)
    with broken("larger than any"):
        invariants.advantages_follow(batch.adding(advantages=9 * batch.require("advantages")), None, GRPO)
    whole = batch_of([*made_groups()], GAE)
    with broken("returns differ by"):
        invariants.advantages_follow(whole.adding(returns=whole.require("returns").roll(1)), None, GAE)


def test_weights_of_steps_and_their_parts():
    batch = batch_of(made_groups(), GRPO)
    (step,) = mini_batches(batch, prompts=2, scale_factor=1)
    invariants.weights_are_a_mean(step, "token-mean")
    twice = step.adding(loss_weight=2 * step.require("loss_weight"))
    with broken("with loss_agg_mode=token-mean the weights sum to 2"):
        invariants.weights_are_a_mean(twice, "token-mean")
    invariants.weights_are_a_mean(twice, "seq-mean-token-sum")
    left = step.require("loss_weight") * (torch.arange(step.tokens) != step.tokens - 1)
    with broken("phase update: 1 tokens have a loss weight and carry no loss, or carry loss and have no weight"):
        invariants.weights_are_a_mean(step.adding(loss_weight=left), "seq-mean-token-sum")


def test_updates():
    parameter = torch.ones(16, requires_grad=True)
    invariants.gradients_are_cleared([parameter])
    parameter.sum().backward()
    with broken("gradients of an earlier optimizer step"):
        invariants.gradients_are_cleared([parameter])
    with broken("the optimizer steps on weights in torch.bfloat16"):
        invariants.gradients_are_cleared([torch.ones(16, dtype=torch.bfloat16, requires_grad=True)])
    invariants.ratio_moves(1e-9, 500, 1e-6, 1.0)
    invariants.ratio_moves(0.0, 500, 1e-9, 1.0)
    invariants.ratio_moves(0.0, 500, 1e-6, 1e-9)  # nothing to learn: all advantages were 0
    with broken("exactly 1 at every token"):
        invariants.ratio_moves(0.0, 500, 1e-6, 1.0)
    invariants.rate_is_positive(0.0, 1e-6, 5)
    invariants.rate_is_positive(0.0, 0.0, 1)
    with broken("learning rate of 0"):
        invariants.rate_is_positive(0.0, 1e-6, 1)


def test_kl_reference_and_resume():
    invariants.kl_is_a_distance(-1.0, "kl")  # k1 may be negative
    with broken("kl_loss_type=k3\\+ gave a mean KL of -0.1"):
        invariants.kl_is_a_distance(-0.1, "k3+")
    old, mask = torch.randn(200), torch.ones(200, dtype=torch.bool)
    invariants.reference_stays(old, old + 1e-6, mask)
    with broken("phase ref: the policy was updated"):
        invariants.reference_stays(old, old.clone(), mask)
    invariants.ordinals_go_on([64, 65], 64)
    with broken("a step begins with example 0, and those below 64 are trained"):
        invariants.ordinals_go_on([0, 65], 64)
    groups = made_groups()  # of policy 0
    invariants.samples_are_fresh(groups, 1, 0)
    invariants.samples_are_fresh(groups, 2, 1)
    with broken("step 2 has samples of policy 0, older than trainer.max_staleness=0 allows"):
        invariants.samples_are_fresh(groups, 2, 0)
    invariants.resume_goes_on(None, 0, 2)
    invariants.resume_goes_on(64.0, 64, 2)
    with broken("step 2 ended before example 64, and the checkpoint goes on with 0"):
        invariants.resume_goes_on(64.0, 0, 2)
