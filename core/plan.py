"""Memory, disk and hours of a configuration, before anything is downloaded or started.

    python -m core.plan dapo preset=paper actor_rollout_ref.model.path=Qwen/Qwen2.5-32B \\
        trainer.nnodes=16 --gpu H100

A dry run prints the same estimate: 12 bytes a trained parameter (float32 weights, two moments of
Adam) over the learner ranks, the highest memory of each pass, and the engine. A reward model is not
planned. A run that would compute on this machine's CPU is planned for this machine, whose ranks
share its memory. The times are :mod:`core.plan_time`'s.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core import plan_time
from core.config import registry
from core.config.composition import compose
from core.config.defaults import has_accelerator
from core.config.paths import cluster_address, is_local
from core.config.schema import Config, RolloutConfig, TrainerConfig
from core.config.section import FULL_PRECISION
from core.config.training_keys import ActorConfig, CriticConfig, FSDPConfig
from core.errors import MEMORY_KEYS, InputError
from core.learner.step_settings import CPU_LOGITS, head_logits
from core.model_shapes import SOURCE, TABLE, Shape, read_config, shape_of
from core.plan_time import GENERATE, LOG_PROBS, UPDATE

GPUS = {name: memory * 2**30 for name, memory in TABLE["gpus"].items()}  # usable bytes
USABLE = 0.95  # share of a GPU's memory; the rest is the allocator's and the libraries'
CRITIC_UPDATE = "critic update"
PHASES = (GENERATE, LOG_PROBS, UPDATE, CRITIC_UPDATE)
# Phase -> its name in MEMORY_KEYS
TIMERS = {
    GENERATE: "gen",
    LOG_PROBS: "old_log_prob",
    UPDATE: "update_actor",
    CRITIC_UPDATE: "update_critic",
}
DEFAULT_GPU = "H100"
HERE = "this machine"  # in place of a GPU's name: the CPU that the command runs on


# -- sizes of passes -------------------------------------------------------------------------------


def width(dtype: str) -> int:
    """Return the bytes of a number in a configuration's ``dtype``."""
    return 4 if dtype in FULL_PRECISION else 2


def pass_tokens(config: Config, section: ActorConfig | CriticConfig) -> int:
    """Return the tokens in one pass of a rank.

    They are those of a token budget, or of sequences that some ranks share.
    """
    longest = config.longest_sequence
    share = -(-longest // section.ulysses_sequence_parallel_size)
    if section.use_dynamic_bsz:
        return max(share, section.ppo_max_token_len_per_gpu)
    return share * (section.ppo_micro_batch_size_per_gpu or 1)


def block_bytes(shape: Shape, width: int) -> int:
    """Return the bytes per token that autograd keeps of one layer."""
    attention = (3 * shape.q_size + 2 * shape.kv_size) * width
    return 2 * shape.hidden * (4 + 2 * width) + attention + 4 * shape.mlp * width


def head_bytes(
    shape: Shape, tokens: int, width: int, trains: bool = True, logits: int = CPU_LOGITS
) -> float:
    """Return the chunked head's bytes.

    They are the logits (about three tensors of a chunk in float32), the gradient of the head's
    weight in float32, and the hidden states with their gradient.
    """
    logit_bytes = 3 * 4 * min(logits, tokens * shape.vocab)
    weight_gradient = 4.0 * shape.vocab * shape.hidden if trains else 0.0
    return logit_bytes + weight_gradient + 2.0 * tokens * shape.hidden * width


def gathered_bytes(shape: Shape, width: int) -> float:
    """Return the bytes of whole weights on a sharded rank: two layers and the ends."""
    return width * (2.0 * shape.block + shape.ends)


def update_bytes(
    shape: Shape,
    tokens: int,
    width: int,
    *,
    checkpointing: bool,
    ranks: int,
    adapters: int = 0,
    logits: int = CPU_LOGITS,
) -> float:
    """Return the most bytes of gradients and activations beside the gathered weights.

    Not all exist at once: a layer's gradient is reduced in float32 while the layer before it is
    passed backward; the gradients of the ends stay whole until everything else is reduced.
    ``adapters`` are the trained parameters of LoRA, 0 if all are trained.
    """
    block = block_bytes(shape, width)
    backward = 2 * (shape.mlp + shape.hidden) * width
    activations = float(tokens) * shape.layers * (shape.hidden * width if checkpointing else block)
    recomputed = block if checkpointing else 0
    if adapters:
        layer_gradients = 4.0 * adapters / ranks
        reduced = 4.0 * adapters / shape.layers
        head = 0.0
        ends = 0.0
    else:
        layer_gradients = 4.0 * (shape.parameters - shape.ends) / ranks
        reduced = 4.0 * shape.block
        head = float(width) * shape.vocab * shape.hidden
        ends = (width + 4.0) * shape.ends
    cast = head if width < 4 else 0.0  # the head sums its gradient in float32 first
    in_head = activations + head_bytes(shape, tokens, width, not adapters, logits) + cast
    in_last_layer = head + reduced + activations + tokens * (backward + recomputed)
    in_first_layer = head + reduced + layer_gradients + tokens * (backward + block)
    at_end = layer_gradients + ends - gathered_bytes(shape, width)
    return max(in_head, in_last_layer, in_first_layer, at_end)


# -- hardware and disk -----------------------------------------------------------------------------


def hardware_of(config: Config) -> str:
    """Return the name of a GPU, or ``HERE`` if the run would compute on this machine's CPU."""
    trainer = config.trainer
    if trainer.device is not None:
        return HERE if trainer.device == "cpu" else DEFAULT_GPU
    elsewhere = trainer.backend == "ray" and (trainer.nnodes > 1 or cluster_address(config))
    return DEFAULT_GPU if elsewhere or has_accelerator() else HERE


def most_checkpoints(trainer: TrainerConfig) -> int | None:
    """Return how many checkpoints are on the disk at once at most; None if the data decide.

    An old one is deleted when a new one is complete, so there is one more than are kept.
    """
    steps = trainer.total_training_steps
    frequency = trainer.save_freq
    kept = trainer.max_actor_ckpt_to_keep
    written = None
    if frequency == "after_each_epoch":
        written = trainer.total_epochs if steps is None else None
    elif frequency < 1:
        written = -frequency  # -1 writes the last step's alone, and 0 none
    elif steps is not None:
        written = -(-steps // frequency)
    if kept is None:
        return written
    return kept + 1 if written is None else min(written, kept + 1)


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Bytes of a GPU that a role takes in some phases.

    State is kept from step to step: outside of these phases it is in host memory.
    """

    role: str
    what: str
    bytes: float
    phases: tuple[str, ...] = PHASES
    state: bool = False


@dataclass(frozen=True)
class Model:
    """A model of the learner, and the settings that decide its memory."""

    role: str
    fsdp: FSDPConfig
    parameters: int
    # The others are those of a model that trains
    update: str = ""  # the phase of its update
    adapters: int = 0  # trained parameters of LoRA; 0 if all are trained
    section: ActorConfig | CriticConfig | None = None
    shape: Shape | None = None  # with the head of its passes
    checkpointing: bool = False  # recomputes activations

    @property
    def trained(self) -> int:
        """Return how many parameters the optimizer holds."""
        return (self.adapters or self.parameters) if self.update else 0


class Plan:
    """The memory and disk of a resolved configuration on one kind of GPU.

    Raises InputError for a model or GPU that is not known.
    """

    def __init__(self, config: Config, gpu: str | None = None):
        gpu = gpu or hardware_of(config)
        self.on_cpu = gpu == HERE
        if not self.on_cpu and gpu not in GPUS:
            raise InputError(f"--gpu={gpu}: not in {SOURCE.name}, which holds {', '.join(GPUS)}")
        roles = config.actor_rollout_ref
        trainer = config.trainer
        self.config = config
        self.gpu = gpu
        self.shape = shape_of(roles.model.path, roles.model.override_config)
        self.sharded = trainer.backend == "ray"
        self.gpus = trainer.nnodes * trainer.n_gpus_per_node if self.sharded else 1
        if self.on_cpu:
            self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.gpus
        else:
            self.memory = GPUS[gpu]
        # Learner ranks that share one copy of the state
        size = roles.actor.fsdp_config.fsdp_size
        self.ranks = size if 0 < size < self.gpus else self.gpus
        # Tokens of the longest sequence
        self.longest = config.longest_sequence
        policy, *critics = self._trained_models()
        models = [policy, *self._frozen_models(), *critics]
        states = [part for model in models for part in self._state(model)]
        passes = [part for model in (policy, *critics) for part in self._passes(model)]
        # The sequences of full length that an engine's cache holds
        engine, self.kv_sequences = self._engine(states)
        self.parts = [*states, *passes, *engine]
        self.host_bytes = sum(part.bytes for part in states if part.phases != PHASES)  # per rank
        self.phase_bytes = {
            phase: sum(part.bytes for part in self.parts if phase in part.phases)
            for phase in PHASES
        }
        self.over = [p for p, size in self.phase_bytes.items() if size > USABLE * self.memory]
        self.fits = not self.over and self.kv_sequences > 0
        self.checkpoint_bytes = sum(12.0 * model.trained for model in models)
        self.checkpoints = most_checkpoints(trainer)

    def _trained_models(self) -> list[Model]:
        """Return the policy, and the critic if there is one."""
        roles = self.config.actor_rollout_ref
        policy = Model(
            "policy",
            roles.actor.fsdp_config,
            parameters=self.shape.parameters,
            update=UPDATE,
            adapters=self.shape.adapters(roles.model.lora_rank),
            section=roles.actor,
            shape=self.shape,
            checkpointing=roles.model.enable_gradient_checkpointing,
        )
        if not self.config.has_critic:
            return [policy]
        section = self.config.critic
        adapters = self.shape.adapters(section.model.lora_rank)
        if adapters:
            adapters += self.shape.hidden + 1  # the new head trains whole
        critic = Model(
            "critic",
            section.model.fsdp_config,
            parameters=self.shape.critic_parameters,
            update=CRITIC_UPDATE,
            adapters=adapters,
            section=section,
            shape=replace(self.shape, vocab=1),  # a value head has one output
            checkpointing=section.model.enable_gradient_checkpointing,
        )
        return [policy, critic]

    def _frozen_models(self) -> Iterator[Model]:
        """Yield the reference policy and a recipe's frozen models."""
        roles = self.config.actor_rollout_ref
        if (
            self.config.needs_ref and not roles.model.lora_rank
        ):  # the base of adapters is the reference
            yield Model("reference", roles.ref.fsdp_config, self.shape.parameters)
        for role, frozen in self.config.frozen_models.items():
            shape = shape_of(frozen.model.path, frozen.model.override_config)
            yield Model(role, roles.ref.fsdp_config, shape.parameters)

    def _state(self, model: Model) -> Iterator[Part]:
        """Yield weights and optimizer of a model, and when they are on the GPU."""
        updates = (model.update,) if model.update else ()
        weight_phases = optimizer_phases = PHASES
        if self.sharded and not self.on_cpu:  # a CPU's state has no other memory to go to
            if model.fsdp.param_offload:
                weight_phases = (LOG_PROBS, *updates)
            if model.fsdp.optimizer_offload:
                optimizer_phases = updates
            if model.fsdp.offload_policy:
                weight_phases = optimizer_phases = ()
        weights = 4.0 * model.parameters / self.ranks
        yield Part(model.role, "weights in float32", weights, weight_phases, state=True)
        if model.update:
            moments = 8.0 * model.trained / self.ranks
            yield Part(model.role, "optimizer", moments, optimizer_phases, state=True)

    def _passes(self, model: Model) -> Iterator[Part]:
        """Yield the memory of a model's passes: of log-probs, and of its update."""
        shape = model.shape
        size = width(model.fsdp.dtype)
        gathered = gathered_bytes(self.shape, size) if self.sharded or size == 2 else 0.0
        tokens = pass_tokens(self.config, model.section)
        logits = head_logits(None if self.on_cpu else self.memory)
        # In one process, and without answers, no pass takes log-probs
        if model.update == UPDATE and self.sharded and self.config.generates:
            in_mlp = float(tokens) * (3 * shape.mlp + 4 * shape.hidden) * size
            in_head = head_bytes(shape, tokens, size, trains=False, logits=logits)
            what = f"activations of {tokens} tokens, a layer's weights"
            yield Part(model.role, what, gathered + max(in_mlp, in_head), (LOG_PROBS,))
        update = update_bytes(
            shape,
            tokens,
            size,
            checkpointing=model.checkpointing,
            ranks=self.ranks,
            adapters=model.adapters,
            logits=logits,
        )
        what = f"gradients, activations of {tokens} tokens, a layer's weights"
        yield Part(model.role, what, gathered + update, (model.update,))

    def _engine(self, states: Sequence[Part]) -> tuple[list[Part], int]:
        """Return the engine's parts, and how many sequences of full length its cache holds."""
        if not self.config.needs_engine:
            return [], 1
        rollout = self.config.actor_rollout_ref.rollout
        size = width(rollout.dtype)
        # Engines such as vLLM reserve a share of the memory for weights and cache
        reserves = "gpu_memory_utilization" in registry.ENGINES[rollout.name].reads
        gpus = rollout.tensor_model_parallel_size if reserves else 1
        weights = 0.0 if self.config.one_copy else size * self.shape.parameters / gpus
        phases = (GENERATE,) if reserves and rollout.free_cache_engine else PHASES
        parts = [Part("engine", "weights", weights, phases)]
        if reserves:
            room = rollout.gpu_memory_utilization * self.memory - weights
            what = "KV cache (the rest of gpu_memory_utilization)"
            parts.append(Part("engine", what, max(0.0, room), phases))
        else:
            always = sum(part.bytes for part in states if part.phases == PHASES)
            room = USABLE * self.memory - weights - always
            if rollout.name == "hf":
                room = min(room, hf_cache_gib(rollout) * 2**30)
        sequence_bytes = self.shape.kv_bytes(size) / gpus * self.longest
        return parts, max(0, int(room // sequence_bytes))


def hf_cache_gib(rollout: RolloutConfig) -> float:
    """Return the bound of the hf engine's cache, of keys and values."""
    return float((rollout.engine_kwargs.get("hf") or {}).get("cache_gib", registry.HF_CACHE_GIB))


# -- text ------------------------------------------------------------------------------------------


def lines(plan: Plan, mean_answer: int | None = None) -> Iterator[str]:
    """Yield the plan as text, what matters most first. ``mean_answer`` is in tokens, if known."""

    def row(role: str, when: str, size: float, what: str) -> str:
        return f"  {role:<10}{when:<19}{size / 2**30:>7.1f} GiB  {what}"

    if plan.on_cpu:
        device = "rank"
        where = f"{HERE} (cores: {os.cpu_count()}, no GPU, ranks: {plan.gpus})"
    else:
        device = "GPU"
        where = f"{plan.gpus} x {plan.gpu}"
    verdict = "fits on" if plan.fits else "DOES NOT FIT on"
    peak = max(plan.phase_bytes.values()) / 2**30
    memory = plan.memory / 2**30
    yield f"The run {verdict} {where}: {peak:.1f} of a {device}'s {memory:.1f} GiB are needed."
    for phase in plan.over:
        keys = MEMORY_KEYS[TIMERS[phase]]
        yield f"  - {phase}: lower {keys}, offload state, or share it among more GPUs"
    if plan.kv_sequences == 0:
        keys = "actor_rollout_ref.rollout.tensor_model_parallel_size or gpu_memory_utilization"
        if plan.config.actor_rollout_ref.rollout.name == "hf":
            keys = "actor_rollout_ref.rollout.engine_kwargs.hf.cache_gib"
        yield f"  - the engine's cache holds no sequence of full length: raise {keys}"
    for part in plan.parts:
        if part.phases:
            when = "always" if part.phases == PHASES else ", ".join(part.phases)
            yield row(part.role, when, part.bytes, part.what)
    yield row("host", "a rank", plan.host_bytes, "offloaded state")
    count = plan.checkpoints
    size = plan.checkpoint_bytes
    kept = f"checkpoints: {count} at most, of {size / 2**30:.1f} GiB"
    if count is None:
        kept = "a checkpoint; all that trainer.save_freq writes are kept"
    yield row("disk", "", size if count is None else size * count, kept)
    if plan.config.needs_engine:
        yield (
            f"KV cache per engine: {plan.kv_sequences:,} sequences of full length, "
            f"{plan.longest:,} tokens each."
        )
    gpu = None if plan.on_cpu else plan.gpu
    work = plan_time.work_of(plan.config, plan.shape, plan.gpus, gpu, mean_answer)
    yield from plan_time.lines(work, plan.config.trainer.total_training_steps)


def plan_lines(config: Config, gpu: str | None = None) -> list[str]:
    """Return the plan's lines for a dry run, or a line with the reason why there is no plan."""
    model = config.actor_rollout_ref.model.path
    absent = is_local(model) and not (Path(model).expanduser() / "config.json").exists()
    if config.trainer.val_only or absent:  # an earlier command may make the model
        return []
    try:
        return list(lines(Plan(config, gpu)))
    except InputError as error:
        return [f"none: {error}"]


def length_notes(config: Config) -> list[str]:
    """Return a line if the longest sequence is beyond the model's positions.

    If the data are here, nothing is returned: a dry run measures them, as a start does.
    """
    data = config.data
    model = config.actor_rollout_ref.model
    files = [*data.train_files, *data.val_files]
    settings = read_config(model.path)
    if settings is None or all(Path(file).expanduser().is_file() for file in files):
        return []
    settings = {**settings, **settings.get("text_config", {}), **(model.override_config or {})}
    positions = settings.get("max_position_embeddings")
    longest = config.longest_sequence
    if type(positions) is not int or longest <= positions:
        return []
    return [
        f"data.max_prompt_length + data.max_response_length={longest}: {model.path} has "
        f"max_position_embeddings={positions}; lower them unless the data's prompts are shorter"
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Return 1 if it does not fit, 2 if the configuration is at fault."""
    parser = argparse.ArgumentParser(
        "python -m core.plan", description="Estimate memory, disk and hours of a run."
    )
    parser.add_argument("recipe", help="The recipe whose configuration is planned, as in grpo.")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run's."
    )
    default = f"Left out: {DEFAULT_GPU}, or {HERE} if the run would compute on its CPU."
    parser.add_argument("--gpu", help=f"The kind of GPU: one of {', '.join(GPUS)}. {default}")
    parser.add_argument(
        "--mean_answer", type=int, help="Mean tokens of an answer, for the hours, if you know it."
    )
    args = parser.parse_intermixed_args(arguments)
    overrides = [text for text in args.overrides if text != "--"]
    try:
        plan = Plan(compose(args.recipe, overrides), args.gpu)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(plan, args.mean_answer)))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
