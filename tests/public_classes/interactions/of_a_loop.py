"""Plays the user from within an agent loop of verl's server manager."""

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.interactions.base import BaseInteraction


class LoopInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return AgentLoopOutput(messages), "", 0.0, {}
