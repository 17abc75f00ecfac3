"""The values that flow through the loop, and the one alignment rule.

This file imports no torch at its head: scorers and reports use it too.

A tensor's name ends with its axes: ``P`` prompts a step, ``G`` trajectories a prompt, ``B = P * G``
sequences, ``N`` tokens of all sequences, one sequence after another. Padded to the longest sequence
a tensor is ``[B, T]``.

**Alignment.** Entry ``[n]`` of any ``[N]`` tensor describes the token ``input_ids[n]``. A log-prob
is ``log p(token n | tokens of its sequence before n)``, a value is that of the state in which token
``n`` is chosen, so both come from the hidden state at ``n - 1``. That shift happens in exactly one
function (``core.learner.packed_attention.predicting_tokens``); nothing else in the repository
moves a tensor by one.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

    # Python 3.11.2 would store a call of getattr, which torch does not load
    def __reduce_ex__(self, protocol):
        return type(self), (self.value,)


@dataclass(frozen=True)
class Prompt:
    """One question, tokenised once."""

    # Its number in the order of drawing, which with the run's seed decides its sampling seeds
    ordinal: int
    uid: str  # names the example, so that the same question can be paired across runs
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    style: str = "rule"  # "model": the reward model scores the answers, any other: a scorer
    # core.vision.pictures.Pictures in the order of their placeholders in token_ids, or None
    media: Any = None
    # A tag such as <think> that the prompt's end opens and the policy has to close
    opened_tag: str | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of the response and who wrote it: ``policy``, ``tool``, ..."""

    role: str
    text: str


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The ids that top-k and top-p kept for each of n tokens, in one flat array.

    The ids of a token begin at the sum of the counts before it. A count of 0 means that nothing was
    cut: the token has the whole vocabulary.
    """

    ids: np.ndarray  # [K] int32
    counts: np.ndarray  # [n] int32

    @staticmethod
    def joined(parts: Sequence[tuple[KeptSets | None, int]]) -> KeptSets | None:
        """Return the sets of stretches of so many tokens; None if no stretch has any."""
        sets = [kept for kept, _ in parts if kept is not None]
        if not sets:
            return None
        counts = [
            np.zeros(length, np.int32) if kept is None else kept.counts for kept, length in parts
        ]
        return KeptSets(np.concatenate([kept.ids for kept in sets]), np.concatenate(counts))


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """One flat token stream and the mask of the tokens that the policy wrote; R response tokens."""

    prompt_ids: np.ndarray  # [len(prompt)] int32
    response_ids: np.ndarray  # [R] int32: everything after the prompt, tool output included
    response_mask: np.ndarray  # [R] bool: True where the policy wrote the token
    # [R] float32: the engine's, under the distribution it sampled from; 0 elsewhere
    logprobs: np.ndarray
    segments: tuple[Segment, ...]
    stop: Stop
    policy_version: int
    seed: int
    turns: int = 1
    tool_calls: int = 0
    user_scores: tuple[float, ...] = ()  # a simulated user's, of the policy's turns in their order
    tool_rewards: tuple[float, ...] = ()  # tools', of the policy's calls in their order
    failure: str = ""  # why it cannot be scored: a simulated user failed, for example
    reward: float | None = None  # an agent's own, in place of a scorer's
    # Further trajectories of the same episode, of an agent that branched or edited its history.
    # They have no branches of their own, and train with this one's score.
    branches: tuple[Trajectory, ...] = ()
    kept: KeptSets | None = None  # of the response tokens, if truncation cut any and it is replayed

    def __post_init__(self) -> None:
        dtypes = {
            "prompt_ids": np.int32,
            "response_ids": np.int32,
            "response_mask": np.bool_,
            "logprobs": np.float32,
        }
        for name, dtype in dtypes.items():
            value = np.array(getattr(self, name), dtype=dtype)
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        if not len(self.response_ids) == len(self.response_mask) == len(self.logprobs):
            raise ValueError("response_ids, response_mask and logprobs differ in length")

    def __repr__(self) -> str:
        """Return a short text.

        asyncio of Python 3.11 formats a step's groups, which took longer than collecting them.
        """
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
    def sequences(self) -> list[tuple[Trajectory, Score, bool]]:
        """Return the sequences of a batch, with their score and whether they are branches."""
        return [
            (sequence, score, sequence is not trajectory)
            for trajectory, score in zip(self.trajectories, self.scores, strict=True)
            for sequence in (trajectory, *trajectory.branches)
        ]

    @property
    def version(self) -> int:
        """The oldest policy version among the samples."""
        return min(trajectory.policy_version for trajectory, _, _ in self.sequences)

    @property
    def tokens(self) -> int:
        return sum(len(trajectory.response_ids) for trajectory, _, _ in self.sequences)


@dataclass(frozen=True, eq=False)
class Dropped:
    """What is left of a group that did not pass."""

    version: int  # the oldest policy version among its samples
    tokens: int  # of its samples


def batch_field(axes: str, phase: str) -> Any:
    """Declare a field of a batch, which ``phase`` sets.

    ``axes`` are N tokens, B sequences, or K kept ids: ``kept_counts[n]`` of token n.
    """
    return field(init=False, metadata={"axes": axes, "phase": phase})


@dataclass(frozen=True, eq=False, repr=False)
class TrainBatch:
    """What a step trains on: the tokens of all sequences, one after another, without padding.

    Phases set fields with :meth:`adding`. A field that is read before its phase has set it raises
    an error that names the phase; :meth:`has` tells which are set. Two phases replace a field:
    rollout correction takes rejected tokens out of ``loss_mask``, and a KL penalty lowers
    ``reward``.

    A batch is pickled as numpy arrays, whose memory Ray shares between the processes of a node.
    What was cut from a larger batch does not carry the rest of it along.

    Shapes: a token field has [N] entries (prompts included), a sequence field [B], ``kept_ids``
    [K]. Ids and counts are int32, masks bool, ``group`` int64, all others float32. Token fields of
    numbers are 0 outside ``response_mask``.
    """

    lengths: Tensor  # [B] int64: tokens of each sequence
    pad_id: int = 0  # for padded()
    media: Mapping[int, Any] = field(default_factory=dict)  # group -> Prompt.media

    # The prompt's tokens, then the response's
    input_ids: Tensor = batch_field("N", "make_batch")
    # True where the policy wrote the token
    response_mask: Tensor = batch_field("N", "make_batch")
    # response_mask without the sequences and tokens that carry no loss
    loss_mask: Tensor = batch_field("N", "make_batch")
    # Index of the sequence's prompt in the step
    group: Tensor = batch_field("B", "make_batch")
    # The shaped score; later less its KL penalty
    reward: Tensor = batch_field("B", "make_batch")
    # True where the sequence's reward enters its group's statistics
    in_group_stats: Tensor = batch_field("B", "make_batch")
    # True where an earlier sequence of the same episode is in the statistics for it
    is_branch: Tensor = batch_field("B", "make_batch, if an episode has several trajectories")
    # As the engine reported them
    rollout_log_probs: Tensor = batch_field("N", "make_batch")
    # True where the policy sampled the token, if that is not response_mask
    sampled_mask: Tensor = batch_field("N", "make_batch, if tokens train that nobody sampled")
    # Number of ids that truncation kept for the token; 0 stands for the whole vocabulary
    kept_counts: Tensor = batch_field("N", "make_batch, if truncated samples are replayed")
    # Those ids, int32, of all tokens one after another
    kept_ids: Tensor = batch_field("K", "make_batch, if truncated samples are replayed")
    # Score of the greedy answer to the sequence's prompt
    baseline: Tensor = batch_field("B", "make_batch, for an estimator with a greedy baseline")
    # The learner's log-probs before the step's first update
    old_log_probs: Tensor = batch_field("N", "compute_log_probs")
    # Entropy of the distribution behind the old log-probs
    entropy: Tensor = batch_field("N", "compute_log_probs")
    # The reference policy's log-probs
    ref_log_prob: Tensor = batch_field("N", "compute_log_probs, with a KL term")
    values: Tensor = batch_field("N", "compute_log_probs, with a critic")
    # Factors of the loss
    rollout_is_weights: Tensor = batch_field("N", "rollout correction, with rollout_is")
    advantages: Tensor = batch_field("N", "compute_advantages")
    # The critic's target
    returns: Tensor = batch_field("N", "compute_advantages")
    # The token's share of the objective of its mini-batch
    loss_weight: Tensor = batch_field("N", "mini_batches, once a mini-batch")
    # True at the tokens that the policy loss treats apart
    selected: Tensor = batch_field("N", "mini_batching, for a policy loss that selects tokens")
    # For clip_cov, which gives up clipped tokens: candidates in a random order, int32, the highest
    # first; positive where drawn, negative where a token waits to take the place of a clipped one
    selection_order: Tensor = batch_field("N", "mini_batching, for clip_cov")

    if not TYPE_CHECKING:  # a type checker knows the fields above and no others

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which names the phase that sets the field."""
            if name not in BATCH_FIELDS:
                raise AttributeError(f"TrainBatch has no field {name!r}")
            phase = BATCH_FIELDS[name].metadata["phase"]
            raise AttributeError(f"TrainBatch.{name} is not set yet: {phase} sets it")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Return N, the number of tokens."""
        return int(self.lengths.sum())

    def has(self, name: str) -> bool:
        """Return whether a field is set. Raises KeyError for a name that is no field's."""
        return BATCH_FIELDS[name].name in vars(self)

    def optional(self, name: str) -> Tensor | None:
        """Return a field, or None if it is not set."""
        return getattr(self, name) if self.has(name) else None

    @property
    def stored(self) -> dict[str, Tensor]:
        """Return the fields that are set."""
        return {name: vars(self)[name] for name in BATCH_FIELDS if name in vars(self)}

    def padded(self, name: str) -> Tensor:
        """Return a field of tokens as [B, T], padded on the right; T is the longest sequence."""
        fill = self.pad_id if name == "input_ids" else 0
        return pad(getattr(self, name), self.lengths, fill)

    def adding(self, **fields: Tensor | None) -> TrainBatch:
        """Return a batch with these fields set as well; None takes a field away."""
        stored = self.stored
        for name, value in fields.items():
            if value is None:
                stored.pop(name, None)
                continue
            axes = BATCH_FIELDS[name].metadata["axes"]
            sizes = {"B": len(self), "N": self.tokens}
            if axes == "K":
                sizes["K"] = int(stored["kept_counts"].sum())
            shape = (sizes[axes],)
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"TrainBatch.{name} has shape {tuple(value.shape)}, expected {shape} ({axes})"
                )
            stored[name] = value.int() if name == "input_ids" else value
        return self._with(stored)

    def only(self, names: Collection[str]) -> TrainBatch:
        """Return a batch with these fields alone: those that a process is sent and reads."""
        kept = {*names, "group"} if self.media else names
        return self._with({name: value for name, value in self.stored.items() if name in kept})

    def rows(self, index: Any) -> TrainBatch:
        """Return the sequences of ``index``: a slice, a list, or a tensor of numbers.

        Tokens of neighbouring sequences are a view of this batch.
        """
        import torch

        rows = torch.arange(len(self), device=self.lengths.device)[index]
        spans = {"N": self.spans(rows)}
        if self.has("kept_counts"):
            spans["K"] = self._kept_spans(spans["N"])
        are_neighbours = bool((rows.diff() == 1).all())

        def select(value: Tensor, axes: str) -> Tensor:
            if axes == "B":
                return value[rows]
            if not spans[axes]:
                return value[:0]
            if are_neighbours:
                return value[spans[axes][0].start : spans[axes][-1].stop]
            # An index of every token would take 8 bytes for each, and ten times as long
            return torch.cat([value[span] for span in spans[axes]])

        return self._map(select, self.lengths[rows])

    def spans(self, rows: Tensor) -> list[slice]:
        """Return where the tokens of each of these sequences are in a field of tokens."""
        ends_B = self.lengths.cumsum(0)
        starts = (ends_B - self.lengths)[rows].tolist()
        ends = ends_B[rows].tolist()
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    def _kept_spans(self, spans: list[slice]) -> list[slice]:
        """Return where the kept ids of these spans of tokens are in ``kept_ids``."""
        offset_N1 = self.kept_counts.new_zeros(self.tokens + 1, dtype=self.lengths.dtype)
        offset_N1[1:] = self.kept_counts.cumsum(0)
        starts = offset_N1[[span.start for span in spans]].tolist()
        ends = offset_N1[[span.stop for span in spans]].tolist()
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    def put_into(self, target_N: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write the values of these sequences' tokens to their places in a tensor of all tokens."""
        values_by_sequence = values.split(self.lengths[rows].tolist())
        for span, sequence_values in zip(self.spans(rows), values_by_sequence, strict=True):
            target_N[span] = sequence_values

    def blank_row(self) -> TrainBatch:
        """Return a batch of one sequence: two tokens that nobody wrote and that weigh nothing."""

        def zeros(value: Tensor, axes: str) -> Tensor:
            return value.new_zeros({"B": 1, "N": 2, "K": 0}[axes])

        blank = self._map(zeros, self.lengths.new_full((1,), 2))
        return blank._with(blank.stored, media={})

    def to(self, device: Any) -> TrainBatch:
        """Return the batch on a device."""
        lengths = self.lengths.to(device, non_blocking=True)
        return self._map(lambda value, axes: value.to(device, non_blocking=True), lengths)

    def _map(self, change: Callable[[Tensor, str], Tensor], lengths: Tensor) -> TrainBatch:
        """Return a batch of sequences with ``lengths`` whose fields are ``change(field, axes)``."""
        stored = {
            name: change(value, BATCH_FIELDS[name].metadata["axes"])
            for name, value in self.stored.items()
        }
        return self._with(stored, lengths=lengths)

    def _with(self, stored: Mapping[str, Tensor], **changes: Any) -> TrainBatch:
        """Return a batch with exactly the fields ``stored``.

        ``changes`` are arguments of the class, which are this batch's otherwise.
        """
        arguments = {"lengths": self.lengths, "pad_id": self.pad_id, "media": self.media}
        batch = TrainBatch(**{**arguments, **changes})
        vars(batch).update(stored)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        media = self.media
        if media:
            groups_here = set(self.group.tolist())
            media = {group: value for group, value in media.items() if group in groups_here}
        arrays = {name: value.cpu().numpy() for name, value in self.stored.items()}
        return {
            "lengths": self.lengths.cpu().numpy(),
            "arrays": arrays,
            "pad_id": self.pad_id,
            "media": media,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        import torch

        arrays = {"lengths": state["lengths"], **state["arrays"]}
        with warnings.catch_warnings():
            # Ray maps what it holds into every process of a node; nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        vars(self).update(tensors, pad_id=state["pad_id"], media=state["media"])


def pad(value_N: Tensor, lengths_B: Tensor, fill: float = 0) -> Tensor:
    """Return [B, T]: the tokens of B sequences, padded on the right; differentiable."""
    mask_BT = token_places(lengths_B)
    return value_N.new_full(mask_BT.shape, fill).masked_scatter(mask_BT, value_N)


def token_places(lengths_B: Tensor) -> Tensor:
    """Return [B, T] bool: True where padded sequences of these lengths have tokens."""
    import torch

    longest = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]


BATCH_FIELDS = {
    declared.name: declared
    for declared in dataclasses.fields(TrainBatch)
    if "phase" in declared.metadata
}


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
        """Record ``timing_s/<phase>``, also if the phase raises. Raises OutOfMemory."""
        start = time.perf_counter()
        try:
            with memory_phase(phase):
                yield
        finally:
            self.add({f"timing_s/{phase}": time.perf_counter() - start})
