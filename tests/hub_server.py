"""A stand-in for a model hub: the part of its HTTP API that huggingface_hub uploads through, over real HTTP.

It keeps what was committed in ``files`` (path -> bytes) and refuses a commit that names a large file whose bytes never
came, or came with another hash. Run the client with ``HF_ENDPOINT=<url>`` and the token :data:`TOKEN`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_stub"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, bool] = {}  # name -> private
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}  # large files, by SHA-256
        self.calls: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        self.server.calls.append(f"GET {self.path}")
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        if name in self.server.repositories:
            self.answer({"id": name, "siblings": []})
        else:
            self.answer({"error": "Repository not found"}, 404)

    def do_PUT(self) -> None:
        self.server.calls.append("PUT blob")
        data = self.body()
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        self.server.calls.append(f"POST {self.path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            name = "/".join(part for part in (given.get("organization"), given["name"]) if part)
            self.server.repositories[name] = given.get("visibility") == "private" or bool(given.get("private"))
            self.answer({"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer(
                {
                    "files": [
                        {"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False} for one in files
                    ]
                }
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            href = f"{self.server.url}/blob"
            objects = [{**one, "actions": {"upload": {"href": href}}} for one in json.loads(body)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.commit(repository, [json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": f"{self.path} is not known here"}, 404)

    def commit(self, repository: str, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.blobs:
                    self.answer({"error": f"{value['path']}: its bytes never came"}, 400)
                    return
                self.server.files[value["path"]] = self.server.blobs[value["oid"]]
        url = f"{self.server.url}/{repository}/commit/{'0' * 40}"
        self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": url})


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
