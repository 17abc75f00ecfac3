"""A user's own reward function, with verl's signature: loading it, calling it, reading what it returns."""

from __future__ import annotations

import copy
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from core.config.plugins import load_object
from core.errors import InputError
from reward_scores.score import Score, ScoreStatus
from reward_scores.scorer import Scorer, any_ground_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class CustomFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``.

    It is called by argument name, as verl does. ``path`` is a Python file or a module's name; two files of the same
    name do not collide. Where the module has ``EXAMPLES`` or ``check_ground_truth``, they are used like a scorer's
    own. A ``batched`` one takes lists, ``compute_score(data_sources, solution_strs, ground_truths, extra_infos,
    **reward_kwargs)``, and returns a list. Raises InputError.
    """

    def __init__(
        self,
        path: str,
        name: str = "compute_score",
        kwargs: Mapping[str, Any] | None = None,
        batched: bool = False,
    ):
        self.path, self.function_name, self.batched = path, name, batched
        self.kwargs = dict(kwargs or {})
        self.name = f"{path}:{name}"
        where = path.removeprefix("file://").removeprefix("pkg://")
        self.function = _load(where, name)
        _check_signature(self.function, name, self.kwargs, BATCH_ARGUMENTS if batched else ARGUMENTS)
        self.examples = _optional(where, "EXAMPLES", ())
        self.check_ground_truth = _optional(where, "check_ground_truth", any_ground_truth)

    def scorer(self, data_source: str) -> Scorer:
        """The function in the shape of a built-in scorer, for one data source."""
        return Scorer(self.name, partial(self._score, data_source), tuple(self.examples), self.check_ground_truth)

    def _score(
        self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Score | Awaitable[Score]:
        # Copies: what the function does to its arguments must not reach the data row.
        result = self.function(
            data_source=data_source,
            solution_str=response,
            ground_truth=copy.deepcopy(ground_truth),
            extra_info=copy.deepcopy(dict(extra_info)),
            **self.kwargs,
        )
        return _await_score(result) if inspect.isawaitable(result) else as_score(result)

    def score_all(
        self,
        data_sources: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any]],
    ) -> list[Score] | Awaitable[list[Score]]:
        """One call of a ``batched`` function. Raises ValueError where it does not return one result an answer."""
        lists = ([*data_sources], [*responses], copy.deepcopy([*ground_truths]), copy.deepcopy([*extra_infos]))
        result = self.function(**dict(zip(BATCH_ARGUMENTS, lists, strict=True)), **self.kwargs)
        count = len(data_sources)
        return _await_scores(result, count) if inspect.isawaitable(result) else as_scores(result, count)


async def _await_score(result: Awaitable[Any]) -> Score:
    return as_score(await result)


async def _await_scores(result: Awaitable[Any], count: int) -> list[Score]:
    return as_scores(await result, count)


def _load(where: str, name: str) -> Callable[..., Any]:
    # load_object takes what ends in .py for a file, and everything else for a module
    try:
        function = load_object(f"{where}:{name}", "custom_reward_function.path")
    except InputError as error:
        raise InputError([str(error)]) from error
    except Exception as error:  # whatever the user's module raises while it is imported is a problem of this key
        problem = f"custom_reward_function.path={where}: importing it failed\n{traceback.format_exc(limit=-3).rstrip()}"
        raise InputError([problem]) from error
    if not callable(function):
        raise InputError([f"custom_reward_function.name={name}: {where} has it, but it is not a function"])
    return function


def _optional(where: str, name: str, default: Any) -> Any:
    try:
        return load_object(f"{where}:{name}")
    except InputError:
        return default


def _check_signature(
    function: Callable[..., Any], name: str, kwargs: Mapping[str, Any], arguments: tuple[str, ...]
) -> None:
    taken = sorted(set(kwargs) & set(arguments))
    if taken:
        raise InputError(
            [f"custom_reward_function.reward_kwargs: {', '.join(taken)} come from the data; drop them here"]
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        call = f"{name}({', '.join([*arguments, *kwargs])})"
        raise InputError(
            [
                f"custom_reward_function.name={name}: it is called by name as {call}, which its signature refuses: "
                f"{error}; rename its arguments, or mend custom_reward_function.reward_kwargs"
            ]
        ) from error


def as_scores(result: Any, count: int) -> list[Score]:
    """What a batched function returned: ``count`` results, each as :func:`as_score` takes it."""
    if isinstance(result, Mapping | str) or not hasattr(result, "__len__") or len(result) != count:
        had = f"{len(result)} results" if hasattr(result, "__len__") else type(result).__name__
        raise ValueError(f"a batched reward function must return one result an answer: got {had} for {count} answers")
    return [as_score(one) for one in result]


def as_score(result: Any) -> Score:
    """A number, a dict with ``score``, or a :class:`Score`, as a Score.

    Of a dict, ``pred`` is the answer that was read, other numbers (``acc`` among them) are parts, and texts are left
    out. The status is OK where ``acc`` (the score itself, unless given) is above 0. Raises TypeError or ValueError for
    anything else, non-finite numbers included.
    """
    if isinstance(result, Score):
        return Score(
            _number(result.value),
            {name: _number(part, name) for name, part in result.parts.items()},
            result.status,
            result.masked,
            result.pred,
        )
    if not isinstance(result, Mapping):
        value = _number(result)
        return Score(value, status=_status(value))
    if "score" not in result:
        raise ValueError(f"a reward function's dict needs the key 'score', it has {sorted(map(str, result))}")
    value = _number(result["score"])
    pred = result.get("pred")
    parts = {
        str(name): _number(part, name)
        for name, part in result.items()
        if name not in ("score", "pred") and part is not None and not isinstance(part, str)
    }
    status = _status(parts.get("acc", value))
    return Score(value, parts, status, pred=None if pred is None else str(pred))


def _status(acc: float) -> ScoreStatus:
    return ScoreStatus.OK if acc > 0 else ScoreStatus.WRONG


def _number(value: Any, name: Any = "score") -> float:
    scalar = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if not isinstance(scalar, (int, float)):
        raise TypeError(f"a reward function's {name!r} must be a number, got {type(value).__name__}: {value!r:.200}")
    if not math.isfinite(scalar):
        raise ValueError(f"a reward function's {name!r} must be finite, got {scalar}")
    return float(scalar)
