"""Answers with a picture, which an episode here cannot hold."""

from PIL import Image
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Cropper(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        picture = Image.new("RGB", (64, 64)).crop(parameters["box"])
        return ToolResponse(image=[picture], text="cropped"), 0.0, {}
