"""Keeps an answer an episode and rewards a better one, after the published tool of word problems."""

from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op


class AnswerChecker(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        ground_truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"answer": "", "gold": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        state = self._instance_dict[instance_id]
        state["answer"] = "#### " + str(parameters.get("answer", "")).removeprefix("#### ")
        reward = await self.calc_reward(instance_id)
        gain = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return ToolResponse(text=f"reward {reward}"), gain, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["answer"], state["gold"], method="flexible")

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
