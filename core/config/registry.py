"""All that the repository knows about a name in a configuration: one entry of one table.

Adding an estimator, a policy loss, an engine, a logger or an agent loop touches two files: a function in a module of
its own, and an entry here. The schema takes its names from these tables, rules and plan read the facts,
and :mod:`core.config.code_by_path` imports the function when a run first uses it. A user's own function, named by its
path, needs no entry. ``function`` is always ``module:name``. ``reads`` lists the keys of the entry's section that not
every other entry reads: where they are set for an entry without them, they are reported as unused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A name's function, and the keys that it reads; of an agent loop its class."""

    function: str
    reads: Collection[str] = ()


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An advantage estimator: a function of :class:`core.algorithm.advantages.AdvantageInputs`."""

    critic: bool = False  # it reads values
    groups: bool = False  # it compares the answers to a prompt, so it needs at least two
    greedy_baseline: bool = False  # it reads the score of a greedy answer to the prompt


@dataclass(frozen=True)
class LossEntry(Entry):
    """A policy loss: a function of :class:`core.algorithm.losses.LossInputs`."""

    # The only loss_agg_mode that the loss is defined with: its published implementation ignores the key.
    aggregation: str | None = None
    has_ratio: bool = True  # of new to old probabilities, which under bypass_mode is the importance weight
    # "module:function" that selects the tokens which the loss treats apart, among all of a mini-batch
    selects: str | None = None
    moves_without_advantage: bool = False  # a sequence whose advantages are all 0 trains too


@dataclass(frozen=True)
class EngineEntry(Entry):
    """A rollout engine: a function of configuration, policy, tokenizer and device."""

    package: str | None = None  # that has to be installed
    problems: str | None = None  # "module:function": of a configuration, what else the engine lacks at a start
    seeded: bool = True  # a request's seed decides its answer; without that nothing sampled can be drawn again
    top_p_within_top_k: bool = True  # with both set, top_p counts what top_k left
    reads_media: bool = True  # pictures of prompts


@dataclass(frozen=True)
class LoggerEntry:
    """A logger: a function of the run's :class:`core.tracking.tracker.Tracker`."""

    function: str | None = None  # None: the tracker has it anyway
    login: str | None = None  # when the service asks for one


ADVANTAGES, LOSSES = "core.algorithm.advantages", "core.algorithm.losses"
ESTIMATORS = {  # algorithm.adv_estimator
    "gae": EstimatorEntry(f"{ADVANTAGES}:gae", critic=True, reads=("gamma", "lam")),
    "grpo": EstimatorEntry(f"{ADVANTAGES}:grpo", groups=True, reads=("norm_adv_by_std_in_grpo",)),
    "grpo_passk": EstimatorEntry(f"{ADVANTAGES}:grpo_passk", groups=True, reads=("norm_adv_by_std_in_grpo",)),
    "rloo": EstimatorEntry(f"{ADVANTAGES}:rloo", groups=True),
    "remax": EstimatorEntry(f"{ADVANTAGES}:remax", greedy_baseline=True),
    "reinforce_plus_plus": EstimatorEntry(f"{ADVANTAGES}:reinforce_plus_plus", reads=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorEntry(f"{ADVANTAGES}:reinforce_plus_plus_baseline", groups=True),
    "opo": EstimatorEntry(f"{ADVANTAGES}:opo", groups=True),
    "gpg": EstimatorEntry(f"{ADVANTAGES}:gpg", groups=True),
}
CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
SEQUENCE_MEAN = "seq-mean-token-mean"
CLIP_COV = ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")
KL_COV = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
POLICY_LOSSES = {  # actor_rollout_ref.actor.policy_loss.loss_mode
    "vanilla": LossEntry(f"{LOSSES}:vanilla", reads=(*CLIP, "clip_ratio_c")),
    "gspo": LossEntry(f"{LOSSES}:gspo", aggregation=SEQUENCE_MEAN, reads=CLIP),
    "geo_mean": LossEntry(f"{LOSSES}:geo_mean", aggregation=SEQUENCE_MEAN, reads=CLIP),
    "sapo": LossEntry(f"{LOSSES}:sapo", aggregation=SEQUENCE_MEAN, reads=("tau_pos", "tau_neg")),
    "gpg": LossEntry(f"{LOSSES}:gpg", has_ratio=False),
    "reinforce": LossEntry(f"{LOSSES}:gpg", has_ratio=False),
    "cispo": LossEntry(f"{LOSSES}:cispo", reads=CLIP),
    "clip_cov": LossEntry(f"{LOSSES}:clip_cov", selects=f"{LOSSES}:clip_cov_tokens", reads=(*CLIP, *CLIP_COV)),
    "kl_cov": LossEntry(
        f"{LOSSES}:kl_cov", selects=f"{LOSSES}:kl_cov_tokens", moves_without_advantage=True, reads=KL_COV
    ),
}
SERVING = (  # what a serving engine reads
    *("tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
    *("max_model_len", "enable_chunked_prefill", "enable_prefix_caching"),
)
ENGINES = {  # actor_rollout_ref.rollout.name
    "hf": EngineEntry("core.engines.hf:make"),
    "vllm": EngineEntry("core.engines.vllm:make", package="vllm", reads=SERVING),
    "sglang": EngineEntry(
        "core.engines.sglang:make",
        problems="core.engines.sglang:problems",
        seeded=False,
        top_p_within_top_k=False,
        reads_media=False,
        reads=("max_model_len",),
    ),
}
# reward_model.reward_manager; the length penalty, the other half of verl's dapo, is DAPO's shape_reward
REWARD_MANAGERS = ("naive", "batch", "prime", "dapo")
LOGGERS = {  # trainer.logger
    "console": LoggerEntry(),
    "jsonl": LoggerEntry(),
    "tensorboard": LoggerEntry("core.tracking.loggers:TensorboardLogger"),
    "wandb": LoggerEntry("core.tracking.loggers:WandbLogger", "unless WANDB_MODE=offline"),
    "mlflow": LoggerEntry("core.tracking.loggers:MlflowLogger", "unless the server of MLFLOW_TRACKING_URI is open"),
}
TOOL_AGENT = "tool_agent"  # verl's name
AGENT_LOOPS = {TOOL_AGENT: Entry("core.rollout.tool_agent:ToolAgentLoop")}  # actor_rollout_ref.rollout.agent_loop
# --- types of keys, and other names ---
PICTURE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # model_type of the models whose pictures are read
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL, *(f"{kind}+" for kind in _KL))
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def estimator(name: str) -> EstimatorEntry:
    """Return the estimator's entry. A user's own may read any key, and provides for itself what it needs."""
    return ESTIMATORS.get(name) or EstimatorEntry(name, reads=_all_keys(ESTIMATORS))


def policy_loss(name: str) -> LossEntry:
    """Return the policy loss's entry. A user's own may read any key, and has a ratio."""
    return POLICY_LOSSES.get(name) or LossEntry(name, reads=_all_keys(POLICY_LOSSES))


def logger(name: str) -> LoggerEntry:
    """Return the logger's entry; a user's own is its path."""
    return LOGGERS.get(name) or LoggerEntry(name)


def _all_keys(table: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for entry in table.values() for key in entry.reads)


def readers(table: Mapping[str, Any], key: str) -> str:
    """Return the names of the entries that read a key, for a message."""
    return ", ".join(name for name, entry in table.items() if key in entry.reads)
