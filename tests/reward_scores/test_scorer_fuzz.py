"""No text makes a scorer raise, hang, or answer differently the second time."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from reward_scores import (
    SCORERS,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_math,
    qa_em,
    short_answer,
    unit_tests,
)
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
VARIANTS = [
    (scorer, {"method": method} if method else {})
    for scorer in {scorer.name: scorer for scorer in SCORERS.values()}.values()
    for method in METHODS.get(scorer.name, ("",))
]
# What may not end is graded where a run would grade it; a program of prime_code starts a process of
# its own
HERE = [
    (one, options)
    for one, options in VARIANTS
    if not one.libraries(**options) and one.name != "prime_code"
]
PIECES = (
    "#### |####|#|Answer:|answer is |\\boxed{|\\boxed "
    "|\\fbox{|}|{|<answer>|</answer>|<think>|</think>|<search>|"
    "<information>|</information>|\\frac|\\sqrt|[3]|\\text{|\\text{ "
    "|\\pi|\\%|\\$|$|^|^{|^\\circ|_|,|.|-|+|*|/|=|("
    "|)|[|]|!|1|72|1,000|9|.5|1e9|x|a| |\n|\\\\|million| or |\u2212|\uff17|\u00bd|\u0130|Assistant:"
    "|\x00|inf|nan|\\|\ufdfa|\\begin{pmatrix}|```python\n|```"
)
TEXTS = st.lists(st.sampled_from(PIECES.split("|")) | st.text(max_size=6), max_size=40).map("".join)
SLOW = {  # patterns that a careless regular expression or loop takes quadratic time or worse on
    "braces": "{" * 100_000,
    "boxes": "\\boxed{" * 14_000,
    "spaces": "Answer: 1" + " " * 100_000,
    "hashes": "#" * 100_000,
    "digits": "#### " + "9" * 100_000,
    "commas": "1,000" * 20_000,
    "dollars": "Answer: " + "$" * 100_000,
    "answer lines": "Answer: 1\n" * 10_000,
    "text commands": "\\boxed{" + "\\text{" * 16_000 + "}",
    "powers": "\\boxed{" + "9^" * 50_000 + "9}",
    "parentheses": "\\boxed{" + "(" * 50_000 + ")" * 50_000 + "}",
    "list": "\\boxed{" + "1," * 50_000 + "1}",
    "equation": "<answer>" + "1+" * 50_000 + "1</answer>",
    "tower": "<answer>9**9**9**9</answer> \\boxed{9^9^9^9}",
    "underscores": "_1" * 50_000,
    "ligatures": "\\boxed{" + "\ufdfa" * 100_000 + "}",
    "backslashes": "\\" * 100_000,
}


def ground_truth(scorer):
    return scorer.examples[0][1]


@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_no_text_makes_a_scorer_raise_or_change_its_mind(text):
    for scorer, options in HERE:
        where = (scorer.name, options)
        first, again = (scorer(text, ground_truth(scorer), {}, **options) for _ in range(2))
        assert isinstance(first, Score) and first == again, where
        assert first.acc in (0.0, 1.0) and (first.status is ScoreStatus.OK) == (first.acc == 1.0), (
            where
        )
        assert first.status is not ScoreStatus.PARSE_ERROR or first.pred is None, where


def test_long_answers_take_no_time():
    for name, text in SLOW.items():
        for scorer, options in HERE:
            start = time.process_time()
            scorer(text, ground_truth(scorer), {}, **options)
            # What backtracks takes minutes
            assert time.process_time() - start < 5.0, (name, scorer.name, options)
        start = time.process_time()
        unit_tests.extract(text)
        assert time.process_time() - start < 5.0, name
