"""verl's ``BaseTool`` with its schemas, and what lets a class on it serve episodes here.

An instance of a tool belongs to an episode: ``create`` when the episode begins, ``execute`` for each call,
``calc_reward`` and ``release`` when it has ended. verl's SGLang rollout does the same; its agent loop makes an instance
for each call, in which a tool cannot remember earlier calls. The rewards of ``execute`` are kept in
``extra_info["tool_rewards"]``, those of ``calc_reward`` in ``extra_info["rollout_reward_scores"]`` by the tools' names.
"""

from __future__ import annotations

import inspect
import json
import math
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from core.rollout.tools.tools import EpisodeTool, ToolAnswer


class OpenAIFunctionPropertySchema(BaseModel):
    model_config = ConfigDict(extra="allow")  # items and the like, which a chat template writes

    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={}, required=[])
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    name: str
    arguments: str  # JSON


class OpenAIFunctionCallSchema(BaseModel):
    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Return the call, and whether its arguments were no JSON object."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        readable = isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments if readable else {})
        return call, not readable


class OpenAIFunctionToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What ``execute`` answers. Pictures and videos are not taken in: they are reported as the tool's failure."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("text", mode="before")
    @classmethod
    def _without_response(cls, text: Any) -> Any:
        """Take the text of a response: the sandbox tool of verl 0.6 puts one into another."""
        return text.text if isinstance(text, ToolResponse) else text

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """The base class of tools that were written for verl."""

    tool_schema: OpenAIFunctionToolSchema | None = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema of its own: give the entry tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


class VerlTool(EpisodeTool):
    """A tool of the tool agent that a class on verl's ``BaseTool`` carries out."""

    def __init__(self, kind: type, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None):
        schema_given = None if tool_schema is None else OpenAIFunctionToolSchema.model_validate(tool_schema)
        self._make = partial(kind, {"type": "native", **config}, schema_given)
        self.tool: Any = None
        try:
            self.tool = self._make()
        except RuntimeError as error:
            # Of asyncio, where the class makes what belongs to an event loop: it is made on that of its calls
            if tool_schema is None or "event loop" not in str(error):
                raise
        if tool_schema is None:
            schema = self.tool.tool_schema or self.tool.get_openai_tool_schema()
            tool_schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        self.schema = tool_schema

    async def start(self, facts: Mapping[str, Any]) -> SimpleNamespace:
        """Return a new instance: its ``instance_id``, and what a call reads of verl 0.7's ``agent_data``.

        ``create_kwargs`` reach ``create`` one by one, as verl's SGLang rollout passes them, and as a mapping, as its
        agent loop does.
        """
        self.tool = self.tool or self._make()
        create, given = self.tool.create, dict(facts.get("create_kwargs") or {})
        optional = accepted(create, {"instance_id": str(uuid.uuid4()), "create_kwargs": given})
        created = await awaited(create(**{**optional, **given}))
        created = created[0] if isinstance(created, tuple) else created
        data = {"request_id": str(uuid.uuid4()), "tools_kwargs": {self.schema["function"]["name"]: facts}}
        return SimpleNamespace(instance_id=created, **data, extra_fields={})

    async def call_in(
        self, state: SimpleNamespace, arguments: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> ToolAnswer:
        execute, given = self.tool.execute, facts.get("execute_kwargs") or {}
        optional = accepted(execute, {"agent_data": state})
        answer = await awaited(execute(state.instance_id, dict(arguments), **{**optional, **given}))
        response, reward, *_ = answer if isinstance(answer, tuple) else (answer, None)
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise ValueError("the tool returned a picture or a video, and a tool's answer is text here")
        text = getattr(response, "text", response)
        if isinstance(reward, str) and reward == text:  # the sandbox tool of verl until 0.4 returns its text twice
            reward = None
        return ToolAnswer("" if text is None else text, reward)

    async def reward(self, state: SimpleNamespace, facts: Mapping[str, Any]) -> float | None:
        """Return the instance's reward; None where there is none, or no number (some of verl's tools return a list)."""
        calculate = getattr(self.tool, "calc_reward", None)
        if calculate is None or getattr(type(self.tool), "calc_reward", None) is BaseTool.calc_reward:
            return None
        value = await awaited(calculate(state.instance_id, **(facts.get("calc_reward_kwargs") or {})))
        return float(value) if isinstance(value, Real) and math.isfinite(value) else None

    async def end(self, state: SimpleNamespace, facts: Mapping[str, Any]) -> None:
        await awaited(self.tool.release(state.instance_id, **(facts.get("release_kwargs") or {})))


METHODS = ("create", "execute", "release")  # by which a class on verl's base is told, the stand-in's or the package's


def adapt(kind: Any) -> Callable[[Mapping[str, Any], Mapping[str, Any] | None], VerlTool] | None:
    """Return what makes a tool that a class on verl's base carries out, or None for another class."""
    if not (isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in METHODS)):
        return None
    if kind.execute is BaseTool.execute:
        raise ValueError(f"{kind.__name__} has no execute of its own, so that its calls would do nothing; write one")
    return partial(VerlTool, kind)


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
