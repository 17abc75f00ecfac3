"""A run folder with recorded steps, without a model: real batch, advantages, weights and loss, made-up log-probs.

A test plants a bug in one of the stages that a step goes through; :func:`record` passes what each stage made through
the bug's function. The alphabet is one byte a token, so that a token can be half a character.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.algorithm.losses import LossInputs, vanilla
from core.config import Config
from core.learner.batching import make_batch, mini_batches
from core.learner.learner import clipped_how
from core.learner.passes import TracedTokens
from core.trace import TraceRecorder, _byte_of
from core.types import Prompt, ScoredGroup, Segment, StepMetrics, Stop, TrainBatch, Trajectory
from reward_scores.score import graded
from tests.core.synthetic import configured, make_run
from tests.padded import estimate

PAD, EOS, BOS, WHOLE = 256, 257, 258, 259
EVIL = "<img src=x onerror=\"document.title='owned'\">"  # one token; a text has it as the character \x01
NAMES = {code: name for name, code in _byte_of().items()} | {PAD: "<pad>", EOS: "<eos>", BOS: "<bos>", WHOLE: EVIL}
Bugs = Mapping[str, Callable[[Any], Any]]


class ByteTokenizer:
    """One token a byte, as a byte-level vocabulary has it, and three special ones. Counts what it decodes."""

    eos_token_id, pad_token_id = EOS, PAD
    decoded = 0

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [NAMES.get(one) for one in ids]

    def batch_decode(self, rows: Sequence[Sequence[int]], **_: Any) -> list[str]:
        self.decoded += len(rows)
        return [NAMES.get(one, "") if one > 255 else bytes([one]).decode("utf-8", "replace") for (one,) in rows]


class Workers:
    def __init__(self, traced: TracedTokens):
        self.kept = traced

    def traced(self, rows):
        return self.kept.of(rows)


def traced_config(folder: Path, **changes: Any) -> Config:
    values = {f"trainer.trace.{name}": value for name, value in {"freq": 1, "groups": 4, **changes}.items()}
    return configured({"trainer.default_local_dir": str(folder), "actor_rollout_ref.rollout.n": 4, **values})


def trajectory(
    rng: np.random.Generator, question: str, text: str, tool: str = "", length: int = 0, **changes
) -> Trajectory:
    """One or two turns of the policy, with a tool's answer between them."""
    prompt = [BOS, *question.encode()]
    first, second = [WHOLE if one == 1 else one for one in text.encode()], list(b"so it is 7") if tool else []
    first += rng.integers(97, 123, max(0, length - len(first) - len(second) - len(tool.encode()) - 1)).tolist()
    ids = [*first, *tool.encode(), *second, EOS]
    mask = [True] * len(first) + [False] * len(tool.encode()) + [True] * (len(second) + 1)
    logprobs = np.where(mask, -rng.exponential(0.4, len(ids)), 0).astype(np.float32)
    segments = [Segment("policy", text)]
    segments += [Segment("tool", tool), Segment("policy", "so it is 7<eos>")] if tool else []
    made = Trajectory(prompt, ids, mask, logprobs, tuple(segments), Stop.EOS, 0, 0, 1 + bool(tool), int(bool(tool)))
    return dataclasses.replace(made, **changes)


TEXT = "think <b>7</b> &amp; é"


def made_groups(
    step: int, seed: int, count: int = 4, n: int = 4, length: int = 0, text: str = TEXT, tool: str = ""
) -> list[ScoredGroup]:
    """Groups of ``n`` answers of which some are right; the questions of every step are the same."""
    rng = np.random.default_rng([seed, step])
    found = []
    for index in range(count):
        question = f"Question {index}: how much is <b>{index}</b> + 7?"
        chat = ({"role": "user", "content": question},)
        prompt = Prompt(10 * step + index, f"q{index}", (BOS,), chat, "7", "tests/sums")
        every = [trajectory(rng, question, text, tool, length, policy_version=step - 1) for _ in range(n)]
        right = (rng.permutation(n) < 1 + (index + step) % (n - 1)).tolist()
        scores = tuple(graded(ok, "7" if ok else "8", 1.0 if ok else 0.0, format=0.5) for ok in right)
        found.append(ScoredGroup(prompt, tuple(every), scores))
    return found


def record(
    config: Config,
    step: int = 1,
    groups: Sequence[ScoredGroup] | None = None,
    bugs: Bugs | None = None,
    seed: int = 0,
    recorder: TraceRecorder | None = None,
    single: bool = False,
) -> TraceRecorder:
    """Record one step. ``bugs`` have functions by stage: groups, batch, old, advantages, weights, loss.

    ``single`` is a step of one optimizer step: without old log-probs.
    """

    def passing(stage: str, value: Any) -> Any:
        return (bugs or {}).get(stage, lambda same: same)(value)

    rng = torch.Generator().manual_seed(seed + step)
    recorder = recorder or TraceRecorder(config, ByteTokenizer(), 4)
    groups = passing("groups", list(groups or made_groups(step, seed)))
    batch = passing("batch", recorder.begin(make_batch(groups, PAD), step))
    noise = 1e-6 * torch.randn(batch.tokens, generator=rng)
    old = passing("old", (batch.rollout_log_probs + noise) * batch.response_mask)
    batch = batch.adding(old_log_probs=None if single else old)
    batch = estimate(batch, config.algorithm)
    batch = passing("advantages", batch)
    traced = TracedTokens()
    for one in mini_batches(batch, prompts=len(groups), agg_mode="token-mean", scale_factor=100):
        update(passing("weights", one), old, traced, config, passing, rng)
    metrics = StepMetrics(step)
    metrics.add({"timing_s/step": 1.0})
    recorder.metrics = recorder.record(groups, batch, metrics, Workers(traced))
    return recorder


def update(one: TrainBatch, old: torch.Tensor, traced: TracedTokens, config: Config, passing: Callable, rng) -> None:
    """Compute the loss as the learner does, with log-probs that a few updates have moved, and keep it."""
    actor, old_N = config.actor_rollout_ref.actor, one.adding(entropy=old).entropy
    moved = 0.2 * torch.randn(one.tokens, generator=rng) if one.has("old_log_probs") else torch.zeros(one.tokens)
    now = (old_N + moved) * one.response_mask
    loss, stats = vanilla(LossInputs(now, old_N, one.advantages, one.response_mask, actor, one.lengths))
    entropy = torch.rand(one.tokens, generator=rng) * one.response_mask
    kept = {"old": old_N, "entropy": entropy, "clip": clipped_how(stats), "loss": loss, "loss_weight": one.loss_weight}
    kept = passing("loss", {"log_prob": now, **kept})
    traced.keep(one, kept.pop("log_prob"), **kept)


def traced_run(
    folder: Path, steps: Sequence[int] = (1, 2), bugs: Bugs | None = None, seed: int = 0, **groups: Any
) -> Path:
    """Write a run folder with these steps recorded, and return it."""
    config = traced_config(folder)
    make_run(folder, config, steps=4, questions=8)
    for step in steps:
        record(config, step, made_groups(step, seed, **groups), bugs, seed)
    return folder
