"""Has a base class of its own for where verl is absent, and reads what the agent loop passes if it does."""

try:
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import ToolResponse
except ImportError:
    BaseTool, ToolResponse = object, None


class Dictionary(BaseTool):
    WORDS = {"oak": "a tree", "owl": "a bird"}

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        text = self.WORDS.get(parameters["word"], "unknown")
        turn = getattr(agent_data, "assistant_turns", None)
        return ToolResponse(text=text if turn is None else f"{text} ({turn})"), 0.0, {}
