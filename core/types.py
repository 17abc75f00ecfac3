"""The values that flow through the loop, and the one alignment rule.

Axes: ``P`` prompts a step, ``G`` trajectories a prompt, ``B = P * G`` sequences, ``T`` tokens.
A tensor's name carries its axes: ``adv_BT``, ``reward_B``, ``groups_P``.

**Alignment.** Entry ``[b, t]`` of any ``[B, T]`` tensor describes the token ``input_ids[b, t]``.
A log-prob is ``log p(token t | tokens < t)``, a value is that of the state in which token ``t`` is
chosen, so both come from the hidden state at ``t - 1``. That shift happens in exactly one function
(``core.learner.packing.before``); nothing else in the repository moves a tensor by one.

Nothing here imports torch: the scorers, the configuration and the reports use these types too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import memory_phase
from reward_scores.score import Score

if TYPE_CHECKING:
    from torch import Tensor


class Stop(str, Enum):
    """Why an engine stopped writing."""

    EOS = "eos"  # the policy wrote the end-of-sequence token
    STOP_TOKEN = "stop_token"  # one of the request's stop ids, kept as the last token
    STOP_STRING = "stop_string"  # a stop string was completed by the last token
    LENGTH = "length"  # the token budget ran out: the response is truncated
    ABORT = "abort"  # given up before it ended; never trained on


@dataclass(frozen=True)
class Prompt:
    """One question, tokenised once.

    ``ordinal`` is the number of the prompt in the order of drawing; with the run's seed it decides
    everything about the prompt, sampling seeds included. ``uid`` names the data row, so that the
    same question can be paired across runs.
    """

    ordinal: int
    uid: str
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    style: str = "rule"  # "model": the reward model scores the answers, any other: a scorer


@dataclass(frozen=True)
class Segment:
    """A stretch of the response and who wrote it: ``policy``, ``tool``, ..."""

    role: str
    text: str


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One flat token stream and the mask of the tokens that the policy wrote.

    Shapes (R response tokens):
        prompt_ids     [len(prompt)] int32
        response_ids   [R] int32    everything after the prompt, tool output included
        response_mask  [R] bool     True where the policy wrote the token
        logprobs       [R] float32  the engine's, under the distribution it sampled from; 0 elsewhere
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_mask: np.ndarray
    logprobs: np.ndarray
    segments: tuple[Segment, ...]
    stop: Stop
    policy_version: int
    seed: int
    turns: int = 1
    tool_calls: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (
            ("prompt_ids", np.int32),
            ("response_ids", np.int32),
            ("response_mask", np.bool_),
            ("logprobs", np.float32),
        ):
            value = np.array(getattr(self, name), dtype=dtype)
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        lengths = {len(self.response_ids), len(self.response_mask), len(self.logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"response_ids, response_mask and logprobs differ in length: {sorted(lengths)}")

    @property
    def response_text(self) -> str:
        """What the policy wrote, and nothing else: the text a scorer may judge."""
        return "".join(segment.text for segment in self.segments if segment.role == "policy")

    @property
    def truncated(self) -> bool:
        return self.stop is Stop.LENGTH


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A prompt with its ``G`` trajectories and their scores: the unit that is kept or dropped."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]
    baseline: Score | None = None  # of a greedy answer, where the estimator asks for one

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.scores):
            raise ValueError(f"{len(self.trajectories)} trajectories but {len(self.scores)} scores")

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def version(self) -> int:
        """The oldest policy version among the samples."""
        return min(trajectory.policy_version for trajectory in self.trajectories)

    @property
    def tokens(self) -> int:
        return sum(len(trajectory.response_ids) for trajectory in self.trajectories)


@dataclass(frozen=True)
class Dropped:
    """What is kept of a group that did not pass: the oldest policy version among its samples, and their tokens."""

    version: int
    tokens: int


def _of(axes: str, phase: str, **options: Any) -> Any:
    """Declare a tensor of a batch: its axes, and the phase that sets it."""
    return field(metadata={"axes": axes, "phase": phase}, **options)


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """What a step trains on. Later phases add fields with :meth:`adding`; none is changed in place.

    Shapes:
        input_ids          [B, T] int64    prompt then response, right-padded
        attention_mask     [B, T] bool     a real token
        response_mask      [B, T] bool     written by the policy
        loss_mask          [B, T] bool     response_mask less the rows and tokens that carry no loss
        group              [B]    int64    index of the row's prompt in the step
        reward             [B]    float32  the shaped score
        in_group_stats     [B]    bool     the row's reward enters its group's statistics
        rollout_log_probs  [B, T] float32  as the engine reported them
        sampled_mask       [B, T] bool     has one, where that is not response_mask
        baseline           [B]    float32  score of the greedy answer to the row's prompt
        old_log_probs      [B, T] float32  the learner's, before the step's first update
        ref_log_prob       [B, T] float32  the reference policy's
        values             [B, T] float32  the critic's
        rollout_is_weights [B, T] float32  importance weights of the policy-gradient loss
        advantages         [B, T] float32  0 where response_mask is False
        returns            [B, T] float32  the critic's target
        loss_weight        [B, T] float32  the token's share of the objective, over all ranks
    """

    input_ids: Tensor = _of("BT", "make_batch")
    attention_mask: Tensor = _of("BT", "make_batch")
    response_mask: Tensor = _of("BT", "make_batch")
    loss_mask: Tensor = _of("BT", "make_batch")
    group: Tensor = _of("B", "make_batch")
    reward: Tensor = _of("B", "make_batch")
    in_group_stats: Tensor = _of("B", "make_batch")
    rollout_log_probs: Tensor = _of("BT", "make_batch")
    sampled_mask: Tensor | None = _of("BT", "make_batch, without state masking", default=None)
    baseline: Tensor | None = _of("B", "make_batch, for an estimator with a greedy baseline", default=None)
    old_log_probs: Tensor | None = _of("BT", "compute_log_probs", default=None)
    ref_log_prob: Tensor | None = _of("BT", "compute_log_probs, with a KL term", default=None)
    values: Tensor | None = _of("BT", "compute_log_probs, with a critic", default=None)
    rollout_is_weights: Tensor | None = _of("BT", "compute_log_probs, with rollout_correction.rollout_is", default=None)
    advantages: Tensor | None = _of("BT", "compute_advantages", default=None)
    returns: Tensor | None = _of("BT", "compute_advantages", default=None)
    loss_weight: Tensor | None = _of("BT", "optimizer_steps, once an optimizer step", default=None)

    def __post_init__(self) -> None:
        axes = dict(zip("BT", self.input_ids.shape, strict=True))
        for name, its in BATCH_FIELDS.items():
            value, names = getattr(self, name), its["axes"]
            wanted = tuple(axes[axis] for axis in names)
            if value is not None and tuple(value.shape) != wanted:
                raise ValueError(f"TrainBatch.{name} has shape {tuple(value.shape)}, expected {wanted} ({names})")

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def need(self, name: str) -> Tensor:
        """Return the field, or raise an error that names the phase which should have set it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"TrainBatch.{name} is not set yet: {BATCH_FIELDS[name]['phase']} sets it")
        return value

    def adding(self, **fields: Tensor) -> TrainBatch:
        """Return a batch with these fields set as well."""
        return dataclasses.replace(self, **fields)

    def rows(self, index: Any) -> TrainBatch:
        """Return the rows of ``index`` (a slice, a list or a tensor of numbers), with every field that is set."""
        return self._map(lambda value, axes: value[index])

    def cut(self, width: int) -> TrainBatch:
        """Return the first ``width`` columns: padding removed from a piece whose longest row is that long."""
        return self._map(lambda value, axes: value[:, :width] if axes == "BT" else value)

    def blank_row(self) -> TrainBatch:
        """One row of two tokens that nobody wrote and that weigh nothing, with the fields of this batch."""
        blank = self._map(lambda value, axes: value.new_zeros((1, 2) if axes == "BT" else (1,)))
        return blank.adding(attention_mask=~blank.attention_mask)

    def to(self, device: Any) -> TrainBatch:
        return self._map(lambda value, axes: value.to(device, non_blocking=True))

    def _map(self, f: Callable[[Tensor, str], Tensor]) -> TrainBatch:
        present = {name: (getattr(self, name), its["axes"]) for name, its in BATCH_FIELDS.items()}
        return TrainBatch(**{n: None if value is None else f(value, axes) for n, (value, axes) in present.items()})


BATCH_FIELDS = {one.name: one.metadata for one in dataclasses.fields(TrainBatch)}


class StepMetrics:
    """The numbers of one step. A name is written once; a value is finite."""

    def __init__(self, step: int):
        self.step = step
        self.values: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in self.values:
                raise ValueError(f"metric {name!r} was written twice in step {self.step}")
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"metric {name!r} is {number} in step {self.step}")
            self.values[name] = number

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Record ``timing_s/<phase>``, also where the phase raises; a failed allocation raises OutOfMemory."""
        start = time.perf_counter()
        try:
            with memory_phase(phase):
                yield
        finally:
            self.add({f"timing_s/{phase}": time.perf_counter() - start})
