"""A user's own reward function, with verl's signature: how it is loaded and called, and how its result is read.

Where it is called (in this process or in a grader) is not decided here.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from core.config.plugins import load_module, load_object
from core.errors import InputError
from reward_scores.score import Scorer, any_ground_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
OTHER = {ARGUMENTS: BATCH_ARGUMENTS, BATCH_ARGUMENTS: ARGUMENTS}
MANAGER = {  # the arguments that the manager gives -> what to do about a function of the other kind
    ARGUMENTS: "it takes lists (data_sources, solution_strs, ...); set reward_model.reward_manager=batch",
    BATCH_ARGUMENTS: "it takes one answer, and reward_model.reward_manager=batch calls with lists; set naive or prime",
}
KEY = "custom_reward_function"


class CustomFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``.

    It is called by argument name, as verl does. ``path`` is a Python file or a module's name; two files of the same
    name do not collide. Where the module has ``EXAMPLES`` or ``check_ground_truth``, they are used like a scorer's
    own. A ``batched`` one takes lists, ``compute_score(data_sources, solution_strs, ground_truths, extra_infos,
    **reward_kwargs)``, and returns a list. ``settings`` are the arguments that make it anew in another process.
    Raises InputError.
    """

    def __init__(
        self, path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None, batched: bool = False
    ):
        self.settings = {"path": path, "name": name, "kwargs": dict(kwargs or {}), "batched": batched}
        self.name, self.kwargs, self.batched = f"{path}:{name}", dict(kwargs or {}), batched
        where = without_scheme(path)
        self.function = _load(where, name, self.kwargs, BATCH_ARGUMENTS if batched else ARGUMENTS)
        self.examples, self.check_ground_truth = (), any_ground_truth
        with suppress(InputError):  # the module need not have it
            self.examples = tuple(load_object(f"{where}:EXAMPLES"))
        with suppress(InputError):
            self.check_ground_truth = load_object(f"{where}:check_ground_truth")

    def scorer(self, data_source: str) -> Scorer:
        """Return the function in the shape of a built-in scorer, for one data source."""
        return Scorer(self.name, partial(self._call, data_source), self.examples, self.check_ground_truth)

    def _call(self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
        # Copies: what the function does to its arguments must not reach the example in memory.
        return self.function(
            data_source=data_source,
            solution_str=response,
            ground_truth=copy.deepcopy(ground_truth),
            extra_info=copy.deepcopy(dict(extra_info)),
            **self.kwargs,
        )

    def call_batch(self, *lists: Sequence[Any]) -> Any:
        """Call a batched function with the lists of BATCH_ARGUMENTS, for :func:`as_scores` to read the result."""
        return self.function(**dict(zip(BATCH_ARGUMENTS, lists, strict=True)), **self.kwargs)


def without_scheme(path: str) -> str:
    """Return a path of the configuration without verl's ``file://`` or ``pkg://``."""
    return path.removeprefix("file://").removeprefix("pkg://")


@contextmanager
def users_code(key: str, what: str) -> Iterator[None]:
    """Turn whatever a user's module raises at start into an InputError that names the configuration key."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{key}: {what} failed\n{traceback.format_exc(limit=-3).rstrip()}") from error


def _load_attribute(where: str, name: str, arguments: tuple[str, ...]) -> Any:
    """Return the object of a user's module; where it lacks the name, a function of the other kind is pointed out."""
    try:
        return load_object(f"{where}:{name}", f"{KEY}.path")
    except InputError as error:
        module = load_module(where, f"{KEY}.path={where}")
        others = [
            other
            for other, value in vars(module).items()
            if other.startswith(name) and callable(value) and _fits(value, OTHER[arguments], {})
        ]
        if not others or hasattr(module, name):
            raise
        raise InputError(f"{error}; for {others[0]} set {KEY}.name={others[0]}: {MANAGER[arguments]}") from error


def _fits(function: Callable[..., Any], arguments: tuple[str, ...], kwargs: Mapping[str, Any]) -> bool:
    with suppress(TypeError, ValueError):
        inspect.signature(function).bind(**dict.fromkeys(arguments), **kwargs)
        return True
    return False


def _load(where: str, name: str, kwargs: Mapping[str, Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    key = KEY
    with users_code(f"{key}.path={where}", "importing it"):
        function = _load_attribute(where, name, arguments)
    if not callable(function):
        raise InputError(f"{key}.name={name}: {where} has it, but it is not a function")
    if taken := sorted(set(kwargs) & set(arguments)):
        raise InputError(f"{key}.reward_kwargs: {', '.join(taken)} come from the data; drop them here")
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        if _fits(function, OTHER[arguments], kwargs):
            raise InputError(f"{key}.name={name}: {MANAGER[arguments]}") from error
        call = f"{name}({', '.join([*arguments, *kwargs])})"
        raise InputError(
            f"{key}.name={name}: it is called by name as {call}, which its signature refuses: {error}; "
            f"rename its arguments, or correct {key}.reward_kwargs"
        ) from error
    return function
