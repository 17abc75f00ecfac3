"""Bounds of the correction for samples of another policy, as verl writes them: ``2.0``, ``0.5_2.0``, ``token_k1``."""

from __future__ import annotations

import math
from dataclasses import dataclass

STATISTICS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
# v0.6.1's names, which bound the ratio itself: the statistic of its logarithm, negated
RATIOS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(frozen=True)
class Bounds:
    """Bounds of a weight: one above ``upper`` is truncated; where there is a ``lower``, one outside both is dropped."""

    lower: float | None
    upper: float


@dataclass(frozen=True)
class Criterion:
    """A condition on tokens: kept where the statistic, named as in verl, lies within ``[lower, upper]``."""

    name: str
    lower: float
    upper: float


def weight_bounds(spec: float | str) -> Bounds:
    """Read the bounds of a weight: ``2.0`` truncates at 2, ``"0.5_2.0"`` drops what is outside. Raises ValueError."""
    lower, upper = _numbers(spec)
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError("bounds of a ratio are above 0, the lower one first, as in 0.5_2.0")
    return Bounds(lower, upper)


def criteria(options: str, spec: float | str | None, lower: float | None = None) -> tuple[Criterion, ...]:
    """Return the criteria of ``rollout_rs`` and its thresholds, repeated options once.

    One threshold serves all options, or each has its own, separated by commas. ``token``, ``sequence`` and
    ``geometric`` bound the ratio learner / rollout from above and, by ``lower`` or else the reciprocal, from below.
    ``..._k1`` takes ``lower_upper`` or the upper bound of the inverse ratio rollout / learner (that of verl's main
    branch: k1 is the logarithm of that one), all others an upper bound of the divergence.

    Raises ValueError: the bounds are impossible or cannot be read.
    """
    names = list(dict.fromkeys(part.strip() for part in options.split(",") if part.strip()))
    if strange := [name for name in names if name not in (*STATISTICS, *RATIOS)]:
        raise ValueError(f"{strange[0]} is none of {', '.join((*RATIOS, *STATISTICS))}")
    specs = [part.strip() for part in str("" if spec is None else spec).split(",") if part.strip()]
    if not names or len(specs) not in (1, len(names)):
        raise ValueError(f"has {len(names)} options and {len(specs)} thresholds: give one, or one each")
    specs = specs * len(names) if len(specs) == 1 else specs
    return tuple(_criterion(name, one, lower) for name, one in zip(names, specs, strict=True))


def _criterion(name: str, spec: float | str, lower: float | None) -> Criterion:
    low, upper = _numbers(spec)
    if upper <= 0 or (low is not None and low <= 0):
        raise ValueError(f"thresholds are above 0, got {spec}")
    if not name.endswith("k1") and name not in RATIOS:
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


def _numbers(spec: float | str) -> tuple[float | None, float]:
    """Return (None, number) of a number, (lower, upper) of ``lower_upper``."""
    lower, separator, upper = str(spec).strip().rpartition("_")
    numbers = (float(lower) if separator else None), float(upper)
    if any(number is not None and math.isnan(number) for number in numbers):
        raise ValueError(f"{spec!r} is no number, so it bounds nothing")
    return numbers
