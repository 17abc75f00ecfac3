"""Each check holds of a sound step, and fails where one value is another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from core.algorithm import checks
from core.config.training_keys import AlgorithmConfig
from core.engines.engine import SampleRequest, SamplingParams
from core.errors import BrokenInvariant, InputError
from core.learner.batching import make_batch
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score

GRPO = AlgorithmConfig(adv_estimator="grpo")


def made_groups() -> list[ScoredGroup]:
    """Two prompts with three answers of two turns each, with a tool's two tokens between them."""
    rng, groups = np.random.default_rng(0), []
    for number, values in enumerate(((1.0, 0.0, 0.5), (0.0, 2.0, 0.0))):
        trajectories = []
        for index in range(3):
            mask = np.array([True] * (2 + index) + [False] * 2 + [True] * 2)
            ids, logprobs = (
                rng.integers(7, 30, len(mask)),
                np.where(mask, -rng.random(len(mask)), 0),
            )
            seed = 10 * number + index
            trajectories.append(
                Trajectory([3, 5, 6], ids, mask, logprobs, (), Stop.EOS, 0, seed, 2, 1)
            )
        prompt = Prompt(number, f"q{number}", (3, 5, 6), (), None, "tests")
        groups.append(ScoredGroup(prompt, tuple(trajectories), tuple(map(Score, values))))
    return groups


def broken(match: str):
    return pytest.raises(BrokenInvariant, match=match)


@pytest.mark.parametrize("second", [dict, torch.Tensor])
def test_what_a_loss_or_an_estimator_returns_has_a_number_for_each_token(second):
    """A mean, returned by mistake, would spread over the tokens of a micro-batch and train on
    another objective."""
    one, other = torch.ones(3), {} if second is dict else torch.ones(3)
    assert checks.of_tokens(lambda x: (x, other), one, one.shape, second) == (one, other)
    wrong = (
        one,
        (one.mean(), other),
        (one[:2], other),
        (0.5, other),
        (one, other, other),
        [one, other],
        None,
    )
    for found in (*wrong, (one, None)):
        with pytest.raises(InputError, match=r"<lambda> returned .*, expected \[\[3\], "):
            checks.of_tokens(lambda x, found=found: found, one, one.shape, second)


@pytest.mark.parametrize("state_masking", [True, False])
def test_a_batch_is_what_was_sampled(state_masking):
    groups = made_groups()
    groups[0] = dataclasses.replace(
        groups[0], scores=(Score(1.0, masked=True), *groups[0].scores[1:])
    )
    batch = make_batch(groups, 0, state_masking)
    checks.batch_is_sampled(groups, batch)
    mask = "response_mask" if state_masking else "sampled_mask"
    last = torch.arange(batch.tokens) == batch.tokens - 1
    for name, value, found in (
        ("input_ids", batch.input_ids.roll(1), "input_ids are not"),
        (mask, getattr(batch, mask) & ~last, "the mask of 1 tokens"),
        ("rollout_log_probs", batch.rollout_log_probs.roll(1), "rollout_log_probs"),
    ):
        with broken(f"phase batch: {found}"):
            checks.batch_is_sampled(groups, batch.adding(**{name: value}))


def test_what_trains_is_what_the_engine_returned():
    groups, sampled = made_groups(), checks.SampledTurns()
    for one in (t for group in groups for t in group.trajectories):
        first = len(one.response_ids) - 4
        for turn, (begin, end) in enumerate(((0, first), (first + 2, first + 4))):
            request = SampleRequest((3, 5, 6), SamplingParams(99), one.seed + 1000 * turn, one.seed)
            ids, logprobs = one.response_ids[begin:end], one.logprobs[begin:end]
            sampled.add(
                request,
                Trajectory(
                    [3], ids, [True] * (end - begin), logprobs, (), Stop.EOS, 0, request.seed
                ),
            )
    sampled.check(groups)
    one = groups[1].trajectories[2]
    for name, value in (
        ("response_mask", np.append(one.response_mask[:-1], False)),  # the end of the sequence
        ("response_mask", np.ones_like(one.response_mask)),  # what a tool wrote
        ("response_ids", one.response_ids + 1),
        ("logprobs", one.logprobs * 0.5),
    ):
        changed = (*groups[1].trajectories[:2], dataclasses.replace(one, **{name: value}))
        with broken("of the trajectory of seed 12 are not what the engine returned"):
            sampled.check([groups[0], dataclasses.replace(groups[1], trajectories=changed)])
    sampled.forget(oldest=1)
    assert not sampled.turns
    sampled.check(groups)  # of a checkpoint: unknown


def test_nothing_is_infinite():
    batch = make_batch(made_groups(), 0)
    batch = batch.adding(old_log_probs=torch.zeros(batch.tokens), values=torch.zeros(batch.tokens))
    checks.finite(batch, "log_probs", "old_log_probs", "values", "ref_log_prob")
    with broken("phase log_probs: 1 numbers of values are not finite"):
        value = batch.values.masked_fill(torch.arange(batch.tokens) == 7, float("nan"))
        checks.finite(batch.adding(values=value), "log_probs", "old_log_probs", "values")


def gap_z(entropy, log_prob, **more):
    gap = (entropy + log_prob).double()
    found = {
        "entropy_gap": float(gap.mean()),
        "entropy_gap_square": float(gap.square().mean()),
        **more,
    }
    return checks.entropy_gap_z(
        {f"rollout_corr/{name}": value for name, value in found.items()}, len(gap)
    )


def test_entropy_and_samples_agree_at_the_same_temperature_alone():
    torch.manual_seed(0)
    log_probs = (2 * torch.randn(3000, 40)).log_softmax(-1)
    sampled = log_probs.gather(1, log_probs.exp().multinomial(1))[:, 0]
    right, wrong = ((log_probs / temperature).log_softmax(-1) for temperature in (1.0, 0.8))
    entropies = [-(one.exp() * one).sum(-1) for one in (right, wrong)]
    assert abs(gap_z(entropies[0], sampled)) < 3 and gap_z(entropies[1], sampled) < -8
    assert gap_z(entropies[1], sampled, logp_diff_mean=0.2) == 0  # the engine is apart
    assert checks.entropy_gap_z({}, 3000) is None
