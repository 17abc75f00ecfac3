"""File systems for tests: memory, a folder as ``file://``, and a real S3 server of the package
moto."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from core import files

LOGIN = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def fresh(monkeypatch, tmp_path: Path) -> Path:
    """Makes the cache an empty folder, as on another machine, and returns it."""
    folder = tmp_path / f"cache-{uuid.uuid4().hex[:6]}"
    monkeypatch.setenv(files.CACHE, str(folder))
    files._copied.cache_clear()
    return folder


def put(folder: Path, url: str) -> str:
    """Copies a file or folder to a URL with the driver's own means, and returns the URL."""
    fs, path = fsspec.core.url_to_fs(url)
    for file in (
        [folder]
        if folder.is_file()
        else sorted(each for each in folder.rglob("*") if each.is_file())
    ):
        target = path if folder.is_file() else f"{path}/{file.relative_to(folder)}"
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(target, file.read_bytes())
    return url


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Starts the server and yields the environment in which a process reaches it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    # It counts requests before it checks who sends them: never, until a test resets the count to 0.
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "inf"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(600):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None, "the S3 server ended"
                time.sleep(0.1)
            yield {**LOGIN, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        finally:
            server.kill()
