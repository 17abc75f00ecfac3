"""Test programs on a Sandbox Fusion server: one ``POST /run_code`` a test.

Scores are those of verl's ``sandbox_fusion``: outputs are equal but for newlines at the end, and the tests behind one
that did not compile count as not compiled. A server that is away is tried again for ``give_up_s`` seconds: one that
restarts costs no answer. What the server could not do scores nothing under ``published``, with status
crash, and raises under ``robust``, so that ``reward_model.on_error`` decides. A program that uses up the time of an
answer, or prints more than is read here, is a failure of the program: the server is given less time than the answer
has, so that it is the server that ends it.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import json
import math
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_scores import unit_tests
from reward_scores.score import Score, ScoreStatus, graded, no_answer

if TYPE_CHECKING:
    from reward_scores.http_client import HttpClient, RequestFailed

METHODS = ("published", "robust")
COUNTED = 10  # tests that a continuous score is made of
ATTEMPTS = 3  # of a request that ends in 504
RETRY_SECONDS = 1.0  # before the second attempt, twice that before the third
LONGEST_SECONDS = 10.0  # between the attempts at a server that is away
SPARE_SECONDS = 10.0  # for the request itself, besides compiling and running
AT_ONCE = 16  # requests of one answer
LARGEST_REPLY = 64 * 2**20  # bytes; nearly all of a reply is what the program printed
SPARE_SHARE = 0.25  # of an answer's time, for the request besides the run, at most ANSWER_SPARE_S
ANSWER_SPARE_S = 2.0
PARTS = ("timeout", "error", "api_error")
TOO_LONG = {"status": "Failed", "run_result": {"status": "Error"}}  # in the server's words
TOO_LATE = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
_KIND = {-1: "api_error", -2: "error", -3: "timeout", -4: "error"}
# A function is called with an argument a line of the input, and prints its result as JSON.
_CALLER = """
import json as _json, sys as _sys
def _text(value):
    plain = value is None or isinstance(value, (bool, dict, list, tuple))
    return _json.dumps(value) if plain else str(value)
def _called(name):
    owner = globals()
    found = owner[name] if name in owner else getattr(owner["Solution"](), name)
    given = _sys.stdin.read()
    return found(*[_json.loads(line) for line in given.split("\\n")] if given.strip() else [])
print(_text(_called({name!r})))
"""


class FusionError(RuntimeError):
    """The server did not run a test."""


@dataclass(frozen=True)
class Server:
    """``reward_model.sandbox_fusion``: the whole address, ``/run_code`` included, and what a program may use."""

    url: str
    max_concurrent: int = 64  # requests of this machine's scoring processes at a time
    memory_limit_mb: int = 1024
    timeout: float = 10.0  # seconds to compile, and to run
    give_up_s: float = 120.0  # seconds for which a server that is away is tried again
    api_key_env: str | None = None  # environment variable that holds the server's key
    end: float = math.inf  # of the answer's time, by time.monotonic()
    spare: float = 0.0  # seconds before it by which the server must have ended a program

    def client(self) -> HttpClient:
        """Return the client of this server, which all answers that this process scores share."""
        with _ONE_AT_A_TIME:  # two threads that made one each would share neither's event loop
            return _client(os.getpid(), self.url, 2 * self.timeout + SPARE_SECONDS, self.give_up_s, LARGEST_REPLY)

    async def run(self, source: str, stdin: str | None) -> tuple[Any, str]:
        """Return the server's answer, or what went wrong."""
        from reward_scores.http_client import Reply, ReplyTooLong, RequestFailed, authorization

        try:
            answer = await self.client().request(
                "POST",
                self.url,
                lambda: self._body(source, stdin),
                Reply.json,
                headers={"accept": "application/json", **authorization(self.api_key_env)},
                turn=lambda: place(self.url, self.max_concurrent, self.end),
                end=self.end,
            )
            return answer, ""
        except _NoTimeLeft:
            return TOO_LATE, ""
        except ReplyTooLong:
            return TOO_LONG, ""
        except TimeoutError as error:
            return None, f"{self.url}: {error}"
        except RequestFailed as failure:
            tries = f" (try {failure.failures.total()}, give_up_s={self.give_up_s:g})" if failure.may_pass else ""
            return None, f"{self.url}: {failure}{tries}"

    def _body(self, source: str, stdin: str | None) -> dict[str, Any]:
        seconds = min(self.timeout, self.end - self.spare - time.monotonic())
        if seconds <= 0:
            raise _NoTimeLeft
        return {
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "code": source,
            "stdin": stdin,
            "memory_limit_MB": self.memory_limit_mb,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }


_ONE_AT_A_TIME = threading.Lock()


class _NoTimeLeft(Exception):
    """The time of the answer is over before the program could begin."""


@functools.cache
def _client(process: int, url: str, timeout_s: float, give_up_s: float, largest_reply: int) -> HttpClient:
    """Return a client. ``process`` is this one's id: a client does not outlive a fork, since its thread does not."""
    from reward_scores.http_client import HttpClient, HttpOptions

    options = HttpOptions(
        timeout_s,
        give_up_s,
        RETRY_SECONDS,
        LONGEST_SECONDS,
        largest_reply=largest_reply,
        retried=_may_pass,
    )
    return HttpClient("sandbox_fusion", options)


def _may_pass(failure: RequestFailed, failures: Mapping[str, int]) -> bool:
    if failure.status == 504:  # the server is there, and may have been busy with this program
        return failures["status"] < ATTEMPTS
    return failure.kind in ("connect", "busy") or failure.status == 502


@asynccontextmanager
async def place(url: str, count: int, end: float = math.inf) -> AsyncIterator[None]:
    """Hold one of a server's ``count`` places, over all processes of this machine that use this address.

    A place is a lock on a file, so a process that is killed gives its place back. Raises TimeoutError where none is
    free until ``end``.
    """
    folder = Path(tempfile.gettempdir()) / f"rlrepro-places-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's; remove it, or set TMPDIR")
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    wait = 0.002
    while True:
        for number in random.Random().sample(range(count), count):
            file = os.open(folder / f"{name}-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            try:
                yield
            finally:
                os.close(file)
            return
        if time.monotonic() + wait >= end:
            raise TimeoutError(f"none of {count} places was free (reward_model.sandbox_fusion.max_concurrent)")
        await asyncio.sleep(wait)
        wait = min(wait * 2, 0.1)


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "published",
    continuous: bool = True,
    url: str = "",
    max_concurrent: int = 64,
    memory_limit_mb: int = 1024,
    timeout: float = 10.0,
    give_up_s: float = 120.0,
    api_key_env: str | None = None,
    total_timeout_s: float = math.inf,
) -> Score:
    """Return the share of tests passed: of the first ten with ``continuous``. ``acc`` is 1 where all of them pass.

    ``total_timeout_s`` are the seconds of an answer; tests that have not run by then have failed.

    Raises FusionError under ``method="robust"`` where the server failed, ValueError without ``url``.
    """
    if method not in METHODS:
        raise ValueError(f"sandbox_fusion method={method!r}: must be one of {', '.join(METHODS)}")
    if not url:
        raise ValueError("reward_model.sandbox_fusion.url is not set")
    empty = dict.fromkeys(PARTS, 0.0)
    source = extract(response) if method == "published" else unit_tests.extract(response)
    tests = _tests(ground_truth, extra_info)
    if source is None or tests is None:
        return no_answer(**empty)
    end, spare = time.monotonic() + total_timeout_s, min(ANSWER_SPARE_S, SPARE_SHARE * total_timeout_s)
    server = Server(url, max_concurrent, memory_limit_mb, timeout, give_up_s, api_key_env, end, spare)
    results, problems = check(server, source, tests)
    counted = [result for result, _ in (results[:COUNTED] if continuous else results)]
    if not counted:
        return graded(False, source, **empty)
    if problems and method == "robust":
        raise FusionError(f"{len(problems)} of {len(results)} tests were not judged: {problems[0]}")
    share = sum(result is True for result in counted) / len(counted)
    kinds = [_KIND.get(result if result is not True and result is not False else 0) for result in counted]
    parts = {name: kinds.count(name) / len(counted) for name in PARTS}
    if problems:
        return Score(share, {"acc": float(share == 1), **parts}, ScoreStatus.CRASH, pred=source)
    return graded(share == 1, source, share, **parts)


def extract(response: str) -> str | None:
    """Return, as published, the text after the last mark of Python, else the first block, else None."""
    if "```python" in response:
        return response.split("```python")[-1].split("```")[0]
    if "```" not in response:
        return None
    source = response.split("```")[1]
    first, newline, rest = source.partition("\n")
    return rest if newline and first.strip().isalpha() else source


def _tests(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    given = ground_truth if ground_truth is not None else (extra_info or {}).get("test_cases")
    if isinstance(given, (str, bytes)):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    given = unit_tests.as_columns(given)
    return given if isinstance(given, Mapping) and "inputs" in given and "outputs" in given else None


Result = tuple[bool | int, str]  # True, False, -1 server, -2 run, -3 time, -4 compilation; and its name


def check(server: Server, source: str, tests: Mapping[str, Any]) -> tuple[list[Result], list[str]]:
    """Return every test's result, and the server's failures."""
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if len(inputs) != len(outputs):
        return [(-1, "input_output_mismatch")] * len(inputs), [f"{len(inputs)} inputs and {len(outputs)} outputs"]
    if tests.get("fn_name"):
        source += _CALLER.format(name=tests["fn_name"])

    async def run_all() -> list[tuple[Any, str]]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def run(given: Any) -> tuple[Any, str]:
            async with slots:
                return await server.run(source, None if given is None else str(given))

        return await asyncio.gather(*map(run, inputs))

    answers = server.client().loop.submit(run_all()).result()
    results = [read_answer(answer, problem, str(out)) for (answer, problem), out in zip(answers, outputs, strict=True)]
    problems = [
        problem or f"the server says {status}"
        for (result, status), (_, problem) in zip(results, answers, strict=True)
        if result == -1 and result is not False
    ]
    return after_compilation(results), problems


def after_compilation(results: Sequence[Result]) -> list[Result]:
    """Give all tests behind the first that did not compile its result, as published."""
    first = next((number for number, (result, _) in enumerate(results) if result == -4), len(results))
    return [
        (-4, "compile_error_skipped") if number > first and result != -4 else (result, status)
        for number, (result, status) in enumerate(results)
    ]


def read_answer(answer: Any, problem: str, wanted: str) -> Result:
    """Return the result of a test that expects the output ``wanted``, from one answer of the server."""
    if problem:
        return -1, "api_error"
    if not isinstance(answer, Mapping):
        return -1, "unknown_api_state"
    run, compilation = answer.get("run_result") or {}, answer.get("compile_result") or {}
    match answer.get("status"):
        case "SandboxError":
            return -1, "sandbox_error"
        case "Failed":
            return _failed(run, compilation)
        case "Success" if run.get("status") == "Finished":
            right = str(run.get("stdout") or "").rstrip("\n") == wanted.rstrip("\n")
            return (True, "success") if right else (False, "wrong_answer")
        case "Success":
            return -1, "unexpected_success_state"
        case status:
            return -1, f"unknown_api_status_{status}"


def _failed(run: Mapping[str, Any], compilation: Mapping[str, Any]) -> Result:
    compiled = compilation.get("status")
    if compiled == "TimeLimitExceeded":
        return -4, "compile_timeout"
    if compiled == "Error" or (compiled == "Finished" and compilation.get("return_code") != 0):
        return -4, "compile_error"
    if not run:
        return -1, "unknown_failure_state"
    if run.get("status") == "TimeLimitExceeded":
        return -3, "timeout"
    if run.get("status") == "Error" or (run.get("status") == "Finished" and run.get("return_code") != 0):
        return -2, "runtime_error"
    return -1, "unknown_failure"
