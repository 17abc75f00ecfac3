"""A Sandbox Fusion server for tests: a process of its own that runs what it is sent in ``reward_scores.sandbox``.

``python -m tests.fusion_server`` prints its port. With ``--recite FILE`` it answers what stands there (JSON list), in
order, each an answer or ``{"http": status}``. ``GET /log`` tells how many requests there were, the most at a time, and
the last one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from reward_scores.sandbox import Limits, Sandbox

ROOT = Path(__file__).resolve().parents[1]
SUCCESS = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Finished", "stdout": "recited\n", "stderr": "", "return_code": 0, "execution_time": 0.1},
}


class Log:
    def __init__(self, answers: list[Any] | None):
        self.lock = threading.Lock()
        self.answers = answers
        self.requests, self.now, self.most, self.last = 0, 0, 0, None

    def begin(self, request: dict[str, Any]) -> int:
        with self.lock:
            self.now += 1
            self.requests += 1
            self.most, self.last = max(self.most, self.now), request
            return self.requests - 1

    def end(self) -> None:
        with self.lock:
            self.now -= 1

    def as_dict(self) -> dict[str, Any]:
        return {"requests": self.requests, "most": self.most, "last": self.last}


class Handler(BaseHTTPRequestHandler):
    log: Log

    def do_GET(self) -> None:
        self._reply(200, self.log.as_dict())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/run_code":
            return self._reply(404, {})
        number = self.log.begin(request)
        try:
            answer = run(request) if self.log.answers is None else self.log.answers[number]
        finally:
            self.log.end()
        self._reply(answer.get("http", 200), answer)

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def run(request: dict[str, Any]) -> dict[str, Any]:
    limits = Limits(seconds=request["run_timeout"], memory_mb=request["memory_limit_MB"])
    with Sandbox(limits) as box:
        ran = box.run(request["code"], request["stdin"] or "")
    result = {
        "status": "TimeLimitExceeded" if ran.status == "timeout" else "Finished",
        "stdout": ran.stdout,
        "stderr": ran.stderr,
        "return_code": ran.exit_code,
        "execution_time": ran.seconds,
    }
    status = "Success" if ran.status == "ok" else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result}


@contextmanager
def serve(answers: Sequence[Any] | None = None) -> Iterator[str]:
    """Starts the server as a process; yields the address of ``/run_code``."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as recited:
        json.dump(None if answers is None else list(answers), recited)
        recited.flush()
        command = [sys.executable, "-m", "tests.fusion_server", "--recite", recited.name]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/run_code"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def read_log(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url.replace("/run_code", "/log")) as answer:
        return json.loads(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recite", type=Path, help="answers as a JSON list; null runs the programs")
    given = parser.parse_args().recite
    Handler.log = Log(json.loads(given.read_text()) if given else None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
