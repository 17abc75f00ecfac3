"""What a run will need, before anything is downloaded or started: memory a GPU, time, disk, and what to turn.

    python -m core.plan dapo preset=paper actor_rollout_ref.model.path=Qwen/Qwen2.5-32B trainer.nnodes=16 --gpu H100
    DRY_RUN=1 bash recipes/dapo/run_qwen2.5_32b.sh                         prints the same below the configuration

An estimate from shapes (``model_shapes``) and the configuration; torch is not imported. Formulas, with P
parameters, R learner ranks that share them, c bytes a number in the passes (2 in bf16, 4 in fp32), T tokens a pass:

    learner, resident   12 P / R          float32 weights and two Adam moments; on the CPU between phases, or always,
                                          where offloaded
                        (4 P + 8 A) / R   with LoRA of A parameters, on every linear layer
    reference           4 P / R           float32 weights; none with LoRA, whose base it is
    gathered weights    c (2 block + ends)    one layer and the next, and the ends; in one process only bf16 copies:
                                          2 P, or of one layer with checkpointing
    update              gradients and activations at their highest moment (update_bytes, sharded_update_bytes)
    log-probs           activations of one layer, or the head's chunks, whichever is more (log_prob_bytes)
    engine              c P / tp + KV cache; a token's cache is 2 L kv c / tp

Where t learner ranks share each layer (``tensor_model_parallel_size``), a rank has a narrower model: heads and MLP are
divided by t, the stream between layers is not, the ends are only between passes, and R / t ranks share what it has.

An episode (``data.max_start_length``) is several turns of generated tokens with observed ones between them, which are
prefilled once and are in every pass of the learner. A phase's memory is what is there always and what it adds; policy
and critic update one after the other. ``python -m tests.scale.world`` counts what the learner allocates on fake ranks
beside these figures. Times are estimated in ``step_seconds``. This is the only place that they come from: dry runs,
a run's first lines and the tables of ``results`` print its figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.config import compose, recipes, registry, schema
from core.config.sections.actor import Sharing
from core.errors import InputError
from core.learner.logit_memory import CPU_LOGITS, head_logits
from core.planning.model_rules import model_problems
from core.planning.model_shapes import TABLE, Gpu, Shape, gpu, shape_of, width
from core.planning.published import lengths_of, questions_of, step_errors
from core.planning.step_seconds import (
    Assumptions,
    Load,
    copy_seconds,
    step_seconds,
    validation_seconds,
    writing_seconds,
)
from core.tracking.memory_settings import log_prob_tokens, pass_tokens, remedies, update_remedies

USABLE = 0.95  # of a GPU's memory; the rest is the allocator's and the libraries'
MEASURED = Path(__file__).parents[3] / "results/benchmarks/plan_memory.json"  # of tests.benchmarks.plan_memory
PHASES = ("generate", "log-probs", "update", "critic update")
ALWAYS = ("always",)
UPDATES = {"policy": ("update",), "critic": ("critic update",)}  # of a role that trains
DEFAULT_GPU = "H100"
PROMPT_LENGTH = 256  # tokens, where no table has them


def block_bytes(shape: Shape, width: int, residual: int) -> int:
    """Return what autograd keeps of one layer, a token; ``residual`` bytes a number in the stream between layers."""
    attention = (3 * shape.q_size + 2 * shape.kv_size) * width
    return 2 * shape.hidden * (4 + residual + width) + attention + 4 * shape.mlp * width


def head_bytes(shape: Shape, tokens: int, width: int, trains: bool = True, logits: int = CPU_LOGITS) -> float:
    """Return the chunked head's bytes: logits (about three tensors of a chunk in float32), its weight's gradient in
    float32, hidden states and their gradient."""
    chunk = 3 * 4 * min(logits, tokens * shape.vocab)
    weight = 4.0 * shape.vocab * shape.hidden if trains else 0.0
    return chunk + weight + 2.0 * tokens * shape.hidden * width


def update_bytes(
    shape: Shape,
    tokens: int,
    width: int,
    residual: int,
    *,
    checkpointing: bool,
    ranks: int = 1,
    adapters: int = 0,
    logits: int = CPU_LOGITS,
) -> tuple[float, str]:
    """Return gradients and activations at their highest, and when that is: they do not all exist at once.

    In the head nothing of the layers has a gradient yet; in the first layer, the last to be passed backward, the
    activations of the others are gone and only the embedding lacks its gradient. ``logits`` exist at a time
    (``core.learner.logit_memory``).
    """
    block, backward = block_bytes(shape, width, residual), 2 * (shape.mlp + shape.hidden) * width
    activations = float(tokens) * shape.layers * (shape.hidden * residual if checkpointing else block)
    table = 0.0 if adapters else 4.0 * shape.vocab * shape.hidden / ranks
    gradients = 4.0 * (adapters or shape.parameters) / ranks
    moments = {
        "in the head": activations + head_bytes(shape, tokens, width, not adapters, logits),
        "in the last layer": table + activations + tokens * (backward + (block if checkpointing else 0)),
        "in the first layer": gradients - (0.0 if shape.tied else table) + tokens * (backward + block),
    }
    moment = max(moments, key=moments.__getitem__)
    return max(moments[moment], gradients), moment


def sharded_update_bytes(
    shape: Shape,
    tokens: int,
    width: int,
    *,
    checkpointing: bool,
    ranks: int,
    adapters: int = 0,
    logits: int = CPU_LOGITS,
) -> tuple[float, str]:
    """Return what :func:`update_bytes` does for a model that ranks share, beside the gathered weights.

    A layer's gradient is reduced in float32 while the layer before it is passed backward. Those of the ends stay whole,
    in the passes' precision, until everything else is reduced: embedding and head are one unit of FSDP2. By then no
    weight is gathered any more.
    """
    block, backward = block_bytes(shape, width, width), 2 * (shape.mlp + shape.hidden) * width
    activations = float(tokens) * shape.layers * (shape.hidden * width if checkpointing else block)
    gradients = 4.0 * (adapters or shape.parameters - shape.ends) / ranks  # of the layers
    reduced = 4.0 * (adapters / shape.layers if adapters else shape.block)
    whole = 0.0 if adapters else float(width) * shape.vocab * shape.hidden
    head = whole / shape.sharers
    ends = 0.0 if adapters else (width + 4.0) * shape.ends
    cast = whole if width < 4 else 0.0  # the head sums its gradient in float32 first
    moments = {
        "in the head": activations + head_bytes(shape, tokens, width, not adapters, logits) + cast,
        "in the last layer": head + reduced + activations + tokens * (backward + (block if checkpointing else 0)),
        "in the first layer": head + reduced + gradients + tokens * (backward + block),
        "at the end": gradients + ends - gathered_bytes(shape, width),
    }
    moment = max(moments, key=moments.__getitem__)
    return moments[moment], moment


def gathered_bytes(shape: Shape, width: int) -> float:
    """Return the weights that a rank of a sharded model has whole: one layer and the next, and the ends.

    Ranks that share the ends have their part of them, and the head whole where it is at work.
    """
    head = shape.vocab * shape.hidden if shape.sharers > 1 else 0
    return width * (2.0 * shape.block + shape.ends + head)


def log_prob_bytes(shape: Shape, tokens: int, width: int, adapters: int = 0, logits: int = CPU_LOGITS) -> float:
    """Return what a pass without gradients holds beside the weights: in an MLP, or in the head."""
    mlp = 3 + bool(adapters)  # numbers of the MLP's width a token; adapters' part is added to the layer's own
    inside = float(tokens) * (mlp * shape.mlp + 4 * shape.hidden) * width
    return max(inside, head_bytes(shape, tokens, width, False, logits))


def copies_bytes(shape: Shape, checkpointing: bool) -> float:
    """Return autocast's bf16 copies of the weights: of a layer and the head, or of all that autograd keeps."""
    return 2.0 * (shape.block + shape.vocab * shape.hidden if checkpointing else shape.parameters)


@dataclass(frozen=True)
class Part:
    """Bytes that a role takes of a GPU."""

    role: str
    phase: str  # always, or one of PHASES
    what: str
    bytes: float


@dataclass(frozen=True)
class State:
    """Bytes that a role keeps from step to step, and the phases in which they are on the GPU: else in host memory."""

    role: str
    what: str
    bytes: float
    phases: tuple[str, ...]

    @property
    def parts(self) -> list[Part]:
        return [Part(self.role, phase, self.what, self.bytes) for phase in self.phases]


class Plan:
    """What a resolved configuration needs on one kind of GPU. Raises InputError for a model not known offline."""

    def __init__(self, config: schema.Config, on: Gpu, assumed: Assumptions | None = None):
        roles, trainer, data = config.actor_rollout_ref, config.trainer, config.data
        self.config, self.gpu = config, on
        self.most_turns = config.turns
        self.shape = shape_of(roles.model.path, roles.model.override_config)
        self.assumed = a = self._resolved(assumed or Assumptions())
        self.generated, self.observed = a.turns * a.mean_length, (a.turns - 1) * a.observed_length  # a trajectory
        self.sequence = a.prompt_length + self.generated + self.observed  # tokens, the prompt's included
        self.sharded = trainer.backend == "ray"
        self.gpus = 1 if trainer.backend == "local" else trainer.nnodes * trainer.n_gpus_per_node
        size = roles.actor.fsdp_config.fsdp_size
        self.ranks = size if 0 < size < self.gpus else self.gpus  # learner ranks that share one copy of the state
        self.longest = data.max_prompt_length + data.max_response_length  # tokens of a sequence
        # Whether an engine reserves a share of the memory of one GPU or several, as vLLM does.
        self.engine_reserves = "gpu_memory_utilization" in registry.ENGINES[roles.rollout.name].reads
        self.engine_gpus = roles.rollout.tensor_model_parallel_size if self.engine_reserves else 1
        self.engines = max(1, self.gpus // self.engine_gpus) if self.engine_reserves else 1  # side by side
        answers = data.train_batch_size * roles.rollout.n
        self.drawn = answers / (a.keep_rate if config.algorithm.filter_groups.enable else 1.0)  # answers
        self.generated_tokens = self.drawn * self.generated * config.generates  # of a step, as are trained_tokens
        self.trained_tokens = answers * self.sequence
        self.learners = (  # role, phase of its update, section, model, fsdp_config
            ("policy", "update", roles.actor, roles.model, roles.actor.fsdp_config),
            ("critic", "critic update", config.critic, config.critic.model, config.critic.model.fsdp_config),
        )
        self.states = list(self._states())
        engine, self.kv_sequences = self._engine()  # the sequences of full length that an engine's cache holds
        self.reward_bytes = self._reward_model() if config.reward_model.loads_model else 0.0
        beside = [] if self.sharded else [Part("reward", "always", "weights and activations", self.reward_bytes)]
        learner = [*(part for state in self.states for part in state.parts), *self._passes()]
        self.parts = [*learner, *engine, *(part for part in beside if part.bytes)]
        self.host_bytes = sum(state.bytes for state in self.states if state.phases != ALWAYS)  # a rank
        self.phase_bytes = {
            phase: sum(part.bytes for part in self.parts if part.phase in ("always", phase)) for phase in PHASES
        }
        peak = max(*self.phase_bytes.values(), self.reward_bytes)
        self.fits = peak <= USABLE * on.memory and self.kv_sequences > 0
        cached = self.kv_sequences * self.longest / self.sequence  # in_batch: sequences that an engine decodes at once
        steps, save = trainer.total_training_steps, trainer.save_freq
        saves = None if steps is None else -(-steps // save) if save > 0 else 0
        # None: all of them, of an open number
        self.checkpoints = saves if saves is None else min(saves, trainer.max_actor_ckpt_to_keep or saves)
        trained = self.shape.adapters(roles.model.lora_rank) or self.shape.parameters
        self.checkpoint_bytes = 12.0 * (trained + (self.shape.critic_parameters if config.critic.enable else 0))
        sizes = (self.gpus, self.engines, self.engine_gpus, self.most_turns, cached, self.drawn, self.checkpoint_bytes)
        self.load = Load(config, self.shape, on, a, *sizes)
        self.in_batch = self.load.in_batch(self.drawn)
        self.seconds = step_seconds(self.load)  # of a step, by phase; their sum is the step's

    def _resolved(self, assumed: Assumptions) -> Assumptions:
        """Fill in numbers where they were left to the configuration."""
        data = self.config.data
        self.known = known = None if assumed.mean_length else lengths_of(self.config)
        prompt = assumed.prompt_length or (known and known.prompt) or PROMPT_LENGTH
        return replace(
            assumed,
            train_efficiency=assumed.train_efficiency or self.gpu.efficiency,
            mean_length=assumed.mean_length or (known.answer if known else max(1, data.max_response_length // 2)),
            prompt_length=min(prompt, data.max_start_length or data.max_prompt_length),
            turns=min(assumed.turns or 1 + self.most_turns // 2, self.most_turns),
            observed_length=data.max_obs_length if assumed.observed_length is None else assumed.observed_length,
        )

    def _states(self) -> Iterator[State]:
        """Yield what a rank keeps from step to step, the policy's first."""
        roles, critic = self.config.actor_rollout_ref, self.config.critic
        rank = roles.model.lora_rank
        models = [("policy", roles.actor, roles.actor.fsdp_config)]
        if (roles.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward) and not rank:
            models.append(("reference", roles.ref, roles.ref.fsdp_config))
        if critic.enable:
            models.append(("critic", critic, critic.model.fsdp_config))
        for role, part, fsdp in models:
            (shape, ranks), sharded = self._on_rank(part), self.sharded
            number = shape.critic_parameters if role == "critic" else shape.parameters
            trained = shape.adapters(rank) if rank and role == "policy" else number
            weights, moments = 4.0 * number, 0.0 if role == "reference" else 8.0 * trained
            of = f"x {shape.parameters / 1e9:.3g}e9 / {ranks})"
            away, updates = sharded and fsdp.offload_policy, UPDATES.get(role, ())
            at_work = ("log-probs", *updates) if sharded and fsdp.param_offload else ALWAYS
            yield State(role, f"weights (4 B {of}", weights / ranks, () if away else at_work)
            if moments:
                at_work = updates if sharded and fsdp.optimizer_offload else ALWAYS
                what = f"optimizer ({'8 B of adapters' if rank and role == 'policy' else '8 B'} {of}"
                yield State(role, what, moments / ranks, () if away else at_work)

    def _on_rank(self, part: Sharing) -> tuple[Shape, int]:
        """Return the model as a rank has it, and the ranks that share its state."""
        if not self.sharded or part.layer_ranks == 1:
            return self.shape, self.ranks
        return self.shape.split(part.layer_ranks), self.ranks // part.layer_ranks

    def _passes(self) -> Iterator[Part]:
        """Yield what an update needs for a while, the policy's and the critic's."""
        config, sharded = self.config, self.sharded
        logits = head_logits(self.gpu.memory)
        if sharded and config.generates:  # else no pass takes log-probs
            shape, _ = self._on_rank(config.actor_rollout_ref.actor)
            size, tokens = width(config.actor_rollout_ref.actor.fsdp_config.dtype), log_prob_tokens(config)
            adapters = shape.adapters(config.actor_rollout_ref.model.lora_rank)
            highest = log_prob_bytes(shape, tokens, size, adapters, logits)
            yield Part("policy", "log-probs", "weights of the layers at work", gathered_bytes(shape, size))
            yield Part("policy", "log-probs", f"activations of {tokens} tokens", highest)
        for role, phase, part, model, fsdp in self.learners[: 1 + config.critic.enable]:
            (tokens, _), size = pass_tokens(config, part), width(fsdp.dtype)
            checkpointing, (shape, ranks) = model.enable_gradient_checkpointing, self._on_rank(part)
            headed, adapters = replace(shape, vocab=1), 0  # a value head has one output
            if role == "policy":
                headed, adapters = shape, shape.adapters(model.lora_rank)
            options = {"checkpointing": checkpointing, "ranks": ranks, "adapters": adapters, "logits": logits}
            if sharded:
                gathered = gathered_bytes(shape, size)
                highest, moment = sharded_update_bytes(headed, tokens, size, **options)
            else:
                gathered = copies_bytes(shape, checkpointing) if size == 2 else 0.0
                highest, moment = update_bytes(headed, tokens, size, 4, **options)
            stored = "layer inputs" if checkpointing else "all layers"
            yield Part(role, phase, "weights of the layers at work", gathered)
            what = f"gradients, activations of {tokens} tokens ({stored} kept), highest {moment}"
            yield Part(role, phase, what, highest)

    def _reward_model(self) -> float:
        """Return what a rank of the reward model takes of its GPU; 0 for a shape that is not known offline."""
        reward, model = self.config.reward_model, self.config.reward_model.model
        try:
            shape, size = shape_of(model.path), width(model.fsdp_config.dtype)
        except InputError:
            return 0.0
        ranks = model.fsdp_config.fsdp_size if model.fsdp_config.fsdp_size > 0 else reward.ranks
        tokens = reward.forward_max_token_len_per_gpu
        if not reward.use_dynamic_bsz:
            tokens = reward.micro_batch_size_per_gpu * reward.max_length
        gathered = gathered_bytes(shape, size) if reward.ranks > 1 else 0.0
        weights = size * shape.critic_parameters / (ranks if reward.ranks > 1 else 1)
        return weights + gathered + log_prob_bytes(replace(shape, vocab=1), tokens, size)

    def _engine(self) -> tuple[list[Part], int]:
        """List the engine's parts, and count the sequences of full length that its cache holds."""
        if not self.config.needs_engine:
            return [], 1
        rollout = self.config.actor_rollout_ref.rollout
        size = width(rollout.dtype)
        weights = size * self.shape.parameters / self.engine_gpus
        phase = "generate" if self.engine_reserves and rollout.free_cache_engine else "always"
        parts = [Part("engine", phase, f"weights ({size} B / {self.engine_gpus})", weights)]
        if self.engine_reserves:
            room = rollout.gpu_memory_utilization * self.gpu.memory - weights
            parts.append(Part("engine", phase, "KV cache (the rest of gpu_memory_utilization)", max(0.0, room)))
        else:
            resident = sum(state.bytes for state in self.states if state.phases == ALWAYS)
            room = USABLE * self.gpu.memory - resident - weights
        return parts, max(0, int(room // (self.shape.kv_bytes(size) / self.engine_gpus * self.longest)))


def plan_on(config: schema.Config, name: str = DEFAULT_GPU, assumed: Assumptions | None = None) -> Plan:
    """Return the plan of a configuration for a kind of GPU. Raises InputError for a model or GPU that is not known."""
    return Plan(config, gpu(name), assumed)


def advice(plan: Plan) -> list[str]:
    """List the settings to change where it does not fit; memory settings cannot change the result."""
    config, tips = plan.config, []
    if plan.kv_sequences == 0:
        remedy = "take a larger GPU, or rollout.name=vllm over several"
        if plan.engine_reserves:
            remedy = "raise tensor_model_parallel_size or gpu_memory_utilization"
        tips.append(f"the engine's cache holds no sequence of full length: {remedy}")
    over = [phase for phase, size in plan.phase_bytes.items() if size > USABLE * plan.gpu.memory]
    large = 0.4 * plan.gpu.memory
    state = sum(one.bytes for one in plan.states if one.role == "policy" and one.phases)
    if over and state > large:
        ranks = int(12.0 * plan.shape.parameters / large) + 1
        more = f"{ranks} ranks would share it" if plan.sharded else "trainer.backend=ray"
        tips.append(f"the learner's state takes {_gib(state)}: fsdp_config.offload_policy=True, or {more}")
    for role in (role for role, phase, *_ in plan.learners if phase in over):
        turn = update_remedies(config, role)
        if not turn and not tips:
            remedy = "shorten data.max_response_length, or larger GPUs"
            turn = [f"one sequence of full length is a pass already: {remedy}"]
        tips += turn
    if "log-probs" in over:
        tips += remedies(config, "old_log_prob")
    if "generate" in over and plan.engine_reserves:
        tips.append("lower rollout.gpu_memory_utilization: the learner's state stays beside the engine")
    if plan.reward_bytes > USABLE * plan.gpu.memory:
        tips += remedies(config, "reward_model")
        if plan.sharded:
            tips.append(
                "share the reward model: reward_model.enable_resource_pool=True with more nnodes, n_gpus_per_node"
            )
    if plan.checkpoints and plan.checkpoints * plan.checkpoint_bytes > 1e12:  # bytes
        tips.append("checkpoints take much disk: trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq")
    return tips


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.1f} MiB"


def checked() -> str:
    """Return what is known of the error of an update's estimate."""
    if not MEASURED.exists():
        return "An update's estimate was not compared with measured ones."
    errors = json.loads(MEASURED.read_text(encoding="utf-8"))["errors"]
    span = f"{min(errors):+.0%} to {max(errors):+.0%}"
    sentence = (
        f"The error of an update's estimate was {span} in {len(errors)} measured updates of small models on a CPU"
    )
    return f"{sentence}; none was measured on a GPU."


def _three(value: float) -> str:
    """Return three digits of a number, without an exponent: 1,800 and 5.45."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def lines(plan: Plan) -> list[str]:
    """Return the plan as text, what matters most first."""
    a, on, config = plan.assumed, plan.gpu, plan.config
    peak = max(plan.phase_bytes.values())
    verdict = "fits on" if plan.fits else "DOES NOT FIT on"
    trajectory = f"episodes of {a.turns} turns of {a.mean_length:,} tokens, {a.observed_length:,} read after each"
    if a.turns == 1:
        source = f" ({plan.known.source})" if plan.known else ""
        trajectory = f"answers of {a.mean_length:,} tokens on average{source}"
    engines = f"engines that generate side by side: {plan.engines}" if config.needs_engine else "there is no engine"
    layers = config.actor_rollout_ref.actor.layer_ranks if plan.sharded else 1
    shared = f", {layers} of them each layer" if layers > 1 else ""
    kept_groups = f", {a.keep_rate:.0%} of groups kept" if config.algorithm.filter_groups.enable else ""
    out = [
        f"The run {verdict} {plan.gpus} x {on.name}: it needs {_gib(peak)} of a GPU's {_gib(on.memory)}.",
        *(f"  - {line}" for line in advice(plan)),
        f"The model has {plan.shape.parameters / 1e9:.3g}e9 parameters. Learner ranks that share its state: "
        f"{plan.ranks}{shared}; {engines}.",
        f"Assumed: {trajectory}, prompts of {a.prompt_length}{kept_groups}; "
        f"{a.train_efficiency:.0%} of the peak FLOP/s in training, {a.decode_efficiency:.0%} of the decoding roofline.",
        *_memory(plan),
    ]
    phases = ", ".join(f"{name} {_three(seconds)} s" for name, seconds in plan.seconds.items())
    out.append(
        f"A step takes about {_three(sum(plan.seconds.values()))} s: {phases}. It generates "
        f"{_three(plan.generated_tokens)} tokens and trains on {_three(plan.trained_tokens)}."
    )
    out += _shares(plan)
    length = "The number of steps depends on the data: trainer.total_epochs decides when the run ends."
    if steps := config.trainer.total_training_steps:
        hours = steps * sum(plan.seconds.values()) / 3600
        length = f"All {steps:,} steps take {_three(hours)} hours, {_three(hours * plan.gpus)} GPU-hours."
    retention = "all of them are kept" if plan.checkpoints is None else f"the run keeps {plan.checkpoints}"
    total = "" if not plan.checkpoints else f", {_gib(plan.checkpoints * plan.checkpoint_bytes)} in all"
    return [*out, length, f"A checkpoint takes {_gib(plan.checkpoint_bytes)} of disk; {retention}{total}."]


def _shares(plan: Plan) -> Iterator[str]:
    """Yield what the time of a step rests on: the whole of what it carries a share of, and what is known of errors."""
    a, trainer = plan.assumed, plan.config.trainer
    if trainer.test_freq > 0:
        count, samples = questions_of(plan.config), plan.config.actor_rollout_ref.rollout.val_kwargs.n
        size = f"{count:,} questions x {samples:,} answer{'s' * (samples > 1)}"
        yield f"A validation takes about {_three(validation_seconds(plan.load))} s ({size})."
    if trainer.save_freq > 0:
        held, written = _three(copy_seconds(plan.load)), _three(writing_seconds(plan.load))
        memory = _gib(plan.checkpoint_bytes / trainer.nnodes)
        yield f"A checkpoint holds the run up for about {held} s and is written in {written} s beside it."
        yield f"Meanwhile its copy takes {memory} of host memory a node."
    rates = f"{a.transfer_rate / 1e9:g} GB/s of weights between processes, {a.disk_rate / 1e9:g} GB/s of disk"
    if "retrieval" in plan.seconds:
        rates += f", {a.search_rate / 1e12:g} TFLOP/s of the CPUs that search"
    yield f"Assumed: {rates}. The plan's {step_errors()}; none of them is of this repository."


def _memory(plan: Plan) -> Iterator[str]:
    """Yield what a GPU holds, part by part and phase by phase, and how many answers an engine's cache has room for."""
    yield "Memory of one GPU, with the phase in which it is taken:"
    yield from (f"  {part.role:<10}{part.phase:<14}{_gib(part.bytes):>11}  {part.what}" for part in plan.parts)
    for phase in PHASES[not plan.config.needs_engine : 3 + plan.config.critic.enable]:
        if phase == "log-probs" and (plan.config.trainer.backend == "local" or not plan.config.generates):
            continue  # never more than an update, and not estimated; or there is none
        size = plan.phase_bytes[phase]
        yield f"Memory in the phase {phase}: {_gib(size)}, {size / plan.gpu.memory:.0%} of the GPU's."
    if plan.config.reward_model.loads_model:
        more = f"{plan.config.reward_model.ranks} x {plan.gpu.name} more" if plan.sharded else "part of the GPU"
        size = _gib(plan.reward_bytes) if plan.reward_bytes else "not estimated (its shape is not known offline)"
        yield f"The reward model takes {more}; memory of each: {size}."
    yield checked()
    if plan.host_bytes:
        yield f"Offloaded state takes {_gib(plan.host_bytes)} of host memory a rank."
    if not plan.config.needs_engine:
        return
    kind = "answers" if plan.assumed.turns == 1 else "episodes"
    yield (
        f"KV cache per engine: {plan.kv_sequences:,} {kind} of maximum length; planned concurrency {plan.in_batch:,} "
        f"at the assumed mean of {plan.generated + plan.observed:,} tokens."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Return 1 where it does not fit, 2 where the configuration is at fault."""
    parser = argparse.ArgumentParser("python -m core.plan", description="Estimate memory, time and disk of a run.")
    add = parser.add_argument
    add("recipe", help="The recipe whose configuration is planned, as in grpo.")
    add("overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run takes them.")
    add("--gpu", default=DEFAULT_GPU, help=f"The kind of GPU (default %(default)s): one of {', '.join(TABLE['gpus'])}.")
    add("--mean-length", type=int, help="The mean tokens of an answer or a turn (default: as published, else half).")
    add("--turns", type=int, help="The turns of an episode (default: half of those that may search, and one).")
    add("--observed-length", type=int, help="The tokens between two turns (default: data.max_obs_length).")
    add("--prompt-length", type=int, help="The mean tokens of a prompt (default: as published, else 256).")
    add("--keep-rate", type=float, default=0.5, help="The share of groups that filtering keeps (default %(default)s).")
    args = parser.parse_intermixed_args(arguments)
    assumed = Assumptions(args.mean_length, args.prompt_length, args.turns, args.observed_length, args.keep_rate)
    try:
        overrides = [each for each in args.overrides if each != "--"]
        config = compose(args.recipe, overrides, recipes.trainer_of(args.recipe)[1])
        if problems := model_problems(config):
            raise InputError(problems)
        plan = plan_on(config, args.gpu, assumed)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(plan)))
    return 0 if plan.fits else 1
