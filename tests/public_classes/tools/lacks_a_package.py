"""Imports a package that is not installed."""

import a_package_of_nobody
from verl.tools.base_tool import BaseTool


class Absent(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return a_package_of_nobody.answer(parameters), 0.0, {}
