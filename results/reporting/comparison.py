"""Comparisons of runs: one number over seeds, two sets of seeds, two runs question by question,
many rows at once.

Only reports compare. The interval of a single validation is in :mod:`core.tracking.validation`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.tracking.validation import (
    Estimate,
    ValRecord,
    merge_by_question,
    t_interval,
    t_probability,
    t_quantile,
    wilson,
)


@dataclass(frozen=True)
class SeedEstimate(Estimate):
    """A mean over ``n`` seeds; ``sd`` is their sample standard deviation (None for one seed).

    ``over_questions``: the interval is that over questions, which is the wider one.
    """

    sd: float | None
    over_questions: bool = False


@dataclass(frozen=True)
class Paired:
    """``b`` minus ``a`` on the ``n`` questions that both answered, and on how many b did better or
    worse."""

    difference: Estimate
    better: int
    worse: int
    only_a: int
    only_b: int


def seed_interval(values: Sequence[float], by_question: Sequence[Estimate] = ()) -> SeedEstimate:
    """Return mean, sample standard deviation and Student's 95 % interval of one number over the
    seeds of a run.

    Where every value is a share (in [0, 1], as accuracies are), so are the interval's ends. Two or
    three seeds may agree by chance. ``by_question`` are the seeds' own intervals over questions:
    where the mean of these is wider it is taken.
    """
    mean = t_interval(values)
    if len(values) < 2:
        return SeedEstimate(mean.value, None, None, mean.n, None)
    low, high = mean.low, mean.high
    if all(0.0 <= value <= 1.0 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    sd = statistics.stdev(values)
    if by_question and all(each.low is not None for each in by_question):
        question_low = statistics.fmean(each.low for each in by_question)
        question_high = statistics.fmean(each.high for each in by_question)
        if question_high - question_low > high - low:
            return SeedEstimate(mean.value, question_low, question_high, mean.n, sd, True)
    return SeedEstimate(mean.value, low, high, mean.n, sd)


def welch_interval(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the difference of means ``b - a`` of two sets of seeds, unequal variances (Welch 1947,
    df rounded)."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    n = len(a) + len(b)
    if min(len(a), len(b)) < 2:
        return Estimate(difference, None, None, n)
    error, df = _welch(a, b)
    half = t_quantile(df) * error
    return Estimate(difference, difference - half, difference + half, n)


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, int]:
    """Return the standard error of the difference of means, and Welch's degrees of freedom, rounded
    down."""
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if va + vb == 0:
        return 0.0, len(a) + len(b) - 2
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return math.sqrt(va + vb), max(1, int(df))


def welch_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p of Welch's test; None where one side has a single seed, or no seed
    differs at all."""
    if min(len(a), len(b)) < 2 or _welch(a, b)[0] == 0:
        return None
    error, df = _welch(a, b)
    return 1.0 - t_probability(abs(statistics.fmean(b) - statistics.fmean(a)) / error, df)


def accuracy_by_question(
    records: Iterable[ValRecord], variable: str = "acc"
) -> dict[str, dict[str, float]]:
    """Return ``data_source -> uid -> mean accuracy`` over the question's samples, for a paired
    comparison. Questions without the variable are left out."""
    merged = merge_by_question(records)
    return {
        source: {r.uid: statistics.fmean(r.values[variable]) for r in rows if variable in r.values}
        for source, rows in merged.items()
    }


def paired_comparison(a_by_uid: Mapping[str, float], b_by_uid: Mapping[str, float]) -> Paired:
    """Return the per-question difference ``b - a`` over the questions that both have, with
    Student's interval.

    Where no question differs, the bounds are those of Wilson's interval for 0 of n: the share of
    questions that could differ and have not been seen to.

    Raises:
        ValueError: no question is shared.
    """
    shared = sorted(a_by_uid.keys() & b_by_uid.keys())
    if not shared:
        raise ValueError(
            "a paired comparison needs questions that both runs answered; the uids share none"
        )
    differences = [b_by_uid[uid] - a_by_uid[uid] for uid in shared]
    estimate = t_interval(differences)
    if not any(differences):
        bound = wilson(0.0, len(shared))[1]
        estimate = Estimate(0.0, -bound, bound, len(shared))
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Paired(estimate, better, worse, len(a_by_uid) - len(shared), len(b_by_uid) - len(shared))


EXACT_QUESTIONS = 16  # that differ: all 65,536 ways to give them signs are tried


def question_p(a_by_uid: Mapping[str, float], b_by_uid: Mapping[str, float]) -> float:
    """Return the two-sided p that two policies do equally well on the questions that both answered.

    One answer a question: McNemar's exact test (1947) of the questions that only one of them got
    right. Means over several answers: Fisher's randomization of signs where few questions differ,
    else Student's t. At accuracies of 97 to 99 % few questions differ, where t is too sure: 4 up
    and 0 down would be a difference.
    """
    differences = [b_by_uid[uid] - a_by_uid[uid] for uid in a_by_uid.keys() & b_by_uid.keys()]
    different = sorted(d for d in differences if d)
    if not different:
        return 1.0
    if all(abs(d) == 1.0 for d in different) and len(different) <= 1000:
        fewer = min(sum(d > 0 for d in different), sum(d < 0 for d in different))
        return min(
            1.0,
            2 * sum(math.comb(len(different), i) for i in range(fewer + 1)) / 2 ** len(different),
        )
    if len(different) <= EXACT_QUESTIONS:
        seen, sums = abs(math.fsum(different)), [0.0]
        for d in different:
            sums = [total + sign for total in sums for sign in (d, -d)]
        return sum(abs(total) >= seen - 1e-9 for total in sums) / len(sums)
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    error = spread / math.sqrt(len(differences))
    return 1.0 - t_probability(abs(mean) / error, len(differences) - 1) if spread else 0.0


def holm(p_by_claim: Mapping[str, float]) -> dict[str, float]:
    """Return p after Holm's step-down adjustment (1979), which bounds the chance of any false
    confirmation."""
    adjusted, least = {}, 0.0
    for rank, name in enumerate(sorted(p_by_claim, key=p_by_claim.__getitem__)):
        least = max(least, min(1.0, (len(p_by_claim) - rank) * p_by_claim[name]))
        adjusted[name] = least
    return adjusted
