"""File systems for tests: memory, a folder as ``file://``, and a real S3 server of the package moto.

The server runs in an environment of its own, as its packages and Hydra's exclude one another: ``python -m venv X``,
``X/bin/pip install 'moto[server]'``, ``MOTO_SERVER=X/bin/moto_server``. The client is s3fs (``pip install '.[s3]'``).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest

from core.remote import cache

SERVER = os.environ.get("MOTO_SERVER", "moto_server")
LOGIN = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


def skip_reason() -> str | None:
    """Why there is no S3 server for tests, None where there is one."""
    if find_spec("s3fs") is None:
        return "s3fs is not installed (pip install '.[s3]')"
    if shutil.which(SERVER) is None:
        return (
            "no S3 server: MOTO_SERVER has to name the moto_server of another environment (pip install 'moto[server]')"
        )
    return None


def fresh(monkeypatch, tmp_path: Path) -> Path:
    """Makes the cache an empty folder, as on another machine, and returns it."""
    folder = tmp_path / f"cache-{uuid.uuid4().hex[:6]}"
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    cache._copied.cache_clear()
    return folder


def put(folder: Path, url: str) -> str:
    """Copies a file or folder to a URL with the driver's own means, and returns the URL."""
    fs, path = fsspec.core.url_to_fs(url)
    for file in [folder] if folder.is_file() else sorted(each for each in folder.rglob("*") if each.is_file()):
        target = path if folder.is_file() else f"{path}/{file.relative_to(folder)}"
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(target, file.read_bytes())
    return url


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Starts the server and yields the environment in which a process reaches it."""
    if reason := skip_reason():
        pytest.skip(reason)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [SERVER, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
        server.wait()
