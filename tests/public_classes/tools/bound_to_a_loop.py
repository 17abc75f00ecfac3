"""Makes a connection pool when it is made, which belongs to the event loop that runs then, as aiohttp's do."""

import asyncio

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Pool:
    def __init__(self):
        self.loop = asyncio.get_running_loop()

    async def fetch(self, text):
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("the pool is attached to a different loop")
        return text.upper()


class PoolTool(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.pool = Pool()

    async def create(self, instance_id=None, **kwargs):
        return instance_id or "one", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=await self.pool.fetch(parameters["text"])), 0.0, {}

    async def release(self, instance_id, **kwargs):
        pass
