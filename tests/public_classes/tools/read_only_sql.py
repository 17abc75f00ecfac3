"""Queries a database of the row, for reading alone."""

import sqlite3

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class ReadOnlySQL(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.connections = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id, **kwargs)
        self.connections[instance_id] = connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.executescript(kwargs.get("create_kwargs", kwargs)["script"])
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        query = parameters["query"].strip()
        if not query.lower().startswith("select"):
            return ToolResponse(text="read only"), -0.1, {}
        rows = self.connections[instance_id].execute(query).fetchmany(10)
        return ToolResponse(text="\n".join(map(str, rows))), 0.0, {"rows": len(rows)}

    async def release(self, instance_id, **kwargs):
        self.connections.pop(instance_id).close()
