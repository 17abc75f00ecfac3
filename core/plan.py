"""Memory and disk of a configuration, before anything is downloaded or started; a dry run prints
the same.

    python -m core.plan dapo preset=paper actor_rollout_ref.model.path=Qwen/Qwen2.5-32B
    trainer.nnodes=16 --gpu H100

An estimate: 12 bytes a trained parameter (float32 weights, two moments of Adam) over the learner
ranks, what a pass holds at its highest, and the engine. A reward model is not planned. A run that
would compute on this machine's CPU is planned for this machine, whose ranks share its memory.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from core.config import compose, registry
from core.config.defaults import has_accelerator
from core.config.paths import cluster_address, is_local
from core.config.schema import Config, TrainerConfig
from core.config.section import FULL_PRECISION
from core.errors import MEMORY_KEYS, InputError
from core.learner.step_settings import CPU_LOGITS, head_logits
from core.vision import pictures

SOURCE = Path(__file__).with_name("model_shapes.yaml")
TABLE = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
GPUS = {name: memory * 2**30 for name, memory in TABLE["gpus"].items()}  # usable bytes
USABLE = 0.95  # of a GPU's memory; the rest is the allocator's and the libraries'
GENERATE, LOG_PROBS, UPDATE, CRITIC_UPDATE = PHASES = (
    "generate",
    "log-probs",
    "update",
    "critic update",
)
MEMORY_KEY = dict(
    zip(PHASES, ("gen", "old_log_prob", "update_actor", "update_critic"), strict=True)
)
DEFAULT_GPU = "H100"
HERE = "this machine"  # in place of a GPU's name: the CPU that the command runs on


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, a gated MLP and RMS norms (the Llama and Qwen2
    families)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool
    bias: bool
    head_dim: int = 0  # 0: hidden / heads
    tower: int = 0  # parameters of the part that reads pictures; its activations are not planned

    @property
    def q_size(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        return self.q_size // self.heads * self.kv_heads

    @property
    def block(self) -> int:
        """Count the parameters of one layer."""
        attention = 2 * self.hidden * (self.q_size + self.kv_size)
        bias = (self.q_size + 2 * self.kv_size) if self.bias else 0
        return attention + bias + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def ends(self) -> int:
        """Count the parameters outside the layers: embedding, head, last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends + self.tower

    @property
    def critic_parameters(self) -> int:
        """Count the parameters of the same body with one number a token instead of the vocabulary
        (and a bias)."""
        return self.layers * self.block + self.vocab * self.hidden + 2 * self.hidden + 1

    def adapters(self, rank: int) -> int:
        """Count the parameters of LoRA on every linear layer: two factors each."""
        return (
            self.layers
            * rank
            * (7 * self.hidden + 2 * self.q_size + 2 * self.kv_size + 3 * self.mlp)
        )

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of key and value cache a token at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_size * width


MODELS = {
    name + suffix: Shape(**s) for name, s in TABLE["models"].items() for suffix in TABLE["suffixes"]
}
SIZES = {
    **{"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
    **{
        "kv_heads": "num_key_value_heads",
        "mlp": "intermediate_size",
        "vocab": "vocab_size",
        "head_dim": "head_dim",
    },
}


def shape_of(path: str, override: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of a hub id in the table, or of a folder's ``config.json``. Raises
    InputError for others."""
    if (found := read_config(path)) is None:
        if path in MODELS:
            return MODELS[path]
        near = difflib.get_close_matches(path, MODELS, n=1)
        raise InputError(
            f"the shape of {path} is not known offline; nearest in {SOURCE.name}: {near or 'none'}"
        )
    config = {
        "head_dim": 0,
        "num_key_value_heads": found.get("num_attention_heads"),
        **found,
        **(override or {}),
    }
    sizes = {field: config.get(name) or 0 for field, name in SIZES.items()}
    wrong = [
        SIZES[field]
        for field, size in sizes.items()
        if type(size) is not int or size < (field != "head_dim")
    ]
    if wrong or "vision_config" in found:
        raise InputError(
            f"{path}/config.json: no model of text by its {', '.join(wrong) or 'vision_config'}"
        )
    bias = config.get("attention_bias", config.get("model_type", "").startswith("qwen2"))
    return Shape(**sizes, tied=config.get("tie_word_embeddings", True), bias=bias)


def read_config(path: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a model's folder; None where there is none, as for a hub id.
    Raises InputError."""
    file = Path(os.path.expanduser(path)) / "config.json"
    try:
        return {**json.loads(file.read_text(encoding="utf-8"))} if file.is_file() else None
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}/config.json: cannot be read ({error}); it must hold a model's settings"
        ) from error


def model_problems(config: Config) -> list[str]:
    """Return a line for each key that does not go together with a model that reads pictures."""
    path, found = config.actor_rollout_ref.model.path, None
    with suppress(InputError):  # a damaged folder: loading it reports that
        found = read_config(path)
    known = MODELS[path].tower > 0 if path in MODELS else False
    reads = found.get("model_type") in registry.PICTURE_MODELS if found else known
    return [str(problem) for problem in pictures.problems(config)] if reads else []


def length_notes(config: Config) -> list[str]:
    """Return a line if the longest sequence is beyond the model's positions and the data are not
    here to be measured.

    Where they are, a dry run measures them as a start does.
    """
    data, model = config.data, config.actor_rollout_ref.model
    files = [*data.train_files, *data.val_files]
    settings = read_config(model.path)
    if settings is None or all(Path(file).expanduser().is_file() for file in files):
        return []
    settings = {**settings, **settings.get("text_config", {}), **(model.override_config or {})}
    positions = settings.get("max_position_embeddings")
    longest = data.max_prompt_length + data.max_response_length
    if type(positions) is not int or longest <= positions:
        return []
    keys = f"data.max_prompt_length + data.max_response_length={longest}"
    rule = f"{model.path} has max_position_embeddings={positions}"
    return [f"{keys}: {rule}; lower them unless the data's prompts are shorter"]


def width(dtype: str) -> int:
    """Return the bytes of a number in a configuration's ``dtype``."""
    return 4 if dtype in FULL_PRECISION else 2


def pass_tokens(config: Config, part: Any) -> int:
    """Return the tokens in one pass of a rank, a budget or sequences that some ranks share, of
    actor or critic."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    share = -(-longest // part.ulysses_sequence_parallel_size)
    if part.use_dynamic_bsz:
        return max(share, part.ppo_max_token_len_per_gpu)
    return share * (part.ppo_micro_batch_size_per_gpu or 1)


def block_bytes(shape: Shape, width: int) -> int:
    """Return what autograd keeps of one layer, a token."""
    attention = (3 * shape.q_size + 2 * shape.kv_size) * width
    return 2 * shape.hidden * (4 + 2 * width) + attention + 4 * shape.mlp * width


def head_bytes(
    shape: Shape, tokens: int, width: int, trains: bool = True, logits: int = CPU_LOGITS
) -> float:
    """Return the chunked head's bytes: logits (about three tensors of a chunk in float32), its
    weight's gradient in float32, hidden states and their gradient."""
    weight = 4.0 * shape.vocab * shape.hidden if trains else 0.0
    return 3 * 4 * min(logits, tokens * shape.vocab) + weight + 2.0 * tokens * shape.hidden * width


def gathered_bytes(shape: Shape, width: int) -> float:
    """Return the weights that a rank of a sharded model has whole: one layer and the next, and the
    ends."""
    return width * (2.0 * shape.block + shape.ends)


def update_bytes(
    shape: Shape,
    tokens: int,
    width: int,
    *,
    checkpointing: bool,
    ranks: int,
    adapters: int = 0,
    logits=CPU_LOGITS,
) -> float:
    """Return gradients and activations at their highest beside the gathered weights: not all exist
    at once.

    A layer's gradient is reduced in float32 while the layer before it is passed backward; those of
    the ends stay whole until everything else is reduced. ``adapters`` are the trained parameters of
    LoRA, 0 where all are trained.
    """
    block, backward = block_bytes(shape, width), 2 * (shape.mlp + shape.hidden) * width
    activations = float(tokens) * shape.layers * (shape.hidden * width if checkpointing else block)
    gradients = 4.0 * (adapters or shape.parameters - shape.ends) / ranks  # of the layers
    reduced = 4.0 * (adapters / shape.layers if adapters else shape.block)
    head = 0.0 if adapters else float(width) * shape.vocab * shape.hidden
    ends = 0.0 if adapters else (width + 4.0) * shape.ends
    cast = head if width < 4 else 0.0  # the head sums its gradient in float32 first
    return max(
        activations + head_bytes(shape, tokens, width, not adapters, logits) + cast,  # in the head
        # In the last layer
        head + reduced + activations + tokens * (backward + (block if checkpointing else 0)),
        head + reduced + gradients + tokens * (backward + block),  # in the first layer
        gradients + ends - gathered_bytes(shape, width),  # at the end
    )


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


@dataclass(frozen=True)
class Part:
    """Bytes that a role takes of a GPU in some phases. State is kept from step to step, else in
    host memory."""

    role: str
    what: str
    bytes: float
    phases: tuple[str, ...] = PHASES
    state: bool = False


class Plan:
    """What a resolved configuration needs on one kind of GPU. Raises InputError for a model or GPU
    not known."""

    def __init__(self, config: Config, gpu: str | None = None):
        gpu = gpu or hardware_of(config)
        self.on_cpu = gpu == HERE
        if not self.on_cpu and gpu not in GPUS:
            raise InputError(f"--gpu={gpu}: not in {SOURCE.name}, which holds {', '.join(GPUS)}")
        roles, trainer = config.actor_rollout_ref, config.trainer
        self.config, self.gpu = config, gpu
        self.shape = shape_of(roles.model.path, roles.model.override_config)
        self.sharded = trainer.backend == "ray"
        self.gpus = trainer.nnodes * trainer.n_gpus_per_node if self.sharded else 1
        if self.on_cpu:
            self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.gpus
        else:
            self.memory = GPUS[gpu]
        size = roles.actor.fsdp_config.fsdp_size
        # Learner ranks that share one copy of the state
        self.ranks = size if 0 < size < self.gpus else self.gpus
        # Tokens of a sequence
        self.longest = config.data.max_prompt_length + config.data.max_response_length
        self.adapters = self.shape.adapters(roles.model.lora_rank)
        self.critic_adapters = self.shape.adapters(config.critic.model.lora_rank)
        if self.critic_adapters:
            self.critic_adapters += self.shape.hidden + 1  # the new head trains whole
        states = list(self._states())
        # The sequences of full length that an engine's cache holds
        engine, self.kv_sequences = self._engine(states)
        self.parts = [*states, *self._passes(), *engine]
        self.host_bytes = sum(part.bytes for part in states if part.phases != PHASES)  # a rank
        self.phase_bytes = {
            one: sum(part.bytes for part in self.parts if one in part.phases) for one in PHASES
        }
        self.over = [
            phase for phase, taken in self.phase_bytes.items() if taken > USABLE * self.memory
        ]
        self.fits = not self.over and self.kv_sequences > 0
        self.checkpoint_bytes = 12.0 * (self.adapters or self.shape.parameters)
        if config.critic.enable:
            trained = self.critic_adapters or self.shape.critic_parameters
            self.checkpoint_bytes += 12.0 * trained
        self.checkpoints = most_checkpoints(trainer)

    def _states(self) -> Iterator[Part]:
        """Yield weights and optimizers of policy, reference and critic, and when they are on the
        GPU."""
        roles, critic, whole = (
            self.config.actor_rollout_ref,
            self.config.critic,
            self.shape.parameters,
        )
        models = [("policy", roles.actor.fsdp_config, (UPDATE,), whole, self.adapters or whole)]
        if (
            roles.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward
        ) and not self.adapters:
            models.append(("reference", roles.ref.fsdp_config, (), whole, 0))
        for role, frozen in self.config.frozen_models.items():
            shape = shape_of(frozen.model.path, frozen.model.override_config)
            models.append((role, roles.ref.fsdp_config, (), shape.parameters, 0))
        if critic.enable:
            fsdp, size = critic.model.fsdp_config, self.shape.critic_parameters
            trained = self.critic_adapters or size
            models.append(("critic", fsdp, (CRITIC_UPDATE,), size, trained))
        leaves = self.sharded and not self.on_cpu  # a CPU's state has no other memory to go to
        for role, fsdp, updates, number, trained in models:
            offloaded = (
                ()
                if fsdp.offload_policy
                else (LOG_PROBS, *updates)
                if fsdp.param_offload
                else PHASES
            )
            phases = offloaded if leaves else PHASES
            yield Part(role, "weights in float32", 4.0 * number / self.ranks, phases, state=True)
            if trained:
                offloaded = (
                    () if fsdp.offload_policy else updates if fsdp.optimizer_offload else PHASES
                )
                phases = offloaded if leaves else PHASES
                yield Part(role, "optimizer", 8.0 * trained / self.ranks, phases, state=True)

    def _passes(self) -> Iterator[Part]:
        """Yield what log-probs and updates need for a while, the policy's and the critic's."""
        config, roles = self.config, self.config.actor_rollout_ref
        logits = head_logits(None if self.on_cpu else self.memory)
        learners = [
            (
                "policy",
                UPDATE,
                roles.actor,
                roles.model,
                roles.actor.fsdp_config,
                self.shape,
                self.adapters,
            )
        ]
        if config.critic.enable:
            # A value head has one output
            part, headed = config.critic, replace(self.shape, vocab=1)
            learners.append(
                (
                    "critic",
                    CRITIC_UPDATE,
                    part,
                    part.model,
                    part.model.fsdp_config,
                    headed,
                    self.critic_adapters,
                )
            )
        for role, phase, part, model, fsdp, shape, adapters in learners:
            size = width(fsdp.dtype)
            gathered = gathered_bytes(self.shape, size) if self.sharded or size == 2 else 0.0
            # Else no pass takes log-probs
            if role == "policy" and self.sharded and config.generates:
                tokens = pass_tokens(config, roles.actor)
                # An MLP; else the head is highest
                inside = float(tokens) * (3 * shape.mlp + 4 * shape.hidden) * size
                highest = gathered + max(inside, head_bytes(shape, tokens, size, False, logits))
                yield Part(
                    role,
                    f"activations of {tokens} tokens, a layer's weights",
                    highest,
                    (LOG_PROBS,),
                )
            tokens, checkpointing = pass_tokens(config, part), model.enable_gradient_checkpointing
            options = {
                "checkpointing": checkpointing,
                "ranks": self.ranks,
                "adapters": adapters,
                "logits": logits,
            }
            what = f"gradients, activations of {tokens} tokens, a layer's weights"
            yield Part(
                role, what, gathered + update_bytes(shape, tokens, size, **options), (phase,)
            )

    def _engine(self, states: Sequence[Part]) -> tuple[list[Part], int]:
        """List the engine's parts, and count the sequences of full length that its cache holds."""
        if not self.config.needs_engine:
            return [], 1
        rollout = self.config.actor_rollout_ref.rollout
        reserves = "gpu_memory_utilization" in registry.ENGINES[rollout.name].reads  # as vLLM does
        gpus, size = rollout.tensor_model_parallel_size if reserves else 1, width(rollout.dtype)
        weights = 0.0 if self.config.one_copy else size * self.shape.parameters / gpus
        phases = (GENERATE,) if reserves and rollout.free_cache_engine else PHASES
        parts = [Part("engine", "weights", weights, phases)]
        room = (
            USABLE * self.memory
            - weights
            - sum(part.bytes for part in states if part.phases == PHASES)
        )
        if reserves:
            room = rollout.gpu_memory_utilization * self.memory - weights
            parts.append(
                Part(
                    "engine",
                    "KV cache (the rest of gpu_memory_utilization)",
                    max(0.0, room),
                    phases,
                )
            )
        return parts, max(0, int(room // (self.shape.kv_bytes(size) / gpus * self.longest)))


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as text, what matters most first."""

    def row(role: str, when: str, size: float, what: str) -> str:
        return f"  {role:<10}{when:<19}{size / 2**30:>7.1f} GiB  {what}"

    peak, memory = max(plan.phase_bytes.values()) / 2**30, plan.memory / 2**30
    if plan.on_cpu:
        device = "rank"
        where = f"{HERE} (cores: {os.cpu_count()}, no GPU, ranks: {plan.gpus})"
    else:
        device = "GPU"
        where = f"{plan.gpus} x {plan.gpu}"
    verdict = "fits on" if plan.fits else "DOES NOT FIT on"
    yield f"The run {verdict} {where}: {peak:.1f} of a {device}'s {memory:.1f} GiB are needed."
    for phase in plan.over:
        yield (
            f"  - {phase}: lower {MEMORY_KEYS[MEMORY_KEY[phase]]}, offload state, or share it "
            f"among more GPUs"
        )
    if plan.kv_sequences == 0:
        keys = "actor_rollout_ref.rollout.tensor_model_parallel_size or gpu_memory_utilization"
        yield f"  - the engine's cache holds no sequence of full length: raise {keys}"
    for part in [part for part in plan.parts if part.phases]:
        yield row(
            part.role,
            "always" if part.phases == PHASES else ", ".join(part.phases),
            part.bytes,
            part.what,
        )
    yield row("host", "a rank", plan.host_bytes, "offloaded state")
    count, frequency = plan.checkpoints, plan.config.trainer.save_freq
    if count is None:
        kept = f"a checkpoint; all that trainer.save_freq={frequency} writes are kept"
    else:
        kept = f"checkpoints: {count} at most, of {plan.checkpoint_bytes / 2**30:.1f} GiB"
    yield row("disk", "", plan.checkpoint_bytes * (1 if count is None else count), kept)
    if plan.config.needs_engine:
        yield (
            f"KV cache per engine: {plan.kv_sequences:,} sequences of full length, "
            f"{plan.longest:,} tokens each."
        )


def plan_lines(config: Config, gpu: str | None = None) -> list[str]:
    """Return what a dry run prints of the plan: its lines, or one that gives the reason why there
    is none."""
    model = config.actor_rollout_ref.model.path
    absent = is_local(model) and not (Path(model).expanduser() / "config.json").exists()
    if config.trainer.val_only or absent:  # an earlier command may make the model
        return []
    try:
        return list(lines(Plan(config, gpu)))
    except InputError as error:
        return [f"none: {error}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Return 1 where it does not fit, 2 where the configuration is at fault."""
    parser = argparse.ArgumentParser(
        "python -m core.plan", description="Estimate memory and disk of a run."
    )
    parser.add_argument("recipe", help="The recipe whose configuration is planned, as in grpo.")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run's."
    )
    default = f"Left out: {DEFAULT_GPU}, or {HERE} if the run would compute on its CPU."
    parser.add_argument("--gpu", help=f"The kind of GPU: one of {', '.join(GPUS)}. {default}")
    args = parser.parse_intermixed_args(arguments)
    try:
        plan = Plan(
            compose(args.recipe, [each for each in args.overrides if each != "--"]), args.gpu
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(plan)))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
