"""Test programs on a Sandbox Fusion server: one ``POST /run_code`` a test.

Scores are those of verl's ``sandbox_fusion``: outputs are equal but for newlines at the end, and the tests behind one
that did not compile count as not compiled. A server that is away is tried again for ``give_up_s`` seconds: one that
restarts costs no answer. What the server could not do scores nothing under ``published``, with status
crash, and raises under ``robust``, so that ``reward_model.on_error`` decides. A program that uses up the time of an
answer, or prints more than is read here, is a failure of the program: the server is given less time than the answer
has, so that it is the server that ends it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import http.client
import itertools
import json
import math
import os
import random
import stat
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_scores import unit_tests
from reward_scores.score import Score, ScoreStatus, graded, no_answer
from reward_scores.server_calls import LARGEST_REPLY, Patience, authorization

METHODS = ("published", "robust")
COUNTED = 10  # tests that a continuous score is made of
ATTEMPTS = 3  # of a request that ends in 504
RETRY_SECONDS = 1.0  # before the second attempt, twice that before the third
LONGEST_SECONDS = 10.0  # between the tries of a server that is away
AWAY = (429, 502, 503)  # statuses of a server that restarts or is overloaded
SPARE_SECONDS = 10.0  # for the request itself, besides compiling and running
THREADS = 16  # requests of one answer at a time
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

    def run(self, source: str, stdin: str | None) -> tuple[Any, str]:
        """Return the server's answer, or what went wrong. A server that is away is tried again, without a place."""
        patience, spent_s = _patience(self.url, self.give_up_s), 0.0
        for tries in itertools.count(1):
            try:
                with place(self.url, self.max_concurrent, self.end):
                    begun = time.monotonic()
                    answer, problem, away = self._try(source, stdin)
            except TimeoutError as error:
                return None, f"{self.url}: {error}"
            if not away:
                patience.answered()
                break
            spent_s += time.monotonic() - begun
            pause = patience.pause(begun, tries, spent_s)
            if pause is None or time.monotonic() + pause >= self.end:
                problem += f" (try {tries}, give_up_s={self.give_up_s:g})"
                break
            time.sleep(pause)
            spent_s += pause
        return answer, problem and f"{self.url}: {problem}"

    def _try(self, source: str, stdin: str | None) -> tuple[Any, str, bool]:
        seconds = min(self.timeout, self.end - self.spare - time.monotonic())
        if seconds <= 0:
            return TOO_LATE, "", False
        payload = {
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "code": source,
            "stdin": stdin,
            "memory_limit_MB": self.memory_limit_mb,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
        headers = {"Content-Type": "application/json", "Accept": "application/json", **authorization(self.api_key_env)}
        return self._post(urllib.request.Request(self.url, json.dumps(payload).encode(), headers))

    def _post(self, request: urllib.request.Request) -> tuple[Any, str, bool]:
        """Return the server's answer, or what went wrong and whether the server was away."""
        problem = ""
        for attempt in range(ATTEMPTS):
            left = self.end - time.monotonic()
            try:
                with urllib.request.urlopen(request, timeout=min(2 * self.timeout + SPARE_SECONDS, left)) as answer:
                    text = answer.read(LARGEST_REPLY + 1)
                return (TOO_LONG if len(text) > LARGEST_REPLY else json.loads(text)), "", False
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}"
                if error.code != 504 or left <= RETRY_SECONDS * (attempt + 1):
                    return None, problem, error.code in AWAY
                if attempt + 1 < ATTEMPTS:
                    time.sleep(RETRY_SECONDS * (attempt + 1))
            except (TimeoutError, ValueError, RecursionError) as error:  # it is there, and busy with the program
                return None, f"{type(error).__name__}: {error}", False
            except (OSError, http.client.HTTPException) as error:
                return None, f"{type(error).__name__}: {error}", True
        return None, problem, False


@functools.cache
def _patience(url: str, give_up_s: float) -> Patience:
    """Return the retries to a server, which all answers that this process scores share."""
    return Patience(give_up_s, RETRY_SECONDS, LONGEST_SECONDS)


@contextmanager
def place(url: str, count: int, end: float = math.inf) -> Iterator[None]:
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
        time.sleep(wait)
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

    def run(given: Any) -> tuple[Any, str]:
        return server.run(source, None if given is None else str(given))

    with ThreadPoolExecutor(max(1, min(THREADS, server.max_concurrent, len(inputs)))) as threads:
        answers = list(threads.map(run, inputs))
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
