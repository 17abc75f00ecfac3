"""Confidence intervals of 95 %: of a proportion (Wilson), of a mean (Student), of an accuracy over questions.

Pure functions, without torch and without a random number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_Z95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` units with its 95 % interval; the bounds are None where one unit cannot give any."""

    value: float
    low: float | None
    high: float | None
    n: int


def t_probability(t: float, df: int) -> float:
    """P(-t < T < t) of Student's t with integer ``df``, exact (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(df))
    cos2, odd = math.cos(theta) ** 2, df % 2
    total = term = math.cos(theta) if odd else 1.0
    for i in range(2 + odd, df - 1, 2):
        term *= cos2 * (i - 1) / i
        total += term
    if odd:
        return 2 / math.pi * (theta + (math.sin(theta) * total if df > 1 else 0.0))
    return math.sin(theta) * total


@cache
def t_quantile(df: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, by bisection; the normal one from 10,000 degrees on."""
    if df >= 10_000:
        return _Z95
    low, high = _Z95, 13.0  # 12.706 belongs to one degree of freedom
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, df) < 0.95 else (low, middle)
    return (low + high) / 2


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion seen in ``n`` independent trials (Wilson 1927)."""
    z2 = _Z95**2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def t_interval(values: Sequence[float]) -> Estimate:
    """Mean of independent values with Student's 95 % interval; no bounds for a single value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Estimate(mean, None, None, n)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def question_interval(per_question: Sequence[float], draws: int = 1) -> Estimate:
    """Mean over questions of their own 0/1 frequencies over ``draws`` samples, with a 95 % interval.

    Wilson's interval at the effective sample size ``p (1-p) / var(mean)``, which stays sensible near 0 and 1
    where Student's has no width; with one draw a question it is Wilson's own. The size is kept between the number
    of questions (as if a question's draws always agreed) and that times ``draws`` (as if they were independent).
    """
    n, mean = len(per_question), statistics.fmean(per_question)
    if n < 2:
        return Estimate(mean, None, None, n)
    variance = statistics.variance(per_question) / n
    size = mean * (1 - mean) / variance if variance > 0 else float(n)
    if draws > 1:  # the variance was itself estimated from n questions (Korn and Graubard 1998)
        size *= (_Z95 / t_quantile(n - 1)) ** 2
    low, high = wilson(mean, min(max(size, n), n * draws))
    return Estimate(mean, low, high, n)
