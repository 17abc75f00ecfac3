"""Which keys lower the memory of each phase. A plan before a run and the error of a run name the same keys.

These are memory settings: they split or move the computation and cannot change the result, up to rounding. Where none
is left, the advice says so. :mod:`core.planning.estimate` computes how much a phase needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.config import registry, schema
from core.config.sections.actor import ActorConfig
from core.config.sections.critic import CriticConfig
from core.errors import OutOfMemory, out_of_memory

DOCUMENT = "TROUBLESHOOTING.md"
ENGINE_PHASES = ("gen", "gen_ahead", "wait_ahead", "generate", "testing", "probe")
Learner = ActorConfig | CriticConfig


def pass_tokens(config: schema.Config, part: Learner) -> tuple[int, int]:
    """Return the tokens in one pass of an update on one rank, and a rank's share of the longest sequence."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    share = -(-longest // part.ulysses_sequence_parallel_size)
    if part.use_dynamic_bsz:
        return max(share, part.ppo_max_token_len_per_gpu), share
    return share * (part.ppo_micro_batch_size_per_gpu or 1), share


def log_prob_tokens(config: schema.Config) -> int:
    """Return the tokens in one log-prob pass of the policy on one rank."""
    longest, rollout = config.data.max_prompt_length + config.data.max_response_length, config.actor_rollout_ref.rollout
    share = -(-longest // config.actor_rollout_ref.actor.ulysses_sequence_parallel_size)
    if rollout.log_prob_use_dynamic_bsz:
        return max(share, rollout.log_prob_max_token_len_per_gpu)
    return share * (rollout.log_prob_micro_batch_size_per_gpu or 1)


def update_remedies(config: schema.Config, role: str) -> list[str]:
    """Return what lowers the activations of an update. ``role`` is policy or critic."""
    actor, critic = config.actor_rollout_ref, config.critic
    prefix, key, part, model = ("actor_rollout_ref", "actor_rollout_ref.actor", actor.actor, actor.model)
    if role == "critic":
        prefix, key, part, model = "critic", "critic", critic, critic.model
    settings, (tokens, share) = _pass_remedies(key, "ppo_", part.use_dynamic_bsz, part), pass_tokens(config, part)
    if part.use_dynamic_bsz:
        settings = [f"{setting}, at the least to {share}" for setting in settings if tokens > share]
    if not model.enable_gradient_checkpointing:
        settings.append(f"set {prefix}.model.enable_gradient_checkpointing=True")
    return settings


def _pass_remedies(key: str, prefix: str, dynamic: bool, part: object) -> list[str]:
    """Return how to make a section's passes smaller; nothing where a pass is one sequence already."""
    name = f"{prefix}{'max_token_len' if dynamic else 'micro_batch_size'}_per_gpu"
    value = getattr(part, name)
    return [f"lower {key}.{name} ({value})"] if dynamic or (value or 1) > 1 else []


def _engine_remedies(config: schema.Config) -> list[str]:
    rollout, names = config.actor_rollout_ref.rollout, ["max_num_seqs", "max_num_batched_tokens"]
    if "gpu_memory_utilization" in registry.ENGINES[rollout.name].reads:
        names.insert(0, "gpu_memory_utilization")
    return [f"lower actor_rollout_ref.rollout.{name} ({getattr(rollout, name)})" for name in names]


def _offload_remedies(config: schema.Config, *names: str) -> list[str]:
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    if config.trainer.backend != "ray" or fsdp.offload_policy:
        return []
    return [f"set actor_rollout_ref.actor.fsdp_config.{name}=True" for name in names if not getattr(fsdp, name)]


def remedies(config: schema.Config, phase: str) -> list[str]:
    """Return the remedies for a ``phase`` that ran out of memory, the most effective first."""
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    if phase in ENGINE_PHASES:
        return _engine_remedies(config)
    if phase == "old_log_prob":
        return _pass_remedies("actor_rollout_ref.rollout", "log_prob_", rollout.log_prob_use_dynamic_bsz, rollout)
    if phase == "ref":
        return _pass_remedies("actor_rollout_ref.ref", "log_prob_", ref.log_prob_use_dynamic_bsz, ref)
    if phase == "values":
        return _pass_remedies("critic", "ppo_", config.critic.use_dynamic_bsz, config.critic)
    if phase in ("update_actor", "update_critic"):
        of_passes = update_remedies(config, "critic" if phase == "update_critic" else "policy")
        return [*of_passes, *_offload_remedies(config, "offload_policy")]
    if phase == "reward_model" and (name := config.reward_model.pass_size):
        return [f"lower reward_model.{name} ({getattr(config.reward_model, name)})"]
    utilization = [setting for setting in _engine_remedies(config) if "gpu_memory_utilization" in setting]
    # sync, load, sleep: weights and optimizer beside the engine
    return [*utilization, *_offload_remedies(config, "optimizer_offload", "param_offload")]


@contextmanager
def naming_remedies(config: schema.Config, phase: str) -> Iterator[None]:
    """Raise OutOfMemory with the remedies of its phase, of ``phase`` where none is named, if an allocation fails."""
    try:
        yield
    except Exception as error:
        full = error if isinstance(error, OutOfMemory) else out_of_memory(error, phase)
        if full is None:
            raise
        keys = remedies(config, full.phase)
        remedy = (
            " or ".join(keys) + "; memory settings cannot change the result" if keys else "no key lowers it further"
        )
        raise OutOfMemory(f"{full}: {remedy} ({DOCUMENT} has more)", full.phase) from error
