"""Sizes that have to divide or hold each other: batches, optimizer steps, micro-batches, ranks, sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.config.rulebook import Broken, RuleBook, View

rules = RuleBook()
ULYSSES, LAYERS = "ulysses_sequence_parallel_size", "tensor_model_parallel_size"


@rules.problem
def batches_are_whole(c: View) -> Broken:
    prompts, answers = c.data.train_batch_size, c.data.train_batch_size * c.rollout.n
    if prompts % c.actor.ppo_mini_batch_size:
        yield (
            "data.train_batch_size",
            f"must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={c.actor.ppo_mini_batch_size}; "
            f"set actor_rollout_ref.actor.ppo_mini_batch_size={prompts}, say, for one update a batch",
        )
    own_size = c.critic.enable and c.critic.ppo_mini_batch_size != c.actor.ppo_mini_batch_size
    if own_size and prompts % c.critic.ppo_mini_batch_size:
        yield (
            "data.train_batch_size",
            f"must be a multiple of critic.ppo_mini_batch_size={c.critic.ppo_mini_batch_size}; change one of "
            "them; left out, the critic's follows the actor's",
        )
    if answers % c.data_ranks:
        yield (
            "data.train_batch_size",
            f"times actor_rollout_ref.rollout.n={c.rollout.n} must be a multiple of the {c.data_ranks} ranks that "
            f"share it (trainer.nnodes * trainer.n_gpus_per_node / {ULYSSES} / {LAYERS}); change one of them; "
            "trainer.backend=local without these keys runs one rank",
        )
    elif c.actor.ppo_mini_batch_size * c.rollout.n % c.data_ranks:
        yield (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            f"times actor_rollout_ref.rollout.n={c.rollout.n} must be a multiple of the {c.data_ranks} ranks that "
            "share it; change one of them",
        )


# --- how ranks share what they compute ---


@dataclass(frozen=True)
class Learner:
    """One of the models that ranks compute."""

    section: str
    part: Any
    models: str  # the section of its model
    model: Any
    fsdp_config: str
    runs: bool

    @property
    def fsdp_size(self) -> int:
        owner = self.model if self.section == "critic" else self.part
        return owner.fsdp_config.fsdp_size


def _learners(c: View) -> Iterator[Learner]:
    """Yield the learners whose ranks are counted, the reference included."""
    if c.cluster:
        model = "actor_rollout_ref.model"
        for name, part, runs in (("actor", c.actor, True), ("ref", c.ref, c.needs_ref)):
            section = f"actor_rollout_ref.{name}"
            yield Learner(section, part, model, c.model, f"{section}.fsdp_config", runs)
        critic = "critic.model.fsdp_config"
        yield Learner("critic", c.critic, "critic.model", c.critic_model, critic, c.critic.enable)


@rules.problem
def parts_divide_ranks(c: View) -> Broken:
    """Check the ranks of a sequence and of a layer; a reference that follows the actor is not named twice."""
    for one in (one for one in _learners(c) if one.runs):
        ulysses, layers = getattr(one.part, ULYSSES), getattr(one.part, LAYERS)
        own = {name for name in (ULYSSES, LAYERS) if one.part is c.actor or _differs(c, one, name)}
        ranks = f"the {c.ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node); change one of them"
        if ULYSSES in own and c.ranks % ulysses:
            yield f"{one.section}.{ULYSSES}", f"must divide {ranks}"
        elif LAYERS in own and c.ranks % (ulysses * layers):
            yield f"{one.section}.{LAYERS}", f"times {one.section}.{ULYSSES}={ulysses} must divide {ranks}"
        if LAYERS in own and layers > 1 and one.model.lora_rank:
            yield (
                f"{one.section}.{LAYERS}",
                f"does not split adapters, and {one.models}.lora_rank={one.model.lora_rank}; set it to 1, or "
                f"{one.models}.lora_rank=0",
            )
        if one.fsdp_size > 0 and one.fsdp_size % layers:
            yield (
                f"{one.fsdp_config}.fsdp_size",
                f"counts the ranks of a copy, a multiple of {LAYERS}={layers}; change one of them",
            )


def _differs(c: View, one: Learner, name: str) -> bool:
    return not one.section.endswith(".ref") or getattr(c.ref, name) != getattr(c.actor, name)


@rules.problem
def shared_parts_have_kernels(c: View) -> Broken:
    for one in _learners(c):
        if one.section.endswith(".ref"):
            continue
        layers = getattr(one.part, LAYERS)
        if one.runs and one.part.use_torch_compile and layers > 1:
            yield (
                f"{one.section}.use_torch_compile",
                f"does not compile layers that ranks share, and {LAYERS}={layers}; set it to False, or "
                f"{one.section}.{LAYERS}=1",
            )


@rules.problem
def engine_layers_divide_gpus(c: View) -> Broken:
    serves = LAYERS in c.engine.reads and c.config.needs_engine and c.cluster
    if serves and c.engine_gpus % c.rollout.tensor_model_parallel_size:
        yield (
            f"actor_rollout_ref.rollout.{LAYERS}",
            f"must divide the {c.engine_gpus} GPUs of a node that engines compute on; change one of them; a model "
            "that fits one GPU needs 1",
        )


# --- passes ---


@rules.problem
def passes_hold_a_sequence(c: View) -> Broken:
    """Check the size of each kind of pass: a number of trajectories, or of tokens."""
    actor, rollout, ref = c.actor, c.rollout, c.ref
    for section, part, prefix, runs in (
        ("actor_rollout_ref.actor", actor, "ppo", True),
        ("actor_rollout_ref.rollout", rollout, "log_prob", True),
        ("actor_rollout_ref.ref", ref, "log_prob", c.needs_ref),
        ("critic", c.critic, "ppo", c.critic.enable),
    ):
        if not runs:
            continue
        dynamic = "use_dynamic_bsz" if prefix == "ppo" else "log_prob_use_dynamic_bsz"
        micro, tokens = f"{prefix}_micro_batch_size_per_gpu", f"{prefix}_max_token_len_per_gpu"
        # the others follow the actor, whose own line says what is missing
        first = part is actor or actor.ppo_micro_batch_size_per_gpu or actor.use_dynamic_bsz
        if getattr(part, dynamic) is False and getattr(part, micro) is None and first:
            yield (
                f"{section}.{micro}",
                f"is needed with {section}.{dynamic}=False; give a number of trajectories a pass, or leave "
                f"{dynamic} out: passes are then packed by tokens",
            )
        if getattr(part, dynamic):
            ranks = getattr(actor if part is rollout else part, ULYSSES)
            if getattr(part, tokens) * ranks < c.longest:
                yield (
                    f"{section}.{tokens}",
                    f"must hold a sequence of max_prompt_length + max_response_length = {c.longest} tokens (times "
                    f"{ULYSSES}); raise it to {c.longest}, or shorten the sequences",
                )
