"""For tests of retrieval: small corpora, a real server process, and servers that misbehave."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACES = (
    "harbour",
    "mountain",
    "river",
    "castle",
    "market",
    "garden",
    "library",
    "bridge",
    "tower",
    "island",
)


def contents(number: int) -> str:
    """A passage that no other one equals: its title holds a word of its own."""
    place, other = PLACES[number % 10], PLACES[number // 10 % 10]
    return (
        f'"Entity{number}"\nEntity{number} is a {place} beside the {other} of district '
        f"{number % 7}."
    )


def write_corpus(path: Path, rows: int = 200) -> Path:
    lines = (
        json.dumps({"id": f"p{number}", "contents": contents(number)}) for number in range(rows)
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """``retrieval_server`` in a process of its own; it can be killed and started again on its
    port."""

    def __init__(self, index: Path, *arguments: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        self._command = [
            sys.executable,
            "-m",
            "recipes.search_r1.retrieval_server",
            "--index",
            str(index),
        ]
        self._command += ["--port", str(self.port), *arguments]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Server:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert int(self._process.stdout.readline()) == self.port
        self._listens()
        return self

    def _listens(self) -> None:
        """The port is said before it is open: an attempt in between is refused, and counted."""
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return
            except ConnectionRefusedError:
                assert self._process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.kill()


class PlainServer(Server):
    """A server that repeats each query as its passage, in a process that starts in a tenth of a
    second."""

    def __init__(self):
        super().__init__(Path())
        self._command = [sys.executable, "-S", "-m", "tests.search", str(self.port)]


def answer_for(request: Mapping[str, Any]) -> dict[str, Any]:
    """A right answer in the published format: passages that repeat the query."""
    return {
        "result": [
            [
                {"document": {"id": f"{query}/{n}", "contents": query}, "score": -n}
                for n in range(request["topk"])
            ]
            for query in request["queries"]
        ]
    }


Behaviour = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def reply(
    handler: BaseHTTPRequestHandler, status: int, body: Any, headers: Sequence[tuple[str, str]] = ()
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **dict(headers),
    }.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def serving(
    behave: Behaviour, path: str = "/", port: int = 0, listed: Behaviour | None = None
) -> Iterator[str]:
    """A server in a thread whose answer to every POST is ``behave``'s, to every GET ``listed``'s;
    yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one piece: two would wait for each other's acknowledgement

        def do_GET(self) -> None:
            listed(self, {})

        def do_POST(self) -> None:
            behave(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 1024

        def handle_error(self, *_: Any) -> None:
            """A client that went away is what some tests are about."""

    server = Quiet(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{path}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def misbehaving(behave: Behaviour) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose answer to a search is ``behave``'s; yields its URL and what it was asked."""
    asked: list[dict[str, Any]] = []

    def record(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        asked.append(request)
        behave(handler, request)

    with serving(record, "/retrieve") as url:
        yield url, asked


@dataclass
class Recorder:
    """What a server was asked, and the most requests at a time."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)  # of the Authorization header
    now: int = 0
    most: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counted(self, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> Iterator[int]:
        """Record a request while it is answered; yields its number."""
        with self.lock:
            number = len(self.requests)
            self.requests.append(request)
            self.keys.append(handler.headers["Authorization"])
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            yield number
        finally:
            with self.lock:
                self.now -= 1


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        threading.Event().wait(0.005)


if __name__ == "__main__":
    with serving(
        lambda handler, request: reply(handler, 200, answer_for(request)), port=int(sys.argv[1])
    ):
        print(sys.argv[1], flush=True)
        threading.Event().wait()
