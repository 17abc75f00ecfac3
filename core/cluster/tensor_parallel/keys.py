"""The key of layers that ranks share, of actor, reference and critic, and the rules on it."""

from __future__ import annotations

from core.config import limits
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Section


class LayerKeys(Section):
    tensor_model_parallel_size: limits.Count = 1  # ranks that share each layer's matrices; FSDP2 shards over the others

    @property
    def layer_ranks(self) -> int:
        return self.tensor_model_parallel_size


class RefLayerKeys(Section):
    tensor_model_parallel_size: limits.Count | None = None  # ranks that share each layer; None: the actor's

    @property
    def layer_ranks(self) -> int:
        return self.tensor_model_parallel_size


rules = RuleBook()


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


@rules.unused
def one_rank(c: View) -> Unused:
    if c.trainer.backend == "local":
        keys = tuple(f"{part}.tensor_model_parallel_size" for part in SECTIONS)
        yield keys, "trainer.backend=local runs one rank in this process"


SECTIONS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
