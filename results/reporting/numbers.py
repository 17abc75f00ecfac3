"""Numbers as text: accuracies in hundredths with their intervals, and how far a number of the
tables is supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    return f"{text} [{number(estimate.low, sign)}, {number(estimate.high, sign)}]"


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


def evidence(
    name: str, runs: Sequence[Mapping[str, Any]], verified: Sequence[Mapping[str, str]] = ()
) -> str:
    """Return how far an experiment's number is supported: ``verified`` names what repeated it, else
    it is measured.

    What repeated an earlier recording of the run does not count.
    """
    recorded = {run["commit"] for run in runs}
    repeated = next(
        (one for one in verified if one["experiment"] == name and one["recorded"] in recorded), None
    )
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}, {commits}"
    if repeated is None:
        return f"measured ({seeds})"
    return (
        f"verified by {repeated['by']}, {repeated['run']} on {repeated['date']} at "
        f"{repeated['commit']} ({seeds})"
    )
