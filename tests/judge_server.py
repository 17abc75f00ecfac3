"""A server with OpenAI's chat interface for tests, scripted: what it replies is a function of the request.

``reply(number, body)`` returns a text (the judge's words), a dict of what differs in the reply (``text``, ``finish``,
``model``, ``status``, ``headers``, ``raw``), or a number of seconds for which it hangs. It runs on threads of the
test's own process, so that the function can be any.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "scripted-judge"


class JudgeServer:
    """The server's record: every chat request, in order, and the most at a time."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], Any], models: Any):
        self.reply, self.models = reply, models
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []  # of the Authorization header
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.over = threading.Event()  # ends what hangs
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        told = self.server.told
        if isinstance(told.models, int):
            return self._send(told.models, b'{"error": {"message": "scripted"}}', {})
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "tests"} for name in told.models]
        self._send(200, json.dumps({"object": "list", "data": listed}).encode(), {})

    def do_POST(self) -> None:
        told, body = self.server.told, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with told.lock:
            number = len(told.requests)
            told.requests.append(body)
            told.keys.append(self.headers.get("Authorization"))
            told.now += 1
            told.most = max(told.most, told.now)
        try:
            given = told.reply(number, body)
            if isinstance(given, float):
                told.over.wait(given)
                given = "late"
        finally:
            with told.lock:
                told.now -= 1
        given = {"text": given} if isinstance(given, str) else given
        message = {"role": "assistant", "content": given.get("text", "[[1]]")}
        choice = {"index": 0, "message": message, "finish_reason": given.get("finish", "stop"), "logprobs": None}
        made = {
            **{"id": "x", "object": "chat.completion", "created": 0, "model": given.get("model", MODEL)},
            **{"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}},
        }
        status = given.get("status", 200)
        if status != 200:
            made = {"error": {"message": f"scripted {status}", "type": "x", "code": status}}
        self._send(status, given.get("raw", json.dumps(made)).encode(), given.get("headers", {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client gave up
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def serve(
    reply: Callable[[int, dict[str, Any]], Any] | str = "[[1]]", models: Any = (MODEL,), port: int = 0
) -> Iterator[JudgeServer]:
    """Yield a running server. ``models`` are the names that it lists, or a status."""
    told = JudgeServer(reply if callable(reply) else lambda *_: reply, models)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.told, server.daemon_threads = told, True
    told.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        told.over.set()
        server.shutdown()
        server.server_close()
