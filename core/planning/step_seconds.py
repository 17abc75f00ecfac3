"""How long the phases of a step take: collecting, passes, weight sync, and its share of validations and checkpoints.

    decoding            an iteration reads the weights and the cache of its sequences, or multiplies 2 P a token,
                        whichever takes longer; never shorter than the longest answer, alone
    refills             dynamic sampling starts as many groups as it expects to need; where they do not suffice, it
                        waits for one more longest answer
    retrieval           searches x FLOP a search / FLOP a second of the CPUs that search
    training            2 P a token forward, 4 P backward, 2 P again with checkpointing, and attention
    weight sync         c P, which each learner rank gathers; engines open them where they are, or receive as much again
                        where they have GPUs of their own
    validation          questions x answers, decoded like a step's; a step carries 1 / test_freq of it
    checkpoint          each rank copies its part to host memory; what writes it goes on beside the steps, which wait
                        where it takes longer than save_freq of them; a step carries 1 / save_freq

P parameters, c bytes a number. Times divide by the stated efficiencies. Not counted: collectives between GPUs,
loading, scoring, and tools. ``core.planning.estimate`` says how large everything is.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config import schema
from core.config.sections.actor import Sharing
from core.planning.model_shapes import Gpu, Shape, width
from core.planning.published import questions_of


@dataclass(frozen=True)
class Assumptions:
    """What no configuration holds. Shown with every plan; most are options of the command.

    The rates are guesses that were measured nowhere: they are of the order that users report.
    """

    mean_length: int | None = None  # tokens of an answer, or of a turn; None: lengths.yaml, else half of the limit
    prompt_length: int | None = None  # tokens, at most the limit; None: lengths.yaml, else 256
    turns: int | None = None  # of an episode; None: half of those that may search, and the answer
    observed_length: int | None = None  # tokens between two turns; None: data.max_obs_length
    keep_rate: float = 0.5  # share of groups that dynamic sampling keeps
    train_efficiency: float | None = None  # of the peak FLOP/s; None: the GPU's in model_shapes.yaml
    decode_efficiency: float = 0.5  # of the peak bandwidth or FLOP/s
    refills: float = 0.5  # late refills a step, where groups are filtered
    transfer_rate: float = 4e9  # bytes of weights a second, into a rank or an engine: verl's 15.8 s for 30B
    disk_rate: float = 1e9  # bytes a second of a checkpoint, written and hashed
    search_rate: float = 2e12  # FLOP a second of all CPUs that search: 26 cores of results/search_r1/retrieval.md


@dataclass(frozen=True)
class Load:
    """What a step asks of which machines; ``estimate.Plan`` has the words for the fields that it shares."""

    config: schema.Config
    shape: Shape
    gpu: Gpu
    assumed: Assumptions  # with every number filled in
    gpus: int
    engines: int
    engine_gpus: int
    most_turns: int
    cached: float  # sequences of mean length that an engine's cache holds
    drawn: float  # trajectories that a step generates
    checkpoint_bytes: float

    @property
    def generated(self) -> int:
        return self.assumed.turns * self.assumed.mean_length

    @property
    def observed(self) -> int:
        return (self.assumed.turns - 1) * self.assumed.observed_length

    @property
    def sequence(self) -> int:
        return self.assumed.prompt_length + self.generated + self.observed

    def in_batch(self, answers: float) -> int:
        """Return how many of these sequences an engine decodes at once."""
        most = self.config.actor_rollout_ref.rollout.max_num_seqs
        return max(1, int(min(self.cached, answers / self.engines, most)))


def step_seconds(load: Load) -> dict[str, float]:
    """Return the seconds of each phase of a step, the shares of what is not done every step among them."""
    config, trainer = load.config, load.config.trainer
    seconds = _collect_seconds(load) if config.generates else {}
    seconds |= _learner_seconds(load)
    if config.generates:
        seconds["weight sync"] = sync_seconds(load)
    if trainer.test_freq > 0:
        sync = 0.0 if config.generates else sync_seconds(load)  # engines get weights only where they are to answer
        seconds["validation"] = (validation_seconds(load) + sync) / trainer.test_freq
    if trainer.save_freq > 0:
        waits = writing_seconds(load) - trainer.save_freq * sum(seconds.values())  # for the checkpoint before
        seconds["checkpoint"] = (copy_seconds(load) + max(0.0, waits)) / trainer.save_freq
    return seconds


def _collect_seconds(load: Load) -> dict[str, float]:
    """Return the seconds of collecting a step's groups."""
    seconds = {"generate": generate_seconds(load, load.drawn, load.config.actor_rollout_ref.rollout.n)}
    if load.config.algorithm.filter_groups.enable:
        seconds["refills"] = load.assumed.refills * _longest(load)
    if searching := search_seconds(load, load.drawn):
        seconds["retrieval"] = searching
    return seconds


def generate_seconds(load: Load, answers: float, samples: int) -> float:
    """Return the seconds that these answers take, ``samples`` to a prompt, which is prefilled once."""
    assumed, at_once = load.assumed, load.in_batch(answers)
    rounds = answers * load.generated / load.engines / at_once
    prompts = answers * (assumed.prompt_length / samples + load.observed) / load.engines
    work = 2.0 * load.shape.matmul_parameters * prompts
    prefill = work / (load.engine_gpus * load.gpu.flops) / assumed.train_efficiency
    return prefill + max(rounds * _iteration(load, at_once), _longest(load))


def _iteration(load: Load, sequences: float) -> float:
    """Return the seconds in which an engine decodes one token of each of its sequences."""
    shape, on = load.shape, load.gpu
    size = width(load.config.actor_rollout_ref.rollout.dtype)
    context = (load.assumed.prompt_length + load.sequence) / 2
    read = size * shape.matmul_parameters + sequences * context * shape.kv_bytes(size)
    work = 2.0 * shape.matmul_parameters * sequences / (load.engine_gpus * on.flops)
    return max(read / (load.engine_gpus * on.bandwidth), work) / load.assumed.decode_efficiency


def _longest(load: Load) -> float:
    """Return the seconds of the longest answer, decoded alone."""
    return load.most_turns * load.config.data.max_response_length * _iteration(load, 1)


def search_seconds(load: Load, episodes: float) -> float:
    """Return the seconds that the searches of these episodes take, one after each turn but the last."""
    return episodes * (load.assumed.turns - 1) * load.config.search_flops / load.assumed.search_rate


def forward_flops(shape: Shape, sequence: float) -> float:
    """Return the FLOPs of a token in a forward pass over sequences of this length; attention is causal: half of 4."""
    return 2.0 * shape.matmul_parameters + 2.0 * shape.layers * shape.q_size * sequence


def _learner_seconds(load: Load) -> dict[str, float]:
    config, actor, shape = load.config, load.config.actor_rollout_ref.actor, load.shape
    tokens = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * load.sequence

    def pass_seconds(part: Sharing) -> float:
        """Return how long all tokens take forward. Ranks that share a layer repeat what no layer has, the head."""
        ranks = part.layer_ranks if load.config.trainer.backend == "ray" else 1
        work = tokens * ranks * forward_flops(shape.split(ranks), load.sequence)
        return work / (load.gpus * load.gpu.flops * load.assumed.train_efficiency)

    once = pass_seconds(actor)
    backward = 3.0 + config.actor_rollout_ref.model.enable_gradient_checkpointing
    seconds = {}
    updates = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    if updates > 1 and config.generates:
        seconds["old log-probs"] = once
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        seconds["reference"] = pass_seconds(config.actor_rollout_ref.ref)
    if config.critic.enable:
        seconds["critic"] = pass_seconds(config.critic) * (1 + backward * config.critic.ppo_epochs)
    return {**seconds, "update": once * backward * actor.ppo_epochs}


def sync_seconds(load: Load) -> float:
    """Return how long the engines wait for a step's weights; in one process they are copied on the GPU."""
    roles, trainer = load.config.actor_rollout_ref, load.config.trainer
    size = width(roles.rollout.dtype) * load.shape.parameters
    if trainer.backend == "local":
        return size / load.gpu.bandwidth
    return size * (1 if roles.hybrid_engine else 2) / load.assumed.transfer_rate


def validation_seconds(load: Load) -> float:
    """Return the seconds of one validation, searches included."""
    samples = load.config.actor_rollout_ref.rollout.val_kwargs.n
    answers = questions_of(load.config) * samples
    return generate_seconds(load, answers, samples) + search_seconds(load, answers)


def copy_seconds(load: Load) -> float:
    """Return for how long a checkpoint holds up the run."""
    return load.checkpoint_bytes / load.gpus / load.assumed.transfer_rate


def writing_seconds(load: Load) -> float:
    """Return how long a checkpoint is written, beside the run."""
    return load.checkpoint_bytes / load.assumed.disk_rate
