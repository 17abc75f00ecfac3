"""A user whom a model behind a server plays."""

import aiohttp
from verl.interactions.base import BaseInteraction


class ModelUserInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        swapped = {"user": "assistant", "assistant": "user"}
        chat = [{**one, "role": swapped.get(one["role"], one["role"])} for one in messages]
        async with aiohttp.ClientSession() as session:
            body = {"model": self.config.get("model", "user"), "messages": chat}
            async with session.post(self.config["url"], json=body) as reply:
                said = (await reply.json())["choices"][0]["message"]["content"]
        return "ACCEPT" in said, said, 1.0 if "ACCEPT" in said else -0.3, {}
