"""Sends queries to a retrieval server, in a pool of threads, by verl's helper."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.utils.search_r1_like_utils import perform_single_search_batch


class SearchClient(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        assert config.get("retrieval_service_url"), "Configuration must include 'retrieval_service_url'"
        self.pool = ThreadPoolExecutor(config.get("num_workers", 4))

    async def execute(self, instance_id, parameters, **kwargs):
        queries = parameters.get("query_list")
        if not isinstance(queries, list):
            return ToolResponse(text=json.dumps({"result": "query_list is no list"})), 0.0, {}
        url, topk = self.config["retrieval_service_url"], self.config.get("topk", 3)
        loop = asyncio.get_running_loop()
        text, facts = await loop.run_in_executor(self.pool, perform_single_search_batch, url, queries, topk)
        return ToolResponse(text=text), 0.0, facts
