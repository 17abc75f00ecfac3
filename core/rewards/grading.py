"""What is graded, by which scorer (a user's own function among them), and what its result is."""

from __future__ import annotations

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
from reward_scores import Scorer, scorer_for
from reward_scores.score import Score, ScoreStatus, any_ground_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a user's function
CUSTOM = "custom_reward_function"
RETURN = "return a number, or a dict with the number under 'score'"
LARGEST = 1e18  # rewards are float32, and so are the squares of a group's variance
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
    """An answer as a model reads it that scores it: a chat and a text, or the policy's own token
    ids."""

    messages: tuple[Mapping[str, Any], ...]
    response: str  # what the policy wrote, and nothing else
    token_ids: tuple[int, ...]  # prompt and response
    ground_truth: Any = None  # for a judge that compares with it


# The reward model as the reward layer calls it: with all the answers that wait at once
Scores = Sequence[Score | Failure]
RewardModelCall = Callable[[Sequence[Answer]], Scores | Awaitable[Scores]]


def model_score(value: float, cut: bool = False, **more: float) -> Score | Failure:
    """Return the score of a reward model or a judge. ``cut``: it did not see the end of the
    answer."""
    if not math.isfinite(value):
        return Failure(ScoreStatus.CRASH, f"the reward model gave {value}\n")
    return Score(value, {"model": value, "model_cut": float(cut), **more})


class ScoreError(ValueError):
    """A reward function returned what is no score; the message holds what to return."""


class CustomFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info,
    **reward_kwargs)``.

    It is called by argument name with those of the four that it takes; it must take
    ``solution_str``. ``path`` is a Python file or a module's name, whose ``EXAMPLES`` and
    ``check_ground_truth`` are used like a scorer's. One of ``lists`` (verl's batch manager) takes
    lists, here of one answer, and returns a list. Raises InputError.
    """

    def __init__(
        self,
        path: str,
        name: str = "compute_score",
        kwargs: Mapping[str, Any] | None = None,
        lists: bool = False,
    ):
        self.settings = {"path": path, "name": name, "kwargs": dict(kwargs or {}), "lists": lists}
        self.lists, self.known = (
            lists,
            tuple(f"{name}s" for name in ARGUMENTS) if lists else ARGUMENTS,
        )
        self.name, self.kwargs = f"{path}:{name}", dict(kwargs or {})
        self._loop: asyncio.AbstractEventLoop | None = None  # for a function that asks for one
        where = path.removeprefix("file://").removeprefix("pkg://")
        try:
            self.function: Callable[..., Any] = load_object(f"{where}:{name}", f"{CUSTOM}.path")
            module = load_module(where, f"{CUSTOM}.path={where}")
        except InputError:
            raise
        except Exception as error:  # of the user's module, which may raise anything
            fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
            trace = traceback.format_exc(limit=-3).rstrip()
            raise InputError(f"{CUSTOM}.path={where}: importing it failed{fix}\n{trace}") from error
        self.examples = tuple(getattr(module, "EXAMPLES", ()))
        # Its texts hold the tokens that it looks for
        self.code = "".join(linecache.getlines(str(module.__file__)))
        self.check_ground_truth = getattr(module, "check_ground_truth", any_ground_truth)
        try:
            signature = inspect.signature(self.function)
            takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
            self.arguments = tuple(
                name for name in self.known if takes_all or name in signature.parameters
            )
            if self.known[1] not in self.arguments:
                raise TypeError(f"it has no argument {self.known[1]}")
            signature.bind(**dict.fromkeys(self.arguments), **self.kwargs)
        except TypeError as error:
            rule = (
                f"is called by name with ({', '.join([*self.known, *self.kwargs])}), which it "
                f"refuses: {error}"
            )
            fix = f"rename its arguments, or correct {CUSTOM}.reward_kwargs"
            raise InputError(f"{CUSTOM}.name={name}: {rule}; {fix}") from error

    def scorer(self, data_source: str) -> Scorer:
        """Return the function in the shape of a built-in scorer, for one data source."""
        return Scorer(
            self.name, partial(self._call, data_source), self.examples, self.check_ground_truth
        )

    def _call(
        self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Any:
        # Copies: what the function does to its arguments must not reach the example in memory.
        values = (data_source, response, *copy.deepcopy((ground_truth, dict(extra_info))))
        values = [[value] for value in values] if self.lists else values
        given = {
            name: value
            for name, value in zip(self.known, values, strict=True)
            if name in self.arguments
        }
        with self._own_event_loop():
            result = self.function(**given, **self.kwargs)
        if self.lists and len(result) != 1:
            raise ScoreError(
                f"a function of lists must return one result an answer: got {result!r:.100} for one"
            )
        return result[0] if self.lists else result

    @contextmanager
    def _own_event_loop(self) -> Iterator[None]:
        """Let the function run an event loop (``asyncio.run``), which one that runs in this thread
        would refuse."""
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
    """The scorers of a run and their options: the table of :mod:`reward_scores`, or the user's
    function for all."""

    def __init__(
        self, reward_kwargs: Mapping[str, Any] | None = None, custom: CustomFunction | None = None
    ):
        self.reward_kwargs = {
            name: dict(options or {}) for name, options in (reward_kwargs or {}).items()
        }
        self.custom = custom

    def scorer(self, data_source: str) -> Scorer:
        """Return the scorer of a data source. Raises UnknownDataSource where there is none."""
        return self.custom.scorer(data_source) if self.custom else scorer_for(data_source)

    def options(self, scorer: Scorer) -> dict[str, Any]:
        return self.reward_kwargs.get(scorer.name, {})

    def libraries(self, data_source: str) -> tuple[str, ...]:
        """Return the libraries of a data source's scorer whose work may not end. Raises
        UnknownDataSource."""
        scorer = self.scorer(data_source)
        return tuple(scorer.libraries(**self.options(scorer)))

    def __call__(self, job: Job) -> Any:
        """Return what the scorer returned, for :func:`as_score` to read; an awaitable of it from an
        async function."""
        scorer = self.scorer(job.data_source)
        return scorer(job.response, job.ground_truth, job.extra_info, **self.options(scorer))


class JoinedCalls:
    """Calls a function of many, one call at a time, with what arrived during the call before."""

    def __init__(self, function: Callable[[list[Any]], Any]):
        self.function = function
        self._waiting: list[tuple[Any, asyncio.Future]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Any) -> Any:
        """Return the result of one item, or raise what the call raised that had it."""
        loop = asyncio.get_running_loop()
        self._waiting.append((item, answer := loop.create_future()))
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        # Lets what arrives in the same turn of the event loop join the first call
        await asyncio.sleep(0)
        while waiting := [(item, answer) for item, answer in self._waiting if not answer.done()]:
            self._waiting = []
            try:
                results = self.function([item for item, _ in waiting])
                results = await results if inspect.isawaitable(results) else results
            except Exception as error:  # every caller gets it; the next call goes on
                results = [error] * len(waiting)
            for (_, answer), result in zip(waiting, results, strict=True):
                if answer.done():  # the caller was cancelled
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)


def crash(error: BaseException) -> Failure:
    """Return the failure of a scorer that raised, with the end of its traceback."""
    if isinstance(error, ScoreError):
        return Failure(ScoreStatus.CRASH, f"ScoreError: {error}\n")
    return Failure(ScoreStatus.CRASH, "".join(traceback.format_exception(error, limit=-20)))


def as_score(result: Any) -> Score:
    """Read what a scorer returned: a number, a dict with ``score``, or a :class:`Score`.

    Of a dict, ``pred`` is the answer that was read, other finite numbers (``acc`` among them) are
    parts, and anything else is kept as text (``notes``). The status is OK where ``acc`` (the score
    itself, unless given) is above 0. Raises ScoreError where ``score`` or ``acc`` is no finite
    number.
    """
    if isinstance(result, Score):
        parts, notes = _parts(result.parts)
        return dataclasses.replace(
            result, value=_number(result.value), parts=parts, notes={**result.notes, **notes}
        )
    fields = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        has = ", ".join(map(repr, fields)) or "nothing"
        raise ScoreError(
            f"the reward function returned a dict without 'score' (it has {has}); {RETURN}"
        )
    value, pred = _number(fields.pop("score")), fields.pop("pred", None)
    parts, notes = _parts(fields)
    status = ScoreStatus.OK if parts.get("acc", value) > 0 else ScoreStatus.WRONG
    return Score(value, parts, status, pred=None if pred is None else str(pred), notes=notes)


def _parts(given: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the parts that are finite numbers, and the others as texts. Raises ScoreError for
    ``acc`` among these."""
    parts, notes = {}, {}
    for name, part in given.items():
        if name == "acc" and part is not None or finite_number(part) is not None:
            parts[str(name)] = _number(part, name)
        elif part is not None:
            notes[str(name)] = str(part)[:LONGEST_NOTE]
    return parts, notes


def _number(value: Any, name: Any = "score") -> float:
    number = finite_number(value)
    if number is None:
        shown = (
            "None (is a return missing?)"
            if value is None
            else (f"a {type(value).__name__} ({value!r:.100})")
        )
        rule = f"{RETURN}, finite and at most {LARGEST:g}"
        raise ScoreError(f"the reward function returned {shown} as its {str(name)!r}; {rule}")
    return number


def finite_number(value: Any) -> float | None:
    """Return a number as a float; None for anything else, and for one that is not finite or too
    large."""
    try:
        scalar = value.item() if hasattr(value, "item") else value  # of numpy and torch
        number = math.nan if isinstance(scalar, str | bytes) else float(scalar)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # An array of several, an int beyond any float
        return None
    return number if abs(number) <= LARGEST else None
