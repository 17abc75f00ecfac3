"""No text makes a scorer raise, hang, or answer differently the second time."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.rewards.graders import GraderPool
from core.rewards.grading import Failure, Job, Scorers
from reward_scores import SCORERS, geo3k, gsm8k, math_dapo, math_reward, prime_math, qa_em, qa_em_format, short_answer
from reward_scores.math_reward import strip_string
from reward_scores.qa_em import normalize_answer
from reward_scores.score import Score, ScoreStatus

METHODS = {
    "gsm8k": gsm8k.METHODS,
    "math_reward": math_reward.METHODS,
    "math_dapo": math_dapo.METHODS,
    "prime_math": prime_math.METHODS,
    "geo3k": geo3k.METHODS,
    "qa_em": qa_em.METHODS,
    "short_answer": short_answer.METHODS,
}
SCORERS_BY_NAME = {scorer.name: scorer for scorer in SCORERS.values()}
VARIANTS = [
    pytest.param(scorer, {"method": method} if method else {}, id=f"{name}-{method}")
    for name, scorer in SCORERS_BY_NAME.items()
    for method in METHODS.get(name, ("",))
]
# What may not end is graded where a run would grade it
HERE = [each for each in VARIANTS if not each.values[0].libraries(**each.values[1])]
IN_WORKERS = [each for each in VARIANTS if each.values[0].libraries(**each.values[1])]
PIECES = st.sampled_from(
    [
        *("#### ", "####", "#", "Answer:", "answer is ", "\\boxed{", "\\boxed ", "\\fbox{", "}", "{", "<answer>"),
        *("</answer>", "<think>", "</think>", "<search>", "<information>", "</information>", "\\frac", "\\sqrt", "[3]"),
        *(
            "\\text{",
            "\\text{ ",
            "\\pi",
            "\\%",
            "\\$",
            "$",
            "^",
            "^{",
            "^\\circ",
            "_",
            ",",
            ".",
            "-",
            "+",
            "*",
            "/",
            "=",
        ),
        *(
            "(",
            ")",
            "[",
            "]",
            "!",
            "1",
            "72",
            "1,000",
            "9",
            ".5",
            "1e9",
            "x",
            "a",
            " ",
            "\n",
            "\\\\",
            "million",
            " or ",
        ),
        *(
            "\u2212",
            "\uff17",
            "\u00bd",
            "\u0130",
            "Assistant:",
            "\x00",
            "inf",
            "nan",
            "\\",
            "\ufdfa",
            "\\begin{pmatrix}",
        ),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=40).map("".join)
SLOW = {  # patterns that a careless regular expression or loop takes quadratic time or worse on
    "braces": "{" * 100_000,
    "closed braces": "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "boxes": "\\boxed{" * 14_000,
    "closed boxes": "\\boxed{1}" * 11_000,
    "spaces": "Answer: 1" + " " * 100_000,
    "hashes": "#" * 100_000,
    "hash numbers": "#### 1" * 16_000,
    "digits": "#### " + "9" * 100_000,
    "commas": "1,000" * 20_000,
    "dollars": "Answer: " + "$" * 100_000,
    "opened answers": "<answer>" * 12_000,
    "closed answers": "</answer>" * 11_000,
    "answers": "<answer>1</answer>" * 5_500,
    "answer lines": "Answer: 1\n" * 10_000,
    "answer words": "answer " * 14_000,
    "text commands": "\\boxed{" + "\\text{" * 16_000 + "}",
    "fractions": "\\boxed{" + "\\frac" * 20_000 + "1}",
    "roots": "\\boxed{" + "\\sqrt1" * 16_000 + "}",
    "powers": "\\boxed{" + "9^" * 50_000 + "9}",
    "parentheses": "\\boxed{" + "(" * 50_000 + ")" * 50_000 + "}",
    "tuples": "\\boxed{" + "(1," * 30_000 + "}",
    "list": "\\boxed{" + "1," * 50_000 + "1}",
    "equation": "<answer>" + "1+" * 50_000 + "1</answer>",
    "minus": "<answer>" + "-" * 100_000 + "1</answer>",
    "tower": "<answer>9**9**9**9</answer> \\boxed{9^9^9^9}",
    "pi": "\\boxed{" + "\\pi" * 30_000 + "}",
    "stops": "is. " * 25_000,
    "underscores": "_1" * 50_000,
    "ligatures": "\\boxed{" + "\ufdfa" * 100_000 + "}",
    "episode": "<think>t</think><search>q</search><information>i</information>" * 1_600,
    "letters": "x" * 100_000,
    "backslashes": "\\" * 100_000,
    "units": "\\boxed{" + "5\\text{ cm}" * 9_000 + "}",
    "days": "\\boxed{" + "day " * 25_000 + "}",
}


def ground_truth(scorer):
    return scorer.examples[0][1]


@pytest.mark.parametrize(("scorer", "options"), HERE)
def test_no_text_makes_a_scorer_raise_or_change_its_mind(scorer, options):
    # A program of prime_code starts a process of its own
    @settings(max_examples=10 if scorer.name == "prime_code" else 50, deadline=None)
    @given(TEXTS)
    def run(text):
        first, again = (scorer(text, ground_truth(scorer), {}, **options) for _ in range(2))
        assert isinstance(first, Score) and first == again
        assert first.acc in (0.0, 1.0) and (first.status is ScoreStatus.OK) == (first.acc == 1.0)
        assert first.status is not ScoreStatus.PARSE_ERROR or first.pred is None

    run()


@pytest.mark.parametrize(("scorer", "options"), IN_WORKERS)
def test_no_text_crashes_a_library_in_a_worker(scorer, options):
    source = next(name for name, each in SCORERS.items() if each.name == scorer.name)
    pool = GraderPool(Scorers({scorer.name: options}), num_workers=1, timeout_s=1.0)
    pool.preload(scorer.libraries(**options))

    @settings(max_examples=10, deadline=None)
    @given(st.lists(TEXTS, min_size=2, max_size=2))
    def run(texts):
        async def grade():
            return [
                await pool.run(Job(source, *each, {})) for each in ((f"\\boxed{{{texts[0]}}}", texts[1] or "1"),) * 2
            ]

        results = asyncio.run(grade())
        ends = [one for one in results if not isinstance(one, Failure)]
        assert all(one.status is ScoreStatus.TIMEOUT for one in results if isinstance(one, Failure)), results
        assert len(ends) < 2 or ends[0] == ends[1]

    run()
    pool.close()


@pytest.mark.parametrize(("scorer", "options"), HERE)
def test_a_gold_written_by_anyone_does_not_raise(scorer, options):
    @settings(max_examples=30, deadline=None)
    @given(TEXTS)
    def run(text):
        gold = {"target": [text]} if scorer.name in ("qa_em", "qa_em_format", "short_answer") else text
        problem = scorer.check_ground_truth(gold, **options)
        assert problem is None or isinstance(problem, str)
        if problem is None:
            scorer(scorer.examples[0][0], gold, {}, **options)

    run()


@pytest.mark.parametrize(("scorer", "options"), HERE)
def test_long_answers_take_no_time(scorer, options):
    for name, text in SLOW.items():
        start = time.process_time()
        scorer(text, ground_truth(scorer), {}, **options)
        assert time.process_time() - start < 5.0, name  # what backtracks takes minutes, or for ever


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_normalising_twice_changes_nothing(text):
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_a_normal_form_is_a_text_or_a_value_error(text):
    try:
        assert isinstance(strip_string(text), str)
    except ValueError:
        assert "\\text{ " in text or "\\sqrt" in text or "\\frac" in text or "frac" in text


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS)
def test_the_episode_scorer_takes_any_segments(policy, tool):
    segments = [{"role": "policy", "text": policy}, {"role": "tool", "text": tool}]
    score = qa_em_format.score(policy, {"target": ["Paris"]}, {"rollout": {"segments": segments}})
    assert score.acc in (0.0, 1.0)
