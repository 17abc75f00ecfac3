"""What a run will need, before anything is downloaded or started: memory a GPU, time, disk, and what to turn.

    python -m core.plan dapo preset=paper actor_rollout_ref.model.path=Qwen/Qwen2.5-32B trainer.nnodes=16 --gpu H100
    DRY_RUN=1 bash recipes/dapo/run_qwen2.5_32b.sh                         prints the same below the configuration

An estimate from shapes (``core.planning.model_shapes``) and the configuration; torch is not imported. Formulas, with P
parameters, R learner ranks that share them, c bytes a number in the passes (2 in bf16, 4 in fp32), T tokens a pass:

    learner, resident   12 P / R          float32 weights and two Adam moments; on the CPU where offloaded
                        (4 P + 8 A) / R   with LoRA of A parameters, on every linear layer
    reference           4 P / R           float32 weights; none with LoRA, whose base it is
    gathered weights    c (2 block + ends) + 4 (block + ends)     one layer and the next, the ends, and their gradients;
                                          alone (R = 1) only bf16 copies: 2 P, or of one layer with checkpointing
    one layer, a token  b = 2 h (4 + r + c) + (3 q + 2 kv) c + 4 m c      what autograd keeps; r bytes a number between
                                          layers: 4 under autocast (R = 1), else c; backward 2 (m + h) c more
    update              the highest of three moments, with K = T L h r (checkpointing) or T L b:
                        head              K + 3 x 32 MiB + 4 V h + 2 T h c     chunks of logits, the head's gradient
                        last layer        K + 4 V h / R + T (2 (m + h) c + b)   b only with checkpointing
                        first layer       (4 P - 4 V h) / R + T (2 (m + h) c + b)   all gradients but the embedding's
    engine              c P / tp + KV cache; a token's cache is 2 L kv c / tp
    decoding            an iteration reads the weights and the cache of its sequences, or multiplies 2 P a token,
                        whichever takes longer; never shorter than the longest answer, alone
    training            2 P a token forward, 4 P backward, 2 P again with checkpointing, and attention

An episode (``data.max_start_length``) is several turns of generated tokens with observed ones between them, which are
prefilled once and are in every pass of the learner. A phase's memory is what is there always and what it adds; policy
and critic update one after the other. Times divide by the stated efficiencies. Not counted: communication, loading,
scoring, validation, and tools or a retriever, which answer outside these GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config.schema import (
    FULL_PRECISION,
    ActorConfig,
    Config,
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    ModelConfig,
)
from core.planning.model_shapes import Gpu, Shape, UnknownShape, gpu, shape_of

GIB = 2**30
HEAD_CHUNK = 3 * 4 * 2**23  # bytes: core.learner.log_probs holds about three chunks of 2**23 float32 numbers
USABLE = 0.95  # of a GPU's memory; the rest is the allocator's and the libraries'
MEASURED = (
    Path(__file__).parents[2] / "results/benchmarks/plan_memory.json"
)  # of python -m tests.benchmarks.plan_memory
LARGE_DISK = 1e12  # bytes of checkpoints that are worth a word
PHASES = ("generate", "update", "critic update")
HOOKS = ("shape_reward", "keep_group", "compute_advantages")  # a plan does not judge the trainer
DEFAULT_GPU = "H100"


@dataclass(frozen=True)
class Assumptions:
    """What no configuration says. Shown with every plan; each is an option of the command."""

    mean_length: int | None = None  # tokens of an answer, or of a turn; None: half of the limit
    prompt_length: int = 256  # tokens, at most the limit
    turns: int | None = None  # of an episode; None: half of those that may search, and the answer
    observed_length: int | None = None  # tokens between two turns; None: data.max_obs_length
    keep_rate: float = 0.5  # share of groups that dynamic sampling keeps
    train_efficiency: float = 0.35  # of the peak FLOP/s
    decode_efficiency: float = 0.5  # of the peak bandwidth or FLOP/s

    @property
    def generated(self) -> int:
        return self.turns * self.mean_length

    @property
    def observed(self) -> int:
        return (self.turns - 1) * self.observed_length

    @property
    def sequence(self) -> int:
        """Tokens of a trajectory, the prompt's included."""
        return self.prompt_length + self.generated + self.observed

    def resolved(self, config: Config) -> Assumptions:
        """With a number for what was left to the configuration."""
        data, most = config.data, config.turns
        return dataclasses.replace(
            self,
            mean_length=self.mean_length or max(1, data.max_response_length // 2),
            prompt_length=min(self.prompt_length, data.max_start_length or data.max_prompt_length),
            turns=min(self.turns or 1 + most // 2, most),
            observed_length=data.max_obs_length if self.observed_length is None else self.observed_length,
        )


@dataclass(frozen=True)
class Part:
    role: str
    phase: str  # always, or one of PHASES
    what: str
    bytes: float


@dataclass(frozen=True)
class Plan:
    config: Config
    gpu: Gpu
    shape: Shape
    assumed: Assumptions
    parts: tuple[Part, ...]
    host_bytes: float  # of offloaded state, a rank
    kv_sequences: int  # of full length that an engine's cache holds
    in_batch: int  # sequences an engine decodes at once
    generated_tokens: float  # a step
    trained_tokens: float
    seconds: tuple[tuple[str, float], ...]  # a step, by phase
    steps: int | None
    checkpoint_bytes: float
    checkpoints: int | None

    @property
    def gpus(self) -> int:
        return _gpus(self.config)

    def phase_bytes(self, phase: str) -> float:
        return sum(part.bytes for part in self.parts if part.phase in ("always", phase))

    @property
    def fits(self) -> bool:
        return max(map(self.phase_bytes, PHASES)) <= USABLE * self.gpu.memory and self.kv_sequences > 0

    @property
    def step_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)


# --- estimates ---


def make_plan(config: Config, on: Gpu, assumed: Assumptions | None = None) -> Plan:
    """The plan of a resolved configuration. Raises UnknownShape where the model is not known offline."""
    model = config.actor_rollout_ref.model
    assumed, shape = (assumed or Assumptions()).resolved(config), shape_of(model.path, model.override_config)
    learner = tuple(_learner(config, shape))
    engine, kv_sequences = _engine(config, shape, on, sum(p.bytes for p in learner if p.phase == "always"))
    answers = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    drawn = answers / (assumed.keep_rate if config.algorithm.filter_groups.enable else 1.0)
    trained = answers * assumed.sequence
    in_batch = _in_batch(config, kv_sequences, drawn, assumed)
    seconds = (
        ("generate", _generate_seconds(config, shape, on, assumed, drawn, in_batch)),
        *_learner_seconds(config, shape, on, assumed, trained),
    )
    steps, save = config.trainer.total_training_steps, config.trainer.save_freq
    kept = None if steps is None else -(-steps // save) if save > 0 else 0
    limit = config.trainer.max_actor_ckpt_to_keep
    return Plan(
        config,
        on,
        shape,
        assumed,
        (*learner, *engine),
        sum(size for _, _, size, fsdp in _states(config, shape) if _offloaded(config, fsdp)),
        kv_sequences,
        in_batch,
        drawn * assumed.generated,
        trained,
        seconds,
        steps,
        _checkpoint_bytes(config, shape),
        min(kept, limit) if kept is not None and limit else kept,
    )


def _width(dtype: str) -> int:
    return 4 if dtype in FULL_PRECISION else 2


def _gpus(config: Config) -> int:
    trainer = config.trainer
    return 1 if trainer.backend == "local" else trainer.nnodes * trainer.n_gpus_per_node


def _ranks(config: Config) -> int:
    """Learner ranks that share one copy of the model's state."""
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    return size if 0 < size < _gpus(config) else _gpus(config)


def _offloaded(config: Config, fsdp: FSDPConfig) -> bool:
    return config.trainer.backend == "ray" and (fsdp.param_offload or fsdp.optimizer_offload or fsdp.offload_policy)


def _state_bytes(config: Config, shape: Shape) -> float:
    """Weights and Adam's moments of the policy, a rank."""
    if rank := config.actor_rollout_ref.model.lora_rank:
        return (4.0 * shape.parameters + 8.0 * shape.adapters(rank)) / _ranks(config)
    return 12.0 * shape.parameters / _ranks(config)


def _checkpoint_bytes(config: Config, shape: Shape) -> float:
    """Float32 weights and Adam's moments of what trains."""
    rank = config.actor_rollout_ref.model.lora_rank
    policy = shape.adapters(rank) if rank else shape.parameters
    return 12.0 * (policy + (shape.critic_parameters if config.critic.enable else 0))


def block_bytes(shape: Shape, width: int, residual: int) -> int:
    """What autograd keeps of one layer, a token; ``residual`` bytes a number in the stream between layers."""
    attention = (3 * shape.q_size + 2 * shape.kv_size) * width
    return 2 * shape.hidden * (4 + residual + width) + attention + 4 * shape.mlp * width


def head_bytes(shape: Shape, tokens: int, width: int, trains: bool = True) -> float:
    """The chunked head: logits, its weight's gradient in float32, hidden states and their gradient."""
    logits = min(HEAD_CHUNK, 3 * 4 * tokens * shape.vocab)
    weight = 4.0 * shape.vocab * shape.hidden if trains else 0.0
    return logits + weight + 2.0 * tokens * shape.hidden * width


def update_bytes(
    shape: Shape, tokens: int, width: int, residual: int, *, checkpointing: bool, ranks: int = 1, adapters: int = 0
) -> tuple[float, str]:
    """Gradients and activations at their highest, and when that is: they do not all exist at once.

    In the head nothing of the layers has a gradient yet; in the first layer, the last to be passed backward, the
    activations of the others are gone and only the embedding lacks its gradient.
    """
    block, backward = block_bytes(shape, width, residual), 2 * (shape.mlp + shape.hidden) * width
    kept = float(tokens) * shape.layers * (shape.hidden * residual if checkpointing else block)
    table = 0.0 if adapters else 4.0 * shape.vocab * shape.hidden / ranks
    gradients = 4.0 * (adapters or shape.parameters) / ranks
    moments = {
        "in the head": kept + head_bytes(shape, tokens, width, trains=not adapters),
        "in the last layer": table + kept + tokens * (backward + (block if checkpointing else 0)),
        "in the first layer": gradients - (0.0 if shape.tied else table) + tokens * (backward + block),
    }
    moment = max(moments, key=moments.__getitem__)
    return max(moments[moment], gradients), moment


def longest_sequence(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def share_of_longest(config: Config, part: ActorConfig | CriticConfig) -> int:
    """Tokens of the longest sequence that a rank passes; with sequence parallelism it has a share of each."""
    return -(-longest_sequence(config) // part.ulysses_sequence_parallel_size)


def pass_tokens(config: Config, part: ActorConfig | CriticConfig) -> int:
    """Tokens in one pass of an update on one rank."""
    longest = share_of_longest(config, part)
    if part.use_dynamic_bsz:
        return max(longest, part.ppo_max_token_len_per_gpu)
    return longest * (part.ppo_micro_batch_size_per_gpu or 1)


def _states(config: Config, shape: Shape) -> Iterator[tuple[str, str, float, FSDPConfig]]:
    """Role, words, bytes a rank and FSDP settings of what a rank keeps from step to step."""
    roles, ranks = config.actor_rollout_ref, _ranks(config)
    lora, count = roles.model.lora_rank, f"{shape.parameters / 1e9:.3g}e9 / {ranks}"
    what = f"weights and optimizer ({'4 B, LoRA 12 B' if lora else '12 B'} x {count})"
    yield "policy", what, _state_bytes(config, shape), roles.actor.fsdp_config
    if (roles.actor.use_kl_loss or config.algorithm.use_kl_in_reward) and not lora:
        yield "reference", f"weights (4 B x {count})", 4.0 * shape.parameters / ranks, roles.ref.fsdp_config
    if config.critic.enable:
        size = 12.0 * shape.critic_parameters / ranks
        yield "critic", f"weights and optimizer (12 B x {count})", size, config.critic.model.fsdp_config


def _learner(config: Config, shape: Shape) -> Iterator[Part]:
    for role, what, size, fsdp in _states(config, shape):
        if not _offloaded(config, fsdp):
            yield Part(role, "always", what, size)
    part, critic = config.actor_rollout_ref, config.critic
    yield from _passes("policy", "update", config, shape, part.actor, part.actor.fsdp_config, part.model)
    if critic.enable:
        yield from _passes("critic", "critic update", config, shape, critic, critic.model.fsdp_config, critic.model)


def _passes(
    role: str,
    phase: str,
    config: Config,
    shape: Shape,
    part: ActorConfig | CriticConfig,
    fsdp: FSDPConfig,
    model: ModelConfig | CriticModelConfig,
) -> Iterator[Part]:
    """What a role's update needs for a while."""
    tokens, width, checkpointing = pass_tokens(config, part), _width(fsdp.dtype), model.enable_gradient_checkpointing
    alone, policy, rank = config.trainer.backend == "local", role == "policy", config.actor_rollout_ref.model.lora_rank
    if alone:
        gathered = copies_bytes(shape, checkpointing) if width == 2 else 0.0
    else:
        gathered = width * (2.0 * shape.block + shape.ends) + 4.0 * (shape.block + shape.ends)
    yield Part(role, phase, "weights of the layers at work", gathered)
    headed = shape if policy else dataclasses.replace(shape, vocab=1)  # a value head is one row
    adapters = shape.adapters(rank) if policy and rank else 0
    residual = 4 if alone else width
    highest, moment = update_bytes(
        headed, tokens, width, residual, checkpointing=checkpointing, ranks=_ranks(config), adapters=adapters
    )
    kept = "layer inputs" if checkpointing else "all layers"
    yield Part(role, phase, f"gradients, activations of {tokens} tokens ({kept} kept), highest {moment}", highest)


def copies_bytes(shape: Shape, checkpointing: bool) -> float:
    """The bf16 copies of the weights that autocast makes: of a layer and the head, or of all that autograd keeps."""
    return 2.0 * (shape.block + shape.vocab * shape.hidden if checkpointing else shape.parameters)


def _engine(config: Config, shape: Shape, on: Gpu, resident: float) -> tuple[list[Part], int]:
    """The engine's parts, and how many sequences of full length its cache holds."""
    rollout = config.actor_rollout_ref.rollout
    width, longest = _width(rollout.dtype), longest_sequence(config)
    if rollout.name != "vllm":
        weights = float(width * shape.parameters)
        room = USABLE * on.memory - resident - weights
        phase, ranks = "always", 1
    else:
        ranks = rollout.tensor_model_parallel_size
        weights = width * shape.parameters / ranks
        room = rollout.gpu_memory_utilization * on.memory - weights
        phase = "generate" if rollout.free_cache_engine else "always"
    sequences = max(0, int(room // (shape.kv_bytes(width) / ranks * longest)))
    parts = [Part("engine", phase, f"weights ({width} B / {ranks})", weights)]
    if rollout.name == "vllm":
        parts.append(Part("engine", phase, "KV cache (the rest of gpu_memory_utilization)", max(0.0, room)))
    return parts, sequences


def _engines(config: Config) -> int:
    """Engines that decode side by side."""
    rollout = config.actor_rollout_ref.rollout
    return 1 if rollout.name != "vllm" else max(1, _gpus(config) // rollout.tensor_model_parallel_size)


def _in_batch(config: Config, kv_sequences: int, drawn: float, assumed: Assumptions) -> int:
    """Sequences an engine decodes at once: what the cache holds of mean length, what is asked, what is allowed."""
    limit = config.data.max_prompt_length + config.data.max_response_length
    cached = kv_sequences * limit / assumed.sequence
    return max(1, int(min(cached, drawn / _engines(config), config.actor_rollout_ref.rollout.max_num_seqs)))


def _generate_seconds(config: Config, shape: Shape, on: Gpu, assumed: Assumptions, drawn: float, batch: int) -> float:
    rollout, engines = config.actor_rollout_ref.rollout, _engines(config)
    width, ranks = _width(rollout.dtype), rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    context = (assumed.prompt_length + assumed.sequence) / 2

    def iteration(sequences: float) -> float:
        read = (width * shape.matmul_parameters + sequences * context * shape.kv_bytes(width)) / (ranks * on.bandwidth)
        work = 2.0 * shape.matmul_parameters * sequences / (ranks * on.flops)
        return max(read, work) / assumed.decode_efficiency

    rounds = drawn * assumed.generated / engines / batch
    prompts = drawn * (assumed.prompt_length / rollout.n + assumed.observed) / engines
    longest = config.turns * config.data.max_response_length
    prefill = 2.0 * shape.matmul_parameters * prompts / (ranks * on.flops) / assumed.train_efficiency
    return prefill + max(rounds * iteration(batch), longest * iteration(1))


def _learner_seconds(
    config: Config, shape: Shape, on: Gpu, assumed: Assumptions, tokens: float
) -> Iterator[tuple[str, float]]:
    actor = config.actor_rollout_ref.actor
    forward = (
        2.0 * shape.matmul_parameters + 2.0 * shape.layers * shape.q_size * assumed.sequence
    )  # causal attention: half of 4
    speed = _gpus(config) * on.flops * assumed.train_efficiency
    backward = 3.0 + config.actor_rollout_ref.model.enable_gradient_checkpointing
    updates = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    if updates > 1:
        yield "old log-probs", tokens * forward / speed
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        yield "reference", tokens * forward / speed
    if config.critic.enable:
        yield "critic", tokens * forward * (1 + backward * config.critic.ppo_epochs) / speed
    yield "update", tokens * forward * backward * actor.ppo_epochs / speed


# --- advice ---


def advice(plan: Plan) -> list[str]:
    """Which knob to turn where it does not fit; memory knobs cannot change the result."""
    config, lines = plan.config, []
    rollout = config.actor_rollout_ref.rollout
    room = USABLE * plan.gpu.memory
    state = _state_bytes(config, plan.shape)
    if plan.kv_sequences == 0:
        vllm = "raise tensor_model_parallel_size or gpu_memory_utilization"
        knob = vllm if rollout.name == "vllm" else "take a larger GPU, or rollout.name=vllm over several"
        lines.append(f"the engine's cache holds no sequence of full length: {knob}")
    over = [phase for phase in PHASES if plan.phase_bytes(phase) > room]
    if over and not _offloaded(config, config.actor_rollout_ref.actor.fsdp_config) and state > 0.4 * plan.gpu.memory:
        ranks = int(12.0 * plan.shape.parameters / (0.4 * plan.gpu.memory)) + 1
        more = f"{ranks} ranks would share it" if config.trainer.backend == "ray" else "trainer.backend=ray"
        lines.append(f"the learner's state takes {_gib(state)}: fsdp_config.optimizer_offload=True, or {more}")
    roles, critic = config.actor_rollout_ref, config.critic
    if "update" in over:
        lines += _shorter_passes(
            "actor_rollout_ref", roles.model.enable_gradient_checkpointing, config, roles.actor, lines
        )
    if "critic update" in over:
        lines += _shorter_passes("critic", critic.model.enable_gradient_checkpointing, config, critic, lines)
    if "generate" in over and rollout.name == "vllm":
        lines.append("lower rollout.gpu_memory_utilization: the learner's state stays beside the engine")
    if plan.checkpoints and plan.checkpoints * plan.checkpoint_bytes > LARGE_DISK:
        lines.append("checkpoints take much disk: trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq")
    return lines


def _shorter_passes(
    prefix: str, checkpointing: bool, config: Config, part: ActorConfig | CriticConfig, said: Sequence[str]
) -> Iterator[str]:
    """What makes an update smaller; ``said`` is the advice before it."""
    if not checkpointing:
        yield f"activations of all layers are kept: {prefix}.model.enable_gradient_checkpointing=True"
    longest = share_of_longest(config, part)
    if pass_tokens(config, part) > longest:
        name = "actor" if prefix == "actor_rollout_ref" else prefix
        yield f"lower {name}.ppo_max_token_len_per_gpu, at the least to {longest}"
    elif checkpointing and not said:
        yield "one sequence of full length is a pass already: shorten data.max_response_length, or larger GPUs"


# --- text ---


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if value >= 0.1 * GIB else f"{value / 2**20:.1f} MiB"


def _trajectory(assumed: Assumptions) -> str:
    if assumed.turns == 1:
        return f"answers of {assumed.mean_length} tokens on average"
    return (
        f"episodes of {assumed.turns} turns of {assumed.mean_length} tokens, {assumed.observed_length} read after each"
    )


def checked() -> str:
    """What is known of the error of an update's estimate."""
    if not MEASURED.exists():
        return "an update's estimate was not compared with measured ones"
    errors = json.loads(MEASURED.read_text(encoding="utf-8"))["errors"]
    span = f"{min(errors):+.0%} to {max(errors):+.0%}"
    return f"error of an update's estimate: {span} in {len(errors)} measured updates of small models on a CPU; no GPU's"


def lines(plan: Plan) -> list[str]:
    """The plan as text, a line each."""
    a, on, config = plan.assumed, plan.gpu, plan.config
    out = [
        f"{plan.shape.parameters / 1e9:.3g}e9 parameters on {plan.gpus} x {on.name} ({_gib(on.memory)}); "
        f"{_ranks(config)} learner ranks share the state, {_engines(config)} engines",
        f"assumed: {_trajectory(a)}, prompts of {a.prompt_length}"
        + (f", {a.keep_rate:.0%} of groups kept" if config.algorithm.filter_groups.enable else "")
        + f"; {a.train_efficiency:.0%} of peak FLOP/s in training, {a.decode_efficiency:.0%} of the decoding roofline",
    ]
    out += [f"  {p.role:<10}{p.phase:<14}{_gib(p.bytes):>11}  {p.what}" for p in plan.parts]
    for phase in PHASES[: 2 + config.critic.enable]:
        share = plan.phase_bytes(phase) / on.memory
        out.append(f"memory, {phase}: {_gib(plan.phase_bytes(phase))} a GPU, {share:.0%} of it")
    out.append(f"  {checked()}")
    if plan.host_bytes:
        out.append(f"memory, host: {_gib(plan.host_bytes)} a rank, of offloaded state")
    out.append(f"the engine's cache holds {plan.kv_sequences} sequences of full length; {plan.in_batch} decode at once")
    out.append(f"{'fits' if plan.fits else 'DOES NOT FIT'} on {on.name}")
    out += [f"  {line}" for line in advice(plan)]
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in plan.seconds)
    out.append(f"a step: {plan.generated_tokens:.3g} tokens generated, {plan.trained_tokens:.3g} trained; {phases}")
    if plan.steps is None:
        out.append("length: as long as total_epochs says; the number of steps depends on the data")
    else:
        hours = plan.steps * plan.step_seconds / 3600
        out.append(f"{plan.steps} steps: {hours:.3g} hours, {hours * plan.gpus:.3g} GPU-hours")
    kept = "all" if plan.checkpoints is None else str(plan.checkpoints)
    total = "" if not plan.checkpoints else f", {_gib(plan.checkpoints * plan.checkpoint_bytes)} in all"
    out.append(f"disk: {_gib(plan.checkpoint_bytes)} a checkpoint (12 B a parameter), {kept} kept{total}")
    return out


def shown(config: Config, name: str = DEFAULT_GPU) -> list[str]:
    """The plan's lines, or one that says why there is none: what a dry run prints."""
    if config.trainer.val_only:
        return ["none: a plan is of training, and trainer.val_only trains nothing"]
    try:
        return lines(make_plan(config, gpu(name)))
    except UnknownShape as error:
        return [f"none: {error}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.plan", description="Memory, time and disk of a run, estimated before it starts."
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--gpu", default=DEFAULT_GPU)
    parser.add_argument("--mean-length", type=int, help="tokens of an answer or a turn (default: half of the limit)")
    parser.add_argument("--turns", type=int, help="of an episode (default: half of those that may search, and one)")
    parser.add_argument("--observed-length", type=int, help="tokens between turns (default: data.max_obs_length)")
    parser.add_argument("--prompt-length", type=int, default=Assumptions.prompt_length)
    parser.add_argument("--keep-rate", type=float, default=Assumptions.keep_rate)
    return parser


def hooks_of(recipe: str) -> tuple[str, ...]:
    """HOOKS, and ``generate`` where the recipe's own configuration plays episodes."""
    from core.config import examine

    plain = examine(recipe, [], HOOKS).config
    return (*HOOKS, "generate") if plain is not None and plain.actor_rollout_ref.rollout.agent_loop else HOOKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan. Returns 1 where it does not fit, 2 where the configuration is at fault."""
    from core.config import examine

    args = _parser().parse_intermixed_args(arguments)
    composed = examine(args.recipe, [each for each in args.overrides if each != "--"], hooks_of(args.recipe))
    if composed.problems:
        print("\n".join(composed.problems), file=sys.stderr)
        return 2
    assumed = Assumptions(args.mean_length, args.prompt_length, args.turns, args.observed_length, args.keep_rate)
    try:
        plan = make_plan(composed.config, gpu(args.gpu), assumed)
    except UnknownShape as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(plan)))
    return 0 if plan.fits else 1
