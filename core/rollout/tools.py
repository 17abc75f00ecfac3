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

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict

from core.config.code_by_path import absent, load_object
from core.errors import InputError

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


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
    """A tool. One object serves all episodes of a run, many at a time; an episode's state is kept
    by its instance id.

    A method may be a coroutine, all of which run on one event loop in a thread of their own, or a
    plain ``def``, which may block: each call has a thread. Both are left behind at the deadline
    (``multi_turn.tool_timeout_s``).
    """

    KEY, SECTION = f"{MULTI_TURN}.tool_config_path", "tools"
    tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        """``config`` is the file's, ``tool_schema`` too, without one the class's own. Raises what
        cannot be meant."""
        self.config, self.tool_schema = config, tool_schema or self.tool_schema
        told = OpenAIFunctionToolSchema.model_validate(self.tool_schema)
        # As chat templates read it
        self.name, self.schema = told.function.name, told.model_dump(exclude_unset=True)
        Draft202012Validator.check_schema(told.function.parameters)
        self.validator = Draft202012Validator(told.function.parameters)

    def problem(self, arguments: Any) -> str | None:
        """Return what is wrong with the arguments of a call, or None where they fit."""
        try:
            errors = sorted(
                self.validator.iter_errors(arguments), key=lambda error: len(error.message)
            )
        except Exception as error:
            # What a policy writes may be too deep, or too long a number, for a schema's check
            return f"the arguments cannot be read ({type(error).__name__})"
        return errors[0].message[:200] if errors else None

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode of this id. ``kwargs`` are the example's ``create_kwargs``."""
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return the answer for the policy, the call's reward or None, and metrics, which are not
        read; or text alone.

        Raises ToolError for a call that makes no sense. Anything else is a failure
        (``agent/failed_calls``).
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an episode's state."""

    def close(self) -> None:
        """Let go of what the object holds."""


class BaseInteraction:
    """A simulated user. ``config`` is the file's, with the name. One object serves all episodes,
    many at a time."""

    KEY, SECTION = f"{MULTI_TURN}.interaction_config_path", "interaction"

    def __init__(self, config: dict[str, Any]):
        self.config, self.name = config, config["name"]

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Return whether the episode ends, the user's text, a score of the policy's turn or None,
        and metrics.

        ``messages`` are the prompt's and all since, of roles assistant, tool and user; ``kwargs``
        are the example's ``interaction_kwargs``. What it raises ends the episode, which then has no
        score: ``reward_model.on_error`` decides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")


# --- the files ---


class ListedClass(BaseModel):
    """What a file has of a tool, or of a user, whose name it gives."""

    model_config = ConfigDict(extra="forbid")

    class_name: str
    config: dict[str, Any] = {}
    tool_schema: OpenAIFunctionToolSchema | None = None
    name: str | None = None

    def made(self, base: type, file: Path) -> BaseTool | BaseInteraction:
        """Return the object; its class may be one of the file's project. Raises what loading and
        making it raises."""
        where = self.class_name
        kind = load_object(
            where if ":" in where else ":".join(where.rsplit(".", 1)), "class_name", beside=file
        )
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise ValueError(f"{where} does not extend core.rollout.tools.{base.__name__}")
        if base is BaseTool:
            return kind(
                {name: value for name, value in self.config.items() if name != "type"},
                self.tool_schema,
            )
        if unread := [
            name for name in ("start_interaction", "finalize_interaction") if hasattr(kind, name)
        ]:
            raise ValueError(
                f"nothing calls {where}.{unread[0]}; do all in generate_response, from its messages"
            )
        return kind(
            {**self.config, "name": self.name or kind.__name__.removesuffix("Interaction").lower()}
        )


def load_listed(path: str | Path | None, base: type) -> dict[str, Any]:
    """Return name -> tool or user of a file, in its order; none without a file. Raises InputError
    with all problems."""
    if path is None:
        return {}
    where = f"{base.KEY}={path}"
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    entries = content.get(base.SECTION) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        rule = f"must hold a list under {base.SECTION!r}"
        raise InputError(f"{where}: {rule}; the head of core/rollout/tools.py has the form")
    by_name: dict[str, Any] = {}
    problems = []
    for number, entry in enumerate(entries):
        try:
            one = ListedClass.model_validate(entry).made(base, Path(path))
            if one.name in by_name:
                raise ValueError(f"a second one is named {one.name!r}")
            by_name[one.name] = one
        except (Exception, SystemExit) as error:  # the class of an entry may be a user's
            fix = f"; {absent(error)}" if isinstance(error, ModuleNotFoundError) else ""
            problems.append(f"{where}: {base.SECTION}[{number}]: {described(error)}{fix}")
    if problems:
        raise InputError(problems)
    return by_name


def described(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}"[:1000].split())[:300]


# --- an example's ---


def chosen_tools(
    tools: Mapping[str, BaseTool], extra_info: Mapping[str, Any]
) -> dict[str, BaseTool]:
    """Return the tools of an example. Raises ValueError where it names one that the file does not
    have."""
    names, kwargs = extra_info.get("tool_selection"), extra_info.get("tools_kwargs") or {}
    if isinstance(names, str) or not isinstance(kwargs, Mapping):
        raise ValueError(
            "extra_info.tool_selection must be a list of names, and tools_kwargs a struct"
        )
    if unknown := [name for name in names or () if name not in tools]:
        raise ValueError(
            f"extra_info asks for {', '.join(unknown)}; {BaseTool.KEY} has {', '.join(tools)}"
        )
    return {name: tools[name] for name in (tools if names is None else names)}


def chosen_user(
    users: Mapping[str, BaseInteraction], extra_info: Mapping[str, Any]
) -> BaseInteraction | None:
    """Return an example's user, or None. Raises ValueError for a user whom the file does not
    have."""
    kwargs = extra_info.get("interaction_kwargs")
    name = kwargs.get("name") if isinstance(kwargs, Mapping) else None
    if kwargs is not None and name not in users:
        has = f"{BaseInteraction.KEY} has {', '.join(users) or 'none'}"
        raise ValueError(f"extra_info.interaction_kwargs chooses {name!r}; {has}")
    return users.get(name)
