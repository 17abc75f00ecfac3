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

from core.config.code_by_path import absent, load_object
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
ALIASES = {  # what verl's own scorers call an argument -> its name under which verl calls a user's function
    **dict.fromkeys(("predict_str", "model_output", "completion"), "solution_str"),
    "test_cases": "ground_truth",
}
SIGNATURE = f"write a function compute_score({', '.join(ARGUMENTS)}) that calls it"
FOREIGN = {  # argument that a function of another project requires -> what to do
    "reward_inputs": f"EasyR1 calls it with dictionaries; {SIGNATURE}",
    "reward_input": f"EasyR1 calls it with a dictionary; {SIGNATURE}",
    "completions": f"TRL calls it with lists of completions and columns; {SIGNATURE} for one answer",
    "queries": f"OpenRLHF calls it with lists of whole texts; {SIGNATURE} for one answer",
    "data": f"it reads a batch as verl's reward managers do; {SIGNATURE} for one answer",
    "reward_router_address": "it asks a reward model behind verl's router; set reward_model.judge.url instead",
    "tokenizer": f"verl passes a tokenizer to reward managers alone; load it in the function, or {SIGNATURE}",
}


class CustomFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``.

    It is called by argument name, as verl does, with those of the four that it has: one may be left out, unless it is
    ``solution_str``, and may have the name that verl's own scorers give it (:data:`ALIASES`). ``path`` is a Python file
    or a module's name; two files of the same name do not collide. Where the module has ``EXAMPLES`` or
    ``check_ground_truth``, they are used like a scorer's own. A ``batched`` one takes lists,
    ``compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs)``, and returns a list.
    ``settings`` are the arguments that make it anew in another process. Raises InputError.
    """

    def __init__(
        self, path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None, batched: bool = False
    ):
        self.settings = {"path": path, "name": name, "kwargs": dict(kwargs or {}), "batched": batched}
        self.name, self.kwargs, self.batched = f"{path}:{name}", dict(kwargs or {}), batched
        where = without_scheme(path)
        self.function, self.parameters = _load(where, name, self.kwargs, BATCH_ARGUMENTS if batched else ARGUMENTS)
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
        values = (data_source, response, copy.deepcopy(ground_truth), copy.deepcopy(dict(extra_info)))
        return self.function(**self._named(ARGUMENTS, values), **self.kwargs)

    def call_batch(self, *lists: Sequence[Any]) -> Any:
        """Call a batched function with the lists of BATCH_ARGUMENTS, for :func:`as_scores` to read the result."""
        return self.function(**self._named(BATCH_ARGUMENTS, lists), **self.kwargs)

    def _named(self, arguments: tuple[str, ...], values: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(arguments, values, strict=True)
        return {self.parameters[argument]: value for argument, value in pairs if argument in self.parameters}


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
        fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
        if "relative import" in str(error):
            fix = "; write it without the dot: the file's folder is on the path while it is imported"
        raise InputError(f"{key}: {what} failed{fix}\n{traceback.format_exc(limit=-3).rstrip()}") from error


def _load(
    where: str, name: str, kwargs: Mapping[str, Any], arguments: tuple[str, ...]
) -> tuple[Callable[..., Any], dict[str, str]]:
    """Return a user's function, and argument -> the parameter that takes it. Raises InputError."""
    with users_code(f"{KEY}.path={where}", "importing it"):
        function = load_object(f"{where}:{name}", f"{KEY}.path")
    if not callable(function):
        raise InputError(f"{KEY}.name={name}: {where} has it, but it is not a function")
    if taken := sorted(set(kwargs) & set(arguments)):
        raise InputError(f"{KEY}.reward_kwargs: {', '.join(taken)} come from the data; drop them here")
    if (misfit := _misfit(function, arguments, kwargs)) is None:
        return function, _parameters(function, arguments)
    if _misfit(function, OTHER[arguments], kwargs) is None:
        raise InputError(f"{KEY}.name={name}: {MANAGER[arguments]}")
    fix = f"rename its arguments, or correct {KEY}.reward_kwargs"
    with suppress(ValueError):  # a function of C code need not have a signature
        required = [one.name for one in inspect.signature(function).parameters.values() if one.default is one.empty]
        fix = next((FOREIGN[one] for one in required if one in FOREIGN and one not in kwargs), fix)
    call = f"{name}({', '.join([*arguments, *kwargs])})"
    raise InputError(f"{KEY}.name={name}: it is called by name as {call}, which its signature refuses: {misfit}; {fix}")


def _misfit(function: Callable[..., Any], arguments: tuple[str, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a function cannot be called with an answer's arguments, or None where it can."""
    try:
        parameters = _parameters(function, arguments)
        if arguments[1] not in parameters:
            return f"it has no argument {arguments[1]}"
        inspect.signature(function).bind(**dict.fromkeys(parameters.values()), **kwargs)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _parameters(function: Callable[..., Any], arguments: tuple[str, ...]) -> dict[str, str]:
    """Return argument -> the parameter that takes it, of those that a function takes by name."""
    given = inspect.signature(function).parameters.values()
    taken = {ALIASES.get(one.name, one.name): one.name for one in given if one.kind is not one.POSITIONAL_ONLY}
    taken |= {one.name: one.name for one in given if one.name in arguments}
    if any(one.kind is one.VAR_KEYWORD for one in given):
        taken = {argument: argument for argument in arguments} | taken
    return {argument: taken[argument] for argument in arguments if argument in taken}
