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
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

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


class Media(Protocol):
    """What a prompt holds beside its text, pictures say: hashable, and equal where the files are.

    Only the modality of the model (``core/modality.py``) looks inside.
    """

    def __len__(self) -> int: ...

    def mark(self, prompt: Any) -> Any:
        """Return a prompt, a text or a chat, with the model's mark in each place of a medium. Raises MediaError."""

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a marked prompt with an id for each token of each medium. Raises MediaError."""

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return expanded ids with one id for each medium again, as a reader sees them."""

    def thumbnails(self) -> list[str]:
        """Return the first media, small, as data URIs for a page."""

    def files(self) -> Iterable[bytes]:
        """Return the files as the data has them."""


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
    media: Media | None = None  # in the order of their placeholders in ``token_ids``
    agent_name: str | None = None  # the agent loop that plays its episodes; None: the configured one
    opened_tag: str | None = None  # a tag such as <think> that the prompt's end opens and the policy has to close


@dataclass(frozen=True)
class Segment:
    """A stretch of the response and who wrote it: ``policy``, ``tool``, ..."""

    role: str
    text: str


@dataclass(frozen=True, eq=False, repr=False)
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
    user_scores: tuple[float, ...] = ()  # what a simulated user gave the policy's turns, in their order
    tool_rewards: tuple[float, ...] = ()  # what tools gave the policy's calls, in their order
    tool_scores: Mapping[str, float] = field(default_factory=dict)  # tool's name -> what it gave the whole episode

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

    def __repr__(self) -> str:
        """Return a short text: asyncio formats the result of a step's collection, and never shows it.

        ``asyncio.Runner.run`` of Python 3.11 compares signal handlers by way of an error message that holds the task
        and its result. With all arrays written out that took longer than the rest of collecting.
        """
        tokens = f"{len(self.prompt_ids)} + {len(self.response_ids)} tokens"
        return f"Trajectory({tokens}, {self.stop.value}, seed={self.seed}, policy_version={self.policy_version})"

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
class AnsweredGroup:
    """A prompt with its trajectories, and a greedy one for a baseline, to be scored together with other groups."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None


@dataclass(frozen=True)
class Dropped:
    """What is kept of a group that did not pass: the oldest policy version among its samples, and their tokens."""

    version: int
    tokens: int


class BatchField:
    """A field of a batch: its axes, and the phase that sets it. Reading it as an attribute pads it, in a new tensor."""

    def __init__(self, axes: str, phase: str, *, optional: bool = False):
        self.axes, self.phase, self.optional = axes, phase, optional

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: TrainBatch | None, owner: type) -> Any:
        if batch is None:
            return self
        return None if self.optional and self.name not in batch.stored else batch.need(self.name)


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """What a step trains on, stored without padding. Later phases add fields with :meth:`adding`; none is changed.

    A field of the axes [B, T] is stored *flat*, [N]: its real tokens, sequence by sequence. Reading it as an attribute
    pads it on the right, since losses and estimators, those of users included, work on [B, T]. Of 8,192 sequences of
    up to 21,000 tokens three quarters of such a tensor are padding, and it takes 0.7 GB. Whoever handles a whole batch
    therefore reads :meth:`flat` or pads one of its :meth:`pieces` after another.

    A batch is pickled as numpy arrays that hold its own tokens: Ray shares their memory between the processes of a
    node, and what was cut from a larger batch does not carry the rest of it along, as a view of a tensor does.

    Shapes (of the attributes):
        input_ids           [B, T] int64    prompt then response, right-padded; stored as int32
        attention_mask      [B, T] bool     a real token; not stored, it follows from the lengths
        response_mask       [B, T] bool     written by the policy
        loss_mask           [B, T] bool     response_mask less the rows and tokens that carry no loss
        group               [B]    int64    index of the row's prompt in the step
        reward              [B]    float32  the shaped score
        in_group_stats      [B]    bool     the row's reward enters its group's statistics
        rollout_log_probs   [B, T] float32  as the engine reported them
        sampled_mask        [B, T] bool     has one, where that is not response_mask
        baseline            [B]    float32  score of the greedy answer to the row's prompt
        old_log_probs       [B, T] float32  the learner's, before the step's first update
        entropy             [B, T] float32  of the distribution that the old log-probs are of, until it is measured
        sum_pi_squared      [B, T] float32  sum of the squared probabilities of that distribution, for an estimator
        ref_log_prob        [B, T] float32  the reference policy's
        values              [B, T] float32  the critic's
        rollout_is_weights  [B, T] float32  importance weights of the policy-gradient loss
        token_level_rewards [B, T] float32  what the estimator reads, until it has
        advantages          [B, T] float32  0 where response_mask is False
        returns             [B, T] float32  the critic's target
        loss_weight         [B, T] float32  the token's share of the objective, over all ranks
        selected            [B, T] bool     what a policy loss of the optimizer step treats apart
        trace_row           [B]    int64    one more than the row's index in the step; only while the step is recorded
    """

    lengths: Tensor  # [B] int64: real tokens of each sequence
    width: int  # T: at least the longest sequence
    stored: Mapping[str, Tensor]  # [N] or [B] of each field that is set
    pad_id: int = 0
    media: Mapping[int, Media] = field(default_factory=dict)  # of each group's prompt, once a group
    seals: Mapping[str, np.ndarray] = field(default_factory=dict)  # [B] uint64 of each sealed field, see sealed()

    input_ids = BatchField("BT", "make_batch")
    response_mask = BatchField("BT", "make_batch")
    loss_mask = BatchField("BT", "make_batch")
    group = BatchField("B", "make_batch")
    reward = BatchField("B", "make_batch")
    in_group_stats = BatchField("B", "make_batch")
    rollout_log_probs = BatchField("BT", "make_batch")
    sampled_mask = BatchField("BT", "make_batch, without state masking", optional=True)
    baseline = BatchField("B", "make_batch, for an estimator with a greedy baseline", optional=True)
    old_log_probs = BatchField("BT", "compute_log_probs", optional=True)
    entropy = BatchField("BT", "compute_log_probs", optional=True)
    sum_pi_squared = BatchField("BT", "compute_log_probs, for an estimator that reads it", optional=True)
    ref_log_prob = BatchField("BT", "compute_log_probs, with a KL term", optional=True)
    values = BatchField("BT", "compute_log_probs, with a critic", optional=True)
    rollout_is_weights = BatchField("BT", "compute_log_probs, with rollout_correction.rollout_is", optional=True)
    token_level_rewards = BatchField("BT", "compute_advantages", optional=True)
    advantages = BatchField("BT", "compute_advantages", optional=True)
    returns = BatchField("BT", "compute_advantages", optional=True)
    loss_weight = BatchField("BT", "optimizer_steps, once an optimizer step", optional=True)
    selected = BatchField("BT", "steps_of, for a policy loss that selects tokens", optional=True)
    trace_row = BatchField("B", "update, in steps that trainer.trace records", optional=True)

    @classmethod
    def of(cls, *, attention_mask: Tensor, pad_id: int = 0, **fields: Tensor | None) -> TrainBatch:
        """Return the batch of padded fields. Raises ValueError where shapes differ or padding is not on the right."""
        lengths, width = attention_mask.sum(dim=1), attention_mask.shape[1]
        batch = cls(lengths, width, {}, pad_id)
        if not bool((attention_mask == batch.attention_mask).all()):
            raise ValueError("TrainBatch.attention_mask has a gap: the real tokens of a sequence must come first")
        return batch.adding(**fields)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.width

    @property
    def tokens(self) -> int:
        """Return N, the number of real tokens."""
        return int(self.lengths.sum())

    @property
    def attention_mask(self) -> Tensor:
        import torch

        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]

    def flat(self, name: str) -> Tensor:
        """Return the field as it is stored, or raise an error that names the phase which should have set it."""
        if name not in self.stored:
            raise ValueError(f"TrainBatch.{name} is not set yet: {BATCH_FIELDS[name].phase} sets it")
        return self.stored[name]

    def need(self, name: str) -> Tensor:
        """Return the field padded; raises as :meth:`flat` does."""
        value, fill = self.flat(name), 0
        if BATCH_FIELDS[name].axes == "B":
            return value
        if name == "input_ids":  # embeddings and labels are indexed by int64
            value, fill = value.long(), self.pad_id
        return value.new_full(self.shape, fill).masked_scatter_(self.attention_mask, value)

    def flattened(self, value_BT: Tensor) -> Tensor:
        """Return [N]: the real tokens of a padded tensor."""
        return value_BT.masked_select(self.attention_mask)

    def adding(self, **fields: Tensor | None) -> TrainBatch:
        """Return a batch with these fields set as well, padded or flat ones; None takes a field away."""
        stored = dict(self.stored)
        for name, value in fields.items():
            axes = BATCH_FIELDS[name].axes
            if value is None:
                stored.pop(name, None)
                continue
            if axes == "BT" and tuple(value.shape) == self.shape:
                value = self.flattened(value)
            elif tuple(value.shape) != (len(self) if axes == "B" else self.tokens,):
                wanted = self.shape if axes == "BT" else self.shape[:1]
                raise ValueError(f"TrainBatch.{name} has shape {tuple(value.shape)}, expected {wanted} ({axes})")
            stored[name] = value.int() if name == "input_ids" else value
        return dataclasses.replace(self, stored=stored)

    def sealed(self, *names: str) -> TrainBatch:
        """Return the batch with a checksum of each row of these fields, by the phase that set them.

        The checksums travel with the rows, so that whoever reads a field later can check that it is what was set. A
        field that is not set is left out.
        """
        return dataclasses.replace(self, seals={**self.seals, **self._row_sums([n for n in names if n in self.stored])})

    def broken_seal(self, names: Collection[str] | None = None) -> tuple[str, int] | None:
        """Return a sealed field (of ``names``) and the number of its first row that has changed since, or None."""
        sealed = [n for n in self.seals if n in self.stored and (names is None or n in names)]
        for name, found in self._row_sums(sealed).items():
            wanted = self.seals[name]
            if not np.array_equal(found, wanted):
                return name, int(np.argmax(found != wanted))
        return None

    def _row_sums(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return [B] uint64 each: the bits of a field in each row, weighted by their place in it; 0 of zeros alone."""
        values = {name: np.ascontiguousarray(self.stored[name].detach().cpu().numpy()) for name in names}
        bits = {name: value.view(f"u{value.dtype.itemsize}") for name, value in values.items()}
        flat = [name for name in names if BATCH_FIELDS[name].axes == "BT"]
        found = {
            name: np.zeros(len(self), np.uint64) if name in flat else bits[name].astype(np.uint64) for name in names
        }
        lengths = self.lengths.cpu().numpy()
        ends = np.cumsum(lengths)
        rows = max(1, PIECE_SLOTS // max(1, int(lengths.max(initial=1))))  # at a time: products take 16 bytes a token
        for first in range(0, len(lengths) if flat else 0, rows):
            some = np.flatnonzero(lengths[first : first + rows]) + first
            if not len(some):
                continue
            start, end = ends[some[0]] - lengths[some[0]], ends[some[-1]]
            starts = ends[some] - lengths[some] - start
            place = (np.arange(1, end - start + 1) - np.repeat(starts, lengths[some])).astype(np.uint64)
            for name in flat:
                found[name][some] = np.add.reduceat(bits[name][start:end] * place, starts)
        return found

    def only(self, names: Collection[str]) -> TrainBatch:
        """Return a batch that has no other fields than these: what a process reads, and is sent."""
        kept = {*names, "group"} if self.media else names
        stored, seals = ({n: v for n, v in some.items() if n in kept} for some in (self.stored, self.seals))
        return dataclasses.replace(self, stored=stored, seals=seals)

    def media_of_rows(self) -> list[Media | None]:
        """Return the media of each row's prompt; an empty list where no row has any."""
        return [self.media.get(group) for group in self.flat("group").tolist()] if self.media else []

    def rows(self, index: Any) -> TrainBatch:
        """Return the rows of ``index`` (a slice, a list or a tensor of numbers), with every field that is set.

        Neighbours are a view of this batch; the width stays.
        """
        import torch

        rows = torch.arange(len(self), device=self.lengths.device)[index]
        if len(rows) and bool((rows.diff() == 1).all()):
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
            start = int(self.lengths[: rows.start].sum())
            spans = [slice(start, start + int(self.lengths[rows].sum()))]
        else:
            spans = self.spans(rows)

        def chosen(value: Tensor, axes: str) -> Tensor:
            if axes == "B":
                return value[rows]
            # Copied sequence by sequence: an index of every token would take 8 bytes each, and ten times as long.
            parts = [value[span] for span in spans]
            return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else value[:0]

        index = rows if isinstance(rows, slice) else rows.cpu().numpy()
        seals = {name: value[index] for name, value in self.seals.items()}
        return dataclasses.replace(self._map(chosen, self.lengths[rows]), seals=seals)

    def spans(self, rows: Tensor) -> list[slice]:
        """Return where the tokens of each of these rows are in a flat field."""
        ends = self.lengths.cumsum(0)
        starts = ends - self.lengths
        return [slice(*one) for one in zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)]

    def count(self, true_N: Tensor) -> Tensor:
        """Return [B] int64: of how many tokens of each sequence a flat mask is True."""
        some = self.lengths > 0  # what has no token has no place in the flat mask
        starts = (self.lengths.cumsum(0) - self.lengths)[some].cpu().numpy()
        counts = self.lengths.new_zeros(len(self))
        if len(starts):
            found = np.add.reduceat(true_N.cpu().numpy(), starts, dtype=np.int64)
            counts[some] = counts.new_tensor(found)
        return counts

    def cut(self, width: int) -> TrainBatch:
        """Return the batch with other padding. Raises ValueError for a width that would cut off a token."""
        longest = int(self.lengths.max()) if len(self) else 0
        if width < longest:
            raise ValueError(f"a batch cannot be cut to {width} columns: a sequence has {longest} tokens")
        return dataclasses.replace(self, width=width)

    def pieces(
        self, slots: int | None = None, *, whole_groups: bool = False, by_length: bool = False
    ) -> Iterator[TrainBatch]:
        """Yield neighbouring rows that take at most ``slots`` entries when padded, and at least one row or group.

        A batch that small is yielded as it is. So is one whose groups are not neighbours, if they must stay whole.
        ``by_length`` sorts a larger one, so that there is little to pad: for sums, to which all rows contribute alike.
        """
        slots, count = slots or PIECE_SLOTS, len(self)
        starts = list(range(count))
        if whole_groups:
            starts = [0, *((self.flat("group").diff() != 0).nonzero()[:, 0] + 1).tolist()] if count else []
            if len(starts) != len(self.flat("group").unique()):
                starts = [0]
        if count * self.width <= slots or len(starts) < 2:
            yield self
            return
        whole = self.rows(self.lengths.argsort(descending=True, stable=True)) if by_length else self
        lengths, first, longest = whole.lengths.tolist(), 0, 0
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            wider = max(longest, *lengths[start:end])
            if start > first and wider * (end - first) > slots:
                yield whole.rows(slice(first, start)).cut(longest)
                first, wider = start, max(lengths[start:end])
            longest = wider
        yield whole.rows(slice(first, count)).cut(longest)

    def blank_row(self) -> TrainBatch:
        """One row of two tokens that nobody wrote and that weigh nothing, with the fields of this batch."""
        blank = self._map(lambda value, axes: value.new_zeros(2 if axes == "BT" else 1), self.lengths.new_full((1,), 2))
        seals = {name: np.zeros(1, np.uint64) for name in self.seals}
        return dataclasses.replace(blank.cut(2), media={}, seals=seals)

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


BATCH_FIELDS = {name: one for name, one in vars(TrainBatch).items() if isinstance(one, BatchField)}
# Entries that whoever goes through a whole batch pads at once: 4 MB of float64, which stays in a cache. The laptop's
# batches are smaller, so theirs are summed in one piece, in the order in which they always were.
PIECE_SLOTS = 2**19


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
