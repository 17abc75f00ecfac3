"""verl 0.4's types: create returns an id, execute a text."""

from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema


class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self.counts[instance_id] = 0
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs) -> tuple[str, float, dict]:
        self.counts[instance_id] += parameters["by"]
        return f"counted to {self.counts[instance_id]}", 0.25, {"by": parameters["by"]}

    async def calc_reward(self, instance_id, **kwargs) -> float:
        return min(self.counts[instance_id], 10) / 10

    async def release(self, instance_id, **kwargs) -> None:
        self.counts.pop(instance_id)
