"""Several actions of one tool, notes that last an episode, and a reward for using them."""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Memory(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.notes: dict[str, dict[str, str]] = {}
        self.most = config.get("most", 3)

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.notes[instance_id] = dict((create_kwargs or kwargs).get("notes", {}))
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        notes = self.notes[instance_id]
        action = getattr(self, f"do_{parameters['action']}", None)
        if action is None:
            return ToolResponse(text=f"no action {parameters['action']}"), -0.1, {"error": True}
        return ToolResponse(text=action(notes, parameters)), 0.0, {"notes": len(notes)}

    def do_write(self, notes, parameters):
        if len(notes) >= self.most:
            return "the memory is full"
        notes[parameters["key"]] = parameters["value"]
        return "written"

    def do_read(self, notes, parameters):
        return notes.get(parameters["key"], "nothing there")

    async def calc_reward(self, instance_id, **kwargs):
        return 0.1 * len(self.notes[instance_id])

    async def release(self, instance_id, **kwargs):
        self.notes.pop(instance_id, None)
