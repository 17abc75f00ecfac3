"""Counts its episodes with an actor of Ray, as the published search and sandbox tools limit their rate."""

import ray
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from .neighbours.dice_rules import total


@ray.remote(concurrency_groups={"take": 1})
class Turnstile:
    def __init__(self, most):
        self.most, self.taken = most, []

    @ray.method(concurrency_group="take")
    def take(self):
        self.taken.append(1)
        return total(self.taken) <= self.most


class Worker:
    """A class that becomes an actor when the tool is made."""

    def execute(self, function, *args):
        return function(*args)


class RayLimited(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.turnstile = Turnstile.options(name="turnstile", get_if_exists=True).remote(config["most"])
        self.worker = ray.remote(Worker).options(num_cpus=0).remote()
        self.entered = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.entered[instance_id] = await self.worker.execute.remote(half, await self.turnstile.take.remote())
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(self.entered[instance_id])), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return self.entered[instance_id]

    async def release(self, instance_id, **kwargs):
        del self.entered[instance_id]


def half(entered):
    return 0.5 if entered else 0.0
