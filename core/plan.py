"""Memory and disk of a configuration, before anything is downloaded or started; a dry run prints the same.

    python -m core.plan dapo preset=paper actor_rollout_ref.model.path=Qwen/Qwen2.5-32B trainer.nnodes=16 --gpu H100

An estimate without torch: 12 bytes a trained parameter (float32 weights, two moments of Adam) over the learner ranks,
what a pass holds at its highest, and the engine. A reward model is not planned.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import yaml

from core.config import compose, registry
from core.config.paths import is_local
from core.config.schema import Config
from core.config.section import FULL_PRECISION, Problem
from core.errors import MEMORY_KEYS, InputError
from core.learner.step_settings import CPU_LOGITS, head_logits

SOURCE = Path(__file__).with_name("model_shapes.yaml")
TABLE = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
GPUS = {name: memory * 2**30 for name, memory in TABLE["gpus"].items()}  # usable bytes
USABLE = 0.95  # of a GPU's memory; the rest is the allocator's and the libraries'
GENERATE, LOG_PROBS, UPDATE, CRITIC_UPDATE = PHASES = ("generate", "log-probs", "update", "critic update")
MEMORY_KEY = dict(zip(PHASES, ("gen", "old_log_prob", "update_actor", "update_critic"), strict=True))
DEFAULT_GPU, TENSOR = "H100", "tensor_model_parallel_size"
SMALL = 1e8  # parameters; a dry run plans no model with fewer


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, a gated MLP and RMS norms (the Llama and Qwen2 families)."""

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
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

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
        """Count the parameters of the same body with one number a token instead of the vocabulary (and a bias)."""
        return self.layers * self.block + self.vocab * self.hidden + 2 * self.hidden + 1

    def adapters(self, rank: int) -> int:
        """Count the parameters of LoRA on every linear layer: two factors each."""
        attention = 2 * (self.hidden + self.q_size) + 2 * (self.hidden + self.kv_size)
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of key and value cache a token at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_size * width


MODELS = {name + suffix: Shape(**s) for name, s in TABLE["models"].items() for suffix in TABLE["suffixes"]}
SIZES = {
    **{"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
    **{"kv_heads": "num_key_value_heads", "mlp": "intermediate_size", "vocab": "vocab_size", "head_dim": "head_dim"},
}


def read_config(path: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a model's folder; None where there is none, as for a hub id. Raises InputError."""
    try:
        file = Path(path).expanduser() / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}/config.json: cannot be read ({error}); it must hold a model's settings") from error
    if config is not None and not isinstance(config, dict):
        raise InputError(f"{file}: holds no mapping; it must hold a model's settings")
    return config


def shape_of(path: str, override: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of a hub id in the table, or of a folder's ``config.json``. Raises InputError for others."""
    if (found := read_config(path)) is None:
        if path in MODELS:
            return MODELS[path]
        near = difflib.get_close_matches(path, MODELS, n=1)
        hint = f"nearest in {SOURCE.name}: {near[0]}" if near else f"{SOURCE.name} holds those that are known"
        raise InputError(f"the shape of {path} is not known offline; {hint}")
    if "vision_config" in found:
        raise InputError(f"{path}/config.json: the size of its vision tower is not known")
    config = {"head_dim": 0, "num_key_value_heads": found.get("num_attention_heads"), **found, **(override or {})}
    sizes = {field: config.get(name) or 0 for field, name in SIZES.items()}
    wrong = [SIZES[field] for field, size in sizes.items() if type(size) is not int or size < (field != "head_dim")]
    if wrong:
        raise InputError(f"{path}/config.json: {', '.join(wrong)} must be whole numbers above 0")
    bias = config.get("attention_bias", config.get("model_type", "").startswith("qwen2"))
    return Shape(**sizes, tied=config.get("tie_word_embeddings", True), bias=bias)


def model_problems(config: Config) -> list[str]:
    """Return a line for each problem between the configuration and the architecture of its models."""
    from core.vision import pictures

    roles, critic = config.actor_rollout_ref, config.critic
    problems = list(pictures.problems(config, reads_pictures(roles.model.path)))
    models = [("actor_rollout_ref.model.path", roles.model)] + [("critic.model.path", critic.model)] * critic.enable
    for key, model in models:
        with suppress(InputError):  # a model that is unknown or damaged: loading it reports that
            problems += _architecture(config, key, model)
    return [str(problem) for problem in problems]


def reads_pictures(path: str) -> bool | None:
    """Return whether the model reads pictures; None where nothing is known of it."""
    with suppress(InputError):
        if (config := read_config(path)) is not None:
            return config.get("model_type") in registry.PICTURE_MODELS
    return MODELS[path].tower > 0 if path in MODELS else None


def _architecture(config: Config, key: str, model: Any) -> Iterator[Problem]:
    """Yield why a model cannot be trained, or which numbers of ranks its heads cannot be split among."""
    found = read_config(model.path) or {}
    other = [name for name in found.get("architectures") or () if name.endswith("ForConditionalGeneration")]
    if (other or "vision_config" in found) and not reads_pictures(model.path):
        fix = f"give a model of text alone, or of {', '.join(registry.PICTURE_MODELS)}"
        yield Problem(key, model.path, "a vision-language or encoder-decoder model, which is not supported", fix)
        return
    shape, roles = shape_of(model.path, model.override_config), config.actor_rollout_ref
    parts = {"critic": config.critic}
    if key != "critic.model.path":
        parts = {"actor_rollout_ref.actor": roles.actor, "actor_rollout_ref.ref": roles.ref}
        ranks = roles.rollout.tensor_model_parallel_size
        # an engine may repeat heads of keys
        common = shape.heads if ranks % shape.kv_heads == 0 else gcd(shape.heads, shape.kv_heads)
        if config.needs_engine and TENSOR in registry.ENGINES[roles.rollout.name].reads and common % ranks:
            yield _unfit(f"actor_rollout_ref.rollout.{TENSOR}", ranks, common, shape, model.path)
    for name, part in parts.items() if config.trainer.backend == "ray" else ():
        layers, ranks = part.tensor_model_parallel_size, part.ulysses_sequence_parallel_size
        if (common := gcd(shape.heads, shape.kv_heads, shape.mlp)) % layers:
            yield _unfit(f"{name}.{TENSOR}", layers, common, shape, model.path)
        if (common := shape.heads // gcd(shape.heads, layers)) % ranks:
            yield _unfit(f"{name}.ulysses_sequence_parallel_size", ranks, common, shape, model.path)


def _unfit(key: str, ranks: int, common: int, shape: Shape, path: str) -> Problem:
    what = f"must divide the {shape.heads} attention heads, {shape.kv_heads} key-value heads and MLP size {shape.mlp}"
    fitting = ", ".join(str(one) for one in range(1, common + 1) if common % one == 0)
    return Problem(key, ranks, f"{what} of {path}, shared with other splits", f"use one of {fitting}")


def width(dtype: str) -> int:
    """Return the bytes of a number in a configuration's ``dtype``."""
    return 4 if dtype in FULL_PRECISION else 2


def pass_tokens(config: Config, part: Any, prefix: str = "ppo_") -> int:
    """Return the tokens in one pass of a rank: a budget, or sequences that some ranks share.

    ``part`` is the actor or the critic, for an update; for log-probs it is the rollout section, with its prefix.
    """
    updates = prefix == "ppo_"
    ranks = (part if updates else config.actor_rollout_ref.actor).ulysses_sequence_parallel_size
    share = -(-(config.data.max_prompt_length + config.data.max_response_length) // ranks)
    if part.use_dynamic_bsz if updates else part.log_prob_use_dynamic_bsz:
        return max(share, getattr(part, f"{prefix}max_token_len_per_gpu"))
    return share * (getattr(part, f"{prefix}micro_batch_size_per_gpu") or 1)


def log_prob_tokens(config: Config) -> int:
    """Return the tokens in one log-prob pass of the policy on one rank."""
    return pass_tokens(config, config.actor_rollout_ref.rollout, "log_prob_")


def block_bytes(shape: Shape, width: int) -> int:
    """Return what autograd keeps of one layer, a token."""
    attention = (3 * shape.q_size + 2 * shape.kv_size) * width
    return 2 * shape.hidden * (4 + 2 * width) + attention + 4 * shape.mlp * width


def head_bytes(shape: Shape, tokens: int, width: int, trains: bool = True, logits: int = CPU_LOGITS) -> float:
    """Return the chunked head's bytes: logits (about three tensors of a chunk in float32), its weight's gradient in
    float32, hidden states and their gradient."""
    weight = 4.0 * shape.vocab * shape.hidden if trains else 0.0
    return 3 * 4 * min(logits, tokens * shape.vocab) + weight + 2.0 * tokens * shape.hidden * width


def gathered_bytes(shape: Shape, width: int) -> float:
    """Return the weights that a rank of a sharded model has whole: one layer and the next, and the ends."""
    return width * (2.0 * shape.block + shape.ends)


def log_prob_bytes(shape: Shape, tokens: int, width: int, adapters: int = 0, logits: int = CPU_LOGITS) -> float:
    """Return what a pass without gradients holds beside the weights: in an MLP, or in the head."""
    mlp = 3 + bool(adapters)  # numbers of the MLP's width a token; adapters' part is added to the layer's own
    inside = float(tokens) * (mlp * shape.mlp + 4 * shape.hidden) * width
    return max(inside, head_bytes(shape, tokens, width, False, logits))


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
    """Return gradients and activations at their highest beside the gathered weights, which do not all exist at once.

    In the head no layer has a gradient yet; in the first layer, the last to be passed backward, the activations of the
    others are gone. A layer's gradient is reduced in float32 while the layer before it is passed backward; those of the
    ends, one unit of FSDP2, stay whole until everything else is reduced.
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
        head + reduced + activations + tokens * (backward + (block if checkpointing else 0)),  # in the last layer
        head + reduced + gradients + tokens * (backward + block),  # in the first layer
        gradients + ends - gathered_bytes(shape, width),  # at the end
    )


@dataclass(frozen=True)
class Part:
    """Bytes that a role takes of a GPU in some phases. State is kept from step to step, else in host memory."""

    role: str
    what: str
    bytes: float
    phases: tuple[str, ...] = PHASES
    state: bool = False


class Plan:
    """What a resolved configuration needs on one kind of GPU. Raises InputError for a model or GPU not known."""

    def __init__(self, config: Config, gpu: str = DEFAULT_GPU):
        if gpu not in GPUS:
            raise InputError(f"--gpu={gpu}: not in {SOURCE.name}, which holds {', '.join(GPUS)}")
        roles, trainer = config.actor_rollout_ref, config.trainer
        self.config, self.gpu, self.memory = config, gpu, GPUS[gpu]
        self.shape = shape_of(roles.model.path, roles.model.override_config)
        self.sharded = trainer.backend == "ray"
        self.gpus = trainer.nnodes * trainer.n_gpus_per_node if self.sharded else 1
        size = roles.actor.fsdp_config.fsdp_size
        self.ranks = size if 0 < size < self.gpus else self.gpus  # learner ranks that share one copy of the state
        self.longest = config.data.max_prompt_length + config.data.max_response_length  # tokens of a sequence
        states = list(self._states())
        engine, self.kv_sequences = self._engine(states)  # the sequences of full length that an engine's cache holds
        self.parts = [*states, *self._passes(), *engine]
        self.host_bytes = sum(part.bytes for part in states if part.phases != PHASES)  # a rank
        self.phase_bytes = {one: sum(part.bytes for part in self.parts if one in part.phases) for one in PHASES}
        self.over = [phase for phase, taken in self.phase_bytes.items() if taken > USABLE * self.memory]
        self.fits = not self.over and self.kv_sequences > 0
        trained = self.shape.adapters(roles.model.lora_rank) or self.shape.parameters
        self.checkpoint_bytes = 12.0 * (trained + (self.shape.critic_parameters if config.critic.enable else 0))

    def _states(self) -> Iterator[Part]:
        """Yield weights and optimizers of policy, reference and critic, and when they are on the GPU."""
        roles, critic = self.config.actor_rollout_ref, self.config.critic
        lora, whole = roles.model.lora_rank, self.shape.parameters
        trained = self.shape.adapters(lora) if lora else whole
        models = [("policy", roles.actor.fsdp_config, (UPDATE,), whole, trained)]
        if (roles.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward) and not lora:
            models.append(("reference", roles.ref.fsdp_config, (), whole, 0))
        if critic.enable:
            sizes = [self.shape.critic_parameters] * 2
            models.append(("critic", critic.model.fsdp_config, (CRITIC_UPDATE,), *sizes))
        for role, fsdp, updates, number, trained in models:
            phases = (LOG_PROBS, *updates) if self.sharded and fsdp.param_offload else PHASES
            away = self.sharded and fsdp.offload_policy
            yield Part(role, "weights in float32", 4.0 * number / self.ranks, () if away else phases, state=True)
            if trained:
                phases = updates if self.sharded and fsdp.optimizer_offload else PHASES
                yield Part(role, "optimizer", 8.0 * trained / self.ranks, () if away else phases, state=True)

    def _passes(self) -> Iterator[Part]:
        """Yield what log-probs and updates need for a while, the policy's and the critic's."""
        config, roles, logits = self.config, self.config.actor_rollout_ref, head_logits(self.memory)
        learners = [("policy", UPDATE, roles.actor, roles.model, roles.actor.fsdp_config, self.shape)]
        if config.critic.enable:
            part, headed = config.critic, replace(self.shape, vocab=1)  # a value head has one output
            learners.append(("critic", CRITIC_UPDATE, part, part.model, part.model.fsdp_config, headed))
        for role, phase, part, model, fsdp, shape in learners:
            size = width(fsdp.dtype)
            gathered = gathered_bytes(self.shape, size) if self.sharded or size == 2 else 0.0
            adapters = shape.adapters(model.lora_rank) if role == "policy" else 0
            if role == "policy" and self.sharded and config.generates:  # else no pass takes log-probs
                tokens = log_prob_tokens(config)
                highest = log_prob_bytes(shape, tokens, size, adapters, logits)
                yield Part(role, "weights of the layers at work", gathered, (LOG_PROBS,))
                yield Part(role, f"activations of {tokens} tokens", highest, (LOG_PROBS,))
            tokens, checkpointing = pass_tokens(config, part), model.enable_gradient_checkpointing
            options = {"checkpointing": checkpointing, "ranks": self.ranks, "adapters": adapters, "logits": logits}
            yield Part(role, "weights of the layers at work", gathered, (phase,))
            what = f"gradients, activations of {tokens} tokens"
            yield Part(role, what, update_bytes(shape, tokens, size, **options), (phase,))

    def _engine(self, states: Sequence[Part]) -> tuple[list[Part], int]:
        """List the engine's parts, and count the sequences of full length that its cache holds."""
        if not self.config.needs_engine:
            return [], 1
        rollout = self.config.actor_rollout_ref.rollout
        reserves = "gpu_memory_utilization" in registry.ENGINES[rollout.name].reads  # as vLLM does
        gpus, size = rollout.tensor_model_parallel_size if reserves else 1, width(rollout.dtype)
        weights = size * self.shape.parameters / gpus
        phases = (GENERATE,) if reserves and rollout.free_cache_engine else PHASES
        parts = [Part("engine", "weights", weights, phases)]
        room = USABLE * self.memory - weights - sum(part.bytes for part in states if part.phases == PHASES)
        if reserves:
            room = rollout.gpu_memory_utilization * self.memory - weights
            parts.append(Part("engine", "KV cache (the rest of gpu_memory_utilization)", max(0.0, room), phases))
        return parts, max(0, int(room // (self.shape.kv_bytes(size) / gpus * self.longest)))


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as text, what matters most first."""
    peak, verdict = max(plan.phase_bytes.values()), "fits on" if plan.fits else "DOES NOT FIT on"
    yield f"The run {verdict} {plan.gpus} x {plan.gpu}: it needs {_gib(peak)} of a GPU's {_gib(plan.memory)}."
    for phase in plan.over:
        yield f"  - {phase}: lower {MEMORY_KEYS[MEMORY_KEY[phase]]}, offload state, or share it among more GPUs"
    if plan.kv_sequences == 0:
        keys = "actor_rollout_ref.rollout.tensor_model_parallel_size or gpu_memory_utilization"
        yield f"  - the engine's cache holds no sequence of full length: raise {keys}"
    for part in [part for part in plan.parts if part.phases]:
        phases = "always" if part.phases == PHASES else ", ".join(part.phases)
        yield f"  {part.role:<10}{phases:<19}{_gib(part.bytes):>11}  {part.what}"
    yield f"  {'host':<10}{'a rank':<19}{_gib(plan.host_bytes):>11}  offloaded state"
    yield f"  {'disk':<10}{'':<19}{_gib(plan.checkpoint_bytes):>11}  a checkpoint"
    if plan.config.needs_engine:
        yield f"KV cache per engine: {plan.kv_sequences:,} sequences of full length, {plan.longest:,} tokens each."


def plan_lines(config: Config) -> list[str]:
    """Return what a dry run prints of the plan: its lines, or one that gives the reason why there is none."""
    model = config.actor_rollout_ref.model.path
    absent = is_local(model) and not (Path(model).expanduser() / "config.json").exists()
    if config.trainer.val_only or config.trainer.device == "cpu" or absent:  # an earlier command may make the model
        return []
    try:
        plan = Plan(config)
    except InputError as error:
        return [f"none: {error}"]
    return list(lines(plan)) if plan.shape.parameters >= SMALL else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Return 1 where it does not fit, 2 where the configuration is at fault."""
    parser = argparse.ArgumentParser("python -m core.plan", description="Estimate memory and disk of a run.")
    parser.add_argument("recipe", help="The recipe whose configuration is planned, as in grpo.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run's.")
    parser.add_argument("--gpu", default=DEFAULT_GPU, help=f"The kind of GPU: one of {', '.join(GPUS)}.")
    args = parser.parse_intermixed_args(arguments)
    try:
        overrides = [each for each in args.overrides if each != "--"]
        config = compose(args.recipe, overrides)
        if problems := model_problems(config):
            raise InputError(problems)
        plan = Plan(config, args.gpu)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(plan)))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
