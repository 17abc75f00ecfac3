"""Jobs of grading, the scorers that grade them (also a user's function), and their results."""

import asyncio
import copy
import dataclasses
import inspect
import linecache
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.config.code_by_path import absent, load_module, load_object
from core.errors import InputError
from reward_scores import SCORERS, Scorer, scorer_for
from reward_scores.score import Score, ScoreStatus, any_ground_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a user's function
CUSTOM = "custom_reward_function"
BY_NAME = {scorer.name: scorer for scorer in SCORERS.values()}
MODEL_STYLE = "model"  # of examples that a reward model scores
RETURN = "return a number, or a dict with the number under 'score'"
LARGEST = 1e18  # rewards are float32, and so are the squares of a group's variance
RESERVED = ("uid", "data_source", "step")  # what a record of a validation has beside the parts
LONGEST_NOTE = 1_000  # characters of a part that is kept as text


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
    """An answer for a model that scores it: a chat and a text, or the policy's own token ids."""

    messages: tuple[Mapping[str, Any], ...]
    response: str  # the text that the policy wrote
    token_ids: tuple[int, ...]  # prompt and response
    ground_truth: Any = None  # for a judge that compares with it


# The reward layer calls a reward model with all the answers that wait at once
Scores = Sequence[Score | Failure]
RewardModelCall = Callable[[Sequence[Answer]], Scores | Awaitable[Scores]]


def model_score(value: float, cut: bool = False, **more: float) -> Score | Failure:
    """Return the score of a reward model or a judge.

    ``cut`` is True if the model did not see the end of the answer.
    """
    if not math.isfinite(value):
        return Failure(ScoreStatus.CRASH, f"the reward model gave {value}\n")
    return Score(value, {"model": value, "model_cut": float(cut), **more})


class ScoreError(ValueError):
    """A reward function returned something that is no score; the message says what to return."""


def _examples(module: Any, where: str) -> tuple[tuple[str, Any, float], ...]:
    """Return a module's ``EXAMPLES``. Raises InputError for a variable of another meaning."""
    examples = getattr(module, "EXAMPLES", ())
    try:
        return tuple((text, ground_truth, float(acc)) for text, ground_truth, acc in examples)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{CUSTOM}.path={where}: EXAMPLES must be a list of (answer, ground_truth, acc) on "
            f"which the function is tried ({error}); rename yours"
        ) from error


class CustomFunction:
    """A user's function, by default named ``compute_score``.

    Its arguments are ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` and
    ``**reward_kwargs``. It is called by argument name with those of the four that it takes; it must
    take ``solution_str``. ``path`` is a Python file or a module's name, whose ``EXAMPLES`` and
    ``check_ground_truth`` are used like a scorer's. With ``lists`` (verl's batch manager) it takes
    lists, here of one answer, and returns a list. Raises InputError.
    """

    def __init__(
        self,
        path: str,
        name: str = "compute_score",
        kwargs: Mapping[str, Any] | None = None,
        lists: bool = False,
    ):
        self.kwargs = dict(kwargs or {})
        self.settings = {"path": path, "name": name, "kwargs": self.kwargs, "lists": lists}
        self.name = f"{path}:{name}"
        self.lists = lists
        self.known = tuple(f"{argument}s" for argument in ARGUMENTS) if lists else ARGUMENTS
        self._loop: asyncio.AbstractEventLoop | None = None  # for a function that runs one
        where = path.removeprefix("file://").removeprefix("pkg://")
        try:
            self.function: Callable[..., Any] = load_object(f"{where}:{name}", f"{CUSTOM}.path")
            module = load_module(where, f"{CUSTOM}.path={where}")
        except InputError:
            raise
        except Exception as error:  # the user's module may raise anything
            fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
            trace = traceback.format_exc(limit=-3).rstrip()
            raise InputError(f"{CUSTOM}.path={where}: importing it failed{fix}\n{trace}") from error
        self.examples = _examples(module, where)
        # The source of the module names the special tokens that the function looks for
        self.code = "".join(linecache.getlines(str(module.__file__)))
        self.check_ground_truth = getattr(module, "check_ground_truth", any_ground_truth)
        try:
            signature = inspect.signature(self.function)
            parameters = signature.parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            self.arguments = [a for a in self.known if takes_all or a in parameters]
            if self.known[1] not in self.arguments:
                raise TypeError(f"it has no argument {self.known[1]}")
            signature.bind(**dict.fromkeys(self.arguments), **self.kwargs)
        except (TypeError, ValueError) as error:  # some built-in functions have no signature
            arguments = ", ".join([*self.known, *self.kwargs])
            raise InputError(
                f"{CUSTOM}.name={name}: is called by name with ({arguments}), which it refuses: "
                f"{error}; rename its arguments, or correct {CUSTOM}.reward_kwargs"
            ) from error

    def scorer(self, data_source: str) -> Scorer:
        """Return the function in the shape of a built-in scorer, for one data source."""
        return Scorer(
            self.name, partial(self._call, data_source), self.examples, self.check_ground_truth
        )

    def _call(
        self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Any:
        # Copies: a function that changes its arguments must not change the example in memory
        values = [data_source, response, *copy.deepcopy((ground_truth, dict(extra_info)))]
        if self.lists:
            values = [[value] for value in values]
        arguments = dict(zip(self.known, values, strict=True))
        with self._own_event_loop():
            result = self.function(**{a: arguments[a] for a in self.arguments}, **self.kwargs)
        if not self.lists:
            return result
        if len(result) != 1:
            raise ScoreError(
                f"a function of lists must return one result an answer: got {result!r:.100} for one"
            )
        return result[0]

    @contextmanager
    def _own_event_loop(self) -> Iterator[None]:
        """Let the function run an event loop, although one runs in this thread already."""
        running = asyncio._get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(self._loop)
        try:
            yield
        finally:
            asyncio.set_event_loop(running)
            asyncio._set_running_loop(running)


class Scorers:
    """The scorers of a run and their options.

    They are those of the table in :mod:`reward_scores`, or the user's function for all. ``named``
    maps data sources that are not in the table to the names of scorers.
    """

    def __init__(
        self,
        reward_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        custom: CustomFunction | None = None,
        named: Mapping[str, str] | None = None,
    ):
        self.reward_kwargs = dict(reward_kwargs or {})
        self.custom = custom
        self.named = dict(named or {})

    def scorer(self, data_source: str) -> Scorer:
        """Return the scorer of a data source. Raises UnknownDataSource."""
        if self.custom:
            return self.custom.scorer(data_source)
        if data_source in self.named:
            return BY_NAME[self.named[data_source]]
        return scorer_for(data_source)

    def options(self, scorer: Scorer) -> Mapping[str, Any]:
        return self.reward_kwargs.get(scorer.name, {})

    def libraries(self, data_source: str) -> tuple[str, ...]:
        """Return the libraries of a data source's scorer whose work may not end.

        Raises UnknownDataSource.
        """
        scorer = self.scorer(data_source)
        return tuple(scorer.libraries(**self.options(scorer)))

    def __call__(self, job: Job) -> Any:
        """Return the scorer's result, which :func:`as_score` reads.

        An async function returns an awaitable of it.
        """
        scorer = self.scorer(job.data_source)
        return scorer(job.response, job.ground_truth, job.extra_info, **self.options(scorer))


def crash(error: BaseException) -> Failure:
    """Return the failure of a scorer that raised, with the end of its traceback."""
    if isinstance(error, ScoreError):
        return Failure(ScoreStatus.CRASH, f"ScoreError: {error}\n")
    return Failure(ScoreStatus.CRASH, "".join(traceback.format_exception(error, limit=-20)))


def as_score(result: Any) -> Score:
    """Read what a scorer returned: a number, a dict with ``score``, or a :class:`Score`.

    In a dict, ``pred`` is the answer that the scorer read, other finite numbers (``acc`` among
    them) are parts, and anything else is kept as text (``notes``). The status is OK if ``acc``, or
    the score where there is no ``acc``, is above 0. Raises ScoreError if ``score`` or ``acc`` is no
    finite number.
    """
    if isinstance(result, Score):
        parts, notes = _parts(result.parts)
        return dataclasses.replace(
            result, value=_number(result.value), parts=parts, notes={**result.notes, **notes}
        )
    fields = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        names = ", ".join(map(repr, fields)) or "nothing"
        raise ScoreError(
            f"the reward function returned a dict without 'score' (it has {names}); {RETURN}"
        )
    value = _number(fields.pop("score"))
    pred = fields.pop("pred", None)
    parts, notes = _parts(fields)
    status = ScoreStatus.OK if parts.get("acc", value) > 0 else ScoreStatus.WRONG
    return Score(value, parts, status, pred=None if pred is None else str(pred), notes=notes)


def _parts(fields: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the fields that are finite numbers, and the others as texts.

    Raises ScoreError if ``acc`` is among the others, or for a name in RESERVED.
    """
    parts: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, value in fields.items():
        if name in RESERVED:
            raise ScoreError(
                f"the reward function returned a part named {name!r}, which a record of a "
                f"validation holds beside the parts; rename it, to 'my_{name}' say"
            )
        if value is None:
            continue
        if name == "acc" or finite_number(value) is not None:
            parts[str(name)] = _number(value, name)
        else:
            notes[str(name)] = str(value)[:LONGEST_NOTE]
    return parts, notes


def _number(value: Any, name: Any = "score") -> float:
    number = finite_number(value)
    if number is None:
        shown = f"a {type(value).__name__} ({value!r:.100})"
        if value is None:
            shown = "None (is a return missing?)"
        raise ScoreError(
            f"the reward function returned {shown} as its {str(name)!r}; "
            f"{RETURN}, finite and at most {LARGEST:g}"
        )
    return number


def finite_number(value: Any) -> float | None:
    """Return a number as a float, or None if it is no number, not finite or too large."""
    try:
        scalar = value.item() if hasattr(value, "item") else value  # numpy's and torch's scalars
        number = math.nan if isinstance(scalar, str | bytes) else float(scalar)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # An array of several numbers, or an int beyond any float
        return None
    return number if abs(number) <= LARGEST else None
