"""Tools that a policy may call: their base class, the YAML file that lists them, and two that come along.

A tool has verl's methods. Of one object ``create`` is awaited when an episode of an example with the tool begins,
``execute`` for each call, ``calc_reward`` and ``release`` when the episode has ended. The file is verl's::

    tools:
      - class_name: core.rollout.tools.Calculator    # or path/to/file.py:Class
        config: {}                                   # for the class; verl's "type: native" may stand there
        timeout_s: 5                                 # optional: seconds of a call, for multi_turn.tool_timeout_s
        tool_schema:                                 # optional: in place of the class's own
          type: function
          function: {name: calculator, description: ..., parameters: {...}}     # parameters: JSON schema

An example may choose among them, ``extra_info.tool_selection: [calculator]``, and give each method of a tool arguments
of its own, ``extra_info.tools_kwargs: {calculator: {create_kwargs: {...}}}`` (``execute_kwargs``,
``calc_reward_kwargs``, ``release_kwargs``). Without a selection it has all tools, with ``need_tools_kwargs: true``
those that ``tools_kwargs`` names.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import BaseModel, ConfigDict, Field

from core.config.code_by_path import absent, load_object
from core.errors import InputError

KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
METHODS = ("create", "execute", "release")  # a class with these is a tool, on BaseTool or on verl's own base
Made = TypeVar("Made")  # of an entry of a YAML list: a tool, a user


class ToolError(Exception):
    """A call that the tool refuses; the text goes back to the policy."""


class OpenAIFunctionPropertySchema(BaseModel):
    model_config = ConfigDict(extra="allow")  # items and the like, which a chat template writes

    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


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

    ``runs_apart``: calls run on an event loop of their own, so that one that blocks meets its deadline
    (:mod:`core.rollout.outside_code`). A class whose methods never block sets it to False: they then answer between two
    steps of the engine, and a run with an engine in this process repeats to the bit.
    """

    runs_apart = True
    tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        """``config`` is the file's, ``tool_schema`` too. Raises ValueError for what it cannot mean."""
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema of its own: give the entry tool_schema")
        self.name = OpenAIFunctionToolSchema.model_validate(self.tool_schema).function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | Mapping[str, Any] | None:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode; return the id of its instance. ``kwargs`` are the example's ``create_kwargs``."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return the answer for the policy, the reward of the call or None, and metrics, which are not read.

        Raises ToolError for a call that makes no sense. Anything else that it raises is answered with an error and
        counted (``agent/failed_calls``).
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the tool's reward for the whole episode."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an episode's state."""

    def close(self) -> None:
        """Let go of what the object holds."""


@dataclass(frozen=True)
class ToolSpec:
    """A tool of the file: its name and schema, and a check of arguments."""

    name: str
    schema: Mapping[str, Any]
    tool: Any  # a BaseTool, or an object with its methods
    validator: Draft202012Validator
    timeout_s: float | None = None  # of a call; None: multi_turn.tool_timeout_s

    def problem(self, arguments: Any) -> str | None:
        """Return what is wrong with the arguments of a call, or None where they fit."""
        errors = sorted(self.validator.iter_errors(arguments), key=lambda error: len(error.message))
        return errors[0].message[:200] if errors else None

    @property
    def keeps_state(self) -> bool:
        """Whether an episode has to call ``create``, ``calc_reward`` and ``release``."""
        own = type(self.tool)
        return any(
            getattr(own, name, None) is not getattr(BaseTool, name) for name in ("create", "calc_reward", "release")
        )


class ToolInstance:
    """A tool in one episode: its methods called as verl calls them, with the example's arguments ``kwargs``."""

    def __init__(self, tool: Any, kwargs: Mapping[str, Any]):
        self.tool, self.id = tool, str(uuid.uuid4())
        self.kwargs = kwargs = copy.deepcopy(dict(kwargs))  # a tool may change what it is given
        self.data = SimpleNamespace(request_id=self.id, tools_kwargs={tool.name: kwargs}, extra_fields={})

    def _given(self, method: str) -> dict[str, Any]:
        return dict(self.kwargs.get(f"{method}_kwargs") or {})

    async def create(self) -> None:
        """Create the instance. ``create_kwargs`` are passed one by one and, where it is a parameter, as a mapping."""
        given = self._given("create")
        optional = accepted(self.tool.create, {"instance_id": self.id, "create_kwargs": given})
        created = await awaited(self.tool.create(**{**optional, **given}))
        created = created[0] if isinstance(created, tuple) else created
        self.id = created if isinstance(created, str) else self.id

    async def execute(self, arguments: Mapping[str, Any]) -> tuple[str, float | None]:
        """Return the text and the reward of a call. Raises ValueError for an answer that is none."""
        optional = accepted(self.tool.execute, {"agent_data": self.data})
        answer = await awaited(self.tool.execute(self.id, dict(arguments), **{**optional, **self._given("execute")}))
        response, reward, *_ = answer if isinstance(answer, tuple) else (answer, None)
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise ValueError("it returned a picture or a video, and an answer is text here")
        text = response if isinstance(response, str) else getattr(response, "text", response)
        text = "" if text is None and response is not None else text
        if not isinstance(text, str):
            raise ValueError(f"it returned {type(text).__name__}, not text")
        if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
            raise ValueError(f"it returned the reward {reward!r:.60}, which is no finite number")
        return text, reward

    async def calc_reward(self) -> float | None:
        """Return the instance's reward; None where there is none, or no number (some of verl's tools return a list)."""
        calculate = getattr(self.tool, "calc_reward", None)
        if calculate is None:
            return None
        value = await awaited(calculate(self.id, **self._given("calc_reward")))
        return float(value) if isinstance(value, Real) and math.isfinite(value) else None

    async def release(self) -> None:
        await awaited(self.tool.release(self.id, **self._given("release")))


async def awaited(value: Any) -> Any:
    """Return a value, awaited where a method was written with ``async``."""
    return await value if inspect.isawaitable(value) else value


def accepted(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a method takes, for such as public classes often leave out."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(kwargs)
    names = {one.name for one in parameters}
    return {name: value for name, value in kwargs.items() if name in names}


# -- the file --------------------------------------------------------------------------------------


def load_tools(path: str | Path) -> dict[str, ToolSpec]:
    """Return name -> tool, in the file's order. Raises InputError with every problem of the file."""

    def named(entry: Any) -> tuple[str, Callable[[], ToolSpec]]:
        spec = _spec(entry, Path(path))
        return spec.name, lambda: spec

    return made_by_name(*read_entries(path, KEY, "tools"), "tool", named)


def check_tools(path: str | Path) -> None:
    """Check the file and its classes, and make no tool. Raises InputError with every problem."""

    def named(entry: Any) -> tuple[str, Callable[[], None]]:
        _tool_class(entry, Path(path))
        return str((entry.get("tool_schema") or {}).get("function", {}).get("name", id(entry))), lambda: None

    made_by_name(*read_entries(path, KEY, "tools"), "tool", named)


def read_entries(path: str | Path, key: str, name: str) -> tuple[list[Any], str]:
    """Return the list that a YAML file holds, alone or under ``name``, and where it stands, for messages.

    Raises InputError where the file cannot be read or holds no such list.
    """
    where = f"{key}={path}"
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    entries = content.get(name) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        form = "core/rollout/tools.py" if name == "tools" else "core/rollout/users.py"
        raise InputError(f"{where}: must hold a list under {name!r}; the head of {form} has the form")
    return entries, f"{where}: {name}"


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
            problems.append(f"{where}[{number}]: {_in_one_line(error)}")
    if problems:
        raise InputError("\n".join(problems))
    return by_name


def load_class(where: str, file: Path) -> Any:
    """Return the class ``module:Class``, ``file.py:Class`` or, as verl writes it, ``module.Class``.

    ``file`` lists it: the module may be one of that file's project.
    """
    return load_object(where if ":" in where else ":".join(where.rsplit(".", 1)), "class_name", beside=file)


def options_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a class's own options: verl's files say beside them that a tool is ``native``, as all are here."""
    options = dict(entry.get("config") or {})
    if (kind := options.pop("type", "native")) != "native":
        raise ValueError(f"config.type={kind!r} is not supported; write a class whose execute() asks the server")
    return options


def _tool_class(entry: Any, file: Path) -> Any:
    """Return the class of an entry whose form is right. Raises ValueError."""
    known = {"name", "class_name", "config", "tool_schema", "timeout_s"}
    if not isinstance(entry, Mapping) or not {"class_name"} <= entry.keys() <= known:
        raise ValueError("must hold class_name, and may hold config, tool_schema and timeout_s")
    timeout_s = entry.get("timeout_s", 1.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r} must be a number of seconds above 0, or left out")
    options_of(entry)
    kind = load_class(entry["class_name"], file)
    if not (isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in METHODS)):
        raise ValueError(f"{entry['class_name']} does not extend core.rollout.tools.BaseTool")
    if kind.execute is BaseTool.execute:
        raise ValueError(f"{kind.__name__} has no execute of its own, so that its calls would do nothing; write one")
    return kind


def _spec(entry: Any, file: Path) -> ToolSpec:
    kind, schema = _tool_class(entry, file), entry.get("tool_schema")
    if schema is not None:
        _check_parameters(schema)
    tool = kind(options_of(entry), None if schema is None else OpenAIFunctionToolSchema.model_validate(schema))
    if schema is None:
        own = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
        schema = own if isinstance(own, Mapping) else own.model_dump(exclude_unset=True, exclude_none=True)
        _check_parameters(schema)
    parameters = schema["function"].get("parameters") or {"type": "object"}
    name = str(schema["function"]["name"])
    tool.name = name
    return ToolSpec(name, schema, tool, Draft202012Validator(parameters), entry.get("timeout_s"))


def _check_parameters(schema: Mapping[str, Any]) -> None:
    try:
        Draft202012Validator.check_schema(schema["function"].get("parameters") or {"type": "object"})
    except SchemaError as error:
        raise ValueError(f"parameters is no JSON schema: {error.message}") from error


def _in_one_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"lacks {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"importing it failed ({error}); {absent(error)}"
    plain = isinstance(error, (InputError, ValueError, TypeError, RuntimeError))
    return "; ".join((str(error) if plain else f"{type(error).__name__}: {error}").splitlines())


# -- an example's tools ----------------------------------------------------------------------------


def chosen(tools: Mapping[str, ToolSpec], extra_info: Mapping[str, Any]) -> dict[str, ToolSpec]:
    """Return the tools of an example. Raises ValueError where it names one that the file does not have."""
    names: Sequence[str] | None = extra_info.get("tool_selection")
    if isinstance(names, str) or not isinstance(extra_info.get("tools_kwargs") or {}, Mapping):
        raise ValueError("extra_info.tool_selection must be a list of names, and tools_kwargs a struct")
    if names is None and extra_info.get("need_tools_kwargs"):
        # parquet gives every example every field of a struct: those without a value are not the example's
        names = [name for name, value in (extra_info.get("tools_kwargs") or {}).items() if value is not None]
    if names is None:
        return dict(tools)
    unknown = [name for name in names if name not in tools]
    if unknown:
        raise ValueError(f"extra_info asks for {', '.join(unknown)}; {KEY} has {', '.join(tools)}")
    return {name: tools[name] for name in names}


def kwargs_of(name: str, extra_info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an example gives the methods of a tool: ``create_kwargs``, ``execute_kwargs`` and so on."""
    return (extra_info.get("tools_kwargs") or {}).get(name) or {}


# -- tools that come along -------------------------------------------------------------------------


def _function(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _refuse_options(tool: BaseTool, options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"{type(tool).__name__} has no option {', '.join(map(repr, options))}")


class Calculator(BaseTool):
    """Arithmetic on numbers, without ``eval``."""

    runs_apart = False  # a thousand characters of bounded powers take no time
    tool_schema = _function(
        "calculator",
        "Computes an arithmetic expression of numbers, + - * / // ** and parentheses.",
        *("expression", "for example (3 + 4) * 12"),
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        _refuse_options(self, config)

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

    runs_apart = False  # it waits in a thread, and the sandbox has a deadline of its own
    tool_schema = _function(
        "python", "Runs a Python script in an empty sandbox and returns what it prints.", "code", "the script"
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        from reward_scores.sandbox import Limits, required_isolation

        super().__init__(config, tool_schema)
        _refuse_options(self, {name: value for name, value in config.items() if name not in ("seconds", "memory_mb")})
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
