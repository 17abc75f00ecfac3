"""Tools that a policy may call: what one is, the YAML file that lists them, and two that come along.

The file is verl's::

    tools:
      - class_name: core.rollout.tools.tools:Calculator        # or path/to/file.py:Class; one for verl will do
        config: {}                               # for the class; verl's "type: native" may stand there
        timeout_s: 5                             # optional: seconds of a call, in place of multi_turn.tool_timeout_s
        tool_schema:                             # optional: in place of the class's own
          type: function
          function: {name: calculator, description: ..., parameters: {...}}     # parameters: JSON schema

A plain list is accepted too, with entries in the form of a function's schema. ``class_name`` then names the class that
carries the calls out; the tools that come along, ``calculator`` and ``python``, need none::

    - name: calculator
      timeout_s: 5
      description: Computes an expression.
      parameters: {expression: {type: string}}   # a JSON schema, or argument -> schema, all of them required

A row of the data may choose among them, ``extra_info.tool_selection: [calculator]``, and give a tool facts of its own,
``extra_info.tools_kwargs: {calculator: {create_kwargs: {...}}}``. Without either it has all of them; with
``need_tools_kwargs: true`` and no selection, those that ``tools_kwargs`` names.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from core.config import extensions
from core.config.plugins import absent, in_project, load_object
from core.errors import InputError

KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
Made = TypeVar("Made")  # of an entry of a YAML list: a tool, a user


class ToolError(Exception):
    """A call that the tool refuses; the text goes back to the policy."""


class Tool:
    """A tool. ``schema`` is what the policy is told of it; one object serves all episodes.

    ``runs_apart``: calls run on an event loop of their own, so that one that blocks meets its deadline
    (:mod:`core.rollout.outside_code`). A class whose calls never block says False: they then answer between two steps
    of the engine, and a run with an engine in this process repeats to the bit.
    """

    schema: Mapping[str, Any] = {}
    runs_apart = True

    def __init__(self, config: Mapping[str, Any]):
        """``config`` is the file's. Raises ValueError for what it cannot mean."""
        if config:
            raise ValueError(f"{type(self).__name__} has no option {', '.join(map(repr, config))}")

    async def call(self, arguments: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        """Return the answer for the policy. ``arguments`` fit the schema; ``facts`` are the row's ``create_kwargs``.

        A function of its arguments, if a run is to be replayed. Raises ToolError for a call that makes no sense.
        Anything else that it raises, and what is no text, is answered with an error and counted
        (``agent/failed_calls``).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what it holds."""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer for the policy, and a reward for the call, where the tool gives one."""

    text: str
    reward: float | None = None


class EpisodeTool(Tool):
    """A tool with a state in each episode of an example that has it. ``facts`` are all of the row's ``tools_kwargs``.

    An episode calls :meth:`start`, then :meth:`call_in` for each call, and at its end :meth:`reward` and :meth:`end`.
    """

    async def start(self, facts: Mapping[str, Any]) -> Any:
        """Return the state of a new episode."""
        raise NotImplementedError

    async def call_in(self, state: Any, arguments: Mapping[str, Any], facts: Mapping[str, Any]) -> ToolAnswer:
        """Answer a call in the episode of this state, as :meth:`Tool.call` does."""
        raise NotImplementedError

    async def reward(self, state: Any, facts: Mapping[str, Any]) -> float | None:
        """Return the tool's reward for the whole episode, or None."""
        return None

    async def end(self, state: Any, facts: Mapping[str, Any]) -> None:
        """Let go of an episode's state. Called once for each that :meth:`start` returned."""


@dataclass(frozen=True)
class ToolSpec:
    """A tool of the file: its name and schema, and a check of arguments."""

    name: str
    schema: Mapping[str, Any]
    tool: Tool
    validator: Draft202012Validator
    timeout_s: float | None = None  # of a call; None: multi_turn.tool_timeout_s

    def problem(self, arguments: Any) -> str | None:
        """Return what is wrong with the arguments of a call, or None where they fit."""
        errors = sorted(self.validator.iter_errors(arguments), key=lambda error: len(error.message))
        return errors[0].message[:200] if errors else None


def load_tools(path: str | Path) -> dict[str, ToolSpec]:
    """Name -> tool, in the file's order. Raises InputError with every problem of the file."""

    def named(entry: Any) -> tuple[str, Callable[[], ToolSpec]]:
        spec = _spec(entry)
        return spec.name, lambda: spec

    return made_by_name(*read_entries(path, KEY, "tools"), "tool", named)


def check_tools(path: str | Path) -> None:
    """Check the file and its classes, and make no tool. Raises InputError with every problem."""

    def named(entry: Any) -> tuple[str, Callable[[], None]]:
        read = _read_entry(entry)
        return str((read.schema or {}).get("function", {}).get("name", id(entry))), lambda: None

    made_by_name(*read_entries(path, KEY, "tools"), "tool", named)


def read_entries(path: str | Path, key: str, name: str) -> tuple[list[Any], str]:
    """Return the list that a YAML file holds, alone or under ``name``, and where it stands, for messages.

    Classes of the file's own project get their files' paths (:func:`core.config.plugins.in_project`). Raises InputError
    where the file cannot be read or holds no such list.
    """
    where = f"{key}={path}"
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    entries = content.get(name) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{where}: must hold a list under {name!r}; core/rollout/tools has the form")
    return [_with_path(entry, Path(path)) for entry in entries], f"{where}: {name}"


def _with_path(entry: Any, file: Path) -> Any:
    where = entry.get("class_name") if isinstance(entry, Mapping) else None
    return {**entry, "class_name": in_project(where, file)} if isinstance(where, str) else entry


def made_by_name(
    entries: Sequence[Any], where: str, noun: str, named: Callable[[Any], tuple[str, Callable[[], Made]]]
) -> dict[str, Made]:
    """Return name -> what is made of each entry, in their order; ``named`` gives an entry's name and what makes it.

    Raises InputError with every problem.
    """
    by_name: dict[str, Made] = {}
    problems = []
    for number, entry in enumerate(entries):
        try:
            name, make = named(entry)
            if name in by_name:
                raise ValueError(f"a second {noun} named {name!r}")
            by_name[name] = make()
        except Exception as error:  # the class of an entry may be a user's
            problems.append(f"{where}[{number}]: {_said(error)}")
    if problems:
        raise InputError("\n".join(problems))
    return by_name


class _Entry(NamedTuple):
    """An entry of the file: what makes its tool, its schema where that is not the tool's own, and its deadline."""

    make: Callable[[], Tool]
    schema: Mapping[str, Any] | None
    timeout_s: float | None


def _read_entry(entry: Any) -> _Entry:
    if isinstance(entry, Mapping) and {"class_name", "tool_schema"} <= entry.keys():
        entry = {key: value for key, value in entry.items() if key != "name"}  # the schema's counts, as in verl
    if isinstance(entry, Mapping) and ("name" in entry or "function" in entry):
        entry = _of_function(entry)
    if not isinstance(entry, Mapping) or not entry.keys() <= {"class_name", "config", "tool_schema", "timeout_s"}:
        raise ValueError(
            "must hold class_name, and may hold config, tool_schema and timeout_s; or name, description, parameters"
        )
    timeout_s = entry.get("timeout_s")
    if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float)):
        raise ValueError(f"timeout_s={timeout_s!r} must be a number of seconds")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r} must be above 0; leave it out for multi_turn.tool_timeout_s")
    options, where, schema = _options(entry.get("config")), entry["class_name"], entry.get("tool_schema")
    kind = load_class(where)
    if isinstance(kind, type) and issubclass(kind, Tool):
        return _Entry(lambda: kind(options), schema or kind.schema, timeout_s)
    for adapter_of in extensions.functions("foreign_tool"):
        if (make := adapter_of(kind)) is not None:
            return _Entry(lambda: make(options, schema), schema, timeout_s)
    raise ValueError(f"{where} does not extend core.rollout.tools.tools.Tool, whose call() is awaited")


def _spec(entry: Any) -> ToolSpec:
    make, schema, timeout_s = _read_entry(entry)
    tool = make()
    schema = schema or tool.schema
    function = schema["function"]
    parameters = function.get("parameters") or {"type": "object"}
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(f"parameters is no JSON schema: {error.message}") from error
    return ToolSpec(str(function["name"]), schema, tool, Draft202012Validator(parameters), timeout_s)


def load_class(where: str) -> Any:
    """Return the class ``module:Class``, ``file.py:Class`` or, as verl spells it, ``module.Class``."""
    return load_object(where if ":" in where else ":".join(where.rsplit(".", 1)), "class_name")


def _options(config: Any) -> dict[str, Any]:
    """Return a class's own options: verl's files say beside them that a tool is ``native``, as all are here."""
    options = dict(config or {})
    if (kind := options.pop("type", "native")) != "native":
        raise ValueError(
            f"config.type={kind!r} is not supported; write a class whose call() or execute() asks the server "
            "(for MCP with the package mcp), and type: native"
        )
    return options


def _of_function(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry that begins with the schema of a function in the form that begins with a class."""
    function = dict(entry.get("function") or entry)
    fields = {key: entry[key] for key in ("class_name", "config", "timeout_s") if key in entry}
    for key in (*fields, "type"):
        function.pop(key, None)
    name, parameters = function["name"], function.get("parameters") or {}
    if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
        raise ValueError(
            f"{name!r} has {', '.join(sorted(unknown))}; it may have description, parameters, class_name, config, "
            "timeout_s"
        )
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{name!r}: parameters must be a JSON schema, or a mapping of arguments to theirs")
    if parameters and "properties" not in parameters and not isinstance(parameters.get("type"), str):
        parameters = {"type": "object", "properties": dict(parameters), "required": list(parameters)}
    if "class_name" not in fields:
        if name not in COME_ALONG:
            known = ", ".join(COME_ALONG)
            raise ValueError(
                f"{name!r} is carried out by nothing here: add class_name: path/to/file.py:Class ({known} need none)"
            )
        tool = COME_ALONG[name]
        fields["class_name"] = f"{tool.__module__}:{tool.__name__}"
        arguments = tool.schema["function"]["parameters"]["properties"]
        if parameters and parameters.get("properties", {}).keys() != arguments.keys():
            raise ValueError(f"{name!r} takes the argument {', '.join(arguments)}, and parameters has others")
        function.setdefault("description", tool.schema["function"]["description"])
        parameters = parameters or tool.schema["function"]["parameters"]
    return {**fields, "tool_schema": {"type": "function", "function": {**function, "parameters": parameters}}}


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"lacks {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"importing it failed ({error}); {absent(error)}"
    plain = isinstance(error, (InputError, ValueError, TypeError, RuntimeError))
    return str(error) if plain else f"{type(error).__name__}: {error}"


def chosen(tools: Mapping[str, ToolSpec], extra_info: Mapping[str, Any]) -> dict[str, ToolSpec]:
    """Return the tools of an example. Raises ValueError where it names one that the file does not have."""
    names: Sequence[str] | None = extra_info.get("tool_selection")
    if isinstance(names, str) or not isinstance(extra_info.get("tools_kwargs") or {}, Mapping):
        raise ValueError("extra_info.tool_selection must be a list of names, and tools_kwargs a struct")
    if names is None and extra_info.get("need_tools_kwargs"):
        # parquet gives every row every field of a struct: those without a value are not the row's
        names = [name for name, value in (extra_info.get("tools_kwargs") or {}).items() if value is not None]
    if names is None:
        return dict(tools)
    unknown = [name for name in names if name not in tools]
    if unknown:
        raise ValueError(f"extra_info asks for {', '.join(unknown)}; {KEY} has {', '.join(tools)}")
    return {name: tools[name] for name in names}


def kwargs_of(name: str, extra_info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an example gives a tool: ``create_kwargs``, and for one with a state ``execute_kwargs`` and so on."""
    return (extra_info.get("tools_kwargs") or {}).get(name) or {}


def facts_for(name: str, extra_info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an example's ``create_kwargs`` of a tool."""
    return kwargs_of(name, extra_info).get("create_kwargs") or {}


def _function(name: str, description: str, **parameters: str) -> Mapping[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                "required": list(parameters),
            },
        },
    }


class Calculator(Tool):
    """Arithmetic on numbers, without ``eval``."""

    runs_apart = False  # a thousand characters of bounded powers take no time
    schema = _function(
        "calculator",
        "Computes an arithmetic expression of numbers, + - * / // ** and parentheses.",
        expression="for example (3 + 4) * 12",
    )

    async def call(self, arguments: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        from reward_scores.arithmetic import CannotEvaluate, evaluate

        try:
            value = evaluate(arguments["expression"])
            return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        except (CannotEvaluate, ValueError) as error:  # the latter for a number of more than 4,300 digits
            raise ToolError(f"cannot compute that: {error}") from error


class PythonSandbox(Tool):
    """Runs a script where it can harm nothing (:mod:`reward_scores.sandbox`) and returns what it printed.

    ``config``: ``seconds`` of processor time and ``memory_mb`` of a script. Raises SandboxUnavailable, when made,
    where this machine cannot isolate a program.
    """

    runs_apart = False  # it waits in a thread, and the sandbox has a deadline of its own
    schema = _function(
        "python", "Runs a Python script in an empty sandbox and returns what it prints.", code="the script"
    )

    def __init__(self, config: Mapping[str, Any]):
        from reward_scores.sandbox import Limits, required_isolation

        super().__init__({name: value for name, value in config.items() if name not in ("seconds", "memory_mb")})
        self.how = required_isolation()
        self.limits = Limits(seconds=float(config.get("seconds", 5)), memory_mb=int(config.get("memory_mb", 512)))

    async def call(self, arguments: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        return await asyncio.to_thread(self._run, arguments["code"])

    def _run(self, code: str) -> str:
        from reward_scores.sandbox import Sandbox

        with Sandbox(self.limits, self.how) as box:
            ran = box.run(code)
        if ran.status == "ok":
            return ran.stdout
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        reasons = {"timeout": "it took too long", "output": "it printed too much"}
        raise ToolError(reasons.get(ran.status) or last or "it ended early and printed no reason")


COME_ALONG: Mapping[str, type[Tool]] = {tool.schema["function"]["name"]: tool for tool in (Calculator, PythonSandbox)}
