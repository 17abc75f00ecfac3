"""What is wrong between keys: a table of rules, all of which are looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from core.config import convert, thresholds
from core.config.batch_rules import BATCHES, MEMORY
from core.config.convert import Problem
from core.config.reward_rules import JUDGES
from core.config.rule import ACTOR, ROLLOUT, Rule, always
from core.config.view import View

GROUPED = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")  # core.advantages.NEEDS
PER_SEQUENCE = ("gspo", "sapo")  # core.losses.AGGREGATION
HF_OPTIONS = ("cache_gib", "max_batch_rows", "max_prefill_tokens")  # core.engines.hf.HFEngine
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DAPO = "use the recipe whose trainer does: python -m recipes.dapo.main_dapo"


def problems(view: View, bad: Collection[str] = ()) -> list[Problem]:
    """What is broken. ``bad`` are keys that were refused already and now hold their default."""
    return [problem for rule in RULES if (problem := rule.check(view, bad)) is not None]


def warnings(view: View) -> list[str]:
    return [str(problem) for rule in WARNINGS if (problem := rule.check(view, ())) is not None]


# --- groups, shaping, filtering ---

HOOKS = (
    Rule(
        "algorithm.filter_groups.enable",
        lambda v: v.filters.enable and "keep_group" not in v.hooks,
        "recipe {recipe} keeps every group: its trainer has no keep_group",
        DAPO,
    ),
    Rule(
        "reward_model.overlong_buffer.enable",
        lambda v: v.buffer.enable and "shape_reward" not in v.hooks,
        "recipe {recipe} does not shape rewards: its trainer has no shape_reward",
        DAPO,
    ),
    Rule(
        f"{ACTOR}.overlong_filtering",
        lambda v: v.actor.overlong_filtering and "shape_reward" not in v.hooks,
        "recipe {recipe} does not mask truncated answers: its trainer has no shape_reward",
        DAPO,
    ),
)

# --- episodes ---

SEARCHING = "python -m recipes.search_r1.main_search_r1"
SEARCH_KEYS = (
    *("max_turns", "do_search", "data.max_start_length", "data.max_obs_length"),
    *(f"retriever.{name}" for name in ("url", "topk", "prefetch", "client", "local")),
)


def _given(v: View, key: str) -> bool:
    return any(given == key or given.startswith(f"{key}.") for given in v.given)


EPISODES = (
    *(
        Rule(
            key,
            lambda v, key=key: "generate" not in v.hooks and _given(v, key),
            "belongs to Search-R1, and the trainer of recipe {recipe} does not search",
            f"use the recipe whose trainer does: {SEARCHING}",
        )
        for key in SEARCH_KEYS
    ),
    Rule(
        f"{ROLLOUT}.agent_loop",
        lambda v: v.rollout.agent_loop and v.rollout.multi_turn.enable,
        "and multi_turn.enable=True, which is the tool agent, both say how an episode goes",
        "leave one out",
    ),
    Rule(
        f"{ROLLOUT}.agent_loop",
        lambda v: "generate" in v.hooks and v.rollout.agent_loop is None,
        "the trainer of recipe {recipe} plays episodes",
        "leave it out, or name a class: path/file.py:Class",
    ),
    Rule(
        f"{ROLLOUT}.multi_turn.tool_config_path",
        lambda v: v.rollout.multi_turn.enable and not v.rollout.multi_turn.tool_config_path,
        "is needed with multi_turn.enable=True",
        "name a YAML file with tools (core/tools.py says what it holds)",
    ),
    Rule(
        "data.max_start_length",
        lambda v: v.data.max_start_length is not None and v.data.max_start_length > v.data.max_prompt_length,
        "must be at most data.max_prompt_length={data.max_prompt_length}, which holds prompt and episode",
        "lower it, or leave it out",
    ),
)

GROUPS = (
    Rule(
        f"{ROLLOUT}.n",
        lambda v: v.rollout.n == 1 and v.algorithm.adv_estimator in GROUPED,
        "algorithm.adv_estimator={algorithm.adv_estimator} compares the answers to a prompt, so it needs at least 2",
        f"set {ROLLOUT}.n=5, say, or use gae, reinforce_plus_plus or remax",
    ),
    Rule(
        f"{ROLLOUT}.n",
        lambda v: v.rollout.n == 1 and v.filters.enable and v.algorithm.adv_estimator not in GROUPED,
        "algorithm.filter_groups.enable=True drops groups of equal answers, and one answer equals itself",
        f"set {ROLLOUT}.n=16, say, or algorithm.filter_groups.enable=False",
    ),
    Rule(
        "data.gen_batch_size",
        lambda v: v.filters.enable and v.data.gen_batch_size < v.data.train_batch_size,
        "must be at least data.train_batch_size={data.train_batch_size} where groups are filtered",
        "raise it (three times the training batch is usual), or leave it out",
    ),
    Rule(
        "algorithm.filter_groups.max_num_gen_batches",
        lambda v: v.filters.enable and v.filters.max_num_gen_batches == 0,
        "must be at least 1: collecting for a step is bounded",
        "set 10, say; at the bound the step trains on the groups there are",
    ),
    Rule(
        "algorithm.filter_groups.metric",
        lambda v: v.filters.enable and v.filters.metric == "seq_final_reward" and v.algorithm.use_kl_in_reward,
        "holds the KL penalty, which is known only after the groups are collected",
        "use acc, score or seq_reward, or algorithm.use_kl_in_reward=False",
    ),
    Rule(
        "reward_model.overlong_buffer.len",
        lambda v: v.buffer.enable and not 1 <= v.buffer.len <= v.data.max_response_length,
        "must be between 1 and data.max_response_length={data.max_response_length}",
        "shorten the buffer, or lengthen the response",
    ),
    Rule(
        "reward_model.overlong_buffer.penalty_factor",
        lambda v: v.buffer.enable and v.buffer.penalty_factor == 0,
        "penalises nothing",
        "set 1.0, or reward_model.overlong_buffer.enable=False",
    ),
)

# --- reward managers ---

LEAST_MEMORY_MB = 256  # of address space: a worker with the scorers imported maps about 120


MANAGERS = (
    Rule(
        "reward_model.reward_manager",
        lambda v: v.reward.source == "register" and v.reward.reward_manager == "batch" and not v.custom.path,
        "calls a function of yours with lists of answers, and there is none",
        "set custom_reward_function.path, or use prime",
    ),
    *(
        Rule(
            f"reward_model.module.{name}",
            lambda v, name=name: v.reward.source == "importlib" and not getattr(v.reward.module, name),
            "is needed with reward_model.source=importlib",
            "name the manager's class and its file or module, or use reward_model.source=register",
        )
        for name in ("path", "name")
    ),
    Rule(
        "reward_model.memory_limit_mb",
        lambda v: v.reward.memory_limit_mb is not None and v.reward.memory_limit_mb < LEAST_MEMORY_MB,
        f"is too little for a worker that has only started; at least {LEAST_MEMORY_MB}",
        "raise it, or null for no limit",
    ),
)

# --- sampling ---

TRUNCATED = "samples from another distribution than the one that trains, and no rollout correction weighs for it"
CORRECTION = "algorithm.rollout_correction"
WEIGH = f"or {CORRECTION}.rollout_is=token"


def _no_criteria(v: View) -> bool:
    one = v.correction
    if one.rollout_rs is None:
        return False
    try:
        thresholds.criteria(one.rollout_rs, one.rollout_rs_threshold, one.rollout_rs_threshold_lower)
    except ValueError:
        return True
    return False


MISMATCH = (
    Rule(
        f"{CORRECTION}.rollout_rs",
        _no_criteria,
        "its thresholds do not fit it: as many as options, above 0, the lower below the upper, lower_upper for k1 only",
        f"set {CORRECTION}.rollout_rs_threshold: 2.0 for token, 1.001 for geometric, say",
    ),
    Rule(
        f"{CORRECTION}.bypass_mode",
        lambda v: v.correction.bypass_mode and v.correction.rollout_rs is not None,
        "skips the learner's log-probs before the update, which rollout_rs compares with the engine's",
        "switch one off",
    ),
    Rule(
        f"{CORRECTION}.bypass_mode",
        lambda v: v.correction.bypass_mode and v.correction.rollout_token_veto_threshold is not None,
        "skips the learner's log-probs before the update, of which rollout_token_veto_threshold is a bound",
        "switch one off",
    ),
    Rule(
        f"{CORRECTION}.bypass_mode",
        lambda v: v.correction.bypass_mode and v.algorithm.use_kl_in_reward,
        "skips the learner's log-probs before the update, of which the KL penalty in the reward is made",
        f"use {ACTOR}.use_kl_loss, or switch one off",
    ),
    Rule(
        "trainer.max_staleness",
        lambda v: v.trainer.max_staleness > 0 and not v.corrects,
        "trains on samples of an older policy, and no rollout correction weighs for it",
        f"set {CORRECTION}.rollout_is=token, or bypass_mode=True there",
    ),
    Rule(
        "trainer.max_staleness",
        lambda v: v.trainer.max_staleness > 1,
        "is at most 1: the next step's samples are drawn while this one updates, and no earlier",
        "set 1, or 0 for samples of the policy that they train",
    ),
)

SAMPLING = (
    Rule(
        f"{ROLLOUT}.top_p",
        lambda v: v.rollout.top_p < 1 and not v.corrects,
        TRUNCATED,
        f"set 1.0 (val_kwargs.top_p is free), {WEIGH}",
    ),
    Rule(
        f"{ROLLOUT}.top_k",
        lambda v: v.rollout.top_k != -1 and not v.corrects,
        TRUNCATED,
        f"set -1 (val_kwargs.top_k is free), {WEIGH}",
    ),
    Rule(
        f"{ROLLOUT}.temperature",
        lambda v: v.rollout.temperature == 0 and v.rollout.do_sample,
        "training needs answers that differ",
        "set 1.0; greedy validation is val_kwargs.do_sample=False",
    ),
    Rule(
        f"{ROLLOUT}.do_sample",
        lambda v: not v.rollout.do_sample and not v.trainer.val_only,
        "training needs answers that differ",
        "leave it out; greedy validation is val_kwargs.do_sample=False",
    ),
    Rule(
        f"{ROLLOUT}.val_kwargs.n",
        lambda v: v.val.n > 1 and not v.val.do_sample,
        "greedy answers to a question are all the same",
        f"set {ROLLOUT}.val_kwargs.do_sample=True and a temperature, or n=1",
    ),
    Rule(
        f"{ROLLOUT}.val_kwargs.temperature",
        lambda v: v.val.do_sample and v.val.temperature == 0,
        f"contradicts {ROLLOUT}.val_kwargs.do_sample=True",
        "set a temperature, or do_sample=False for greedy answers",
    ),
    Rule(
        f"{ROLLOUT}.max_model_len",
        lambda v: (
            v.rollout.name == "vllm" and v.rollout.max_model_len is not None and v.rollout.max_model_len < v.longest
        ),
        "must hold max_prompt_length + max_response_length = {longest} tokens",
        "raise it, or leave it out",
    ),
    Rule(
        f"{ROLLOUT}.max_num_batched_tokens",
        lambda v: (
            v.rollout.name == "vllm"
            and not v.rollout.enable_chunked_prefill
            and v.rollout.max_num_batched_tokens < v.longest
        ),
        "must hold a sequence of {longest} tokens where prefill is not chunked",
        f"raise it, or {ROLLOUT}.enable_chunked_prefill=True",
    ),
    Rule(
        f"{ROLLOUT}.max_num_batched_tokens",
        lambda v: v.rollout.name == "vllm" and v.rollout.max_num_batched_tokens < v.rollout.max_num_seqs,
        f"must be at least {ROLLOUT}.max_num_seqs={{rollout.max_num_seqs}}: each sequence takes one of them a step",
        "change one of them",
    ),
    Rule(
        "actor_rollout_ref.hybrid_engine",
        lambda v: not v.policy.hybrid_engine and v.trainer.backend == "local",
        "needs a cluster: trainer.backend=local runs learner and engine in one process",
        "set trainer.backend=ray, or leave it out",
    ),
)


def _strange_options(v: View) -> set[str]:
    return set(v.rollout.engine_kwargs.get("hf") or ()) - set(HF_OPTIONS) if v.rollout.name == "hf" else set()


ENGINE = (
    Rule(
        f"{ROLLOUT}.engine_kwargs",
        _strange_options,
        f"hf has {', '.join(HF_OPTIONS)} and no other option",
        "leave out what it lacks",
    ),
)

# --- objective ---


def _optim_rules(key: str, runs: Callable[[View], bool]) -> tuple[Rule, ...]:
    def of(v: View) -> Any:
        return v[key].optim

    def unknown_length(v: View) -> bool:
        return runs(v) and v.filters.enable and v.trainer.total_training_steps is None

    section = ACTOR if key == "actor" else key
    known = "needs the number of training steps, which filtering leaves open", "set trainer.total_training_steps"
    return (
        Rule(
            f"{section}.optim.lr_scheduler_type",
            lambda v: of(v).lr_scheduler_type == "cosine" and unknown_length(v),
            *known,
        ),
        Rule(
            f"{section}.optim.lr_warmup_steps_ratio",
            lambda v: of(v).lr_warmup_steps < 0 and of(v).lr_warmup_steps_ratio > 0 and unknown_length(v),
            known[0],
            "set trainer.total_training_steps, or give lr_warmup_steps",
        ),
        Rule(
            f"{section}.optim.lr_warmup_steps",
            lambda v: (
                runs(v) and v.trainer.total_training_steps and of(v).lr_warmup_steps > v.trainer.total_training_steps
            ),
            "is longer than the run of trainer.total_training_steps={trainer.total_training_steps}",
            "shorten the warm-up (it counts RL steps, not optimizer steps)",
        ),
    )


OBJECTIVE = (
    *_optim_rules("actor", always),
    *_optim_rules("critic", lambda v: v.critic.enable),
    Rule(
        "critic.enable",
        lambda v: v.critic.enable != (v.algorithm.adv_estimator == "gae"),
        "algorithm.adv_estimator={algorithm.adv_estimator} decides: there is a critic with gae, and with no other",
        "leave it out",
    ),
    Rule(
        "trainer.critic_warmup",
        lambda v: (
            v.critic.enable
            and v.trainer.total_training_steps is not None
            and v.trainer.critic_warmup >= v.trainer.total_training_steps
        ),
        "leaves no step of trainer.total_training_steps={trainer.total_training_steps} to the policy",
        "shorten it",
    ),
    Rule(
        f"{ACTOR}.loss_agg_mode",
        lambda v: (
            f"{ACTOR}.loss_agg_mode" in v.given
            and v.actor.policy_loss.loss_mode in PER_SEQUENCE
            and v.actor.loss_agg_mode != "seq-mean-token-mean"
        ),
        "policy_loss.loss_mode={actor.policy_loss.loss_mode} is defined with seq-mean-token-mean",
        "leave it out",
    ),
    Rule(
        "algorithm.kl_ctrl.horizon",
        lambda v: v.kl.type == "adaptive" and v.kl.horizon <= 0,
        "must be above 0 with algorithm.kl_ctrl.type=adaptive",
        "the default is 10000 sequences",
    ),
    Rule(
        "algorithm.kl_ctrl.target_kl",
        lambda v: v.kl.type == "adaptive" and v.kl.target_kl <= 0,
        "must be above 0 with algorithm.kl_ctrl.type=adaptive",
        "the default is 0.1",
    ),
    Rule(
        "algorithm.kl_ctrl.kl_coef",
        lambda v: v.kl.type == "adaptive" and v.kl.kl_coef == 0 and v.algorithm.use_kl_in_reward,
        "is multiplied by the adaptive controller, so it stays 0",
        "set 0.001, say, or algorithm.use_kl_in_reward=False",
    ),
)

# --- data, models, runs ---


def _strange_model(path: str | None) -> bool:
    return path is not None and not path.startswith(("/", ".", "~")) and HUB_ID.fullmatch(path) is None


def _model_rule(key: str) -> Rule:
    return Rule(
        key,
        lambda v: _strange_model(convert.get(v.config, key)) and not v.seen.add(key),
        "must be a hub id (org/name) or a folder that starts with /, . or ~",
        "write ./ in front of a relative folder",
    )


SURROUNDINGS = (
    Rule(
        "global_profiler.steps",
        lambda v: v.profiler.tool is not None and not v.profiler.steps,
        "names no step, so global_profiler.tool={profiler.tool} would profile nothing",
        "set global_profiler.steps=[3,4], say; the first step is slower than the others",
    ),
    Rule(
        "global_profiler.steps",
        lambda v: (
            v.profiler.tool is not None
            and v.trainer.total_training_steps is not None
            and any(step > v.trainer.total_training_steps for step in v.profiler.steps or ())
        ),
        "goes beyond trainer.total_training_steps={trainer.total_training_steps}",
        "name earlier steps",
    ),
    Rule(
        "global_profiler.tool",
        lambda v: v.profiler.tool == "nsys" and v.trainer.backend == "local",
        "is started around Ray's workers, and trainer.backend=local has none",
        "use torch, or start the whole command under nsys profile",
    ),
    *(_model_rule(f"actor_rollout_ref.model.{name}") for name in ("path", "tokenizer_path")),
    Rule(
        "critic.model.path",
        lambda v: v.critic.model.path != v.model.path and _strange_model(v.critic.model.path),
        "must be a hub id (org/name) or a folder that starts with /, . or ~",
        "write ./ in front of a relative folder, or leave it out for the policy's",
    ),
    Rule(
        "data.dataset_weights",
        lambda v: (
            v.data.curriculum is None
            and v.data.dataset_weights is not None
            and len(v.data.dataset_weights) != len(v.data.train_files)
        ),
        "must have one weight a file of data.train_files",
        "give a weight to each, or null for the number of rows",
    ),
    Rule(
        "data.dataset_weights",
        lambda v: v.data.curriculum is not None and v.data.dataset_weights is not None,
        "has no meaning with data.curriculum",
        "give each stage its weights: {{files: [...], weights: [...]}}",
    ),
    Rule(
        "data.curriculum",
        lambda v: v.data.curriculum is not None and not v.data.curriculum,
        "must have a stage",
        "give [{{files: [...], prompts: N}}, ...], or null",
    ),
    Rule(
        "data.train_max_samples",
        lambda v: v.data.curriculum is not None and v.data.train_max_samples != -1,
        "has no meaning with data.curriculum",
        "leave it at -1",
    ),
    Rule(
        "trainer.resume_from_path",
        lambda v: v.trainer.resume_mode == "resume_path" and not v.trainer.resume_from_path,
        "is needed with trainer.resume_mode=resume_path",
        "name a checkpoint: <run>/global_step_N",
    ),
)

RULES = (
    *BATCHES,
    *MEMORY,
    *HOOKS,
    *EPISODES,
    *GROUPS,
    *MANAGERS,
    *JUDGES,
    *MISMATCH,
    *SAMPLING,
    *ENGINE,
    *OBJECTIVE,
    *SURROUNDINGS,
)

FULL = ("fp32", "float32")
PENALISED = ("seq_reward", "seq_final_reward", "overlong", "is_overlong")  # what a shaped score's length enters

WARNINGS = (
    Rule(
        f"{ROLLOUT}.dtype",
        lambda v: (v.rollout.dtype in FULL) != (v.actor.fsdp_config.dtype in FULL),
        "the engine's precision is not the learner's (fsdp_config.dtype={actor.fsdp_config.dtype}): log-probs differ",
        "set both",
    ),
    Rule(
        f"{ACTOR}.use_kl_loss",
        lambda v: v.actor.use_kl_loss and v.algorithm.use_kl_in_reward,
        "the KL to the reference is penalised twice, in the loss and in the reward",
        "switch one off, unless that is meant",
    ),
    Rule(
        f"{ACTOR}.policy_loss.loss_mode",
        lambda v: v.actor.policy_loss.loss_mode == "gspo" and v.actor.clip_ratio_high > 0.05,
        "gspo clips the ratio of a whole sequence, and clip_ratio_high={actor.clip_ratio_high} is never reached",
        "the paper's bounds are clip_ratio_low=3e-4, clip_ratio_high=4e-4",
    ),
    Rule(
        "algorithm.filter_groups.metric",
        lambda v: v.filters.enable and v.buffer.enable and v.filters.metric in PENALISED,
        "holds the length penalty: groups of equal answers are then kept for their lengths",
        "acc is what the scorer calls correct",
    ),
    Rule(
        "trainer.total_epochs",
        lambda v: "keep_group" in v.hooks and v.trainer.total_epochs == 1 and v.trainer.total_training_steps is None,
        "ends after one pass: DAPO's length only over its published file, which holds each prompt about 100 times",
        "over data_preprocess.dapo_math's rows set trainer.total_training_steps (the paper: 330 of 512 prompts)",
    ),
    Rule(
        f"{ROLLOUT}.val_kwargs.n",
        lambda v: "keep_group" in v.hooks and v.val.do_sample and v.val.n == 1,
        "samples one answer a question: avg@32 only over DAPO's published AIME file, which holds each 32 times",
        f"over data_preprocess.aime's 30 rows set {ROLLOUT}.val_kwargs.n=32",
    ),
)
