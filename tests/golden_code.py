"""Answers to the golden vectors of scorers that run programs, in the form of ``tests/golden_scorers.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_scores import prime_code, sandbox_fusion
from tests.fusion_server import SUCCESS, serve

Inputs = Mapping[str, Any]


def _prime_code(given: Inputs) -> dict[str, Any]:
    text, tests = given["completion"], given["test_cases"]
    try:
        return {"score": prime_code.score(text, tests, {}, "published", given.get("continuous", False)).value}
    except UnboundLocalError as error:
        raise ValueError(str(error)) from error


def _sandbox_fusion(given: Inputs) -> dict[str, Any]:
    """The recorded answers, in order, from a server that recites them; one request at a time keeps the order."""
    tests, answers = given["test_cases"], given.get("responses")
    with serve(answers=[SUCCESS] * 100 if answers is None else answers) as server:
        url = server.url
        if answers is None:
            with_outputs = {**tests, "outputs": [SUCCESS["run_result"]["stdout"]] * len(tests["outputs"])}
            return {"score": _fusion_score(given["completion"], with_outputs, given, url)}
        results, _ = sandbox_fusion.check(sandbox_fusion.Server(url, max_concurrent=1), "print()", tests)
    return {"score": _share(results, given.get("continuous", False)), "statuses": [status for _, status in results]}


def _fusion_score(text: str, tests: Inputs, given: Inputs, url: str) -> float:
    continuous = given.get("continuous", False)
    return sandbox_fusion.score(text, tests, {}, "published", continuous, url=url, max_concurrent=1).value


def _share(results: Sequence[tuple[Any, str]], continuous: bool) -> float:
    counted = results[: sandbox_fusion.COUNTED] if continuous else results
    return sum(result is True for result, _ in counted) / len(counted) if counted else 0.0


ANSWERS = {"reward_prime_code": _prime_code, "reward_sandbox_fusion": _sandbox_fusion}
