"""GRPO in one file against the trainer: the same trajectories give the same losses, gradients and
weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from core.config.composition import compose
from core.learner.batching import MicroBatchSize, make_batch, mini_batches
from core.learner.learner import Actor
from core.ray_trainer import RayPPOTrainer
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from recipes.grpo import from_scratch
from reward_scores import hops as hops_scorer
from reward_scores.score import Score
from tests.faults import tiny_run
from tests.padded import estimate
from tests.tiny import VOCAB_SIZE, tiny_model

STEPS, PROMPTS, GROUP = 5, 4, 3


def as_tensors(
    groups: tuple[ScoredGroup, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids_BT, mask_BT and reward_B of the groups, padded by other code than the
    trainer's."""
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    rows = [torch.tensor([*answer.prompt_ids, *answer.response_ids]) for answer in answers]
    masks = [
        torch.tensor([*(False for _ in answer.prompt_ids), *answer.response_mask])
        for answer in answers
    ]
    padded = (torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (rows, masks))
    return *padded, torch.tensor(
        [score.value for group in groups for score in group.scores], dtype=dtype
    )


def random_groups(seed: int) -> tuple[ScoredGroup, ...]:
    """Return a step's groups: prompts and answers of mixed lengths, one group of equal rewards."""
    rng, groups = np.random.default_rng(seed), []
    for ordinal in range(PROMPTS):
        prompt, made = rng.integers(4, VOCAB_SIZE, rng.integers(2, 7)), []
        for _ in range(GROUP):
            length = int(rng.integers(1, 15))
            ids, wrote = rng.integers(4, VOCAB_SIZE, length), np.ones(length, bool)
            made.append(Trajectory(prompt, ids, wrote, np.zeros(length), (), Stop.EOS, 0, 0))
        scores = tuple(Score(1.0 if ordinal == 1 else float(rng.normal())) for _ in made)
        groups.append(
            ScoredGroup(
                Prompt(ordinal, str(ordinal), tuple(prompt), (), "x", "test"), tuple(made), scores
            )
        )
    return tuple(groups)


def recording(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return a list that receives the clipped gradients of each optimizer step."""
    seen: list[list[Tensor]] = []

    def record(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        seen.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    optimizer.register_step_pre_hook(record)
    return seen


def actor_step(actor: Actor, groups: tuple[ScoredGroup, ...], config) -> list[dict[str, float]]:
    """Train the learner on the groups as the trainer does, in float64 throughout. Returns each
    update's metrics."""
    batch = make_batch(groups, pad_id=0)
    batch = batch.adding(
        reward=as_tensors(groups, torch.float64)[2], loss_mask=batch.loss_mask.double()
    )
    old_N, _ = actor.log_probs(batch, MicroBatchSize(max_sequences=5))
    batch = estimate(batch.adding(old_log_probs=old_N), config.algorithm)
    steps = mini_batches(
        batch, prompts=PROMPTS // 2, agg_mode=actor.config.loss_agg_mode, scale_factor=1.0
    )
    return [actor.update([step], 1.0) for step in steps]


@pytest.mark.parametrize("lr", [from_scratch.LEARNING_RATE, 0.02])
def test_losses_gradients_and_weights_are_those_of_the_learner_in_float64(lr, monkeypatch):
    monkeypatch.setattr(from_scratch, "LEARNING_RATE", lr)
    config = compose("grpo", ["preset=lab", f"actor_rollout_ref.actor.optim.lr={lr}"])
    actor = Actor(tiny_model().double(), config.actor_rollout_ref.actor, temperature=1.0)
    model = tiny_model().double()
    optimizer = from_scratch.make_optimizer(model)
    gradients = [recording(each) for each in (actor.stepper.optimizer, optimizer)]
    dual_clipped = 0.0
    for step in range(STEPS):
        groups = random_groups(step)
        metrics = actor_step(actor, groups, config)
        ids_BT, mask_BT, reward_B = as_tensors(groups, torch.float64)
        adv_B = from_scratch.group_advantages(reward_B, GROUP)
        losses = from_scratch.update(model, optimizer, ids_BT, mask_BT, adv_B)
        assert losses == pytest.approx([each["actor/pg_loss"] for each in metrics], rel=0, abs=1e-9)
        dual_clipped += sum(each["actor/pg_clipfrac_lower"] for each in metrics)
    assert [len(each) for each in gradients] == [2 * STEPS, 2 * STEPS]
    for theirs, ours in zip(*map(itertools.chain.from_iterable, gradients), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    for theirs, ours in zip(actor.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert dual_clipped > 0 or lr < 0.01  # at the large rate every branch of the loss acts


def test_losses_and_weights_are_those_of_fit_in_float32(tmp_path):
    tiny_run.prepare(tmp_path)
    overrides = (
        "trainer.backend=local",
        f"trainer.save_freq={STEPS}",
        "trainer.test_freq=-1",
        "trainer.logger=[jsonl]",
    )
    lr = f"actor_rollout_ref.actor.optim.lr={from_scratch.LEARNING_RATE}"
    command = tiny_run.command(tmp_path, "grpo", STEPS, lr, *overrides)
    collected: list[tuple[ScoredGroup, ...]] = []

    class Recorder(RayPPOTrainer):
        def collect(self, metrics):
            collected.append(super().collect(metrics))
            return collected[-1]

    Recorder(compose("grpo", command(tmp_path / "run")[3:])).init_workers().fit()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    recorded = [line["actor/pg_loss"] for line in lines if "actor/pg_loss" in line]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    start = [parameter.clone() for parameter in model.parameters()]
    optimizer = from_scratch.make_optimizer(model)
    gradients = recording(optimizer)
    assert len(collected) == len(recorded) == STEPS
    for groups, loss in zip(collected, recorded, strict=True):
        ids_BT, mask_BT, reward_B = as_tensors(groups, torch.float32)
        adv_B = from_scratch.group_advantages(reward_B, GROUP)
        assert adv_B.abs().max() > 0.5
        losses = from_scratch.update(model, optimizer, ids_BT, mask_BT, adv_B)
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=0, abs=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / f"run/global_step_{STEPS}/actor")
    undecided = 0
    for at, (theirs, ours) in enumerate(zip(trained.parameters(), model.parameters(), strict=True)):
        # AdamW divides a first gradient by itself plus 1e-8: one that is as small as that is
        # rounding, made large.
        sizes = torch.stack([each[at].abs() for each in gradients])
        decided = (sizes.where(sizes > 0, 1.0) > 1e-7).all(0)
        torch.testing.assert_close(ours[decided], theirs[decided], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=from_scratch.LEARNING_RATE)
        assert (ours - start[at]).abs().max() > 5e-4  # moved by far more than the bound
        undecided += int((~decided).sum())
    assert undecided < 0.01 * model.num_parameters()


def test_the_settings_are_those_of_the_lab_preset():
    config = compose("grpo", ["preset=lab"])
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    ours = from_scratch
    assert (config.data.train_batch_size, rollout.n) == (ours.PROMPTS, ours.GROUP)
    assert (config.data.max_response_length, rollout.temperature) == (
        ours.MAX_NEW_TOKENS,
        ours.TEMPERATURE,
    )
    assert (ours.UPDATES * actor.ppo_mini_batch_size, actor.ppo_epochs) == (ours.PROMPTS, 1)
    assert (actor.optim.lr, tuple(actor.optim.betas)) == (ours.LEARNING_RATE, ours.BETAS)
    assert (actor.optim.weight_decay, actor.grad_clip) == (ours.WEIGHT_DECAY, ours.GRAD_CLIP)
    assert {ours.CLIP} == {actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high}
    assert (ours.DUAL_CLIP, actor.loss_agg_mode) == (actor.clip_ratio_c, "token-mean")
    assert (
        not actor.use_kl_loss and actor.entropy_coeff == 0 and not config.algorithm.use_kl_in_reward
    )
    assert str(ours.BASE_MODEL) == str(Path(config.actor_rollout_ref.model.path))
    assert (ours.EVALUATE_EVERY, rollout.val_kwargs.temperature) == (
        config.trainer.test_freq,
        ours.TEMPERATURE,
    )


@pytest.mark.parametrize(
    "text", ["abcd#d", "#d", "#a #d\n", "abcd#a", "abcd", "", "#", "d#", "# d", "d"]
)
def test_the_reward_is_the_scorers(text):
    assert from_scratch.reward(text, "d") == hops_scorer.score(text, "d").value


def test_a_sample_ends_with_its_end_token_and_each_token_follows_from_those_before_it(monkeypatch):
    """Near temperature 0 each token is the likeliest one of a plain pass, unless cache or shift are
    wrong."""
    monkeypatch.setattr(from_scratch, "TEMPERATURE", 1e-4)
    model, pad = tiny_model(), 0
    prompts_BT = torch.randint(4, VOCAB_SIZE, (6, 5), generator=torch.Generator().manual_seed(0))
    free_BT, _ = from_scratch.sample(model, prompts_BT, -1, pad)
    # A token that ends the first answer, at the latest, with its fourth token
    eos = int(free_BT[0, 8])
    ids_BT, mask_BT = from_scratch.sample(model, prompts_BT, eos, pad)
    assert not mask_BT[:, :5].any() and torch.equal(ids_BT[:, :5], prompts_BT)
    logits_BTV = model(input_ids=ids_BT).logits
    for row in range(len(ids_BT)):
        answer = ids_BT[row][mask_BT[row]].tolist()
        assert eos not in answer[:-1] and (
            answer[-1] == eos or len(answer) == from_scratch.MAX_NEW_TOKENS
        )
        assert (ids_BT[row, 5 + len(answer) :] == pad).all() and mask_BT[
            row, 5 : 5 + len(answer)
        ].all()
        assert answer == logits_BTV[row, 4 : 4 + len(answer)].argmax(-1).tolist()
    assert (
        int(mask_BT[0].sum()) <= 4
        and int(mask_BT.sum()) < free_BT.shape[0] * from_scratch.MAX_NEW_TOKENS
    )
