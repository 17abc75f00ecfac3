"""The Sandbox Fusion client, against a server that runs programs or recites answers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reward_scores import prime_code, sandbox_fusion
from reward_scores.sandbox_fusion import FusionError, Server, check
from reward_scores.score import ScoreStatus
from tests.fusion_server import SUCCESS, serve

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture
def server():
    with serve() as one:
        yield one


@pytest.fixture
def url(server):
    return server.url


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def test_programs_run_on_the_server(url):
    score = prime_code.score(fenced(ADD), SUM, sandbox_fusion={"url": url, "memory_limit_mb": 300})
    assert (score.value, score.acc, score.status) == (1.0, 1.0, ScoreStatus.OK)
    half = prime_code.score(fenced("print(3)"), SUM, sandbox_fusion={"url": url})
    assert (half.value, half.acc) == (0.5, 0.0)
    source = "print(1 / 0)"
    assert sandbox_fusion.score(fenced(source), SUM, url=url).parts["error"] == 1
    source = "while True: pass"
    slow = sandbox_fusion.score(fenced(source), SUM, url=url, timeout=1)
    assert slow.parts["timeout"] == 1 and slow.status is ScoreStatus.WRONG


def test_what_the_server_is_sent(server):
    check(
        Server(server.url, memory_limit_mb=123, timeout=7),
        "print(input())",
        {"inputs": ["x"], "outputs": ["x"]},
    )
    sent = {
        "compile_timeout": 7,
        "run_timeout": 7,
        "code": "print(input())",
        "stdin": "x",
        "memory_limit_MB": 123,
    }
    assert server.requests == [{**sent, "language": "python", "files": {}, "fetch_files": []}]


def test_a_program_that_uses_up_its_answers_time_is_wrong(server, monkeypatch):
    url = server.url
    monkeypatch.setattr(sandbox_fusion, "ANSWER_SPARE_S", 29.0)  # a busy machine answers late, too
    monkeypatch.setattr(sandbox_fusion, "SPARE_SHARE", 29 / 30)
    begun, options = time.monotonic(), {"url": url, "total_timeout_s": 30.0, "max_concurrent": 1}
    slow = sandbox_fusion.score(
        fenced("import time\ntime.sleep(99)"), SUM, method="robust", **options
    )
    assert (slow.status, slow.value, slow.parts["timeout"]) == (ScoreStatus.WRONG, 0.0, 1.0)
    assert time.monotonic() - begun < 30 and server.requests[-1]["run_timeout"] <= 1
    monkeypatch.setattr(sandbox_fusion, "LARGEST_REPLY", 10_000)
    long = sandbox_fusion.score(fenced("print('x' * 20000)"), SUM, method="robust", url=url)
    assert (long.status, long.parts["error"]) == (ScoreStatus.WRONG, 1.0)


def test_functions_are_called_on_the_server(url):
    tests = {
        "fn_name": "add",
        "inputs": ["1\n2", '"a"\n"b"', "[1]\n[2]"],
        "outputs": ["3", "ab", "[1, 2]"],
    }
    for source in (
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b): return a + b",
    ):
        assert sandbox_fusion.score(fenced(source), tests, url=url).value == 1
    assert sandbox_fusion.score(
        fenced("def add(a, b): return 3"), tests, url=url
    ).value == pytest.approx(1 / 3)


def test_robust_reads_counts_and_compares_as_it_does_without_a_server(url):
    lines = {"inputs": [["1", "2"]], "outputs": [["3"]]}
    source = fenced("print(int(input()) + int(input()), end=' ')")
    assert sandbox_fusion.score(source, lines, method="robust", url=url).acc == 1
    many = {"inputs": [str(n) for n in range(11)], "outputs": [*map(str, range(10)), "x"]}
    echo = fenced("print(input())")
    assert sandbox_fusion.score(echo, many, url=url).acc == 1  # the first ten, as published
    assert sandbox_fusion.score(echo, many, method="robust", url=url).acc == 0


def test_a_gateway_timeout_is_tried_again(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "RETRY_SECONDS", 0.01)
    one = {"inputs": [""], "outputs": ["recited\n"]}
    with serve([{"http": 504}, {"http": 504}, SUCCESS]) as server:
        assert check(Server(server.url), "", one) == ([(True, "success")], [])
        assert len(server.requests) == 3
    with serve([{"http": 504}] * 4) as server:
        results, problems = check(Server(server.url), "", one)
        assert results == [(-1, "api_error")] and "504" in problems[0]
        assert len(server.requests) == sandbox_fusion.ATTEMPTS
    with serve([{"http": 500}, SUCCESS]) as server:
        assert check(Server(server.url), "", one)[0] == [(-1, "api_error")]
        assert len(server.requests) == 1


def test_a_server_that_fails_is_no_silent_zero():
    dead = {"url": "http://127.0.0.1:9/run_code", "give_up_s": 0.05}
    score = prime_code.score(fenced(ADD), SUM, sandbox_fusion=dead)
    assert (score.value, score.status, score.parts["api_error"]) == (0.0, ScoreStatus.CRASH, 1.0)
    with pytest.raises(FusionError, match="2 of 2 tests were not judged"):
        prime_code.score(fenced(ADD), SUM, {}, "robust", sandbox_fusion=dead)


def test_a_server_that_stays_away_is_waited_for_once_and_not_for_every_answer(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "RETRY_SECONDS", 0.02)
    dead = Server("http://127.0.0.1:9/away", give_up_s=0.3)
    begun = time.monotonic()
    for _ in range(20):
        results, problems = check(dead, "", {"inputs": [""], "outputs": [""]})
        assert results == [(-1, "api_error")] and "give_up_s=0.3" in problems[0]
    assert time.monotonic() - begun < 3


def test_the_reply_is_bounded(monkeypatch):
    one = {"inputs": [""], "outputs": ["recited\n"]}
    with serve([SUCCESS] * 3) as server:
        assert check(Server(server.url), "", one) == ([(True, "success")], [])
        monkeypatch.setattr(sandbox_fusion, "LARGEST_REPLY", 10)
        # What was printed is most of it
        assert check(Server(server.url), "", one) == ([(-2, "runtime_error")], [])


def test_as_many_requests_at_a_time_as_allowed(server):
    tests = {"inputs": ["\n"] * 4, "outputs": ["1"] * 4}
    source = "import time\ntime.sleep(0.1)\nprint(1)"
    asked = Server(server.url, max_concurrent=2)
    asked.client()
    with ThreadPoolExecutor(3) as threads:  # three scorers at once share the connections
        found = list(threads.map(lambda _: check(asked, source, tests)[0], range(3)))
    assert all(result == [(True, "success")] * 4 for result in found)
    assert server.most == 2
