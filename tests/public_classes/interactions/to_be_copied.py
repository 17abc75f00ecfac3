"""Written to lie beside verl's interactions, whose base it imports from its own folder."""

from .base import BaseInteraction


class CopiedInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        last = messages[-1]["content"]
        return last == "stop", "more?", float(last == "stop"), {}
