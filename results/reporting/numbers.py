"""Numbers as text: accuracies in hundredths with their intervals."""

from __future__ import annotations

from collections.abc import Callable

from core.tracking.validation import Estimate
from results.reporting.comparison import Paired, SeedEstimate


def with_interval(estimate: Estimate, number: Callable[[float, str], str], sign: str = "") -> str:
    """Return ``96.8 [95.0, 98.0]``, or ``96.8 ± 0.4 [95.9, 97.7]`` over seeds: with the interval
    where there is one.

    ``number`` formats a value; its second argument is the sign option of the format, ``+`` or
    nothing.
    """
    text = number(estimate.value, sign)
    if isinstance(estimate, SeedEstimate) and estimate.sd is not None:
        text += f" ± {number(estimate.sd, '')}"
    if estimate.low is None or estimate.high is None:
        return text
    text += f" [{number(estimate.low, sign)}, {number(estimate.high, sign)}]"
    over_questions = isinstance(estimate, SeedEstimate) and estimate.over_questions
    return f"{text} over questions" if over_questions else text


def percent(estimate: Estimate, sign: str = "") -> str:
    """Return an estimate in hundredths, with its interval."""
    return with_interval(estimate, lambda value, sign: f"{100 * value:{sign}.1f}", sign)


def score(estimate: Estimate, sign: str = "") -> str:
    """Return an estimate of a score that is no share, with its interval."""
    return with_interval(estimate, lambda value, sign: f"{value:{sign}.3g}", sign)


def shown(estimate: Estimate, is_score: bool, sign: str = "") -> str:
    return score(estimate, sign) if is_score else percent(estimate, sign)


def change(paired: Paired, is_score: bool = False) -> str:
    return f"{shown(paired.difference, is_score, '+')}, {paired.better} up, {paired.worse} down"
