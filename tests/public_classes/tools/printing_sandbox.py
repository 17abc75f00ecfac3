"""Extends verl's sandbox tool: prints the last line of a program that prints nothing."""

import re

from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.rollout_trace import rollout_trace_op


class PrintingSandbox(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.code_pattern = re.compile(r"```python(.*?)```", re.DOTALL)

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        code = parameters["code"]
        if fenced := self.code_pattern.findall(code):
            code = fenced[0].strip()
        *before, last = code.splitlines()
        if not last.startswith("print"):
            code = "\n".join([*before, f"print({last})"])
        arguments = (instance_id, code, self.default_timeout, self.default_language)
        return await self.execution_pool.execute.remote(self.execute_code, *arguments), None, None
