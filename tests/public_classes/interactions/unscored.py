"""Gives no score, keeps its own count, and finalizes without an id."""

from verl.interactions.base import BaseInteraction


class UnscoredInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.asked = 0

    async def generate_response(self, instance_id, messages, **kwargs):
        self.asked += 1
        return self.asked > 1, f"question {self.asked}", None, {}

    async def finalize_interaction(self):
        self.asked = 0
