"""Keys that do not work yet with a model that reads pictures, or with one that does not."""

from __future__ import annotations

from collections.abc import Iterator

from core.config.problem import Problem
from core.config.registry import ENGINES
from core.config.schema import Config

MODEL = "actor_rollout_ref.model.path"


def problems(config: Config, reads_pictures: bool | None) -> Iterator[Problem]:
    """Yield what does not work with the model; ``reads_pictures`` is None where nothing is known of it."""
    if reads_pictures:
        yield from _not_supported(config)
    elif reads_pictures is False and config.actor_rollout_ref.actor.freeze_vision_tower:
        key = "actor_rollout_ref.actor.freeze_vision_tower"
        yield Problem(key, True, "the model reads text alone and has no vision tower", "leave it out")


def _not_supported(config: Config) -> Iterator[Problem]:
    """Yield what does not work yet with a model that reads pictures."""
    roles, algorithm = config.actor_rollout_ref, config.algorithm
    what = "a model that reads pictures"
    if config.trainer.backend == "ray":
        parts = (roles.actor, roles.ref)
        for name, whole, most in (
            ("ulysses_sequence_parallel_size", "sequences", max(part.ulysses_sequence_parallel_size for part in parts)),
            ("tensor_model_parallel_size", "layers", max(part.layer_ranks for part in parts)),
        ):
            if most > 1:
                key, rule = f"actor_rollout_ref.actor.{name}", f"does not split the {whole} of {what} yet"
                yield Problem(key, most, rule, "set it to 1")
    if config.critic.enable:
        rule, fix = f"{what} has no critic here", "use an estimator without one, such as grpo"
        yield Problem("algorithm.adv_estimator", algorithm.adv_estimator, rule, fix)
    if config.reward_model.uses_model:
        yield Problem("reward_model.enable", True, "a reward model reads text alone", "score with a function")
    if roles.model.fp32_lm_head:
        key, rule = "actor_rollout_ref.model.fp32_lm_head", f"was not tried with {what}, whose engines it changes too"
        yield Problem(key, True, rule, "set it to False")
    if config.needs_engine and not ENGINES[roles.rollout.name].reads_media:
        yield Problem("actor_rollout_ref.rollout.name", roles.rollout.name, f"sends no pictures of {what}", "use vllm")
    if not config.generates:
        yield Problem(MODEL, roles.model.path, f"fine-tuning does not train {what} yet", "give a model of text alone")
