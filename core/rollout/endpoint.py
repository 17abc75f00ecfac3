"""The HTTP endpoint of outside agents: OpenAI's chat completions, answered by the policy.

It is a small ASGI application on uvicorn, in a thread of the trainer's process. A request carries
the token of an episode that is being played; any other is refused. A field that nothing here acts
on is answered with 400 and its name.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from core.rollout.chat_session import ChatRequest, ChatSession, Completion, Refused
from core.types import Stop

KEEP_ALIVE_S = 3600  # an idle connection that closes while a request is sent would fail it


class Endpoint:
    """Serves the sessions of the episodes that are being played. Raises OSError: no such host."""

    def __init__(self, host: str, tokenizer: Any):
        self.tokenizer = tokenizer
        self.sessions: dict[str, ChatSession] = {}
        listener = socket.create_server((host, 0), backlog=2048)
        self.url = f"http://{host}:{listener.getsockname()[1]}/v1"
        app = FastAPI(openapi_url=None)
        app.post("/v1/chat/completions")(self.answer)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S
        )
        self._server = uvicorn.Server(config)
        run = self._server.run
        self._thread = threading.Thread(target=run, args=([listener],), daemon=True)
        self._thread.start()

    def open(self, session: ChatSession) -> str:
        """Return the token with which requests belong to this session."""
        token = secrets.token_urlsafe(32)
        self.sessions[token] = session
        return token

    def close(self) -> None:
        """Stop listening, and drop open connections."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=10)

    async def answer(self, request: Request) -> Response:
        """Answer a request for completions."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self.sessions.get(token)
        if session is None:
            return _error(401, "authorization", "no episode that is being played has this token")
        try:
            chat = parse_request(await request.body())
            work = asyncio.run_coroutine_threadsafe(session.complete(chat), session.home)
            completions = await asyncio.wrap_future(work)
        except Refused as error:
            return _error(400, error.field, str(error), error.code)
        except asyncio.CancelledError:
            return _error(409, "authorization", "the episode of this token has ended")
        body = self._body(chat, completions)
        if not chat.stream:
            return _json(body)
        return Response("".join(_events(chat, body)), media_type="text/event-stream")

    def _body(self, chat: ChatRequest, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the completions as OpenAI writes them."""
        choices = []
        for index, completion in enumerate(completions):
            message = completion.answer
            reason = "length" if completion.stop is Stop.LENGTH else "stop"
            choice = {
                "index": index,
                "message": {**message, "content": message["content"] or None, "refusal": None},
                "finish_reason": "tool_calls" if "tool_calls" in message else reason,
                "logprobs": None,
            }
            if chat.logprobs:
                choice["logprobs"] = {"content": self._tokens(completion), "refusal": None}
            choices.append(choice)
        written = sum(len(completion.stretch.ids) for completion in completions)
        read = completions[0].length - len(completions[0].stretch.ids)
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": chat.model,
            "choices": choices,
            "usage": {**counts, "total_tokens": read + written},
        }

    def _tokens(self, completion: Completion) -> list[dict[str, Any]]:
        stretch = completion.stretch
        texts = self.tokenizer.batch_decode([[token] for token in stretch.ids.tolist()])
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, stretch.logprobs.tolist(), strict=True)
        ]


def parse_request(body: bytes) -> ChatRequest:
    """Return the request of a body. A null is as good as a missing field. Raises Refused."""
    try:
        fields = dict(json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise Refused("body", f"is no JSON object ({error})") from error
    try:
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        is_unknown = problem["type"] == "extra_forbidden"
        rule = "is not supported" if is_unknown else problem["msg"]
        raise Refused(str(problem["loc"][0]), rule) from error


def _events(chat: ChatRequest, body: dict[str, Any]) -> list[str]:
    """Return a completion as a stream of one chunk, and its usage if that was requested."""
    usage = body.pop("usage")
    body["object"] = "chat.completion.chunk"
    for choice in body["choices"]:
        message = choice.pop("message")
        calls = message.pop("tool_calls", [])
        indexed = [{"index": index, **call} for index, call in enumerate(calls)]
        choice["delta"] = {**message, "tool_calls": indexed} if calls else message
    chunks = [body]
    if chat.stream_options.get("include_usage"):
        chunks.append({**body, "choices": [], "usage": usage})
    return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type="application/json")


def _error(status: int, field: str, message: str, code: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": field, "code": code}
    return _json({"error": error}, status)
