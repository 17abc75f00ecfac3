"""Runs a program in a process of its own, off the event loop."""

import asyncio
import subprocess
import sys

from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse


class PythonRunner(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.timeout = int(config.get("timeout", 10))

    def run(self, code: str) -> str:
        command = [sys.executable, "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout)
        return done.stdout or done.stderr.strip().splitlines()[-1]

    async def execute(self, instance_id: str, parameters: dict, **kwargs) -> tuple[ToolResponse, float, dict]:
        try:
            text = await asyncio.get_running_loop().run_in_executor(None, self.run, parameters["code"])
        except subprocess.TimeoutExpired:
            text = "the program took too long"
        return ToolResponse(text=text), 0.0, {}
