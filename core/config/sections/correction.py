"""Keys of the correction for samples of another policy, the forms in which verl writes its bounds, and rules.

Samples come from an engine of its own precision, from an older policy, or from a truncated distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from core.config import when
from core.config.limits import Limit, NonNegative, NumberOrText, PositiveShare
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import Section, key

STATISTICS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
# v0.6.1's names, which bound the ratio itself: the statistic of its logarithm, negated
RATIOS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

Spec = float | str


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


def weight_bounds(spec: Spec) -> Bounds:
    """Read the bounds of a weight: ``2.0`` truncates at 2, ``"0.5_2.0"`` drops what is outside.

    Raises:
        ValueError: the bounds are impossible or cannot be read.
    """
    lower, upper = _numbers(spec)
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError("bounds of a ratio are above 0, the lower one first, as in 0.5_2.0")
    return Bounds(lower, upper)


def criteria(options: str, spec: Spec | None, lower: float | None = None) -> tuple[Criterion, ...]:
    """Return the criteria of ``rollout_rs`` and its thresholds, repeated options once.

    One threshold serves all options, or each has its own, separated by commas. ``token``, ``sequence`` and
    ``geometric`` bound the ratio learner / rollout from above and, by ``lower`` or else the reciprocal, from below.
    ``..._k1`` takes ``lower_upper`` or the upper bound of the inverse ratio rollout / learner (that of verl's main
    branch: k1 is the logarithm of that one), all others an upper bound of the divergence.

    Raises:
        ValueError: the bounds are impossible or cannot be read.
    """
    names = list(dict.fromkeys(part.strip() for part in options.split(",") if part.strip()))
    if strange := [name for name in names if name not in (*STATISTICS, *RATIOS)]:
        raise ValueError(f"{strange[0]} is none of {', '.join((*RATIOS, *STATISTICS))}")
    if not names:
        raise ValueError("names no option")
    if spec is None:
        raise ValueError("needs rollout_rs_threshold")
    specs = [spec] if not isinstance(spec, str) else [part.strip() for part in spec.split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        raise ValueError(f"has {len(names)} options and {len(specs)} thresholds: give one, or one each")
    specs = specs * len(names) if len(specs) == 1 else specs
    return tuple(_criterion(name, one, lower) for name, one in zip(names, specs, strict=True))


def _criterion(name: str, spec: Spec, lower: float | None) -> Criterion:
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


def _numbers(spec: Spec) -> tuple[float | None, float]:
    """Return (None, number) of a number, (lower, upper) of ``lower_upper``."""
    lower, separator, upper = str(spec).strip().rpartition("_")
    try:
        bounds = (float(lower) if separator else None), float(upper)
    except ValueError as error:
        raise ValueError(f"{spec!r} is neither a number nor lower_upper, as in 0.5_2.0") from error
    if any(number is not None and math.isnan(number) for number in bounds):
        raise ValueError(f"{spec!r} is no number, so it bounds nothing")
    return bounds


def _reads(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except ValueError:
        return False


WeightBounds = Annotated[
    NumberOrText,
    Limit(
        "a number of at least 1, or lower_upper around 1 with a point in both, as in 0.5_2.0 (0.5_2 is read as 0.52)",
        lambda v: _reads(lambda: weight_bounds(v).upper >= 1),
    ),
]
Rejection = Annotated[
    str,
    Limit(
        f"of {', '.join((*RATIOS, *STATISTICS))}, separated by commas",
        lambda v: _reads(lambda: bool(criteria(v, 1.0))),
    ),
]


class RolloutCorrectionConfig(Section):
    bypass_mode: bool = key(
        False, "the engine's log-probs are the old ones: no pass for them, and one ratio", when.RATIO
    )
    rollout_is: Literal["token", "sequence"] | None = key(None, "importance weights; null: none", when.COMPARES)
    rollout_is_threshold: WeightBounds = key(
        2.0, 'upper bound of a weight; "lower_upper" drops what is outside', when.COMPARES + when.WEIGHTS
    )
    rollout_is_batch_normalize: bool = key(False, "scale the weights to a mean of one", when.COMPARES + when.WEIGHTS)
    rollout_rs: Rejection | None = key(None, "rejection, by one or several statistics; null: none")
    rollout_rs_threshold: NumberOrText | None = key(
        None, "upper bounds of rejection, one or one a statistic", when.REJECTS
    )
    rollout_rs_threshold_lower: NonNegative | None = key(None, "lower bounds; null: 1 / threshold", when.REJECTS)
    rollout_token_veto_threshold: PositiveShare | None = key(None, "one such ratio drops the sequence; null: off")

    @property
    def weighs(self) -> bool:
        return self.rollout_is is not None

    @property
    def uses_old_log_probs(self) -> bool:
        criteria = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold)
        return not self.bypass_mode and any(value is not None for value in criteria)


rules = RuleBook()


def _thresholds_fit(one: RolloutCorrectionConfig) -> bool:
    """Return whether the thresholds of rejection fit the statistics that it names."""
    attempt = (one.rollout_rs, one.rollout_rs_threshold, one.rollout_rs_threshold_lower)
    return _reads(lambda: bool(criteria(*attempt)))


@rules.problem
def what_fits_together(c: View) -> Broken:
    if c.correction.rollout_rs is not None and not _thresholds_fit(c.correction):
        yield (
            "algorithm.rollout_correction.rollout_rs",
            "its thresholds do not fit it: as many as options, above 0, the lower below the upper, lower_upper "
            "for k1 only; set algorithm.rollout_correction.rollout_rs_threshold: 2.0 for token, 1.001 for "
            "geometric, say",
        )
    if c.correction.bypass_mode and c.correction.rollout_rs is not None:
        yield (
            "algorithm.rollout_correction.bypass_mode",
            "skips the learner's log-probs before the update, which rollout_rs compares with the engine's; set "
            "algorithm.rollout_correction.bypass_mode=False",
        )
    if c.correction.bypass_mode and c.correction.rollout_token_veto_threshold is not None:
        yield (
            "algorithm.rollout_correction.bypass_mode",
            "skips the learner's log-probs before the update, of which rollout_token_veto_threshold is a bound; "
            "set algorithm.rollout_correction.bypass_mode=False",
        )
