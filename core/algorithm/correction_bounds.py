"""The thresholds of ``algorithm.rollout_correction``, as verl writes them.

``rollout_correction.py`` applies them. This module imports no torch: a dry run reads them too.
"""

import math
from typing import NamedTuple

from core.config.schema import Config
from core.config.section import Problem

SECTION = "algorithm.rollout_correction"
_KS = [f"{over}_k{number}" for over in ("token", "seq_sum", "seq_mean") for number in (1, 2, 3)]
STATISTICS = (*_KS, "seq_max_k2", "seq_max_k3")
# v0.6.1's names, which bound the ratio itself: the statistic of its logarithm, negated
RATIOS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


class Bounds(NamedTuple):
    """Bounds of a weight.

    Without ``lower`` a weight above ``upper`` is truncated. With it a weight outside is dropped.
    """

    lower: float | None
    upper: float


class Criterion(NamedTuple):
    """A condition on tokens: the statistic, named as in verl, lies within ``[lower, upper]``."""

    name: str
    lower: float
    upper: float


def weight_bounds(spec: float | str) -> Bounds:
    """Read the bounds of a weight: ``2.0``, or ``lower_upper`` as in ``0.5_2.0``.

    Raises ValueError: they cannot be read.
    """
    lower, separator, upper = str(spec).strip().rpartition("_")
    bounds = Bounds(float(lower) if separator else None, float(upper))
    if not bounds.upper > 0 or (bounds.lower is not None and not 0 < bounds.lower <= bounds.upper):
        raise ValueError(
            f"bounds of a ratio are above 0, the lower one first, as in 0.5_2.0, got {spec}"
        )
    return bounds


def criteria(
    options: str, spec: float | str | None, lower: float | None = None
) -> tuple[Criterion, ...]:
    """Return the criteria of ``rollout_rs`` and its thresholds, repeated options once.

    One threshold serves all options, or each has its own, separated by commas. ``token``,
    ``sequence`` and ``geometric`` bound the ratio learner / rollout from above and, by ``lower`` or
    else the reciprocal, from below. ``..._k1`` takes ``lower_upper`` or the upper bound of the
    inverse ratio, all others an upper bound of the divergence. Raises ValueError: the bounds are
    impossible or cannot be read.
    """
    chosen = list(dict.fromkeys(part.strip() for part in options.split(",") if part.strip()))
    if strange := [name for name in chosen if name not in (*STATISTICS, *RATIOS)]:
        raise ValueError(f"{strange[0]} is none of {', '.join((*RATIOS, *STATISTICS))}")
    specs = [part.strip() for part in str("" if spec is None else spec).split(",") if part.strip()]
    if not chosen or len(specs) not in (1, len(chosen)):
        raise ValueError(
            f"has {len(chosen)} options and {len(specs)} thresholds: give one, or one each"
        )
    specs = specs * len(chosen) if len(specs) == 1 else specs
    return tuple(
        _criterion(name, threshold, lower) for name, threshold in zip(chosen, specs, strict=True)
    )


def _criterion(name: str, spec: str, lower: float | None) -> Criterion:
    low, upper = weight_bounds(spec)
    if name not in RATIOS and not name.endswith("k1"):
        if low is not None:
            raise ValueError(f"{name} has an upper bound only, got {spec}")
        return Criterion(name, -math.inf, upper)
    if low is None:
        low = 1 / upper if lower is None or name not in RATIOS else lower
    if low > upper:
        raise ValueError(f"the lower bound {low:g} of {name} is above the upper one, {upper:g}")
    if name in RATIOS:  # log(1 / ratio) is the statistic
        return Criterion(RATIOS[name], -math.log(upper), -math.log(low) if low > 0 else math.inf)
    return Criterion(name, math.log(low), math.log(upper))


def threshold_problems(config: Config) -> list[Problem]:
    """Return the problem of thresholds that cannot be read, or do not fit what they bound."""
    correction = config.algorithm.rollout_correction
    weight = correction.rollout_is_threshold
    statistics = correction.rollout_rs
    try:
        if weight_bounds(weight).upper < 1:
            raise ValueError(f"rollout_is_threshold={weight} is below 1, where nothing differs")
        if statistics is not None:
            criteria(
                statistics, correction.rollout_rs_threshold, correction.rollout_rs_threshold_lower
            )
    except ValueError as error:
        rule = f"its thresholds do not fit: {error}"
        fix = f"set {SECTION}.rollout_rs_threshold: 2.0 for token, 1.001 for geometric, say"
        return [Problem(f"{SECTION}.rollout_rs", statistics, rule, fix)]
    return []
