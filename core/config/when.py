"""When a key has an effect, and what is said where it has none: the ``used_if`` of fields in ``sections/``.

A condition reads the configuration through a :class:`core.config.rules.View`, and ``c.own``, the section that holds the
key. A dry run lists keys that were given and have no effect, with the reason; nothing is ignored silently.
"""

from __future__ import annotations

from core.config import registry
from core.config.section import condition

OVER_RAY = condition(
    lambda c: c.trainer.backend == "ray",
    "trainer.backend=local runs one rank in this process",
)

# --- models and their updates ---
ADAPTERS = condition(lambda c: c.own.lora_rank, "lora_rank=0 trains all weights")
NO_ADAPTERS = condition(
    lambda c: not c.model.lora_rank,
    "actor_rollout_ref.model.lora_rank is set: the reference is the policy without its adapters",
)
REFERENCE = condition(
    lambda c: c.needs_ref,
    "there is no reference policy: algorithm.use_kl_in_reward and actor_rollout_ref.actor.use_kl_loss are off",
)
CRITIC = condition(
    lambda c: c.critic.enable, lambda c: f"algorithm.adv_estimator={c.algorithm.adv_estimator} has no critic"
)
BY_RATIO = condition(lambda c: c.own.lr_warmup_steps < 0, "lr_warmup_steps is given")
COSINE = condition(lambda c: c.own.lr_scheduler_type == "cosine", "the learning rate is not a cosine")


def _dynamic(own: object) -> bool:
    """Return whether the passes of a section are packed by tokens."""
    name = "log_prob_use_dynamic_bsz" if hasattr(own, "log_prob_use_dynamic_bsz") else "use_dynamic_bsz"
    return bool(getattr(own, name))


PACKED = condition(lambda c: _dynamic(c.own), "use_dynamic_bsz is off")
NOT_PACKED = condition(lambda c: not _dynamic(c.own), "use_dynamic_bsz packs passes by tokens")

# --- objectives ---
SHUFFLES = condition(lambda c: c.own.shuffle, "shuffle is off")
CLIPS = condition(lambda c: "clip_ratio" in c.loss.reads, lambda c: f"{c.actor.policy_loss.loss_mode} does not clip")
ONE_BOUND = condition(
    lambda c: not all(c.gives(f"actor_rollout_ref.actor.clip_ratio_{end}") for end in ("low", "high")),
    "clip_ratio_low and clip_ratio_high are both given",
)
DUAL_CLIP = condition(
    lambda c: "clip_ratio_c" in c.loss.reads,
    lambda c: f"{c.actor.policy_loss.loss_mode} has no dual clip",
)
CLIP_COV = condition(lambda c: "policy_loss.clip_cov_lb" in c.loss.reads, "only clip_cov has it")
KL_COV = condition(lambda c: "policy_loss.ppo_kl_coef" in c.loss.reads, "only kl_cov has it")
SAPO = condition(
    lambda c: "tau_pos" in c.loss.reads,
    lambda c: f"only {registry.readers(registry.POLICY_LOSSES, 'tau_pos')} has it",
)
FREE_AGGREGATION = condition(
    lambda c: c.loss.aggregation is None,
    lambda c: f"{c.actor.policy_loss.loss_mode} is defined with {c.loss.aggregation}",
)
SUM_NORM = condition(
    lambda c: c.own.loss_agg_mode == "seq-mean-token-sum-norm",
    "only seq-mean-token-sum-norm has it",
)
KL_LOSS = condition(lambda c: c.own.use_kl_loss, "actor_rollout_ref.actor.use_kl_loss is off")
KL_IN_REWARD = condition(lambda c: c.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is off")
ADAPTIVE = condition(lambda c: c.own.type != "fixed", "algorithm.kl_ctrl.type is fixed")
DISCOUNTS = condition(
    lambda c: "gamma" in c.estimator.reads, lambda c: f"{c.algorithm.adv_estimator} does not discount"
)
LAMBDA = condition(
    lambda c: "lam" in c.estimator.reads,
    lambda c: f"only {registry.readers(registry.ESTIMATORS, 'lam')} has it",
)
BY_STD = condition(
    lambda c: "norm_adv_by_std_in_grpo" in c.estimator.reads,
    lambda c: f"{c.algorithm.adv_estimator} does not divide by the group's standard deviation",
)
RATIO = condition(
    lambda c: c.loss.has_ratio or not c.own.bypass_mode,
    lambda c: f"{c.actor.policy_loss.loss_mode} has no ratio",
)
COMPARES = condition(
    lambda c: not c.own.bypass_mode,
    "with bypass_mode the loss's own ratio is the importance weight",
)
WEIGHTS = condition(lambda c: c.own.rollout_is is not None, "algorithm.rollout_correction.rollout_is is not set")
REJECTS = condition(lambda c: c.own.rollout_rs is not None, "algorithm.rollout_correction.rollout_rs is not set")

# --- engines and episodes ---
SERVES = condition(
    lambda c: c.name in c.engine.reads,
    lambda c: f"actor_rollout_ref.rollout.name={c.rollout.name} has no such setting",
)
OF_THE_ENGINE = condition(
    lambda c: c.rest.partition(".")[0] in ("", c.rollout.name),
    lambda c: f"actor_rollout_ref.rollout.name={c.rollout.name} has engine_kwargs.{c.rollout.name}",
)
OWN_POOL = condition(
    lambda c: not c.policy.hybrid_engine,
    "the engine is on the trainer's GPUs; actor_rollout_ref.hybrid_engine=False gives it its own",
)
SHARED_GPUS = condition(
    lambda c: c.policy.hybrid_engine,
    "the engine has GPUs of its own (actor_rollout_ref.hybrid_engine=False)",
)
SAMPLED = condition(
    lambda c: c.own.do_sample,
    "validation is greedy; actor_rollout_ref.rollout.val_kwargs.do_sample=True samples",
)
EPISODES = condition(
    lambda c: c.rollout.agent_loop not in (None, registry.SINGLE_TURN),
    "a trajectory is one turn: neither agent_loop nor multi_turn.enable is set to one of several turns",
)
IN_PROCESS = condition(
    lambda c: c.rollout.name == "hf" and c.trainer.backend == "local",
    "only an engine in this process waits for tools",
)

# --- who grades ---
GRADERS = condition(
    lambda c: c.reward.reward_manager != "naive",
    lambda c: (
        f"reward_model.reward_manager={c.reward.reward_manager} grades in this process, but for what sympy and "
        "math-verify compare (prime_math, geo3k, method=math_verify); prime has workers for all"
    ),
)
SERVER = condition(lambda c: c.own.url, "reward_model.sandbox_fusion.url is not set")
OWN_FUNCTION = condition(lambda c: c.own.path, "custom_reward_function.path is not set")
CLASSIFIER = condition(lambda c: c.reward.enable, "reward_model.enable is off") + condition(
    lambda c: not c.reward.judged, "reward_model.judge.url scores, and no reward model is loaded"
)
POOL = condition(
    lambda c: c.reward.enable_resource_pool,
    "one process holds the reward model (reward_model.enable_resource_pool is off)",
)
NEVER_MOVED = condition(lambda c: False, "the reward model scores while answers are generated, and stays where it is")
JUDGED = condition(lambda c: c.reward.judged, "reward_model.judge.url is not set")

# --- what a run does and records ---
BY_EPOCHS = condition(lambda c: c.own.total_training_steps is None, "trainer.total_training_steps is given")
TRAINS = condition(lambda c: not c.own.val_only, "trainer.val_only is on")
SAVES = condition(lambda c: c.own.save_freq != -1, "trainer.save_freq is off")
RESUMES = condition(lambda c: c.own.resume_mode == "resume_path", "trainer.resume_mode is not resume_path")
TRACED = condition(lambda c: c.own.used, "neither trainer.trace.freq nor trainer.trace.steps is set")
PROFILED = condition(lambda c: c.own.tool, "global_profiler.tool is not set")
BOUNDED = condition(
    lambda c: c.own.bound is not None or ".logp_diff." in c.key and c.follows_rounding,
    "no bound is set beside it",
)
WINDOW = condition(
    lambda c: c.own.reward_drop.bound is not None or c.own.scorer_errors.bound is not None,
    "neither trainer.health.reward_drop.bound nor trainer.health.scorer_errors.bound is set",
)
