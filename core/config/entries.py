"""Classes of the entries of the tables in ``core/config/registry.py``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")  # keys of the section actor that bound a ratio
SERVING = (  # keys of the section rollout that a serving engine reads
    *("tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
    *("max_model_len", "enable_chunked_prefill", "enable_prefix_caching"),
)


@dataclass(frozen=True)
class EstimatorEntry:
    """An advantage estimator: a function of :class:`core.algorithm.advantages.AdvantageInputs`."""

    function: str
    critic: bool = False  # it reads values
    groups: bool = False  # it compares the answers to a prompt, so it needs at least two
    greedy_baseline: bool = False  # it reads the score of a greedy answer to the prompt
    squares: bool = False  # it reads old log-probs and the sums of squared probabilities, of a pass before the update
    penalties: bool = True  # it takes rewards below 0, which a penalty in the reward makes
    reads: Collection[str] = ()  # keys of the section algorithm


@dataclass(frozen=True)
class LossEntry:
    """A policy loss: a function of log-probs, old ones, advantages, mask and the section actor."""

    function: str
    # The only loss_agg_mode that the loss is defined with: its published implementation ignores the key.
    aggregation: str | None = None
    has_ratio: bool = True  # of new to old probabilities, which under bypass_mode is the importance weight
    # The ratio is a whole sequence's: the clip bounds are far smaller, and the loss gets lengths_B, [B] int64.
    sequence_ratio: bool = False
    # Marks tokens of a whole mini-batch, "module:function", which the loss gets as selected_N, [N] bool.
    selects: str | None = None
    moves_without_advantage: bool = False  # a sequence whose advantages are all 0 trains too
    divergence: float | None = None  # clip_ratio* bound a divergence, not a ratio: the published bound
    reads: Collection[str] = ()  # keys of the section actor


@dataclass(frozen=True)
class EngineEntry:
    """A rollout engine: a function of configuration, policy, tokenizer and device."""

    function: str
    package: str | None = None  # that has to be installed
    problems: str | None = None  # "module:function": of a configuration, what else the engine lacks at a start
    seeded: bool = True  # a request's seed decides its answer; without that nothing sampled can be drawn again
    top_p_within_top_k: bool = True  # with both set, top_p counts what top_k left
    reads_media: bool = True  # pictures of prompts
    one_receiver: bool = False  # one process receives the weights also where several GPUs share each layer
    reads: Collection[str] = ()  # keys of the section rollout


@dataclass(frozen=True)
class ManagerEntry:
    """A reward manager: a function of the section reward_model and the run's grader."""

    function: str
    in_process: bool = False  # it grades in this process, without a deadline
    batched: bool = False  # it calls a user's function with lists of answers


@dataclass(frozen=True)
class LoggerEntry:
    """A logger: a function of :class:`core.tracking.loggers.LoggedRun`."""

    function: str | None = None  # None: the tracker has it anyway
    login: str | None = None  # when the service asks for one


@dataclass(frozen=True)
class AgentLoopEntry:
    """An agent loop: a subclass of :class:`core.rollout.agent_loop.AgentLoop`."""

    function: str
