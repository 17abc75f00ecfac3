"""Answers to the golden vectors of scorers that run programs, in the form of
``tests/golden_scorers.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores import prime_code, sandbox_fusion
from tests.fusion_server import SUCCESS, serve

Inputs = Mapping[str, Any]


def _prime_code(given: Inputs) -> dict[str, Any]:
    text, tests = given["completion"], given["test_cases"]
    try:
        return {
            "score": prime_code.score(
                text, tests, {}, "published", given.get("continuous", False)
            ).value
        }
    except UnboundLocalError as error:
        raise ValueError(str(error)) from error


def _sandbox_fusion(given: Inputs) -> dict[str, Any]:
    """The recorded answers, in order, from a server that recites them; one request at a time keeps
    the order."""
    tests, answers, continuous = (
        given["test_cases"],
        given.get("responses"),
        given.get("continuous", False),
    )
    with serve(answers=[SUCCESS] * 100 if answers is None else answers) as server:
        if answers is None:
            tests = {**tests, "outputs": [SUCCESS["run_result"]["stdout"]] * len(tests["outputs"])}
            options = dict(continuous=continuous, url=server.url, max_concurrent=1)
            scored = sandbox_fusion.score(given["completion"], tests, {}, "published", **options)
            return {"score": scored.value}
        results, _ = sandbox_fusion.check(
            sandbox_fusion.Server(server.url, max_concurrent=1), "print()", tests
        )
    counted = results[: sandbox_fusion.COUNTED] if continuous else results
    share = sum(result is True for result, _ in counted) / len(counted) if counted else 0.0
    return {"score": share, "statuses": [status for _, status in results]}


ANSWERS = {"reward_prime_code": _prime_code, "reward_sandbox_fusion": _sandbox_fusion}
