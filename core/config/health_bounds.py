"""Default bounds of ``trainer.health`` that depend on the rest of a configuration; the others stand in the schema."""

from __future__ import annotations

from core.config.limits import FULL_PRECISION
from core.config.schema import Config

EXACT = 1e-4  # mean nats a token that float32 explains
# Nats a token. On a lab task a mean gap of 0.04 cost nothing and one of 0.13 some accuracy
# (results/dapo/ablation.md): a precision that costs more than 0.05 is worth a warning whatever explains it.
LEAST, MOST = 0.02, 0.1
# Engine and learner round differently in places that one model's two passes do not: SmolLM2-135M in bf16 loses 0.032 to
# rounding, and an engine with bf16 weights lies 0.045 from a learner under autocast.
ROUNDINGS = 2


def logp_diff(config: Config) -> float | None:
    """Return what rounding of float32 explains between engine and learner.

    None, no bound, where more is expected and corrected; and where :func:`follows_rounding`.
    """
    return EXACT if _agrees(config) and _full_precision(config) else None


def exact(config: Config) -> bool:
    """Return whether engine and learner must agree to rounding: the same policy in float32, its whole distribution."""
    rollout = config.actor_rollout_ref.rollout
    whole = rollout.do_sample and rollout.top_p == 1 and rollout.top_k < 0
    return bool(_full_precision(config) and whole and not config.trainer.max_staleness)


def follows_rounding(config: Config) -> bool:
    """Return whether the bound of ``logp_diff`` is what rounding costs on the model, measured when the run starts."""
    lower = _agrees(config) and not _full_precision(config)
    return lower and config.trainer.health.logp_diff.bound is None


def of_rounding(cost: float) -> float:
    """Return the bound of ``logp_diff`` for a model on which rounding costs this many nats a token."""
    return min(max(LEAST, ROUNDINGS * cost), MOST)


def _agrees(config: Config) -> bool:
    """Return whether engine and learner should agree up to rounding: nothing makes them differ that is corrected."""
    correction = config.algorithm.rollout_correction
    return not (config.trainer.max_staleness or correction.weighs or correction.bypass_mode)


def _full_precision(config: Config) -> bool:
    part = config.actor_rollout_ref
    return {part.rollout.dtype, part.actor.fsdp_config.dtype} <= {*FULL_PRECISION}
