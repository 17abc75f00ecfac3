"""A simulated user for verl who says higher or lower."""

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction


class GuessInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}
        self.finalized: list[str] = []

    async def start_interaction(self, instance_id: str | None = None, ground_truth: int = 0, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"gold": ground_truth, "turns": 0, "name": kwargs["name"]}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs):
        state = self._instance_dict[instance_id]
        state["turns"] += 1
        said = int(next(one["content"] for one in reversed(messages) if one["role"] == "assistant"))
        score = await self.calculate_score(instance_id, said=said)
        if said == state["gold"]:
            return True, "", score, {}
        return False, "higher" if said < kwargs["ground_truth"] else "lower", score, {"turns": state["turns"]}

    async def calculate_score(self, instance_id: str, said: int) -> float:
        return 1.0 if said == self._instance_dict[instance_id]["gold"] else -0.1

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
        self.finalized.append(instance_id)


class UnscoredInteraction(BaseInteraction):
    """Gives no score, and ends without a state."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return len(messages) > 3, "go on", None, {}

    async def finalize_interaction(self):
        return None
