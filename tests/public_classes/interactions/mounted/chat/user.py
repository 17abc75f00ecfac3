"""Imports its neighbour by the place that its repository has in verl's."""

from recipe.chat.texts import ask
from verl.interactions.base import BaseInteraction
from verl.utils.rollout_trace import rollout_trace_op


class MountedInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self._turns = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        self._turns[instance_id] = 0
        return instance_id

    @rollout_trace_op
    async def generate_response(self, instance_id, messages, **kwargs):
        self._turns[instance_id] += 1
        over = self._turns[instance_id] > 1
        return over, "" if over else ask(self._turns[instance_id]), float(over), {}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        del self._turns[instance_id]
