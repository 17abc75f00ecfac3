"""A server with OpenAI's chat interface for tests, scripted: what it replies is a function of the
request.

``reply(number, body)`` returns a text (the judge's words), a dict of what differs in the reply
(``text``, ``usage``, ``finish``, ``model``, ``status``, ``headers``, ``raw``), or a number of
seconds for which it hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.search import Recorder, reply, serving

MODEL = "scripted-judge"


@dataclass(kw_only=True)
class JudgeServer(Recorder):
    reply: Callable[[int, dict[str, Any]], Any]
    models: Any
    over: threading.Event = field(default_factory=threading.Event)  # ends what hangs

    def list_models(self, handler: BaseHTTPRequestHandler, _: Any) -> None:
        if isinstance(self.models, int):
            return reply(handler, self.models, {"error": {"message": "scripted"}})
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "tests"}
            for name in self.models
        ]
        return reply(handler, 200, {"object": "list", "data": listed})

    def chat(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self.counted(handler, body) as number:
            given = self.reply(number, body)
            if isinstance(given, float):
                self.over.wait(given)
                given = "late"
        given = {"text": given} if isinstance(given, str) else given
        message = {"role": "assistant", "content": given.get("text", "[[1]]")}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": given.get("finish", "stop"),
            "logprobs": None,
        }
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        made = {
            **{
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": given.get("model", MODEL),
            },
            **{"choices": [choice], "usage": given.get("usage", usage)},
        }
        status = given.get("status", 200)
        if status != 200:
            made = {"error": {"message": f"scripted {status}", "type": "x", "code": status}}
        raw = given.get("raw", made)
        reply(
            handler,
            status,
            raw.encode() if isinstance(raw, str) else raw,
            [*given.get("headers", {}).items()],
        )


@contextmanager
def serve(
    reply: Callable[[int, dict[str, Any]], Any] | str = "[[1]]", models: Any = (MODEL,)
) -> Iterator[JudgeServer]:
    """Yield a running server. ``models`` are the names that it lists, or a status."""
    told = JudgeServer(reply=reply if callable(reply) else lambda *_: reply, models=models)
    with serving(told.chat, "/v1", listed=told.list_models) as told.url:
        yield told
        told.over.set()
