"""Sizes that have to divide or hold each other: batches, optimizer steps, micro-batches, ranks, sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from core.config.rulebook import Broken, RuleBook, View

rules = RuleBook()


@rules.problem
def batches_are_whole(c: View) -> Broken:
    if c.data.train_batch_size % c.actor.ppo_mini_batch_size:
        yield (
            "data.train_batch_size",
            f"must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={c.actor.ppo_mini_batch_size}; "
            f"set actor_rollout_ref.actor.ppo_mini_batch_size={c.data.train_batch_size}, say, for one update a batch",
        )
    if (
        c.critic.enable
        and c.critic.ppo_mini_batch_size != c.actor.ppo_mini_batch_size
        and c.data.train_batch_size % c.critic.ppo_mini_batch_size
    ):
        yield (
            "data.train_batch_size",
            f"must be a multiple of critic.ppo_mini_batch_size={c.critic.ppo_mini_batch_size}; change one of "
            "them; left out, the critic's follows the actor's",
        )
    if c.data.train_batch_size * c.rollout.n % c.data_ranks:
        yield (
            "data.train_batch_size",
            f"times actor_rollout_ref.rollout.n={c.rollout.n} must be a multiple of the {c.data_ranks} ranks that "
            "share it (trainer.nnodes * trainer.n_gpus_per_node / ulysses_sequence_parallel_size / "
            "tensor_model_parallel_size); change one of them; trainer.backend=local without these keys runs one "
            "rank",
        )
    if (
        c.data.train_batch_size * c.rollout.n % c.data_ranks == 0
        and c.actor.ppo_mini_batch_size * c.rollout.n % c.data_ranks
    ):
        yield (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            f"times actor_rollout_ref.rollout.n={c.rollout.n} must be a multiple of the {c.data_ranks} ranks that "
            "share it; change one of them",
        )


@rules.problem
def sequence_parts_divide_ranks(c: View) -> Broken:
    for section, part, runs in (
        ("actor_rollout_ref.actor", c.actor, True),
        (
            "actor_rollout_ref.ref",
            c.ref,
            c.needs_ref and c.ref.ulysses_sequence_parallel_size != c.actor.ulysses_sequence_parallel_size,
        ),
        ("critic", c.critic, c.critic.enable),
    ):
        if runs and c.cluster and c.ranks % part.ulysses_sequence_parallel_size:
            yield (
                f"{section}.ulysses_sequence_parallel_size",
                f"must divide the {c.ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node); change one of them",
            )


@rules.problem
def split_sequences_are_packed(c: View) -> Broken:
    for section, part, model, models in (
        ("actor_rollout_ref.actor", c.actor, c.model, "actor_rollout_ref.model"),
        ("critic", c.critic, c.critic_model, "critic.model"),
    ):
        if c.cluster and part.ulysses_sequence_parallel_size > 1 and not model.use_remove_padding:
            yield (
                f"{section}.ulysses_sequence_parallel_size",
                f"splits packed sequences, and {models}.use_remove_padding=False; set "
                f"{models}.use_remove_padding=True, or ulysses_sequence_parallel_size=1",
            )


@rules.problem
def engine_layers_divide_gpus(c: View) -> Broken:
    if (
        "tensor_model_parallel_size" in c.engine.reads
        and c.config.needs_engine
        and c.cluster
        and c.engine_gpus % c.rollout.tensor_model_parallel_size
    ):
        yield (
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            f"must divide the {c.engine_gpus} GPUs of a node that engines compute on; change one of them; a model "
            "that fits one GPU needs 1",
        )


@dataclass(frozen=True)
class PassSizes:
    """The sizes of one kind of pass: of updates, or of log-probs."""

    section: str
    part: Any
    log_probs: bool
    runs: bool
    ranks_a_sequence: Callable[[], int]

    def key(self, name: str) -> str:
        """Return the full key of ``micro_batch_size_per_gpu``, ``use_dynamic_bsz`` or ``max_token_len_per_gpu``."""
        return f"{self.section}.{self.name(name)}"

    def name(self, name: str) -> str:
        if self.log_probs:
            return f"log_prob_{name}"
        return name if name.startswith("use_") else f"ppo_{name}"

    def __getitem__(self, name: str) -> Any:
        return getattr(self.part, self.name(name))


def _passes(c: View) -> Iterator[PassSizes]:
    yield PassSizes("actor_rollout_ref.actor", c.actor, False, True, lambda: c.actor.ulysses_sequence_parallel_size)
    yield PassSizes("actor_rollout_ref.rollout", c.rollout, True, True, lambda: c.actor.ulysses_sequence_parallel_size)
    yield PassSizes("actor_rollout_ref.ref", c.ref, True, c.needs_ref, lambda: c.ref.ulysses_sequence_parallel_size)
    yield PassSizes("critic", c.critic, False, c.critic.enable, lambda: c.critic.ulysses_sequence_parallel_size)


@rules.problem
def passes_have_a_size(c: View) -> Broken:
    for one in _passes(c):
        # the others follow the actor, whose own line says what is missing
        first = one.part is c.actor or c.actor.ppo_micro_batch_size_per_gpu or c.actor.use_dynamic_bsz
        if one.runs and one["use_dynamic_bsz"] is False and one["micro_batch_size_per_gpu"] is None and first:
            yield (
                one.key("micro_batch_size_per_gpu"),
                f"is needed with {one.key('use_dynamic_bsz')}=False; give a number of trajectories a pass, or leave "
                f"{one.name('use_dynamic_bsz')} out: passes are then packed by tokens",
            )


@rules.problem
def passes_hold_a_sequence(c: View) -> Broken:
    for one in _passes(c):
        if one.runs and one["use_dynamic_bsz"] and one["max_token_len_per_gpu"] * one.ranks_a_sequence() < c.longest:
            yield (
                one.key("max_token_len_per_gpu"),
                f"must hold a sequence of max_prompt_length + max_response_length = {c.longest} tokens (times "
                f"ulysses_sequence_parallel_size); raise it to {c.longest}, or shorten the sequences",
            )


@rules.problem
def layer_parts_divide_ranks(c: View) -> Broken:
    for section, part, adapters, models, runs in (
        ("actor_rollout_ref.actor", c.actor, c.model, "actor_rollout_ref.model", True),
        (
            "actor_rollout_ref.ref",
            c.ref,
            c.model,
            "actor_rollout_ref.model",
            c.needs_ref and c.ref.tensor_model_parallel_size != c.actor.tensor_model_parallel_size,
        ),
        ("critic", c.critic, c.critic_model, "critic.model", c.critic.enable),
    ):
        if (
            runs
            and c.cluster
            and (c.ranks % part.ulysses_sequence_parallel_size == 0)
            and c.ranks % (part.ulysses_sequence_parallel_size * part.tensor_model_parallel_size)
        ):
            yield (
                f"{section}.tensor_model_parallel_size",
                f"times {section}.ulysses_sequence_parallel_size={part.ulysses_sequence_parallel_size} must divide "
                f"the {c.ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node); change one of them",
            )
        if runs and c.cluster and part.tensor_model_parallel_size > 1 and adapters.lora_rank:
            yield (
                f"{section}.tensor_model_parallel_size",
                f"does not split adapters, and {models}.lora_rank={adapters.lora_rank}; set it to 1, or "
                f"{models}.lora_rank=0",
            )


@rules.problem
def shared_layers_are_not_compiled(c: View) -> Broken:
    for section, part, runs in (
        ("actor_rollout_ref.actor", c.actor, True),
        ("critic", c.critic, c.critic.enable),
    ):
        if runs and c.cluster and part.use_torch_compile and part.tensor_model_parallel_size > 1:
            yield (
                f"{section}.use_torch_compile",
                "does not compile layers that ranks share, and "
                f"tensor_model_parallel_size={part.tensor_model_parallel_size}; set it to False, or "
                f"{section}.tensor_model_parallel_size=1",
            )


@rules.problem
def copies_have_whole_layers(c: View) -> Broken:
    for fsdp, of, part, runs in (
        ("actor_rollout_ref.actor.fsdp_config", c.actor.fsdp_config, c.actor, True),
        ("actor_rollout_ref.ref.fsdp_config", c.ref.fsdp_config, c.ref, c.needs_ref),
        ("critic.model.fsdp_config", c.critic_model.fsdp_config, c.critic, c.critic.enable),
    ):
        if runs and c.cluster and of.fsdp_size > 0 and of.fsdp_size % part.tensor_model_parallel_size:
            yield (
                f"{fsdp}.fsdp_size",
                "counts the ranks of a copy, a multiple of "
                f"tensor_model_parallel_size={part.tensor_model_parallel_size}; change one of them",
            )
