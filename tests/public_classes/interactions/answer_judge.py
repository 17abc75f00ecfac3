"""Reads the policy's last answer and asks again until it is right."""

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k


class AnswerJudgeInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        said = next((one["content"] for one in reversed(messages) if one["role"] == "assistant"), "")
        self._instance_dict[instance_id]["response"] = said
        reward = await self.calculate_score(instance_id)
        return reward == 1.0, "right" if reward == 1.0 else "wrong, try again", reward, {}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="strict", format_score=0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
