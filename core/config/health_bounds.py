"""Default bounds of ``trainer.health`` that depend on the rest of a configuration; the others stand in the schema."""

from __future__ import annotations

from core.config.schema import FULL_PRECISION, Config

EXACT = 1e-4  # mean nats a token that float32 explains


def logp_diff(config: Config) -> float | None:
    """Return what rounding explains between engine and learner; no bound where more is expected and corrected.

    On a lab task a mean gap of 0.04 cost nothing and one of 0.13 some accuracy (results/dapo/study_course.md).
    """
    part, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
    if config.trainer.max_staleness or correction.rollout_is is not None or correction.bypass_mode:
        return None
    full = {part.rollout.dtype, part.actor.fsdp_config.dtype} <= {*FULL_PRECISION}
    return EXACT if full else 0.02


def exact(config: Config) -> bool:
    """Return whether engine and learner must agree to rounding: the same policy in float32, its whole distribution."""
    part, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    full = {rollout.dtype, part.actor.fsdp_config.dtype} <= {*FULL_PRECISION}
    whole = rollout.do_sample and rollout.top_p == 1 and rollout.top_k < 0
    noise = (rollout.engine_kwargs.get("hf") or {}).get("logits_noise")
    return bool(full and whole and not noise and not config.trainer.max_staleness)


def scorer_errors(config: Config) -> float | None:
    """Return the share of answers without a verdict: a judge's server that is sound has next to none."""
    return 0.1 if config.reward_model.judged else None
