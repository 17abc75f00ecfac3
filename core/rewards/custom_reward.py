"""A user's own reward function, with verl's signature: how it is loaded and called."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from core.config.code_by_path import absent, load_module, load_object
from core.errors import InputError
from reward_scores.score import Scorer, any_ground_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
LISTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
KEY = "custom_reward_function"


class CustomFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``.

    It is called by argument name, as verl does, with those of the four that it takes; it must take ``solution_str``.
    ``path`` is a Python file or a module's name, whose ``EXAMPLES`` and ``check_ground_truth`` are used like a
    scorer's. A ``batched`` one takes lists, with the names of :data:`LISTS`, and returns a list. ``settings`` are the
    arguments that make it anew in another process. Raises InputError.
    """

    def __init__(
        self, path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None, batched: bool = False
    ):
        self.settings = {"path": path, "name": name, "kwargs": dict(kwargs or {}), "batched": batched}
        self.name, self.kwargs, self.batched = f"{path}:{name}", dict(kwargs or {}), batched
        where = path.removeprefix("file://").removeprefix("pkg://")
        try:
            self.function: Callable[..., Any] = load_object(f"{where}:{name}", f"{KEY}.path")
            module = load_module(where, f"{KEY}.path={where}")
        except InputError:
            raise
        except Exception as error:  # of the user's module, which may raise anything
            fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
            trace = traceback.format_exc(limit=-3).rstrip()
            raise InputError(f"{KEY}.path={where}: importing it failed{fix}\n{trace}") from error
        self.arguments = self._arguments()
        self.examples = tuple(getattr(module, "EXAMPLES", ()))
        self.check_ground_truth = getattr(module, "check_ground_truth", any_ground_truth)

    def _arguments(self) -> tuple[str, ...]:
        """Return the arguments that the function is called with. Raises InputError where it cannot be called so."""
        where, known = f"{KEY}.name={self.settings['name']}", LISTS if self.batched else ARGUMENTS
        if not callable(self.function):
            raise InputError(f"{where}: {self.settings['path']} has it, but it is not a function")
        if taken := sorted(set(self.kwargs) & set(known)):
            raise InputError(f"{KEY}.reward_kwargs: {', '.join(taken)} come from the data; drop them here")
        signature = inspect.signature(self.function)
        given = signature.parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in given.values())
        arguments = tuple(name for name in known if takes_all or name in given)
        try:
            if known[1] not in arguments:
                raise TypeError(f"it has no argument {known[1]}")
            signature.bind(**dict.fromkeys(arguments), **self.kwargs)
        except TypeError as error:
            call = f"{self.settings['name']}({', '.join([*known, *self.kwargs])})"
            fix = f"rename its arguments, or correct {KEY}.reward_kwargs"
            if (ARGUMENTS if self.batched else LISTS)[1] in given:
                other = "one answer; set naive or prime" if self.batched else "lists; set batch"
                fix = f"it takes {other} as reward_model.reward_manager"
            rule = f"it is called by name as {call}, which its signature refuses: {error}"
            raise InputError(f"{where}: {rule}; {fix}") from error
        return arguments

    def scorer(self, data_source: str) -> Scorer:
        """Return the function in the shape of a built-in scorer, for one data source."""
        return Scorer(self.name, partial(self._call, data_source), self.examples, self.check_ground_truth)

    def _call(self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
        # Copies: what the function does to its arguments must not reach the example in memory.
        return self._called(ARGUMENTS, (data_source, response, *copy.deepcopy((ground_truth, dict(extra_info)))))

    def call_batch(self, *lists: Sequence[Any]) -> Any:
        """Call a batched function with its four lists, for :func:`core.rewards.grading.as_results` to read."""
        return self._called(LISTS, lists)

    def _called(self, names: Sequence[str], values: Sequence[Any]) -> Any:
        given = {name: value for name, value in zip(names, values, strict=True) if name in self.arguments}
        return self.function(**given, **self.kwargs)
