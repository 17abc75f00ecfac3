"""Equality by sympy and math-verify may not end: it is graded in workers, which are killed at the
deadline."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from core.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from core.data.parquet import Example
from core.rewards.graders import InProcess
from core.rewards.grading import Job
from core.rewards.layer import RewardLayer
from core.rewards.scorer_check import check_scorers
from reward_scores import SCORERS, prime_math, symbolic
from reward_scores.score import ScoreStatus

PRIME, GEO, MATH = "numina_olympiads", "hiyouga/geometry3k", "lighteval/MATH"
TOWER = "9**9**9**9"


def test_what_calls_a_library_declares_it():
    """Every method whose code path reaches the libraries, found by calling it with the libraries
    out of reach."""

    def refuse(*_, **__):
        raise LookupError

    for scorer in SCORERS.values():
        source, methods = scorer.name, getattr(inspect.getmodule(scorer.score), "METHODS", ())
        for method in methods if "\\boxed" in str(scorer.examples) else ():
            response, gold = "<think>t</think>\\boxed{b+a}", "a+b"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(symbolic, "_math_verify", refuse)
                patch.setattr(symbolic, "read", refuse)
                try:
                    scorer(response, gold, {}, method=method)
                    called = False
                except LookupError:
                    called = True
            assert called == bool(scorer.libraries(method=method)), (source, method)


@pytest.fixture
def make_layer():
    layers = []

    def make(path=None, **reward_model):
        reward = RewardModelConfig(**{"num_workers": 1, "timeout_s": 20.0, **reward_model})
        config = SimpleNamespace(
            reward_model=reward, custom_reward_function=CustomRewardFunctionConfig(path=path)
        )
        layers.append(RewardLayer(config))
        return layers[-1]

    yield make
    for layer in layers:
        layer.close()


def row(source, ground_truth="42", **extra_info):
    return Example("file", 0, source, "?", ground_truth, extra_info)


def grade(layer, *jobs):
    async def everything():
        return await asyncio.gather(*map(layer.manager.run, jobs))

    return asyncio.run(everything())


def process_of_symbolic(monkeypatch):
    """Makes every comparison in this process fail: one in a worker does not see it."""

    def here(*_):
        raise AssertionError("compared in the trainer's process")

    monkeypatch.setattr("reward_scores.prm800k.same_formula", here)
    monkeypatch.setitem(prime_math._EQUAL, "math_verify", here)


def test_naive_leaves_algebra_to_graders(make_layer, monkeypatch):
    process_of_symbolic(monkeypatch)
    layer = make_layer(reward_kwargs={"prime_math": {"method": "published"}})
    check_scorers(
        layer, [row("openai/gsm8k"), row(PRIME)]
    )  # grades known answers, in the real worker
    right, wrong, gsm8k = grade(
        layer,
        Job(PRIME, "\\boxed{b+a}", "a+b", {}),
        Job(PRIME, "\\boxed{b-a}", "a+b", {}),
        Job("openai/gsm8k", "#### 4", "4", {}),
    )
    assert [right.acc, wrong.acc, gsm8k.acc] == [1.0, 0.0, 1.0]
    assert isinstance(layer.manager, InProcess) and not layer.in_process


def test_naive_starts_no_process_where_none_is_needed(make_layer):
    layer = make_layer(reward_kwargs={"prime_math": {"method": "robust"}})
    check_scorers(layer, [row("openai/gsm8k"), row(PRIME)])
    assert all(one.process is None for one in layer.pool.graders)
    assert layer.in_process


BOMBS = [
    (PRIME, "published", f"\\boxed{{{TOWER}}}"),
    (PRIME, "math_verify", "\\boxed{9^{9^{9^{9}}}}"),
    (
        MATH,
        "math_verify",
        "\\boxed{\\int_{0}^{\\infty} \\frac{\\sin(x^3)\\cos(x^5)e^{-x^2}}{\\ln(x+2)} dx}",
    ),
    (GEO, "published", f"<think>t</think>\\boxed{{{TOWER}}}"),
    (GEO, "math_verify", "<think>t</think>\\boxed{\\sum_{n=1}^{10^{12}} \\frac{1}{n^3+n!}}"),
]


@pytest.mark.parametrize(("manager", "method"), [("naive", "published"), ("prime", "math_verify")])
def test_bombs_are_killed_at_the_deadline(make_layer, manager, method):
    bombs = [(source, text) for source, given, text in BOMBS if given == method]
    options = {SCORERS[source].name: {"method": method} for source, _ in bombs}
    layer = make_layer(reward_manager=manager, reward_kwargs=options, num_workers=2, timeout_s=3.0)
    check_scorers(layer, [row(source) for source in dict.fromkeys(source for source, _ in bombs)])
    good = Job(PRIME, "\\boxed{2\\sqrt{2}}", "\\sqrt{8}", {})
    jobs = [job for source, text in bombs for job in (Job(source, text, "\\sqrt{2}", {}), good)]
    results = grade(layer, *jobs)
    assert [one.status for one in results[::2]] == [ScoreStatus.TIMEOUT] * len(bombs), results
    assert [one.status for one in results[1::2]] == [ScoreStatus.OK] * len(bombs), results
