"""What is graded, by which scorer, and what its result is: a score, or the reason why there is none."""

from __future__ import annotations

import dataclasses
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from core.rewards.custom_reward import CustomFunction
from reward_scores import Scorer, scorer_for
from reward_scores.score import Score, ScoreStatus

RETURN = "return a number, or a dict with the number under 'score'"
LARGEST = 1e18  # rewards are float32, and so are the squares of a group's variance
LONGEST_NOTE = 1_000  # characters of a part that is kept as text
# What calls a user's function: these frames are no part of its traceback
CALLERS = ("core/rewards/grading.py", "core/rewards/graders.py", "core/rewards/custom_reward.py")
CALLERS += ("reward_scores/score.py", "/asyncio/")


@dataclass(frozen=True)
class Job:
    """One answer to grade: all that a grader needs, as plain data."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """The reason why an answer has no score."""

    status: ScoreStatus
    detail: str


@dataclass(frozen=True)
class Answer:
    """An answer as a model reads it that scores it: a chat and a text, or the policy's own token ids."""

    messages: tuple[Mapping[str, Any], ...]
    response: str  # what the policy wrote, and nothing else
    token_ids: tuple[int, ...]  # prompt and response
    ground_truth: Any = None  # for a judge that compares with it


@dataclass(frozen=True)
class ModelScore:
    """The number of a reward model or a judge, or why there is none (``error``)."""

    value: float = math.nan
    cut: bool = False  # the answer was longer than reward_model.max_length
    error: str = ""
    timed_out: bool = False  # there was no reply in time
    notes: Mapping[str, float] = field(default_factory=dict)  # of a judge: further parts of the score

    @property
    def parts(self) -> dict[str, float]:
        """The parts of a score: the number, and whether the model did not see the end of the answer."""
        return {"model": self.value, "model_cut": float(self.cut), **self.notes}


# The reward model as the reward layer calls it: with all the answers that wait at once
RewardModelCall = Callable[[Sequence[Answer]], Sequence[ModelScore] | Awaitable[Sequence[ModelScore]]]


class ScoreError(ValueError):
    """A reward function returned what is no score; the message holds what to return."""


class Scorers:
    """The scorers of a run and their options: the table of :mod:`reward_scores`, or the user's function for all."""

    def __init__(self, reward_kwargs: Mapping[str, Any] | None = None, custom: CustomFunction | None = None):
        self.reward_kwargs = {name: dict(options or {}) for name, options in (reward_kwargs or {}).items()}
        self.custom = custom

    def scorer(self, data_source: str) -> Scorer:
        """Return the scorer of a data source. Raises UnknownDataSource where there is none."""
        return self.custom.scorer(data_source) if self.custom else scorer_for(data_source)

    def options(self, scorer: Scorer) -> dict[str, Any]:
        return self.reward_kwargs.get(scorer.name, {})

    def libraries(self, data_source: str) -> tuple[str, ...]:
        """Return the libraries of a data source's scorer whose work may not end. Raises UnknownDataSource."""
        scorer = self.scorer(data_source)
        return tuple(scorer.libraries(**self.options(scorer)))

    def __call__(self, job: Job) -> Any:
        """Return what the scorer returned, for :func:`as_score` to read; an awaitable of it from an async function."""
        scorer = self.scorer(job.data_source)
        return scorer(job.response, job.ground_truth, job.extra_info, **self.options(scorer))


def crash(error: BaseException) -> Failure:
    """Return the failure of a scorer that raised: the user's own traceback, without the frames that called it."""
    if isinstance(error, ScoreError):
        return Failure(ScoreStatus.CRASH, f"ScoreError: {error}\n")
    frames = error.__traceback__
    while frames is not None and any(file in Path(frames.tb_frame.f_code.co_filename).as_posix() for file in CALLERS):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames or error.__traceback__, limit=-20)
    return Failure(ScoreStatus.CRASH, "".join(lines))


# -- what a scorer returned -----------------------------------------------------------------------------


def as_results(result: Any, count: int) -> list[Score | Failure]:
    """Read what a function of lists returned. Raises ScoreError unless it is one result an answer."""
    results = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(results, list | tuple) or len(results) != count:
        has = f"{len(results)} results" if isinstance(results, list | tuple) else f"{result!r:.100}"
        raise ScoreError(f"a batched reward function must return one result an answer: got {has} for {count} answers")
    found: list[Score | Failure] = []
    for one in results:
        try:
            found.append(as_score(one))
        except ScoreError as error:  # it costs its own answer only
            found.append(crash(error))
    return found


def as_score(result: Any) -> Score:
    """Read a number, a dict with ``score``, or a :class:`Score`, as a Score.

    Of a dict, ``pred`` is the answer that was read, other finite numbers (``acc`` among them) are parts, and anything
    else is kept as text (``notes``). The status is OK where ``acc`` (the score itself, unless given) is above 0.
    Raises ScoreError where ``score`` or ``acc`` is no finite number.
    """
    if isinstance(result, Score):
        parts, notes = _parts(result.parts)
        return dataclasses.replace(result, value=_number(result.value), parts=parts, notes={**result.notes, **notes})
    fields = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        has = ", ".join(map(repr, fields)) or "nothing"
        raise ScoreError(f"the reward function returned a dict without 'score' (it has {has}); {RETURN}")
    value, pred = _number(fields["score"]), fields.get("pred")
    parts, notes = _parts({name: part for name, part in fields.items() if name not in ("score", "pred")})
    status = ScoreStatus.OK if parts.get("acc", value) > 0 else ScoreStatus.WRONG
    return Score(value, parts, status, pred=None if pred is None else str(pred), notes=notes)


def _parts(given: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the parts that are finite numbers, and the others as texts. Raises ScoreError for ``acc`` among these."""
    parts, notes = {}, {}
    for name, part in given.items():
        if part is None:
            continue
        if name == "acc" or _finite(part) is not None:
            parts[str(name)] = _number(part, name)
        else:
            notes[str(name)] = str(part)[:LONGEST_NOTE]
    return parts, notes


def _number(value: Any, name: Any = "score") -> float:
    number = _finite(value)
    if number is None:
        shown = "None (is a return missing?)" if value is None else f"a {type(value).__name__} ({value!r:.100})"
        rule = f"{RETURN}, finite and at most {LARGEST:g}"
        raise ScoreError(f"the reward function returned {shown} as its {str(name)!r}; {rule}")
    return number


def _finite(value: Any) -> float | None:
    """Return a number as a float; None for anything else, and for one that is not finite or too large."""
    try:
        scalar = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        number = float(scalar) if isinstance(scalar, numbers.Real | Decimal) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several, an int beyond any float
        return None
    return number if number is not None and abs(number) <= LARGEST else None
