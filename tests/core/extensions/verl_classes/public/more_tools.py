"""Tools for verl in the other ways that people write them."""

from typing import Any

from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    ToolResponse,
)


class OwnSchemaTool(BaseTool):
    """Its schema is in the class; its result is a text and two values, as in verl 0.4."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        text = OpenAIFunctionPropertySchema(type="string", description="a text")
        parameters = OpenAIFunctionParametersSchema(type="object", properties={"text": text}, required=["text"])
        function = OpenAIFunctionSchema(name="shout", description="writes in capitals", parameters=parameters)
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[str, float, dict]:
        return parameters["text"].upper(), 0.0, {}


class IdOnlyTool(BaseTool):
    """``create`` returns the id alone and takes no keywords."""

    async def create(self, instance_id: str) -> str:
        return "mine-" + instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> tuple[ToolResponse, None, None]:
        return ToolResponse(text=instance_id[:5]), None, None


class PictureTool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(image=[object()]), 0.0, {}


class BrokenTool(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        raise RuntimeError("no room for an instance")

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="never"), 0.0, {}


class WordyTool(BaseTool):
    """Its reward is a text, and it lacks a release."""

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="words"), "much", {}


class NoExecuteTool(BaseTool):
    pass


class PrintingSandboxTool(SandboxFusionTool):
    """Changes the program before it runs, on the pool of its base."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        code = f"print({parameters['code']})"
        args = (instance_id, code, self.default_timeout, self.default_language)
        result = await self.execution_pool.execute.remote(self.execute_code, *args)
        return result, None, None
