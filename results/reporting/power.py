"""What a comparison could have shown: the smallest difference that would have been found, and the seeds that one needs.

Found means: a two-sided test at 5 % rejects, in 80 % of repetitions (Cohen, Statistical Power Analysis, 1988). The
power of a t test is that of the noncentral t distribution (Johnson and Welch 1940), integrated here over the chi-square
of the variance, because a normal approximation promises too much at 2 to 5 seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache

from core.tracking.confidence_intervals import t_quantile

POWER = 0.8
MOST_SEEDS = 1000
_NORMAL = statistics.NormalDist()
_NODES = 400  # of Simpson's rule; at 1 to 10,000 degrees of freedom its error is below 1e-4


def t_test_power(shift: float, df: int) -> float:
    """Return the chance that a two-sided t test at 5 % rejects; ``shift`` is the true mean in standard errors."""
    critical, shift = t_quantile(df), abs(shift)

    def rejects(scale: float) -> float:
        return _NORMAL.cdf(shift - critical * scale) + _NORMAL.cdf(-shift - critical * scale)

    return _mean_over_chi(rejects, df)


def _mean_over_chi(value: Callable[[float], float], df: int) -> float:
    """Return the mean of ``value(s)``, where ``s**2`` is chi-square with ``df`` degrees of freedom over ``df``."""
    spread = math.sqrt(1 / (2 * df))
    low, high = max(0.0, 1 - 9 * spread), 1 + 9 * spread
    log_constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)

    def density(s: float) -> float:
        if s == 0.0:
            return math.exp(log_constant) if df == 1 else 0.0
        return math.exp(log_constant + (df - 1) * math.log(s) - df * s * s / 2)

    step = (high - low) / _NODES
    nodes = [(low + i * step, 1 if i in (0, _NODES) else 2 + 2 * (i % 2)) for i in range(_NODES + 1)]
    return step / 3 * math.fsum(weight * density(s) * value(s) for s, weight in nodes)


@cache
def detectable_shift(df: int) -> float:
    """Return the true difference in standard errors that a t test finds with 80 % power, by bisection."""
    low, high = 0.0, 200.0  # one degree of freedom needs 16
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if t_test_power(middle, df) < POWER else (low, middle)
    return high


def planned_df(most: float, fewest_seeds: int) -> int:
    """Return the degrees of freedom to plan Welch's test with, of the ``most`` that it can have.

    Its own vary from sample to sample, down to the smaller side's, and are rounded down. With the most of them a plan
    for three seeds a side has 60 % power. Halfway, and the least below four seeds, it is 80 to 90 % at every number of
    seeds (100,000 simulated pairs at 2, 3, 4, 5, 8, 10 and 20).
    """
    least = fewest_seeds - 1
    return least if fewest_seeds < 4 else int(most + least) // 2


def detectable_over_seeds(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the smallest difference of two sets of seeds that Welch's test would have found; None without spread."""
    if min(len(a), len(b)) < 2:
        return None
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if va + vb == 0:
        return None
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return detectable_shift(planned_df(df, min(len(a), len(b)))) * math.sqrt(va + vb)


# Differing questions, all in one direction, at which McNemar's exact test rejects: 2 / 2**6 < 0.05 < 2 / 2**5.
FEWEST_QUESTIONS = 6


def detectable_by_question(differences: Sequence[float]) -> float | None:
    """Return the smallest difference that the questions would have shown; None where there are too few of them.

    It is the paired t test's and two questions more, by which the exact test is stricter (its continuity correction,
    Edwards 1948, and steps of two questions), and never less than six questions, all in one direction.
    """
    n = len(differences)
    if n < FEWEST_QUESTIONS:
        return None
    return max(FEWEST_QUESTIONS / n, detectable_shift(n - 1) * statistics.stdev(differences) / math.sqrt(n) + 2 / n)


# --- how many seeds ---


@cache
def _chi_square_quantile(probability: float, df: int) -> float:
    """Return the quantile of chi-square with ``df`` degrees of freedom, by bisection of its distribution."""
    low, high = 0.0, df + 20 * math.sqrt(2 * df) + 20
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_cdf(middle, df) < probability else (low, middle)
    return high


def _chi_square_cdf(x: float, df: int) -> float:
    """Return the distribution function, by the series of the incomplete gamma function (Abramowitz & Stegun 6.5.29)."""
    if x <= 0:
        return 0.0
    term = total = 1.0
    k = 0
    while term > 1e-15 * total:
        k += 1
        term *= x / 2 / (df / 2 + k)
        total += term
    return min(1.0, total * math.exp(df / 2 * math.log(x / 2) - x / 2 - math.lgamma(df / 2 + 1)))


def careful_deviation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds to plan with: the pooled one's upper 80 % confidence limit.

    A deviation of few seeds is often too small, and a plan that takes it as it is has too little power (Browne, On the
    use of a pilot sample for sample size determination, Stat. Med. 14, 1995). None where no side has two seeds.
    """
    df = len(a) + len(b) - 2
    if df < 1:
        return None
    squares = sum((len(each) - 1) * statistics.variance(each) for each in (a, b) if len(each) > 1)
    return math.sqrt(squares / _chi_square_quantile(1 - POWER, df))


@cache
def seeds_needed(difference: float, deviation: float) -> int | None:
    """Return the seeds on each side with which a true difference is found with 80 % power; None: beyond MOST_SEEDS.

    ``deviation`` is the standard deviation over seeds.
    """
    if difference == 0:
        return None
    if deviation == 0:
        return 2
    low, high = 1, 2

    def enough(n: int) -> bool:
        return t_test_power(difference / (deviation * math.sqrt(2 / n)), planned_df(2 * (n - 1), n)) >= POWER

    while not enough(high):
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high if high <= MOST_SEEDS else None
