"""A tool within a fork of verl, which imports the base class from beside it."""

import logging
import os

from verl.utils.rollout_trace import rollout_trace_op

from .base_tool import BaseTool
from .letter_counts import counts
from .schemas import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class LetterTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(counts(parameters["word"]))), 0.0, {}
