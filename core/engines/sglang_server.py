"""A server of SGLang: where its Python is, its process, and requests to it.

SGLang is not imported. It pins a torch of its own and so has an environment of its own (``environment/sglang.sh``); all
that is used of it is its HTTP surface. A request is not repeated (:mod:`reward_scores.http_client`): a server that is
gone has lost the weights of the run, which then begins again from its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.errors import InputError, WorkersLost
from reward_scores.http_client import HttpClient, HttpOptions, Reply, RequestFailed

KEY = "actor_rollout_ref.rollout.name=sglang"
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-sglang"
CONNECTIONS = 512  # at a time: a shell's usual limit is 1024 open files
SHOWN = 15  # last lines of the log, in a message
# A process between this one and the server: it ends all of the server's when this one ends, however it does
# (PR_SET_PDEATHSIG is 1). The server's own do not notice that while they start.
WITH_PARENT = """
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
sys.exit(subprocess.Popen(sys.argv[1:]).wait())
"""


def python_of_sglang() -> str | None:
    """Return the Python that has SGLang: this one, or that of ``environment/sglang.sh``."""
    if find_spec("sglang") is not None:
        return sys.executable
    return str(ENVIRONMENT / "bin" / "python") if (ENVIRONMENT / ".installed").exists() else None


def problems(config: Any = None) -> list[str]:
    """Return why a run cannot have a server, a line each."""
    return [] if python_of_sglang() else [f"{KEY}: SGLang is not installed; type bash environment/sglang.sh"]


class SGLangServer:
    """A server that answers at ``url``, and its ``process`` and ``log``.

    Coroutines run on the thread of ``loop``. Requests raise RuntimeError with the server's words where it refuses one,
    and WorkersLost where it is gone or gives no answer within ``timeout_s``.
    """

    def __init__(self, url: str, timeout_s: float, process: subprocess.Popen | None = None, log: Any = None):
        self.url, self.timeout_s, self.process, self.log = url, timeout_s, process, log
        # No connection is kept: the server ends idle ones, at times under a request that just took one. A proxy of the
        # environment is for what is elsewhere.
        options = HttpOptions(timeout_s, connections=CONNECTIONS, keep_alive=False, trust_env=False)
        self._http = HttpClient("SGLang client", options)
        self.loop = self._http.loop

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> Future:
        """Send a request, a GET without ``body``; return the future of its reply."""
        return self.loop.submit(self._reply(path, body))

    def get(self, path: str) -> Any:
        return self.send(path).result()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.send(path, body).result()

    def close(self) -> None:
        """End requests, the server and the processes that it started."""
        self._http.close()
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    # -- on the thread ---------------------------------------------------------------------------

    async def generate(
        self, body: Mapping[str, Any]
    ) -> AsyncIterator[tuple[list[int], list[float | None], str | None]]:
        """Yield ids, log-probs and SGLang's reason for the end (None before it) of a response: all of it, or where
        ``body`` has it streamed what is new."""
        known = 0
        try:
            async for line in self._http.lines("POST", f"{self.url}/generate", body):
                text = line.removeprefix("data: ")
                if not text.startswith("{"):
                    continue
                reply = json.loads(text)
                if "error" in reply:
                    raise _refused("/generate", str(reply["error"]))
                meta = reply["meta_info"]
                # A stream has all tokens each time, or with --incremental-streaming-output the new ones.
                known, new = meta["completion_tokens"], meta["completion_tokens"] - known
                pairs = meta["output_token_logprobs"] if new else []
                # Those of the truncated distribution, which is what was sampled from, are apart.
                logprobs = meta.get("output_token_sampling_logprobs") or [pair[0] for pair in pairs]
                ids, logprobs = (values[len(values) - new :] for values in (reply["output_ids"], logprobs))
                yield ids, logprobs, (meta["finish_reason"] or {}).get("type")
        except RequestFailed as failure:
            raise self._error("/generate", failure) from failure

    async def _reply(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            reply: Reply = await self._http.request("GET" if body is None else "POST", f"{self.url}{path}", body)
            json_type = reply.headers.get("content-type", "").startswith("application/json")
            value = reply.json() if json_type else reply.text
        except RequestFailed as failure:
            raise self._error(path, failure) from failure
        if isinstance(value, dict) and value.get("success") is False:
            raise _refused(path, reply.text)
        return value

    def _error(self, path: str, failure: RequestFailed) -> Exception:
        if failure.status == 404:
            return _refused(path, "there is no such request: the server is older than SGLang 0.5.23")
        if failure.status or failure.kind == "reply":
            return _refused(path, str(failure))
        state = f"no answer to {path} in {self.timeout_s:g} s" if failure.kind == "timeout" else str(failure)
        if self.process is not None and (code := self.process.poll()) is not None:
            state = f"it ended with status {code} under {path}"
        return WorkersLost(f"SGLang's server at {self.url} is lost: {state}{log_end(self.log)}")


def _refused(path: str, words: str) -> RuntimeError:
    return RuntimeError(f"SGLang refused {path}: {words:.600}")


# -- its process -----------------------------------------------------------------------------------


def launch(python: str, arguments: Mapping[str, Any], timeout_s: float, *, on_cpu: bool) -> SGLangServer:
    """Start a server and return it once it answers. It ends with this process, however that ends.

    Raises InputError with the end of its log where it ends first, or does not answer within ``timeout_s``.
    """
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), *flags(arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Prompt and response may fill the model's positions, and SGLang wants some to spare.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if on_cpu:  # two threads were 35 times slower
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the server)
    # A session of its own: a Ctrl-C is the driver's, and its processes end together
    watched = [sys.executable, "-c", WITH_PARENT, *line]
    process = subprocess.Popen(watched, env=environment, stdout=log, stderr=log, start_new_session=True)
    server = SGLangServer(f"http://127.0.0.1:{port}", timeout_s, process, log)
    end = time.monotonic() + timeout_s
    try:
        while True:
            with suppress(WorkersLost, RuntimeError):
                server.get("/health")
                return server
            if (code := process.poll()) is not None:
                raise InputError(f"{KEY}: SGLang's server ended with status {code} as it started{log_end(log)}")
            if time.monotonic() > end:
                rule = f"the server was not ready in trainer.phase_timeout_s={timeout_s:g} s"
                raise InputError(f"{KEY}: {rule}; raise it{log_end(log)}")
            time.sleep(0.5)
    except BaseException:
        server.close()
        raise


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as a command line has them; one that is None or False is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif value is not True:
            words += map(str, value if isinstance(value, (list, tuple)) else [value])
    return words


def log_end(log: Any) -> str:
    """Return the last lines of a server's log, for a message."""
    if log is None:
        return ""
    log.flush()
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace")
    lines = [line[:300] for line in text.splitlines() if line.strip()]
    return "; its log ends:\n  " + "\n  ".join(lines[-SHOWN:]) if lines else ""
