"""A user's own reward function, with verl's signature: loading it, calling it, reading what it returns."""

from __future__ import annotations

import copy
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from core.plugins import PluginError, load_object
from core.types import Score, ScoreStatus
from reward_scores.verdict import Scorer, any_ground_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class RewardConfigError(ValueError):
    """What is wrong with the rewards of a configuration or its data; ``problems`` lists every one."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


class CustomFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``.

    It is called by argument name, as verl does. ``path`` is a Python file or a module's name; two files of the same
    name do not collide. Where the module has ``EXAMPLES`` or ``check_ground_truth``, they are used like a scorer's
    own. Raises RewardConfigError.
    """

    def __init__(self, path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None):
        self.kwargs = dict(kwargs or {})
        self.name = f"{path}:{name}"
        where = path.removeprefix("file://").removeprefix("pkg://")
        self.function = _load(where, name)
        _check_signature(self.function, name, self.kwargs)
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


async def _await_score(result: Awaitable[Any]) -> Score:
    return as_score(await result)


def _load(where: str, name: str) -> Callable[..., Any]:
    # load_object takes what ends in .py for a file, and everything else for a module
    try:
        function = load_object(f"{where}:{name}", "custom_reward_function.path")
    except PluginError as error:
        raise RewardConfigError([str(error)]) from error
    except Exception as error:  # whatever the user's module raises while it is imported is a problem of this key
        problem = f"custom_reward_function.path={where}: importing it failed\n{traceback.format_exc(limit=-3).rstrip()}"
        raise RewardConfigError([problem]) from error
    if not callable(function):
        raise RewardConfigError([f"custom_reward_function.name={name}: {where} has it, but it is not a function"])
    return function


def _optional(where: str, name: str, default: Any) -> Any:
    try:
        return load_object(f"{where}:{name}")
    except PluginError:
        return default


def _check_signature(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    taken = sorted(set(kwargs) & set(ARGUMENTS))
    if taken:
        raise RewardConfigError(
            [f"custom_reward_function.reward_kwargs: {', '.join(taken)} come from the data; drop them here"]
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        call = f"{name}({', '.join([*ARGUMENTS, *kwargs])})"
        raise RewardConfigError(
            [
                f"custom_reward_function.name={name}: it is called by name as {call}, which its signature refuses: "
                f"{error}; rename its arguments, or mend custom_reward_function.reward_kwargs"
            ]
        ) from error


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
