"""Makes its schema of a method's signature, and has none in the YAML file."""

import re

from transformers.utils import get_json_schema
from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse


class Reverser(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.fence = re.compile(r"```(.*?)```", re.DOTALL)

    async def reverse(self, text: str) -> str:
        """Reverse a text.

        Args:
            text: The text to reverse.

        Returns:
            str: The reversed text.
        """
        return text[::-1]

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema(**get_json_schema(self.reverse))

    async def execute(self, instance_id: str, parameters: dict, **kwargs) -> tuple[ToolResponse, float, dict]:
        fenced = self.fence.findall(parameters["text"])
        return ToolResponse(text=await self.reverse(fenced[0] if fenced else parameters["text"])), 0, {}
