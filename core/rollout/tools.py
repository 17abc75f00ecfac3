"""Tools that a policy may call, simulated users that answer it, and the YAML files that list them,
in verl's form.

    tools:                                           # multi_turn.tool_config_path
      - class_name: recipes.lab.tools.Calculator     # or path/to/file.py:Class
        config: {}                                   # for the class
        tool_schema: {type: function, function: {name: calculator, parameters: {...}}}   # or the
        class's own

    interaction:                                     # multi_turn.interaction_config_path
      - name: checker
        class_name: path/to/file.py:Checker
        config: {}

An example has all tools, or those of ``extra_info.tool_selection: [calculator]``, and gives their
methods arguments, ``extra_info.tools_kwargs: {calculator: {create_kwargs: {...}, execute_kwargs:
{...}}}``. It has the user that ``extra_info.interaction_kwargs: {name: checker, ...}`` names, who
gets what else stands there; without it, none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict

from core.config.code_by_path import absent, load_object
from core.errors import InputError

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
# Of tools_kwargs; verl's calc_reward_kwargs have no effect here: the scorer rewards an episode
TOOL_ARGUMENTS = ("create_kwargs", "execute_kwargs", "release_kwargs", "calc_reward_kwargs")


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
    """What ``execute`` answers: text. Pictures and videos are not supported: they count as the
    tool's failure."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None


class BaseTool:
    """A tool. One object serves all episodes of a run; it keeps their state by instance id.

    A method may be a coroutine, all of which run on one event loop in a thread of their own, or a
    plain ``def``, which may block: each call has a thread. Both are left behind at the deadline
    (``multi_turn.tool_timeout_s``).
    """

    KEY, SECTION = f"{MULTI_TURN}.tool_config_path", "tools"
    tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        """Take ``config`` and ``tool_schema`` of the file; without a schema the class has its own.

        Raises what pydantic and jsonschema raise for a wrong schema.
        """
        self.config = config
        self.tool_schema = tool_schema or self.tool_schema
        schema = OpenAIFunctionToolSchema.model_validate(self.tool_schema)
        self.name = schema.function.name
        self.schema = schema.model_dump(exclude_unset=True)  # as chat templates read it
        Draft202012Validator.check_schema(schema.function.parameters)
        self.validator = Draft202012Validator(schema.function.parameters)

    def problem(self, arguments: Any) -> str | None:
        """Return what is wrong with the arguments of a call, or None if they fit."""
        try:
            messages = [error.message for error in self.validator.iter_errors(arguments)]
        except Exception as error:
            # What a policy writes may be too deep, or hold too long a number
            return f"the arguments cannot be read ({type(error).__name__})"
        return min(messages, key=len)[:200] if messages else None

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode of this id. ``kwargs`` are the example's ``create_kwargs``."""
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return the answer for the policy, the call's reward or None, and metrics; or text alone.

        The metrics are not read. Raises ToolError for a call that makes no sense. Any other error
        is a failure of the tool (``agent/failed_calls``).
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop an episode's state."""

    def close(self) -> None:
        """Close what the object holds."""


class BaseInteraction:
    """A simulated user. One object serves all episodes. ``config`` is the file's, with the name."""

    KEY, SECTION = f"{MULTI_TURN}.interaction_config_path", "interaction"

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name = config["name"]

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Return whether the episode ends, the text, the turn's score or None, and metrics.

        ``messages`` are the prompt's and all since, of roles assistant, tool and user; ``kwargs``
        are the example's ``interaction_kwargs``. What it raises ends the episode, which then has no
        score: ``reward_model.on_error`` decides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")


# --- the files ---


class ListedClass(BaseModel):
    """An entry of a file: the class of a tool or of a user."""

    model_config = ConfigDict(extra="forbid")

    class_name: str
    config: dict[str, Any] = {}
    tool_schema: OpenAIFunctionToolSchema | None = None
    name: str | None = None

    def make(self, base: type, file: Path) -> BaseTool | BaseInteraction:
        """Return the object; its class may stand beside the file. Raises what its code raises."""
        name = self.class_name
        path = name if ":" in name else ":".join(name.rsplit(".", 1))
        kind = load_object(path, "class_name", beside=file)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise ValueError(f"{name} does not extend core.rollout.tools.{base.__name__}")
        if base is BaseTool:
            # verl's files have the key type, which no tool reads
            config = {key: value for key, value in self.config.items() if key != "type"}
            return kind(config, self.tool_schema)
        for method in ("start_interaction", "finalize_interaction"):
            if hasattr(kind, method):
                fix = "do all in generate_response, from its messages"
                raise ValueError(f"nothing calls {name}.{method}; {fix}")
        user = self.name or kind.__name__.removesuffix("Interaction").lower()
        return kind({**self.config, "name": user})


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises ConstructorError for a key that stands in it twice."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                what = f"found duplicate key {key.value!r}"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_listed(path: str | Path | None, base: type) -> dict[str, Any]:
    """Return the tools or users of a file by name, in its order; none without a file.

    Raises InputError with all problems.
    """
    if path is None:
        return {}
    where = f"{base.KEY}={path}"
    try:
        content = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), UniqueKeys)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"{where}: cannot be read ({one_line_of(error)}); write YAML in UTF-8"
        ) from error
    entries = content.get(base.SECTION) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        rule = f"must hold a list under {base.SECTION!r}"
        raise InputError(f"{where}: {rule}; the head of core/rollout/tools.py has the form")
    by_name: dict[str, Any] = {}
    problems = []
    for number, entry in enumerate(entries):
        try:
            member = ListedClass.model_validate(entry).make(base, Path(path))
            if not member.name:
                raise ValueError("its name is empty")
            if member.name in by_name:
                raise ValueError(f"a second one is named {member.name!r}")
            by_name[member.name] = member
        except (Exception, SystemExit) as error:  # the class of an entry may be a user's
            fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
            problems.append(f"{where}: {base.SECTION}[{number}]: {one_line_of(error)}{fix}")
    if problems:
        raise InputError(problems)
    return by_name


def one_line_of(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}"[:1000].split())[:300]


# --- an example's tools and user ---


def chosen_tools(
    tools: Mapping[str, BaseTool], extra_info: Mapping[str, Any]
) -> dict[str, BaseTool]:
    """Return the tools of an example. Raises ValueError for a tool that the file lacks."""
    names = extra_info.get("tool_selection")
    arguments = extra_info.get("tools_kwargs") or {}
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if isinstance(names, str) or not (names is None or is_list):
        raise ValueError("extra_info.tool_selection must be a list of names")
    _check_arguments(arguments)
    # A parquet file gives each row the fields of all rows, with nulls in them
    asked = [*(names or ()), *(name for name, given in arguments.items() if given is not None)]
    if unknown := [name for name in dict.fromkeys(asked) if name not in tools]:
        has = f"{BaseTool.KEY} has {', '.join(tools) or 'none'}"
        raise ValueError(f"extra_info asks for {', '.join(unknown)}; {has}")
    return dict(tools) if names is None else {name: tools[name] for name in names}


def _check_arguments(arguments: Any) -> None:
    """Raise ValueError for ``tools_kwargs`` that are not structs of a tool's arguments."""
    if not isinstance(arguments, Mapping):
        raise ValueError("extra_info.tools_kwargs must be a struct")
    for name, given in arguments.items():
        where = f"extra_info.tools_kwargs.{name}"
        if not isinstance(given, Mapping | None):
            raise ValueError(f"{where} must be a struct of {', '.join(TOOL_ARGUMENTS)}")
        for key, value in (given or {}).items():
            if key not in TOOL_ARGUMENTS and value is not None:
                raise ValueError(f"{where} has {key}, and not one of {', '.join(TOOL_ARGUMENTS)}")
            if not isinstance(value, Mapping | None):
                raise ValueError(f"{where}.{key} must be a struct")


def chosen_user(
    users: Mapping[str, BaseInteraction], extra_info: Mapping[str, Any]
) -> BaseInteraction | None:
    """Return an example's user, or None. Raises ValueError for a user that the file lacks."""
    arguments = extra_info.get("interaction_kwargs")
    if arguments is None:
        return None
    name = arguments.get("name") if isinstance(arguments, Mapping) else None
    if not isinstance(name, str) or name not in users:
        has = f"{BaseInteraction.KEY} has {', '.join(users) or 'none'}"
        raise ValueError(f"extra_info.interaction_kwargs chooses {name!r}; {has}")
    return users[name]
