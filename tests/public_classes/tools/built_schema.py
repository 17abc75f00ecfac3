"""Builds its schema of verl's schema classes, with items and an enumeration."""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

SCHEMA = OpenAIFunctionToolSchema(
    type="function",
    function=OpenAIFunctionSchema(
        name="sort",
        description="Sort numbers.",
        parameters=OpenAIFunctionParametersSchema(
            type="object",
            properties={
                "numbers": OpenAIFunctionPropertySchema(type="array", description="The numbers."),
                "order": OpenAIFunctionPropertySchema(type="string", enum=["up", "down"]),
            },
            required=["numbers"],
        ),
    ),
)


class Sorter(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema or SCHEMA)

    async def execute(self, instance_id, parameters, **kwargs):
        numbers = sorted(parameters["numbers"], reverse=parameters.get("order") == "down")
        return ToolResponse(text=str(numbers)), None, None
