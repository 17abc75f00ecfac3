"""A tool with a state, written for verl: it adds up what the policy enters, and rewards the right sum at the end."""

import logging
import os
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class NotebookTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.books: dict[str, dict[str, Any]] = {}
        self.released: list[str] = []
        self.step_reward = config.get("step_reward", 0.25)

    async def create(self, instance_id: str | None = None, target: int | None = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.books[instance_id] = {"sum": 0, "target": target, "nested": kwargs["create_kwargs"]["target"]}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        book = self.books[instance_id]
        book["sum"] += int(parameters["number"]) * kwargs.get("scale", 1)
        return ToolResponse(text=f"sum {book['sum']} of {book['target']}"), self.step_reward, {"entries": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        book = self.books[instance_id]
        assert book["target"] == book["nested"]
        return 1.0 if book["sum"] == book["target"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.books[instance_id]
        self.released.append(instance_id)
