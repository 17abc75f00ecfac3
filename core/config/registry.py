"""All that the repository knows about a name in a configuration: one entry of one table.

Adding an estimator, a policy loss, an engine, a logger or an agent loop touches two files: a
function in a module of its own, and an entry here. A user's own function, named by its path, needs
none. ``function`` is ``module:name``. ``reads`` lists keys of the entry's section that others do
not read: set for those, they are reported as unused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A name's function and the keys that it reads. Other facts belong to one table each."""

    function: str | None = None  # None: of a logger that the tracker has anyway
    reads: Collection[str] = ()
    package: str | None = None  # that has to be installed, of an engine or a logger
    # An advantage estimator, a function of core.algorithm.advantages.AdvantageInputs
    critic: bool = False  # it reads values
    groups: bool = False  # it compares the answers to a prompt, so it needs at least two
    fails_alone: bool = False  # it has no value for a single answer
    greedy_baseline: bool = False  # it reads the score of a greedy answer to the prompt
    # A policy loss, a function of core.algorithm.losses.LossInputs
    aggregation: str | None = None  # the only loss_agg_mode that it is defined with
    has_ratio: bool = True  # new to old probabilities: under bypass_mode the importance weight
    selects: str | None = None  # function that selects tokens of a mini-batch to treat apart
    replaces_clipped: bool = False  # clipped tokens give way to the next of its order
    moves_without_advantage: bool = False  # a sequence whose advantages are all 0 trains too
    # An engine, made of configuration, policy, tokenizer and device
    problems: str | None = None  # function of a configuration: what the engine lacks at a start
    seeded: bool = True  # a request's seed decides its answer: it can be drawn again
    reads_media: bool = True  # pictures of prompts
    kept_sets: bool = True  # it returns the ids that top-p and top-k kept
    # A logger
    login: str | None = None  # when the service asks for one


ADVANTAGES = "core.algorithm.advantages"
LOSSES = "core.algorithm.losses"
ESTIMATORS = {  # algorithm.adv_estimator
    "gae": Entry(f"{ADVANTAGES}:gae", critic=True, reads=("gamma", "lam")),
    "grpo": Entry(f"{ADVANTAGES}:grpo", groups=True, reads=("norm_adv_by_std_in_grpo",)),
    "grpo_passk": Entry(
        f"{ADVANTAGES}:grpo_passk",
        groups=True,
        fails_alone=True,
        reads=("norm_adv_by_std_in_grpo",),
    ),
    "rloo": Entry(f"{ADVANTAGES}:rloo", groups=True),
    "remax": Entry(f"{ADVANTAGES}:remax", greedy_baseline=True),
    "reinforce_plus_plus": Entry(f"{ADVANTAGES}:reinforce_plus_plus", reads=("gamma",)),
    "reinforce_plus_plus_baseline": Entry(
        f"{ADVANTAGES}:reinforce_plus_plus_baseline", groups=True
    ),
    "opo": Entry(f"{ADVANTAGES}:opo", groups=True),
    "gpg": Entry(f"{ADVANTAGES}:gpg", groups=True),
}
CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
SEQUENCE_MEAN = "seq-mean-token-mean"
CLIP_COV = ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")
KL_COV = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
POLICY_LOSSES = {  # actor_rollout_ref.actor.policy_loss.loss_mode
    "vanilla": Entry(f"{LOSSES}:vanilla", reads=(*CLIP, "clip_ratio_c")),
    "gspo": Entry(f"{LOSSES}:gspo", aggregation=SEQUENCE_MEAN, reads=CLIP),
    "geo_mean": Entry(f"{LOSSES}:geo_mean", aggregation=SEQUENCE_MEAN, reads=CLIP),
    "sapo": Entry(f"{LOSSES}:sapo", aggregation=SEQUENCE_MEAN, reads=("tau_pos", "tau_neg")),
    "gpg": Entry(f"{LOSSES}:gpg", has_ratio=False),
    "reinforce": Entry(f"{LOSSES}:gpg", has_ratio=False),
    "cispo": Entry(f"{LOSSES}:cispo", reads=CLIP),
    "clip_cov": Entry(
        f"{LOSSES}:clip_cov",
        selects=f"{LOSSES}:clip_cov_tokens",
        replaces_clipped=True,
        reads=(*CLIP, *CLIP_COV),
    ),
    "kl_cov": Entry(
        f"{LOSSES}:kl_cov",
        selects=f"{LOSSES}:kl_cov_tokens",
        moves_without_advantage=True,
        reads=KL_COV,
    ),
}
SERVING = (  # what a serving engine reads
    *("tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
    *("enable_chunked_prefill", "enable_prefix_caching"),
)
ENGINES = {  # actor_rollout_ref.rollout.name
    "hf": Entry("core.engines.hf:make"),
    "vllm": Entry("core.engines.vllm:make", package="vllm", reads=SERVING),
    "sglang": Entry(
        "core.engines.sglang:make",
        problems="core.engines.sglang:problems",
        seeded=False,
        reads_media=False,
        kept_sets=False,
    ),
}
# reward_model.reward_manager. The length penalty of verl's dapo is DAPO's shape_reward.
REWARD_MANAGERS = ("naive", "batch", "prime", "dapo")
LOGGERS = {  # trainer.logger
    "console": Entry("core.tracking.loggers:ConsoleLogger"),
    "jsonl": Entry(),
    "tensorboard": Entry("core.tracking.loggers:TensorboardLogger", package="tensorboard"),
    "wandb": Entry(
        "core.tracking.loggers:WandbLogger", package="wandb", login="unless WANDB_MODE=offline"
    ),
}
TOOL_AGENT = "tool_agent"  # verl's name
OUTSIDE_AGENT = "outside_agent"
HF_CACHE_GIB = 4.0  # default of engine_kwargs.hf.cache_gib
AGENT_LOOPS = {  # actor_rollout_ref.rollout.agent_loop
    TOOL_AGENT: "core.rollout.tool_agent:ToolAgentLoop",
    OUTSIDE_AGENT: "core.rollout.outside_agent:OutsideAgentLoop",
}

# --- types of keys, and other names ---

PICTURE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # model_type of models that read pictures
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL, *(f"{kind}+" for kind in _KL))
_MEANS = ("token-sum", "token-mean", "token-sum-norm")
LOSS_AGG_MODES = ("token-mean", *(f"seq-mean-{mean}" for mean in _MEANS))


def _entry(table: Mapping[str, Entry], name: str) -> Entry:
    """Return a name's entry. A user's own function may read any key that entries read."""
    return table.get(name) or Entry(name, [key for entry in table.values() for key in entry.reads])


def estimator(name: str) -> Entry:
    """Return the estimator's entry. A user's own provides for itself what it needs."""
    return _entry(ESTIMATORS, name)


def policy_loss(name: str) -> Entry:
    """Return the policy loss's entry. A user's own has a ratio."""
    return _entry(POLICY_LOSSES, name)


def logger(name: str) -> Entry:
    """Return the logger's entry; a user's own is its path."""
    return LOGGERS.get(name) or Entry(name)
