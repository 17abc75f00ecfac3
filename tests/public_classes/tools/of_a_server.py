"""A tool of an MCP server, on verl's class for them."""

from verl.tools.mcp_base_tool import MCPBaseTool


class ServerSearch(MCPBaseTool):
    def _parse_tool_result(self, content):
        return " ".join(part.text for part in content), {}
