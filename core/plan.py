"""What a run will need of memory and disk, before anything is downloaded or started.

    python -m core.plan dapo preset=paper actor_rollout_ref.model.path=Qwen/Qwen2.5-32B trainer.nnodes=16 --gpu H100
    DRY_RUN=1 bash recipes/dapo/run_qwen2.5_32b.sh                         prints the same below the configuration

An estimate from the model's shape and the configuration; torch is not imported. With P parameters, R learner ranks that
share them, c bytes a number in the passes (2 in bf16, 4 in fp32):

    learner, resident   12 P / R          float32 weights and two Adam moments
                        (4 P + 8 A) / R   with LoRA of A parameters
    reference           4 P / R           float32 weights; none with LoRA, whose base it is
    gathered weights    c (2 block + ends)    one layer and the next, and the ends
    update              gradients and activations at their highest moment (update_bytes)
    log-probs           activations of one layer, or the head's chunks, whichever is more (log_prob_bytes)
    engine              c P / tp + KV cache

Where t ranks share each layer (``tensor_model_parallel_size``), a rank has a narrower model: heads and MLP are divided
by t, the stream between layers is not, the ends are only between passes, and R / t ranks share what it has. A run in
one process is planned as one rank. ``python -m tests.scale.world`` counts what the learner allocates on fake ranks
beside these figures; on an H200 eight layers of a 32B model took within 2 % of them (results/gpu).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.config import compose, recipes, registry
from core.config.limits import FULL_PRECISION
from core.config.paths import is_local
from core.config.schema import Config
from core.config.sections.actor import ActorConfig, Sharing
from core.config.sections.critic import CriticConfig
from core.errors import MEMORY_KEYS, InputError
from core.learner.logit_memory import CPU_LOGITS, head_logits
from core.model_shapes import GPUS, Shape, model_problems, shape_of

USABLE = 0.95  # of a GPU's memory; the rest is the allocator's and the libraries'
GENERATE, LOG_PROBS, UPDATE, CRITIC_UPDATE = PHASES = ("generate", "log-probs", "update", "critic update")
DEFAULT_GPU = "H100"
SMALL = 1e8  # parameters; a dry run plans no model with fewer


# --- formulas ---


def width(dtype: str) -> int:
    """Return the bytes of a number in a configuration's ``dtype``."""
    return 4 if dtype in FULL_PRECISION else 2


def pass_tokens(config: Config, part: ActorConfig | CriticConfig) -> int:
    """Return the tokens in one pass of an update on one rank."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    share = -(-longest // part.ulysses_sequence_parallel_size)
    if part.use_dynamic_bsz:
        return max(share, part.ppo_max_token_len_per_gpu)
    return share * (part.ppo_micro_batch_size_per_gpu or 1)


def log_prob_tokens(config: Config) -> int:
    """Return the tokens in one log-prob pass of the policy on one rank."""
    longest, rollout = config.data.max_prompt_length + config.data.max_response_length, config.actor_rollout_ref.rollout
    share = -(-longest // config.actor_rollout_ref.actor.ulysses_sequence_parallel_size)
    if rollout.log_prob_use_dynamic_bsz:
        return max(share, rollout.log_prob_max_token_len_per_gpu)
    return share * (rollout.log_prob_micro_batch_size_per_gpu or 1)


def block_bytes(shape: Shape, width: int) -> int:
    """Return what autograd keeps of one layer, a token."""
    attention = (3 * shape.q_size + 2 * shape.kv_size) * width
    return 2 * shape.hidden * (4 + 2 * width) + attention + 4 * shape.mlp * width


def head_bytes(shape: Shape, tokens: int, width: int, trains: bool = True, logits: int = CPU_LOGITS) -> float:
    """Return the chunked head's bytes: logits (about three tensors of a chunk in float32), its weight's gradient in
    float32, hidden states and their gradient."""
    chunk = 3 * 4 * min(logits, tokens * shape.vocab)
    weight = 4.0 * shape.vocab * shape.hidden if trains else 0.0
    return chunk + weight + 2.0 * tokens * shape.hidden * width


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


def update_bytes(
    shape: Shape,
    tokens: int,
    width: int,
    *,
    checkpointing: bool,
    ranks: int,
    adapters: int = 0,
    logits: int = CPU_LOGITS,
) -> tuple[float, str]:
    """Return gradients and activations at their highest beside the gathered weights, and when that is.

    They do not all exist at once. In the head nothing of the layers has a gradient yet; in the first layer, the last to
    be passed backward, the activations of the others are gone. A layer's gradient is reduced in float32 while the layer
    before it is passed backward. Those of the ends stay whole, in the passes' precision, until everything else is
    reduced: embedding and head are one unit of FSDP2. By then no weight is gathered any more.
    """
    block, backward = block_bytes(shape, width), 2 * (shape.mlp + shape.hidden) * width
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


# --- the plan ---


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
            raise InputError(f"--gpu={gpu}: not in model_shapes.yaml, which holds {', '.join(GPUS)}")
        roles, trainer = config.actor_rollout_ref, config.trainer
        self.config, self.gpu, self.memory = config, gpu, GPUS[gpu]
        self.shape = shape_of(roles.model.path, roles.model.override_config)
        self.sharded = trainer.backend == "ray"
        self.gpus = trainer.nnodes * trainer.n_gpus_per_node if self.sharded else 1
        size = roles.actor.fsdp_config.fsdp_size
        self.ranks = size if 0 < size < self.gpus else self.gpus  # learner ranks that share one copy of the state
        self.longest = config.data.max_prompt_length + config.data.max_response_length  # tokens of a sequence
        # Whether an engine reserves a share of the memory of one GPU or several, as vLLM does.
        self.engine_reserves = "gpu_memory_utilization" in registry.ENGINES[roles.rollout.name].reads
        self.engine_gpus = roles.rollout.tensor_model_parallel_size if self.engine_reserves else 1
        self.engines = max(1, self.gpus // self.engine_gpus) if self.engine_reserves else 1  # side by side
        states = list(self._states())
        engine, self.kv_sequences = self._engine(states)  # the sequences of full length that an engine's cache holds
        self.reward_bytes = self._reward_model() if config.reward_model.loads_model else 0.0
        beside = [Part("reward", "weights and activations", self.reward_bytes)] if not self.sharded else []
        self.parts = [*states, *self._passes(), *engine, *(part for part in beside if part.bytes)]
        self.host_bytes = sum(part.bytes for part in states if part.phases != PHASES)  # a rank
        self.phase_bytes = {one: sum(part.bytes for part in self.parts if one in part.phases) for one in PHASES}
        usable = USABLE * self.memory
        self.over = [phase for phase, taken in self.phase_bytes.items() if taken > usable]
        self.fits = not self.over and self.reward_bytes <= usable and self.kv_sequences > 0
        trained = self.shape.adapters(roles.model.lora_rank) or self.shape.parameters
        self.checkpoint_bytes = 12.0 * (trained + (self.shape.critic_parameters if config.critic.enable else 0))

    @property
    def checkpoints(self) -> int | None:
        """Count the checkpoints that the run keeps. None: all of them, of an open number."""
        trainer = self.config.trainer
        if trainer.save_freq < 1:
            return 0
        if trainer.total_training_steps is None:
            return trainer.max_actor_ckpt_to_keep
        saves = -(-trainer.total_training_steps // trainer.save_freq)
        return min(saves, trainer.max_actor_ckpt_to_keep or saves)

    def _states(self) -> Iterator[Part]:
        """Yield weights and optimizers of policy, reference and critic, and when they are on the GPU."""
        roles, critic = self.config.actor_rollout_ref, self.config.critic
        rank = roles.model.lora_rank
        models = [("policy", roles.actor, roles.actor.fsdp_config, (UPDATE,))]
        if (roles.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward) and not rank:
            models.append(("reference", roles.ref, roles.ref.fsdp_config, ()))
        if critic.enable:
            models.append(("critic", critic, critic.model.fsdp_config, (CRITIC_UPDATE,)))
        for role, part, fsdp, updates in models:
            shape, ranks = self._on_rank(part)
            adapted = rank and role == "policy"
            number = shape.critic_parameters if role == "critic" else shape.parameters
            of = f"x {number / 1e9:.3g}e9 / {ranks})"
            at_work = (LOG_PROBS, *updates) if self.sharded and fsdp.param_offload else PHASES
            away = self.sharded and fsdp.offload_policy
            yield Part(role, f"weights (4 B {of}", 4.0 * number / ranks, () if away else at_work, state=True)
            if updates:
                at_work = updates if self.sharded and fsdp.optimizer_offload else PHASES
                moments = 8.0 * (shape.adapters(rank) if adapted else number) / ranks
                what = f"optimizer ({'8 B of adapters' if adapted else '8 B'} {of}"
                yield Part(role, what, moments, () if away else at_work, state=True)

    def _on_rank(self, part: Sharing) -> tuple[Shape, int]:
        """Return the model as a rank has it, and the ranks that share its state."""
        if not self.sharded or part.layer_ranks == 1:
            return self.shape, self.ranks
        return self.shape.split(part.layer_ranks), self.ranks // part.layer_ranks

    def _passes(self) -> Iterator[Part]:
        """Yield what log-probs and updates need for a while, the policy's and the critic's."""
        config, roles, logits = self.config, self.config.actor_rollout_ref, head_logits(self.memory)
        learners = [("policy", UPDATE, roles.actor, roles.model, roles.actor.fsdp_config)]
        if config.critic.enable:
            critic = config.critic
            learners.append(("critic", CRITIC_UPDATE, critic, critic.model, critic.model.fsdp_config))
        for role, phase, part, model, fsdp in learners:
            (shape, ranks), size, at_work = self._on_rank(part), width(fsdp.dtype), "weights of the layers at work"
            gathered = gathered_bytes(shape, size) if self.sharded or size == 2 else 0.0
            adapters = shape.adapters(model.lora_rank) if role == "policy" else 0
            if role == "policy" and self.sharded and config.generates:  # else no pass takes log-probs
                tokens = log_prob_tokens(config)
                highest = log_prob_bytes(shape, tokens, size, adapters, logits)
                yield Part(role, at_work, gathered, (LOG_PROBS,))
                yield Part(role, f"activations of {tokens} tokens", highest, (LOG_PROBS,))
            tokens, checkpointing = pass_tokens(config, part), model.enable_gradient_checkpointing
            headed = shape if role == "policy" else replace(shape, vocab=1)  # a value head has one output
            options = {"checkpointing": checkpointing, "ranks": ranks, "adapters": adapters, "logits": logits}
            highest, moment = update_bytes(headed, tokens, size, **options)
            stored = "layer inputs" if checkpointing else "all layers"
            yield Part(role, at_work, gathered, (phase,))
            what = f"gradients, activations of {tokens} tokens ({stored} kept), highest {moment}"
            yield Part(role, what, highest, (phase,))

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

    def _engine(self, states: Sequence[Part]) -> tuple[list[Part], int]:
        """List the engine's parts, and count the sequences of full length that its cache holds."""
        if not self.config.needs_engine:
            return [], 1
        rollout = self.config.actor_rollout_ref.rollout
        size = width(rollout.dtype)
        weights = size * self.shape.parameters / self.engine_gpus
        phases = (GENERATE,) if self.engine_reserves and rollout.free_cache_engine else PHASES
        parts = [Part("engine", f"weights ({size} B / {self.engine_gpus})", weights, phases)]
        if self.engine_reserves:
            room = rollout.gpu_memory_utilization * self.memory - weights
            parts.append(Part("engine", "KV cache (the rest of gpu_memory_utilization)", max(0.0, room), phases))
        else:
            room = USABLE * self.memory - weights - sum(part.bytes for part in states if part.phases == PHASES)
        return parts, max(0, int(room // (self.shape.kv_bytes(size) / self.engine_gpus * self.longest)))


# --- the text ---


def advice(plan: Plan) -> Iterator[str]:
    """Yield the settings to change where it does not fit; memory settings cannot change the result."""
    if plan.kv_sequences == 0 and (plan.engine_reserves or not plan.over):
        yield (
            "the engine's cache holds no sequence of full length: raise tensor_model_parallel_size or "
            "gpu_memory_utilization, with an engine that has them"
        )
    state = sum(part.bytes for part in plan.parts if part.state and part.phases)
    if plan.over and state > 0.4 * plan.memory:
        offload = "actor_rollout_ref.actor.fsdp_config.offload_policy=True, or " if plan.sharded else ""
        ranks = int(state * plan.ranks / (0.4 * plan.memory)) + 1
        yield f"state takes {_gib(state)}: {offload}{ranks} ranks with trainer.backend=ray would share it"
    if sum(part.bytes for part in plan.parts if part.phases == PHASES) <= USABLE * plan.memory:
        names = {GENERATE: "gen", LOG_PROBS: "old_log_prob", UPDATE: "update_actor", CRITIC_UPDATE: "update_critic"}
        yield from (f"{phase}: lower {MEMORY_KEYS[names[phase]]}" for phase in plan.over)
    if plan.reward_bytes > USABLE * plan.memory:
        yield f"the reward model: lower {MEMORY_KEYS['reward_model']}, or share it: reward_model.enable_resource_pool"


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as text, what matters most first."""
    config, verdict = plan.config, "fits on" if plan.fits else "DOES NOT FIT on"
    peak = max(plan.phase_bytes.values())
    yield f"The run {verdict} {plan.gpus} x {plan.gpu}: it needs {_gib(peak)} of a GPU's {_gib(plan.memory)}."
    yield from (f"  - {line}" for line in advice(plan))
    engines = f"engines that generate side by side: {plan.engines}" if config.needs_engine else "there is no engine"
    layers = config.actor_rollout_ref.actor.layer_ranks if plan.sharded else 1
    shared = f", {layers} of them each layer" if layers > 1 else ""
    size = f"The model has {plan.shape.parameters / 1e9:.3g}e9 parameters."
    yield f"{size} Learner ranks that share its state: {plan.ranks}{shared}; {engines}."
    yield "Memory of one GPU, with the phase in which it is taken:"
    for part in [part for part in plan.parts if part.phases]:
        phases = "always" if part.phases == PHASES else ", ".join(part.phases)
        yield f"  {part.role:<10}{phases:<19}{_gib(part.bytes):>11}  {part.what}"
    for phase, taken in plan.phase_bytes.items():
        if any(part.phases != PHASES and phase in part.phases for part in plan.parts):
            yield f"Memory in the phase {phase}: {_gib(taken)}, {taken / plan.memory:.0%} of the GPU's."
    if config.reward_model.loads_model:
        where = f"{config.reward_model.ranks} x {plan.gpu} more" if plan.sharded else "part of the GPU"
        each = _gib(plan.reward_bytes) if plan.reward_bytes else "not estimated (its shape is not known offline)"
        yield f"The reward model takes {where}; memory of each: {each}."
    if plan.host_bytes:
        yield f"Offloaded state takes {_gib(plan.host_bytes)} of host memory a rank."
    if config.needs_engine:
        yield f"KV cache per engine: {plan.kv_sequences:,} sequences of full length, {plan.longest:,} tokens each."
    kept = "all of them are kept" if plan.checkpoints is None else f"the run keeps {plan.checkpoints or 'none'}"
    total = f", {_gib(plan.checkpoints * plan.checkpoint_bytes)} in all" if plan.checkpoints else ""
    yield f"A checkpoint takes {_gib(plan.checkpoint_bytes)} of disk; {kept}{total}."


def plan_lines(config: Config) -> list[str]:
    """Return what a dry run prints of the plan: its lines, or one that gives the reason why there is none."""
    model = config.actor_rollout_ref.model
    if config.trainer.val_only:
        return ["none: a plan is of training, and trainer.val_only trains nothing"]
    if config.trainer.device == "cpu":
        return []
    if is_local(model.path) and not (Path(model.path).expanduser() / "config.json").exists():
        return []  # a model that an earlier command of the same script makes
    try:
        plan = Plan(config)
    except InputError as error:
        return [f"none: {error}"]
    return list(lines(plan)) if plan.shape.parameters >= SMALL else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Return 1 where it does not fit, 2 where the configuration is at fault."""
    parser = argparse.ArgumentParser("python -m core.plan", description="Estimate memory and disk of a run.")
    add = parser.add_argument
    add("recipe", help="The recipe whose configuration is planned, as in grpo.")
    add("overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run takes them.")
    add("--gpu", default=DEFAULT_GPU, help=f"The kind of GPU (default %(default)s): one of {', '.join(GPUS)}.")
    args = parser.parse_intermixed_args(arguments)
    try:
        overrides = [each for each in args.overrides if each != "--"]
        config = compose(args.recipe, overrides, recipes.trainer_of(args.recipe)[1])
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
