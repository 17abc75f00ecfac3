"""Supported keys that do nothing in this configuration: listed with the reason where an override set them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from core.config import tables
from core.config.rules.algorithm import CORRECTION
from core.config.rules.rule import ACTOR, REF, ROLLOUT, always
from core.config.rules.sizes import PASSES
from core.config.view import View

MODEL = "actor_rollout_ref.model"

# keys (patterns), when, why; the reason is formatted with the view
Entry = tuple[tuple[str, ...], Callable[[View], object], str]


MODELS: tuple[Entry, ...] = (
    (
        (f"{REF}.*",),
        lambda v: not v.needs_ref,
        f"there is no reference policy: algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss are off",
    ),
    (
        ("critic.*", "trainer.critic_warmup"),
        lambda v: not v.critic.enable,
        "algorithm.adv_estimator={algorithm.adv_estimator} has no critic",
    ),
)

ADAPTERS: tuple[Entry, ...] = (
    *(
        (
            tuple(f"{section}.{key}" for key in ("lora_alpha", "target_modules", "exclude_modules")),
            lambda v, name=name: not v[name].lora_rank,
            f"{section}.lora_rank=0 trains all weights",
        )
        for section, name in ((MODEL, "model"), ("critic.model", "critic_model"))
    ),
    (
        (f"{REF}.fsdp_config.*",),
        lambda v: v.model.lora_rank,
        f"{MODEL}.lora_rank is set: the reference is the policy without its adapters",
    ),
)

OBJECTIVE: tuple[Entry, ...] = (
    (
        ("algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
        lambda v: not v.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is off",
    ),
    (
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        lambda v: v.kl.type == "fixed",
        "algorithm.kl_ctrl.type is fixed",
    ),
    (
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        lambda v: not v.actor.use_kl_loss,
        f"{ACTOR}.use_kl_loss is off",
    ),
    (
        ("algorithm.gamma",),
        lambda v: "gamma" not in v.estimator.reads,
        "{algorithm.adv_estimator} does not discount",
    ),
    (
        ("algorithm.lam",),
        lambda v: "lam" not in v.estimator.reads,
        f"only {tables.readers(tables.ESTIMATORS, 'lam')} has it",
    ),
    (
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda v: "norm_adv_by_std_in_grpo" not in v.estimator.reads,
        "{algorithm.adv_estimator} does not divide by the group's standard deviation",
    ),
    (
        (f"{ACTOR}.clip_ratio",),
        lambda v: {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"} <= v.given,
        "clip_ratio_low and clip_ratio_high are both given",
    ),
    (
        (f"{ACTOR}.clip_ratio_c",),
        lambda v: "clip_ratio_c" not in v.loss.reads,
        "{actor.policy_loss.loss_mode} has no dual clip",
    ),
    (
        (f"{ACTOR}.clip_ratio*",),
        lambda v: "clip_ratio" not in v.loss.reads,
        "{actor.policy_loss.loss_mode} does not clip",
    ),
    (
        (f"{ACTOR}.tau_*",),
        lambda v: "tau_pos" not in v.loss.reads,
        f"only {tables.readers(tables.POLICY_LOSSES, 'tau_pos')} has it",
    ),
    (
        (f"{ACTOR}.loss_agg_mode",),
        lambda v: v.loss.aggregation is not None,
        "{actor.policy_loss.loss_mode} is defined with {loss.aggregation}",
    ),
    (
        ("*.loss_scale_factor",),
        lambda v: v.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "only seq-mean-token-sum-norm has it",
    ),
    ((f"{ACTOR}.data_loader_seed",), lambda v: not v.actor.shuffle, f"{ACTOR}.shuffle is off"),
    (("critic.data_loader_seed",), lambda v: not v.critic.shuffle, "critic.shuffle is off"),
)


def _schedule(section: str, name: str) -> tuple[Entry, ...]:
    return (
        (
            (f"{section}.optim.min_lr_ratio", f"{section}.optim.num_cycles"),
            lambda v: v[name].optim.lr_scheduler_type != "cosine",
            "the learning rate is not a cosine",
        ),
        (
            (f"{section}.optim.lr_warmup_steps_ratio",),
            lambda v: v[name].optim.lr_warmup_steps >= 0,
            "lr_warmup_steps is given",
        ),
    )


def _passes(section: str, micro: str, dynamic: str, budget: str) -> tuple[Entry, ...]:
    name = section.rsplit(".", 1)[-1]
    return (
        ((f"{section}.{micro}",), lambda v: getattr(v[name], dynamic), f"{dynamic} packs passes by tokens"),
        ((f"{section}.{budget}",), lambda v: not getattr(v[name], dynamic), f"{dynamic} is off"),
    )


MISMATCH: tuple[Entry, ...] = (
    (
        (f"{CORRECTION}.rollout_is*",),
        lambda v: v.correction.bypass_mode,
        "with bypass_mode the loss's own ratio is the importance weight",
    ),
    (
        (f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_batch_normalize"),
        lambda v: v.correction.rollout_is is None,
        f"{CORRECTION}.rollout_is is not set",
    ),
    (
        (f"{CORRECTION}.rollout_rs_threshold*",),
        lambda v: v.correction.rollout_rs is None,
        f"{CORRECTION}.rollout_rs is not set",
    ),
    (
        (f"{CORRECTION}.bypass_mode",),
        lambda v: v.correction.bypass_mode and not v.loss.has_ratio,
        "{actor.policy_loss.loss_mode} has no ratio",
    ),
)

MEMORY: tuple[Entry, ...] = tuple(entry for one in PASSES for entry in _passes(*one[:4]))

SAMPLING: tuple[Entry, ...] = (
    (
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")),
        lambda v: not v.val.do_sample,
        f"validation is greedy; {ROLLOUT}.val_kwargs.do_sample=True samples",
    ),
    *(
        (
            (f"{ROLLOUT}.{name}",),
            lambda v, name=name: name not in v.engine.reads,
            f"{ROLLOUT}.name={{rollout.name}} has no such setting",
        )
        for entry in tables.ENGINES.values()
        for name in entry.reads
    ),
    (
        tuple(f"{ROLLOUT}.engine_kwargs.{engine}*" for engine in ("vllm", "sglang")),
        lambda v: v.rollout.name != "vllm",
        f"{ROLLOUT}.name={{rollout.name}} has no such setting",
    ),
    (
        (f"{ROLLOUT}.engine_kwargs.hf*",),
        lambda v: v.rollout.name != "hf",
        f"{ROLLOUT}.name={{rollout.name}} has engine_kwargs.{{rollout.name}}",
    ),
    (
        (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"),
        lambda v: v.policy.hybrid_engine,
        "the engine is on the trainer's GPUs; actor_rollout_ref.hybrid_engine=False gives it its own",
    ),
    (
        (f"{ROLLOUT}.free_cache_engine",),
        lambda v: not v.policy.hybrid_engine,
        "the engine has GPUs of its own (actor_rollout_ref.hybrid_engine=False)",
    ),
)


def _one_turn(v: View) -> bool:
    return v.rollout.agent_loop is None and not v.rollout.multi_turn.enable


def _searches(v: View) -> bool:
    return v.config.do_search or v.config.retriever.prefetch


TOOL_AGENT = (
    *("max_assistant_turns", "max_user_turns", "max_tool_calls", "max_parallel_calls", "tool_config_path", "format"),
    *("tool_timeout_s", "max_tool_response_length", "tool_response_truncate_side"),
)

EPISODES: tuple[Entry, ...] = (
    (
        (*(f"{ROLLOUT}.multi_turn.{name}" for name in (*TOOL_AGENT, "repeatable")), f"{ACTOR}.state_masking"),
        _one_turn,
        "a trajectory is one turn: neither agent_loop nor multi_turn.enable is set",
    ),
    (
        (f"{ROLLOUT}.multi_turn.repeatable",),
        lambda v: v.rollout.name != "hf" or v.trainer.backend != "local",
        "only an engine in this process waits for tools",
    ),
    (("max_turns",), lambda v: not v.config.do_search, "do_search is off"),
    (("retriever.*", "data.max_obs_length"), lambda v: not _searches(v), "do_search and retriever.prefetch are off"),
    (("retriever.client*",), lambda v: v.config.retriever.url is None, "retriever.url is null: no server is asked"),
    (("retriever.local*",), lambda v: v.config.retriever.url is not None, "retriever.url names a server"),
)

SHARDING = (
    "param_offload",
    "optimizer_offload",
    "offload_policy",
    "reshard_after_forward",
    "forward_prefetch",
    "fsdp_size",
)

PLACES: tuple[Entry, ...] = (
    (
        (
            *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.balance_batch", "ray_kwargs.*"),
            *("trainer.phase_timeout_s", "trainer.heartbeat_timeout_s"),
            *(f"*.fsdp_config.{name}" for name in SHARDING),
            *(f"{REF}.fsdp_config.dtype", "*.ulysses_sequence_parallel_size", "*.strategy"),
            f"{ROLLOUT}.tensor_model_parallel_size",
        ),
        lambda v: v.trainer.backend == "local",
        "trainer.backend=local runs one rank in this process",
    ),
)

HEALTH = ("nonfinite", "entropy", "reward_drop", "logp_diff", "zero_variance", "scorer_errors")

PROFILER: tuple[Entry, ...] = (
    (("global_profiler.*",), lambda v: v.profiler.tool is None, "global_profiler.tool is not set"),
    (
        ("global_profiler.global_tool_config.*",),
        lambda v: v.profiler.tool != "nsys",
        "global_profiler.tool is not nsys",
    ),
    (
        ("global_profiler.save_path",),
        lambda v: v.profiler.tool == "nsys",
        "Ray keeps nsys reports in logs/nsight of its session",
    ),
)

RUNS: tuple[Entry, ...] = (
    *(
        (
            (f"trainer.health.{name}.action",),
            lambda v, name=name: getattr(v.trainer.health, name).bound is None,
            f"trainer.health.{name}.bound is not set",
        )
        for name in HEALTH
    ),
    (
        ("trainer.health.reward_window",),
        lambda v: v.trainer.health.reward_drop.bound is None,
        "trainer.health.reward_drop.bound is not set",
    ),
    (
        ("trainer.total_epochs",),
        lambda v: v.trainer.total_training_steps is not None,
        "trainer.total_training_steps is given",
    ),
    (
        tuple(f"algorithm.filter_groups.{name}" for name in ("metric", "max_num_gen_batches", "on_exhausted")),
        lambda v: not v.filters.enable,
        "algorithm.filter_groups.enable is off",
    ),
    (
        tuple(f"reward_model.overlong_buffer.{name}" for name in ("len", "penalty_factor", "log")),
        lambda v: not v.buffer.enable,
        "reward_model.overlong_buffer.enable is off",
    ),
    (
        tuple(f"reward_model.{name}" for name in ("num_workers", "timeout_s", "memory_limit_mb")),
        lambda v: v.manager.in_process,
        "reward_model.reward_manager={reward.reward_manager} grades in this process, "
        "but for what sympy and math-verify compare (prime_math, geo3k, method=math_verify); prime has workers for all",
    ),
    (
        (
            *(f"reward_model.{name}" for name in ("model.*", "max_length", "micro_batch_size_per_gpu")),
            *("reward_model.use_dynamic_bsz", "reward_model.forward_max_token_len_per_gpu"),
        ),
        lambda v: not v.reward.enable,
        "reward_model.enable is off",
    ),
    (
        ("reward_model.micro_batch_size_per_gpu",),
        lambda v: v.reward.use_dynamic_bsz,
        "use_dynamic_bsz packs passes by tokens",
    ),
    (
        ("reward_model.forward_max_token_len_per_gpu",),
        lambda v: not v.reward.use_dynamic_bsz,
        "use_dynamic_bsz is off",
    ),
    (
        tuple(f"reward_model.model.fsdp_config.{name}" for name in SHARDING),
        always,
        "one process holds the reward model",
    ),
    (
        ("reward_model.reward_manager",),
        lambda v: v.reward.source == "importlib",
        "reward_model.source=importlib takes the manager of reward_model.module",
    ),
    (
        tuple(f"reward_model.sandbox_fusion.{name}" for name in ("max_concurrent", "memory_limit_mb")),
        lambda v: not v.reward.sandbox_fusion.url,
        "reward_model.sandbox_fusion.url is not set",
    ),
    (
        ("reward_model.module.*",),
        lambda v: v.reward.source == "register",
        "reward_model.source is not importlib",
    ),
    (
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs*"),
        lambda v: not v.custom.path,
        "custom_reward_function.path is not set",
    ),
    (
        ("trainer.resume_from_path",),
        lambda v: v.trainer.resume_mode != "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    (("trainer.max_actor_ckpt_to_keep",), lambda v: v.trainer.save_freq == -1, "trainer.save_freq is off"),
    (("trainer.val_before_train",), lambda v: v.trainer.val_only, "trainer.val_only is on"),
)

ENTRIES = (
    *(*MODELS, *ADAPTERS, *OBJECTIVE, *_schedule(ACTOR, "actor"), *_schedule("critic", "critic"), *MEMORY),
    *(*MISMATCH, *SAMPLING, *EPISODES, *PLACES, *PROFILER, *RUNS),
)


def reasons(view: View, keys: Iterable[str]) -> dict[str, str]:
    """Key -> why it does nothing, for those of ``keys`` that do nothing."""
    found = {}
    for key in keys:
        for patterns, applies, reason in ENTRIES:
            if any(fnmatchcase(key, pattern) for pattern in patterns) and applies(view):
                found[key] = reason.format_map(view)
                break
    return found
