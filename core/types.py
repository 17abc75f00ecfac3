"""The values that flow through the loop, and the one alignment rule. Imports no torch: scorers and reports use it too.

Axes, which a tensor's name carries: ``P`` prompts a step, ``G`` trajectories a prompt, ``B = P * G`` sequences, ``N``
tokens of all sequences, one sequence after another; padded to the longest sequence a tensor is ``[B, T]``.

**Alignment.** Entry ``[n]`` of any ``[N]`` tensor describes the token ``input_ids[n]``. A log-prob is
``log p(token n | tokens of its sequence before n)``, a value is that of the state in which token ``n`` is chosen, so
both come from the hidden state at ``n - 1``. That shift happens in exactly one function
(``core.learner.packing.predicting_tokens``); nothing else in the repository moves a tensor by one.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
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

    def __reduce_ex__(self, protocol):  # Python 3.11.2 would store a call of getattr, which torch does not load
        return type(self), (self.value,)


@dataclass(frozen=True)
class Prompt:
    """One question, tokenised once."""

    ordinal: int  # its number in the order of drawing; with the run's seed it decides sampling seeds and all else
    uid: str  # names the example, so that the same question can be paired across runs
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    style: str = "rule"  # "model": the reward model scores the answers, any other: a scorer
    media: Any = None  # core.vision.pictures.Pictures, in the order of their placeholders in ``token_ids``; None: none
    opened_tag: str | None = None  # a tag such as <think> that the prompt's end opens and the policy has to close


@dataclass(frozen=True)
class Segment:
    """A stretch of the response and who wrote it: ``policy``, ``tool``, ..."""

    role: str
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """One flat token stream and the mask of the tokens that the policy wrote; R response tokens."""

    prompt_ids: np.ndarray  # [len(prompt)] int32
    response_ids: np.ndarray  # [R] int32: everything after the prompt, tool output included
    response_mask: np.ndarray  # [R] bool: True where the policy wrote the token
    logprobs: np.ndarray  # [R] float32: the engine's, under the distribution it sampled from; 0 elsewhere
    segments: tuple[Segment, ...]
    stop: Stop
    policy_version: int
    seed: int
    turns: int = 1
    tool_calls: int = 0
    user_scores: tuple[float, ...] = ()  # what a simulated user gave the policy's turns, in their order
    tool_rewards: tuple[float, ...] = ()  # what tools gave the policy's calls, in their order

    def __post_init__(self) -> None:
        dtypes = {"prompt_ids": np.int32, "response_ids": np.int32, "response_mask": np.bool_, "logprobs": np.float32}
        for name, dtype in dtypes.items():
            value = np.array(getattr(self, name), dtype=dtype)
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        if not len(self.response_ids) == len(self.response_mask) == len(self.logprobs):
            raise ValueError("response_ids, response_mask and logprobs differ in length")

    def __repr__(self) -> str:
        """Return a short text: asyncio of Python 3.11 formats a step's groups, which took longer than collecting."""
        return f"Trajectory({len(self.response_ids)} tokens, {self.stop.value}, seed={self.seed})"

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


@dataclass(frozen=True, eq=False)
class Dropped:
    """What is kept of a group that did not pass: the oldest policy version among its samples, and their tokens."""

    version: int
    tokens: int


class BatchField:
    """A field of a batch: its axes, and the phase that sets it. As an attribute it is the tensor that is stored.

    One of another phase than ``make_batch`` is None until it is set.
    """

    def __init__(self, axes: str, phase: str = "make_batch"):
        self.axes, self.phase = axes, phase

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: TrainBatch | None, owner: type) -> Any:
        if batch is None:
            return self
        return batch.require(self.name) if self.phase == "make_batch" else batch.stored.get(self.name)


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """What a step trains on: the tokens of all sequences, one sequence after another, without padding.

    Phases set fields with :meth:`adding`. Two phases replace one: rollout correction takes rejected tokens out of
    ``loss_mask``, and a KL penalty lowers ``reward``. A batch is pickled as numpy arrays, whose memory Ray shares
    between the processes of a node; what was cut from a larger batch does not carry the rest of it along.

    Shapes: each field has N tokens (prompts included) or B sequences, as its first argument says. Ids are int32, masks
    bool, ``group`` and ``trace_row`` int64, all others float32. Numbers of tokens are 0 outside ``response_mask``.
    """

    lengths: Tensor  # [B] int64: tokens of each sequence
    stored: Mapping[str, Tensor]  # of each field that is set
    pad_id: int = 0  # for padded()
    media: Mapping[int, Any] = field(default_factory=dict)  # Prompt.media of each group, once a group

    input_ids = BatchField("N")  # prompt, then response
    response_mask = BatchField("N")  # written by the policy
    loss_mask = BatchField("N")  # response_mask less the sequences and tokens that carry no loss
    group = BatchField("B")  # index of the sequence's prompt in the step
    reward = BatchField("B")  # the shaped score; less its KL penalty once that is taken off
    in_group_stats = BatchField("B")  # the sequence's reward enters its group's statistics
    rollout_log_probs = BatchField("N")  # as the engine reported them
    sampled_mask = BatchField("N", "make_batch, without state masking")  # has one, where that is not response_mask
    baseline = BatchField("B", "make_batch, for an estimator with a greedy baseline")  # that answer's score
    old_log_probs = BatchField("N", "compute_log_probs")  # the learner's, before the step's first update
    entropy = BatchField("N", "compute_log_probs")  # of the distribution of the old log-probs, until it is measured
    ref_log_prob = BatchField("N", "compute_log_probs, with a KL term")  # the reference policy's
    values = BatchField("N", "compute_log_probs, with a critic")
    rollout_is_weights = BatchField("N", "rollout correction, with rollout_correction.rollout_is")  # of the loss
    advantages = BatchField("N", "compute_advantages")
    returns = BatchField("N", "compute_advantages")  # the critic's target
    loss_weight = BatchField("N", "mini_batches, once a mini-batch")  # the token's share of the objective
    selected = BatchField("N", "mini_batching, for a policy loss that selects tokens")  # treated apart by it
    trace_row = BatchField("B", "update, in steps that trainer.trace records")  # one more than the index in the step

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Return N, the number of tokens."""
        return int(self.lengths.sum())

    def require(self, name: str) -> Tensor:
        """Return a field, or raise an error that names the phase which should have set it."""
        if name not in self.stored:
            raise ValueError(f"TrainBatch.{name} is not set yet: {BATCH_FIELDS[name].phase} sets it")
        return self.stored[name]

    def padded(self, name: str) -> Tensor:
        """Return a field of tokens as [B, T], padded on the right; T is the longest sequence."""
        return pad(self.require(name), self.lengths, self.pad_id if name == "input_ids" else 0)

    def adding(self, **fields: Tensor | None) -> TrainBatch:
        """Return a batch with these fields set as well; None takes a field away."""
        stored = dict(self.stored)
        for name, value in fields.items():
            if value is None:
                stored.pop(name, None)
                continue
            axes = BATCH_FIELDS[name].axes
            shape = (len(self) if axes == "B" else self.tokens,)
            if tuple(value.shape) != shape:
                raise ValueError(f"TrainBatch.{name} has shape {tuple(value.shape)}, expected {shape} ({axes})")
            stored[name] = value.int() if name == "input_ids" else value
        return dataclasses.replace(self, stored=stored)

    def only(self, names: Collection[str]) -> TrainBatch:
        """Return a batch that has no other fields than these: what a process reads, and is sent."""
        kept = {*names, "group"} if self.media else names
        return dataclasses.replace(self, stored={name: value for name, value in self.stored.items() if name in kept})

    def rows(self, index: Any) -> TrainBatch:
        """Return the sequences of ``index`` (a slice, a list or a tensor of numbers), with every field that is set.

        Tokens of neighbours are a view of this batch.
        """
        import torch

        rows = torch.arange(len(self), device=self.lengths.device)[index]
        spans, neighbours = self.spans(rows), bool((rows.diff() == 1).all())

        def chosen(value: Tensor, axes: str) -> Tensor:
            if axes == "B":
                return value[rows]
            if neighbours and spans:
                return value[spans[0].start : spans[-1].stop]
            # Copied sequence by sequence: an index of every token would take 8 bytes each, and ten times as long.
            return torch.cat([value[span] for span in spans]) if spans else value[:0]

        return self._map(chosen, self.lengths[rows])

    def spans(self, rows: Tensor) -> list[slice]:
        """Return where the tokens of each of these sequences are in a field of tokens."""
        ends = self.lengths.cumsum(0)
        return [slice(*both) for both in zip((ends - self.lengths)[rows].tolist(), ends[rows].tolist(), strict=True)]

    def put(self, target_N: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write values of the tokens of these sequences, in their order, to their places in a tensor of all tokens."""
        for span, part in zip(self.spans(rows), values.split(self.lengths[rows].tolist()), strict=True):
            target_N[span] = part

    def blank_row(self) -> TrainBatch:
        """Return a sequence of two tokens that nobody wrote and that weigh nothing, with the fields of this batch."""
        blank = self._map(lambda value, axes: value.new_zeros(2 if axes == "N" else 1), self.lengths.new_full((1,), 2))
        return dataclasses.replace(blank, media={})

    def to(self, device: Any) -> TrainBatch:
        lengths = self.lengths.to(device, non_blocking=True)
        return self._map(lambda value, axes: value.to(device, non_blocking=True), lengths)

    def _map(self, f: Callable[[Tensor, str], Tensor], lengths: Tensor) -> TrainBatch:
        stored = {name: f(value, BATCH_FIELDS[name].axes) for name, value in self.stored.items()}
        return dataclasses.replace(self, lengths=lengths, stored=stored)

    def __getstate__(self) -> dict[str, Any]:
        stored = {name: value.cpu().numpy() for name, value in self.stored.items()}
        here = set(stored["group"].tolist()) if self.media else ()
        media = {group: value for group, value in self.media.items() if group in here}
        return {**vars(self), "lengths": self.lengths.cpu().numpy(), "stored": stored, "media": media}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import torch

        with warnings.catch_warnings():  # Ray maps what it holds into every process of a node; nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            stored = {name: torch.from_numpy(value) for name, value in state["stored"].items()}
            vars(self).update({**state, "lengths": torch.from_numpy(state["lengths"]), "stored": stored})


def pad(value_N: Tensor, lengths_B: Tensor, fill: float = 0) -> Tensor:
    """Return [B, T] of the tokens of B sequences, padded on the right to the longest; differentiable."""
    mask_BT = token_places(lengths_B)
    return value_N.new_full(mask_BT.shape, fill).masked_scatter(mask_BT, value_N)


def token_places(lengths_B: Tensor) -> Tensor:
    """Return [B, T] bool: where padded sequences of these lengths have tokens."""
    import torch

    longest = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]


BATCH_FIELDS = {name: one for name, one in vars(TrainBatch).items() if isinstance(one, BatchField)}


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
