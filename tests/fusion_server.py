"""A Sandbox Fusion server for tests, in a thread: it runs what it is sent in
``reward_scores.sandbox``, or recites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from reward_scores.sandbox.sandbox import Limits, Sandbox
from tests.search import Recorder, reply, serving

SUCCESS = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {
        "status": "Finished",
        "stdout": "recited\n",
        "stderr": "",
        "return_code": 0,
        "execution_time": 0.1,
    },
}


@dataclass(kw_only=True)
class FusionServer(Recorder):
    """``answers`` are recited in order; None runs the programs."""

    answers: Sequence[Any] | None

    def answer(self, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        with self.counted(handler, request) as number:
            answer = run(request) if self.answers is None else self.answers[number]
        reply(handler, answer.get("http", 200), answer)


def run(request: dict[str, Any]) -> dict[str, Any]:
    limits = Limits(seconds=request["run_timeout"], memory_mb=request["memory_limit_MB"])
    with Sandbox(limits) as box:
        ran = box.run(request["code"], request["stdin"] or "")
    result = {
        "status": "TimeLimitExceeded" if ran.status == "timeout" else "Finished",
        **{
            "stdout": ran.stdout,
            "stderr": ran.stderr,
            "return_code": ran.exit_code,
            "execution_time": ran.seconds,
        },
    }
    status = "Success" if ran.status == "ok" else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result}


@contextmanager
def serve(answers: Sequence[Any] | None = None, port: int = 0) -> Iterator[FusionServer]:
    """Yield a running server; its ``url`` is that of ``/run_code``."""
    server = FusionServer(answers=answers)
    with serving(server.answer, "/run_code", port) as server.url:
        yield server
