"""Checks of every step: relations between values that the step has anyway, whatever the settings.

Each compares and changes nothing. A relation that does not hold is an error in the code or in a
user's hook, so it ends the run before it trains on the values. How far entropy and -log p of the
samples are apart is a metric, which ``trainer.health`` bounds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.errors import BrokenInvariant, InputError
from core.types import TrainBatch

ENTROPY_TOLERANCE = 0.02  # nats a token by which entropy and -log p may differ without a fault
# Nats that tokens too rare to be in a sample may take from its mean of -log p, at about five
# standard errors: a token of 15 nats that is expected 14 times is absent once in a million samples
RARE_NATS = 35.0


def require(holds: Any, phase: str, finding: str, remedy: str) -> None:
    """Raise BrokenInvariant with the phase, the finding and where to look, unless it holds."""
    if not holds:
        raise BrokenInvariant(f"invariant broken in phase {phase}: {finding}; {remedy}")


def call_and_check(
    function: Callable[[Any], Any], inputs: Any, shape: torch.Size, second_type: type
) -> Any:
    """Call a policy loss or an estimator and return its pair, with a number for each token.

    ``second_type`` is the type of the pair's second value: a tensor, or the dict of stats. Raises
    InputError if a user's own function returns anything else: a mean would spread over all tokens
    unseen.
    """
    result = function(inputs)
    expected = [list(shape), list(shape) if second_type is Tensor else second_type.__name__]
    values = result if isinstance(result, tuple) else (result,)
    actual = [list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in values]
    if actual != expected:
        name = getattr(function, "__qualname__", function)
        raise InputError(
            f"{name} returned {actual}, expected {expected}; "
            "return a number for each token, and no mean"
        )
    return result


def finite(batch: TrainBatch, *names: str, phase: str) -> None:
    """Check that fields which a phase has set hold neither an infinity nor NaN."""
    for name in names:
        if batch.has(name):
            count = int((~getattr(batch, name).isfinite()).sum())
            finding = f"{count} numbers of {name} are not finite"
            require(not count, phase, finding, "look at the weights and at the scores")


def entropy_gap_z(metrics: Mapping[str, float], tokens: int) -> float | None:
    """Return by how many standard errors entropy and -log p differ beyond the tolerance.

    If samples are drawn from the whole distribution, ``-log p`` of a token has the entropy as its
    expectation. The difference of engine and learner (precision, staleness) moves the mean, hence
    the tolerance. A small sample lacks rare tokens in mean and variance alike: the standard error
    has a term for them that falls with the number of tokens (as in the empirical Bernstein bound,
    Maurer & Pontil 2009, arXiv:0907.3740, theorem 4).
    """
    mean = metrics.get("rollout_corr/entropy_gap")
    mean_square = metrics.get("rollout_corr/entropy_gap_square")
    if mean is None or tokens < 100 or mean_square <= 0:
        return None
    tolerance = ENTROPY_TOLERANCE + 3 * metrics.get("rollout_corr/logp_diff_mean", 0.0)
    beyond = max(0.0, abs(mean) - tolerance)
    standard_error = math.sqrt(mean_square / tokens) + RARE_NATS / tokens
    return math.copysign(beyond / standard_error, mean)
