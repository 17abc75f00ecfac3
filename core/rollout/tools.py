"""Tools that a policy may call, simulated users that answer it, and the YAML files that list them.

Methods and files are verl's. Of a tool ``create`` is awaited when an episode begins, ``execute`` for each call,
``calc_reward`` and ``release`` when the episode has ended::

    tools:                                           # multi_turn.tool_config_path
      - class_name: core.rollout.tools.Calculator    # or path/to/file.py:Class
        config: {}                                   # for the class
        tool_schema: {type: function, function: {name: calculator, parameters: {...}}}   # or the class's own

    interaction:                                     # multi_turn.interaction_config_path
      - name: checker
        class_name: path/to/file.py:Checker
        config: {}

An example chooses among the tools, ``extra_info.tool_selection: [calculator]``, and gives their methods arguments,
``extra_info.tools_kwargs: {calculator: {create_kwargs: {...}, execute_kwargs: {...}}}``. Without a selection it has all
tools, with ``need_tools_kwargs: true`` those that ``tools_kwargs`` names. It has the user that
``extra_info.interaction_kwargs: {name: checker, ...}`` names, who gets what else stands there; without it, none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import BaseModel, ConfigDict

from core.config.code_by_path import absent, load_object
from core.errors import InputError

TOOLS_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
USERS_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


class ToolError(Exception):
    """A call that the tool refuses; the text goes back to the policy."""


class OpenAIFunctionSchema(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: dict[str, Any] = {"type": "object"}


class OpenAIFunctionToolSchema(BaseModel):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What ``execute`` answers. Pictures and videos are not supported: they count as the tool's failure."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """A tool. One object serves all episodes of a run, many at a time; an episode's state is kept by its instance id.

    Its methods run on the run's event loop: await what takes time, in a thread where it blocks (``asyncio.to_thread``).
    """

    tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        """``config`` is the file's, ``tool_schema`` too. Raises ValueError for what it cannot mean."""
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema of its own: give the entry tool_schema")
        told = OpenAIFunctionToolSchema.model_validate(self.tool_schema)
        self.name, self.schema = told.function.name, told.model_dump(exclude_unset=True)  # as chat templates read it
        try:
            Draft202012Validator.check_schema(told.function.parameters)
        except SchemaError as error:
            raise ValueError(f"parameters is no JSON schema: {error.message}") from error
        self.validator = Draft202012Validator(told.function.parameters)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | Mapping[str, Any] | None:
        return self.tool_schema

    def problem(self, arguments: Any) -> str | None:
        """Return what is wrong with the arguments of a call, or None where they fit."""
        try:
            errors = sorted(self.validator.iter_errors(arguments), key=lambda error: len(error.message))
        except Exception as error:  # what a policy writes may be too deep, or too long a number, for a schema's check
            return f"the arguments cannot be read ({type(error).__name__})"
        return errors[0].message[:200] if errors else None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode of this id. ``kwargs`` are the example's ``create_kwargs``."""
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return the answer for the policy, the reward of the call or None, and metrics, which are not read.

        Raises ToolError for a call that makes no sense. Anything else that it raises is answered with an error and
        counted (``agent/failed_calls``). A text alone will do as well.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the tool's reward for the whole episode."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an episode's state."""

    def close(self) -> None:
        """Let go of what the object holds."""


class BaseInteraction:
    """A simulated user. One object serves all episodes of a run, many at a time: keep an episode's state by its id.

    Every method but :meth:`close` gets the example's ``interaction_kwargs`` as ``kwargs``. See :class:`BaseTool`.
    """

    def __init__(self, config: dict[str, Any]):
        """``config`` is the file's, with the user's name. Raises ValueError for what it cannot mean."""
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode of this id."""
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Return whether the episode ends, the user's text, a score of the policy's turn or None, and metrics.

        ``messages`` are the prompt's and all since, of roles assistant, tool and user. Where it raises, or returns what
        is no reply, the policy reads an error in its place, and ``agent/user_failures`` counts it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an episode's state. Called once for each that began, however the episode ends."""

    def close(self) -> None:
        """Let go of what the object holds."""


# --- the files ---


def load_tools(path: str | Path) -> dict[str, BaseTool]:
    """Return name -> tool, in the file's order. Raises InputError with every problem of the file."""

    def made(entry: Any) -> BaseTool:
        kind = _class_of(entry, BaseTool, ("name", "config", "tool_schema"), Path(path))
        if (server := (entry.get("config") or {}).get("type", "native")) != "native":
            raise ValueError(f"config.type={server!r} is not supported; write a class whose execute() asks the server")
        if kind.execute is BaseTool.execute:
            raise ValueError(f"{kind.__name__} has no execute of its own; its calls would do nothing")
        config = {name: value for name, value in (entry.get("config") or {}).items() if name != "type"}
        return kind(config, entry.get("tool_schema") and OpenAIFunctionToolSchema.model_validate(entry["tool_schema"]))

    return _made_by_name(path, TOOLS_KEY, "tools", made)


def load_users(path: str | Path) -> dict[str, BaseInteraction]:
    """Return name -> user, in the file's order. Raises InputError as :func:`load_tools` does."""

    def made(entry: Any) -> BaseInteraction:
        kind = _class_of(entry, BaseInteraction, ("name", "config"), Path(path))
        name = entry.get("name") or kind.__name__.removesuffix("Interaction").lower()
        return kind({**dict(entry.get("config") or {}), "name": str(name)})

    return _made_by_name(path, USERS_KEY, "interaction", made)


def file_problems(tools: str | None, users: str | None) -> list[str]:
    """Return the problems of the files of tools and users that are there."""
    problems: list[str] = []
    for path, load in ((tools, load_tools), (users, load_users)):
        if path is not None and Path(path).expanduser().is_file():
            try:
                load(path)
            except InputError as error:
                problems += error.problems
    return problems


def _made_by_name(path: str | Path, key: str, section: str, made: Callable[[Any], Any]) -> dict[str, Any]:
    """Return name -> what ``made`` makes of each entry of a YAML file. Raises InputError with every problem."""
    where = f"{key}={path}"
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    entries = content.get(section) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{where}: must hold a list under {section!r}; the head of core/rollout/tools.py has the form")
    by_name: dict[str, Any] = {}
    problems = []
    for number, entry in enumerate(entries):
        try:
            one = made(entry)
            if one.name in by_name:
                raise ValueError(f"a second one is named {one.name!r}")
            by_name[one.name] = one
        except Exception as error:  # the class of an entry may be a user's
            fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
            what = str(error) if isinstance(error, InputError | ValueError) else f"{type(error).__name__}: {error}"
            problems.append(f"{where}: {section}[{number}]: {' '.join(what.split())}{fix}")
    if problems:
        raise InputError(problems)
    return by_name


def _class_of(entry: Any, base: type, optional: tuple[str, ...], file: Path) -> type:
    """Return the class of an entry whose form is right; the module may be one of the file's project."""
    if not isinstance(entry, Mapping) or not {"class_name"} <= entry.keys() <= {"class_name", *optional}:
        raise ValueError(f"must hold class_name, and may hold {', '.join(optional)}")
    where = entry["class_name"]
    kind = load_object(where if ":" in where else ":".join(where.rsplit(".", 1)), "class_name", beside=file)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"{where} does not extend core.rollout.tools.{base.__name__}")
    return kind


# --- an example's ---


def chosen_tools(tools: Mapping[str, BaseTool], extra_info: Mapping[str, Any]) -> dict[str, BaseTool]:
    """Return the tools of an example. Raises ValueError where it names one that the file does not have."""
    names, kwargs = extra_info.get("tool_selection"), extra_info.get("tools_kwargs") or {}
    if isinstance(names, str) or not isinstance(kwargs, Mapping):
        raise ValueError("extra_info.tool_selection must be a list of names, and tools_kwargs a struct")
    if names is None and extra_info.get("need_tools_kwargs"):
        # parquet gives every example every field of a struct: those without a value are not the example's
        names = [name for name, value in kwargs.items() if value is not None]
    if names is None:
        return dict(tools)
    if unknown := [name for name in names if name not in tools]:
        raise ValueError(f"extra_info asks for {', '.join(unknown)}; {TOOLS_KEY} has {', '.join(tools)}")
    return {name: tools[name] for name in names}


def chosen_user(users: Mapping[str, BaseInteraction], extra_info: Mapping[str, Any]) -> BaseInteraction | None:
    """Return an example's user, or None. Raises ValueError for a user whom the file does not have."""
    kwargs = extra_info.get("interaction_kwargs")
    if kwargs is None:
        return None
    name = kwargs.get("name") if isinstance(kwargs, Mapping) else kwargs
    if name not in users:
        raise ValueError(
            f"extra_info.interaction_kwargs chooses {name!r}; {USERS_KEY} has {', '.join(users) or 'none'}"
        )
    return users[name]


# --- tools that come along ---


def _function(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Calculator(BaseTool):
    """Arithmetic on numbers, without ``eval``."""

    tool_schema = _function(
        "calculator",
        "Computes an arithmetic expression of numbers, + - * / // ** and parentheses.",
        *("expression", "for example (3 + 4) * 12"),
    )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        from reward_scores.arithmetic import CannotEvaluate, evaluate

        try:
            value = evaluate(parameters["expression"])
            return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        except (CannotEvaluate, ValueError) as error:  # the latter for a number of more than 4,300 digits
            raise ToolError(f"cannot compute that: {error}") from error


class PythonSandbox(BaseTool):
    """Runs a script where it can harm nothing (:mod:`reward_scores.sandbox`) and returns what it printed.

    ``config``: ``seconds`` of processor time and ``memory_mb`` of a script. Raises SandboxUnavailable, when made,
    where this machine cannot isolate a program.
    """

    tool_schema = _function(
        "python", "Runs a Python script in an empty sandbox and returns what it prints.", "code", "the script"
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        from reward_scores.sandbox import Limits, required_isolation

        super().__init__(config, tool_schema)
        self.how = required_isolation()
        self.limits = Limits(seconds=float(config.get("seconds", 5)), memory_mb=int(config.get("memory_mb", 512)))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return await asyncio.to_thread(self._run, parameters["code"])

    def _run(self, code: str) -> str:
        from reward_scores.sandbox import Sandbox

        with Sandbox(self.limits, self.how) as box:
            ran = box.run(code)
        if ran.status == "ok":
            return ran.stdout
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        reasons = {"timeout": "it took too long", "output": "it printed too much"}
        raise ToolError(reasons.get(ran.status) or last or "it ended early and printed no reason")
