"""A Ray cluster of two nodes on this machine: a head, and a node on 127.0.0.2 that may see other
files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE_S = 800
RAY = (sys.executable, "-m", "ray.scripts.scripts")
# A core, so that a run of a rank a node fills both
OPTIONS = ("--num-cpus=1", "--object-store-memory=100000000", "--block")


def namespaces() -> bool:
    """Whether this user may have mounts of its own."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-m", "true"]).returncode == 0
    )


class TwoNodes:
    """``mounts`` are (source, place): what the second node sees at the place."""

    def __init__(self, folder: Path, mounts: Sequence[tuple[Path, Path]] = ()):
        self.folder = folder
        self.mounts = mounts
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        # Ray's sockets lie below it, and their paths may not be long
        self.temporary = tempfile.mkdtemp(prefix="r", dir="/tmp")
        quiet = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "120",
        }
        self.env = {**os.environ, **quiet, "RAY_TMPDIR": self.temporary, "OMP_NUM_THREADS": "1"}
        self.nodes: dict[str, subprocess.Popen] = {}

    def start(self, ip: str) -> None:
        port = self.address.partition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false"]
        command = [*RAY, "start", f"--node-ip-address={ip}", *OPTIONS]
        command += head if ip == "127.0.0.1" else [f"--address={self.address}"]
        if ip != "127.0.0.1" and self.mounts:
            binds = " && ".join(
                f"mount --bind '{source}' '{place}'" for source, place in self.mounts
            )
            command = [
                "unshare",
                "-m",
                "sh",
                "-c",
                f'mount --make-rprivate / && {binds} && exec "$@"',
                "x",
                *command,
            ]
        with open(self.folder / f"{ip}.log", "w") as log:
            self.nodes[ip] = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def until_started(self, ip: str) -> None:
        """Wait for Ray there. On a busy machine its own patience of 30 s may end before; then it is
        started again."""
        log = self.folder / f"{ip}.log"
        deadline = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            if self.nodes[ip].poll() is not None:
                self.start(ip)
            time.sleep(0.2)

    def kill(self, ip: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.nodes[ip].pid, signal.SIGKILL)
        self.nodes.pop(ip).wait()


@contextlib.contextmanager
def two_nodes(folder: Path, mounts: Sequence[tuple[Path, Path]] = ()) -> Iterator[TwoNodes]:
    cluster = TwoNodes(folder, mounts)
    try:
        for ip in ("127.0.0.1", "127.0.0.2"):
            cluster.start(ip)
            cluster.until_started(ip)
        yield cluster
    finally:
        for ip in [*cluster.nodes]:
            cluster.kill(ip)
        shutil.rmtree(cluster.temporary, ignore_errors=True)
