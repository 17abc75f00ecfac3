"""Says one thing and ends the episode; nothing is started and nothing finalized."""

from verl.interactions.base import BaseInteraction


class FixedReplyInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        called = any(one["role"] == "tool" for one in messages)
        return True, "Thank you.", 1.0 if called else 0.0, {}
