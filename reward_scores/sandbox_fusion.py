"""Test programs on a Sandbox Fusion server: one ``POST /run_code`` a test. Scores are those of
verl's client.

What the server could not do scores nothing under ``published``, with status crash, and raises under
``robust``, so that ``reward_model.on_error`` decides. A program that uses up the time of an answer,
or prints more than is read here, is a failure of the program: the server gets less time than the
answer has, so that it is the server that ends it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reward_scores import unit_tests
from reward_scores.score import Score, ScoreStatus, graded, no_answer, plain

if TYPE_CHECKING:
    from reward_scores.http_client import HttpClient, HttpOptions, RequestFailed

COUNTED = 10  # tests that a continuous score is made of
ATTEMPTS = 3  # of a request that ends in 504
RETRY_SECONDS = 1.0  # before the second attempt, twice that before the third
LONGEST_SECONDS = 10.0  # between the attempts at a server that is away
SPARE_SECONDS = 10.0  # for the request itself, besides compiling and running
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
    """``reward_model.sandbox_fusion``: the whole address, ``/run_code`` included, and what a
    program may use."""

    url: str
    max_concurrent: int = 64  # requests of this process at a time
    memory_limit_mb: int = 1024
    timeout: float = 10.0  # seconds to compile, and to run
    give_up_s: float = 120.0  # seconds for which a server that is away is tried again
    end: float = math.inf  # of the answer's time, by time.monotonic()
    spare: float = 0.0  # seconds before it by which the server must have ended a program

    def client(self) -> HttpClient:
        """Return the client of this server, which all answers that this process scores share.

        One that is away is waited for once, and not for every answer. No client outlives a fork:
        its thread does not.
        """
        from reward_scores.http_client import HttpOptions

        seconds = 2 * self.timeout + SPARE_SECONDS
        pauses = (RETRY_SECONDS, LONGEST_SECONDS)
        more = {"largest_reply": LARGEST_REPLY, "retried": _may_pass}
        options = HttpOptions(seconds, self.give_up_s, *pauses, self.max_concurrent, **more)
        return _client(os.getpid(), self.url, options)

    async def run(self, client: HttpClient, source: str, stdin: str | None) -> tuple[Any, str]:
        """Return the server's answer, or what went wrong."""
        from reward_scores.http_client import Reply, ReplyTooLong, RequestFailed

        left = self.end - time.monotonic()
        try:
            async with asyncio.timeout(None if math.isinf(left) else left):
                return await client.request(
                    "POST", self.url, lambda: self._body(source, stdin), Reply.json
                ), ""
        except _NoTimeLeft:
            return TOO_LATE, ""
        except ReplyTooLong:
            return TOO_LONG, ""
        except TimeoutError:
            return None, f"{self.url}: no answer in the time of the answer (reward_model.timeout_s)"
        except RequestFailed as failure:
            tries = (
                f" (try {failure.failures.total()}, give_up_s={self.give_up_s:g})"
                if failure.may_pass
                else ""
            )
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


class _NoTimeLeft(Exception):
    """The time of the answer is over before the program could begin."""


@functools.cache
def _client(process: int, url: str, options: HttpOptions) -> HttpClient:
    from reward_scores.http_client import HttpClient

    return HttpClient("sandbox_fusion", options)


def _may_pass(failure: RequestFailed, failures: Mapping[str, int]) -> bool:
    if failure.status == 504:  # the server is there, and may have been busy with this program
        return failures["status"] < ATTEMPTS
    return failure.kind in ("connect", "busy") or failure.status == 502


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "published",
    continuous: bool = True,
    total_timeout_s: float = math.inf,
    **server: Any,
) -> Score:
    """Return the share of tests passed: of the first ten with ``continuous``. ``acc`` is 1 where
    all of them pass. ``method="robust"`` reads, counts and compares as :mod:`unit_tests` does.

    ``total_timeout_s`` are the seconds of an answer; tests that have not run by then have failed.
    ``server`` are fields of :class:`Server`. Raises FusionError under ``method="robust"`` where the
    server failed.
    """
    empty = dict.fromkeys(PARTS, 0.0)
    source = extract(response) if method == "published" else unit_tests.extract(response)
    tests = published_tests(ground_truth, extra_info)
    if source is None or tests is None:
        return no_answer(**empty)
    same: Callable[[str, str], bool] = same_lines
    if method == "robust":
        read = unit_tests.read_tests(ground_truth, extra_info)
        tests = {"inputs": read.inputs, "outputs": read.outputs, "fn_name": read.fn_name}
        same = unit_tests.same_output
    end = time.monotonic() + total_timeout_s
    spare = min(ANSWER_SPARE_S, SPARE_SHARE * total_timeout_s)
    results, problems = check(Server(**server, end=end, spare=spare), source, tests, same)
    few = continuous and method == "published"
    counted = [result for result, _ in (results[:COUNTED] if few else results)]
    if not counted:
        return graded(False, source, **empty)
    if problems and method == "robust":
        raise FusionError(f"{len(problems)} of {len(results)} tests were not judged: {problems[0]}")
    share = sum(result is True for result in counted) / len(counted)
    kinds = [_KIND.get(result) for result in counted]
    parts = {name: kinds.count(name) / len(counted) for name in PARTS}
    if problems:
        return Score(share, {"acc": float(share == 1), **parts}, ScoreStatus.CRASH, pred=source)
    return graded(share == 1, source, share, **parts)


def extract(response: str) -> str | None:
    """Return, as published, the text after the last mark of Python, else the first block, else
    None."""
    if "```python" in response:
        return response.split("```python")[-1].split("```")[0]
    if "```" not in response:
        return None
    source = response.split("```")[1]
    first, newline, rest = source.partition("\n")
    return rest if newline and first.strip().isalpha() else source


def published_tests(
    ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the tests as they stand; None where they cannot be read."""
    given = ground_truth if ground_truth is not None else (extra_info or {}).get("test_cases")
    if isinstance(given, (str, bytes)):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    given = unit_tests.as_columns(plain(given))
    return (
        given if isinstance(given, Mapping) and "inputs" in given and "outputs" in given else None
    )


# True, False, -1 server, -2 run, -3 time, -4 compilation; and its name
Result = tuple[bool | int, str]


def same_lines(given: str, wanted: str) -> bool:
    """Compare as published: all but the line breaks at the end."""
    return given.rstrip("\n") == wanted.rstrip("\n")


def check(
    server: Server,
    source: str,
    tests: Mapping[str, Any],
    same: Callable[[str, str], bool] = same_lines,
) -> tuple[list[Result], list[str]]:
    """Return every test's result, and the server's failures."""
    inputs = list(tests["inputs"])
    outputs = list(tests["outputs"])
    if len(inputs) != len(outputs):
        return [(-1, "input_output_mismatch")] * len(inputs), [
            f"{len(inputs)} inputs and {len(outputs)} outputs"
        ]
    if tests.get("fn_name"):
        source += _CALLER.format(name=tests["fn_name"])

    async def run_all() -> list[tuple[Any, str]]:
        texts = [None if one is None else str(one) for one in inputs]
        return await asyncio.gather(*(server.run(client, source, text) for text in texts))

    client = server.client()
    answers = client.submit(run_all()).result()
    results = [
        read_answer(answer, problem, str(out), same)
        for (answer, problem), out in zip(answers, outputs, strict=True)
    ]
    problems = [
        problem or f"the server says {status}"
        for (result, status), (_, problem) in zip(results, answers, strict=True)
        if result == -1
    ]
    return after_compilation(results), problems


def after_compilation(results: Sequence[Result]) -> list[Result]:
    """Give all tests behind the first that did not compile its result, as published."""
    first = next(
        (number for number, (result, _) in enumerate(results) if result == -4), len(results)
    )
    return [
        (-4, "compile_error_skipped") if number > first and result != -4 else (result, status)
        for number, (result, status) in enumerate(results)
    ]


def read_answer(
    answer: Any, problem: str, wanted: str, same: Callable[[str, str], bool] = same_lines
) -> Result:
    """Return the result of a test that expects the output ``wanted``, from one answer of the
    server."""
    if problem:
        return -1, "api_error"
    if not isinstance(answer, Mapping):
        return -1, "unknown_api_state"
    run = answer.get("run_result") or {}
    compilation = answer.get("compile_result") or {}
    match answer.get("status"):
        case "SandboxError":
            return -1, "sandbox_error"
        case "Failed":
            return _failed(run, compilation)
        case "Success" if run.get("status") == "Finished":
            right = same(str(run.get("stdout") or ""), wanted)
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
    if run.get("status") == "Error" or (
        run.get("status") == "Finished" and run.get("return_code") != 0
    ):
        return -2, "runtime_error"
    return -1, "unknown_failure"
