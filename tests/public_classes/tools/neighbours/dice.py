"""Imports a file beside it, and rolls dice that the row's seed decides."""

import random

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from .dice_rules import total


class Dice(BaseTool):
    async def create(self, instance_id=None, seed=0, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.dice = random.Random(seed)
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        faces = [self.dice.randint(1, 6) for _ in range(parameters["count"])]
        return ToolResponse(text=f"{faces}: {total(faces)}"), 0.0, {}
