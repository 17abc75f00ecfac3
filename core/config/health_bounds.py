"""Default bounds of ``trainer.health`` that depend on the rest of a configuration; the others stand in the schema."""

from __future__ import annotations

from core.config.schema import FULL_PRECISION, Config


def logp_diff(config: Config) -> float | None:
    """Return what rounding explains between engine and learner; no bound where more is expected and corrected.

    On a lab task a mean gap of 0.04 cost nothing and one of 0.13 some accuracy (results/dapo/study_course.md).
    """
    part, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
    if config.trainer.max_staleness or correction.rollout_is is not None or correction.bypass_mode:
        return None
    full = {part.rollout.dtype, part.actor.fsdp_config.dtype} <= {*FULL_PRECISION}
    return 1e-4 if full else 0.02
