"""The rules between keys (see :mod:`core.config.rules`): those that protect an objective, or a long run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from core.config import registry
from core.config.paths import is_local
from core.config.section import FULL_PRECISION
from core.files import is_url

if TYPE_CHECKING:
    from core.config.rules import View

Broken = Iterator[tuple[str, str, str]]  # key, rule, fix
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
ULYSSES, LAYERS = "ulysses_sequence_parallel_size", "tensor_model_parallel_size"
HYBRID, VAL = "actor_rollout_ref.hybrid_engine", f"{ROLLOUT}.val_kwargs"
HF_OPTIONS = ("cache_gib", "max_batch_rows", "max_prefill_tokens")  # core.engines.hf.HFEngine
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
A_MODEL = "must be a hub id (org/name), a folder that starts with /, . or ~, or a URL (s3://...)"


def episodes_fit(c: View) -> Broken:
    limit = c.data.max_prompt_length
    for key in ("data.max_start_length", "data.max_obs_length"):
        if not c.plays_episodes and c.gives(key):
            rule = f"belongs to Search-R1, and the trainer of recipe {c.recipe} does not search"
            yield key, rule, "use the recipe whose trainer does: python -m recipes.search_r1.main_search_r1"
    if c.data.max_start_length is not None and c.data.max_start_length > limit:
        rule = f"must be at most data.max_prompt_length={limit}, which holds prompt and episode"
        yield "data.max_start_length", rule, "lower it, or leave it out"


def a_model_is_a_hub_id_or_a_path(c: View) -> Broken:
    paths = {
        "actor_rollout_ref.model.path": c.model.path,
        "actor_rollout_ref.model.tokenizer_path": c.model.tokenizer_path,
    }
    if c.critic.model.path != c.model.path:
        paths["critic.model.path"] = c.critic.model.path
    for key, path in paths.items():
        if path is not None and not (is_local(path) or is_url(path) or HUB_ID.fullmatch(path)):
            yield key, A_MODEL, "write ./ in front of a relative folder"


def schedules_have_an_end(c: View) -> Broken:
    steps, needs = c.trainer.total_training_steps, "needs the number of training steps, which filtering leaves open"
    for section, optim, runs in ((ACTOR, c.actor.optim, True), ("critic", c.critic.optim, c.critic.enable)):
        open_end = runs and steps is None and c.drops_groups
        if open_end and optim.lr_scheduler_type == "cosine":
            yield f"{section}.optim.lr_scheduler_type", needs, "set trainer.total_training_steps"
        if open_end and optim.lr_warmup_steps < 0 < optim.lr_warmup_steps_ratio:
            yield f"{section}.optim.lr_warmup_steps_ratio", needs, "give lr_warmup_steps or total_training_steps"
        if runs and steps and optim.lr_warmup_steps > steps:
            rule = f"is longer than the run of trainer.total_training_steps={steps}"
            yield f"{section}.optim.lr_warmup_steps", rule, "shorten the warm-up, which counts RL steps"


def the_critic(c: View) -> Broken:
    steps = c.trainer.total_training_steps
    if c.critic.enable != c.estimator.critic:
        rule = f"algorithm.adv_estimator={c.algorithm.adv_estimator} decides: a critic is there with gae alone"
        yield "critic.enable", rule, "leave it out"
    if c.critic.enable and steps is not None and c.trainer.critic_warmup >= steps:
        rule = f"leaves no step of trainer.total_training_steps={steps} to the policy"
        yield "trainer.critic_warmup", rule, "shorten it"


# --- sizes that have to divide or hold each other ---


def batches_are_whole(c: View) -> Broken:
    prompts, mini, n = c.data.train_batch_size, c.actor.ppo_mini_batch_size, c.rollout.n
    if prompts % mini:
        rule = f"must be a multiple of {ACTOR}.ppo_mini_batch_size={mini}"
        yield "data.train_batch_size", rule, f"set {ACTOR}.ppo_mini_batch_size={prompts}, say, for one update a batch"
    own = c.critic.ppo_mini_batch_size
    if c.critic.enable and own != mini and prompts % own:
        rule = f"must be a multiple of critic.ppo_mini_batch_size={own}"
        yield "data.train_batch_size", rule, "change one of them; left out, the critic's follows the actor's"
    ranks = f"times {ROLLOUT}.n={n} must be a multiple of the {c.data_ranks} ranks that share it"
    if prompts * n % c.data_ranks:
        rule = f"{ranks} (trainer.nnodes * trainer.n_gpus_per_node / {ULYSSES} / {LAYERS})"
        yield "data.train_batch_size", rule, "change one of them; trainer.backend=local without these keys runs one"
    elif mini * n % c.data_ranks:
        yield f"{ACTOR}.ppo_mini_batch_size", ranks, "change one of them"


def _learners(c: View) -> Iterator[tuple[str, Any, Any, str, Any]]:
    """Yield section, its keys, its model, section and keys of its sharding, of the learners whose ranks are counted."""
    if not c.cluster:
        return
    ref = "actor_rollout_ref.ref"
    yield ACTOR, c.actor, c.model, f"{ACTOR}.fsdp_config", c.actor.fsdp_config
    if c.needs_ref:
        yield ref, c.ref, c.model, f"{ref}.fsdp_config", c.ref.fsdp_config
    if c.critic.enable:
        yield "critic", c.critic, c.critic.model, "critic.model.fsdp_config", c.critic.model.fsdp_config


def parts_divide_ranks(c: View) -> Broken:
    """Check the ranks of a sequence and of a layer; a reference that follows the actor is not named twice."""
    for section, part, model, sharding, fsdp in _learners(c):
        ulysses, layers = getattr(part, ULYSSES), getattr(part, LAYERS)
        follows = {name for name in (ULYSSES, LAYERS) if getattr(part, name) == getattr(c.actor, name)}
        own = {ULYSSES, LAYERS} - (follows if section.endswith(".ref") else set())
        ranks = f"must divide the {c.ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node)"
        if ULYSSES in own and c.ranks % ulysses:
            yield f"{section}.{ULYSSES}", ranks, "change one of them"
        elif LAYERS in own and c.ranks % (ulysses * layers):
            yield f"{section}.{LAYERS}", f"times {section}.{ULYSSES}={ulysses} {ranks}", "change one of them"
        if LAYERS in own and layers > 1 and model.lora_rank:
            rule = f"does not split adapters, and its model has lora_rank={model.lora_rank}"
            yield f"{section}.{LAYERS}", rule, "set it to 1, or lora_rank=0"
        if fsdp.fsdp_size > 0 and fsdp.fsdp_size % layers:
            rule = f"counts the ranks of a copy, a multiple of {LAYERS}={layers}"
            yield f"{sharding}.fsdp_size", rule, "change one of them"


def passes_hold_a_sequence(c: View) -> Broken:
    """Check the size of each kind of pass: a number of trajectories, or of tokens."""
    for section, part, prefix, runs in (
        (ACTOR, c.actor, "ppo", True),
        (ROLLOUT, c.rollout, "log_prob", True),
        ("actor_rollout_ref.ref", c.ref, "log_prob", c.needs_ref),
        ("critic", c.critic, "ppo", c.critic.enable),
    ):
        dynamic = "use_dynamic_bsz" if prefix == "ppo" else "log_prob_use_dynamic_bsz"
        micro, tokens = f"{prefix}_micro_batch_size_per_gpu", f"{prefix}_max_token_len_per_gpu"
        # The others follow the actor, whose own line says what is missing
        first = section == ACTOR or c.actor.ppo_micro_batch_size_per_gpu or c.actor.use_dynamic_bsz
        if runs and getattr(part, dynamic) is False and getattr(part, micro) is None and first:
            fix = f"give a number of trajectories a pass, or leave {dynamic} out: passes are then packed by tokens"
            yield f"{section}.{micro}", f"is needed with {section}.{dynamic}=False", fix
        ranks = getattr(c.actor if section == ROLLOUT else part, ULYSSES)
        if runs and getattr(part, dynamic) and getattr(part, tokens) * ranks < c.longest:
            rule = f"(times {ULYSSES}) must hold max_prompt_length + max_response_length = {c.longest} tokens"
            yield f"{section}.{tokens}", rule, f"raise it to {c.longest}, or shorten the sequences"


# --- the objective ---


def answers_are_compared(c: View) -> Broken:
    if c.generates and c.rollout.n == 1 and c.estimator.groups:
        others = " or ".join(sorted(name for name, entry in registry.ESTIMATORS.items() if not entry.groups))
        rule = f"algorithm.adv_estimator={c.algorithm.adv_estimator} compares at least 2 answers to a prompt"
        yield f"{ROLLOUT}.n", rule, f"set {ROLLOUT}.n=5, say, or use {others}"


def rollout_correction_fits(c: View) -> Broken:
    """Check thresholds, and that nothing reads the log-probs that bypass_mode skips."""
    readers = {
        "rollout_rs": c.correction.rollout_rs is not None,
        "rollout_token_veto_threshold": c.correction.rollout_token_veto_threshold is not None,
        "algorithm.use_kl_in_reward": c.algorithm.use_kl_in_reward,
    }
    for what in (name for name, on in readers.items() if on and c.correction.bypass_mode):
        rule = f"skips the learner's log-probs before the update, which {what} reads"
        yield f"{CORRECTION}.bypass_mode", rule, f"set {CORRECTION}.bypass_mode=False"
    if not c.correction.thresholds_fit:
        rule = "its thresholds do not fit it: as many as options, above 0, lower_upper for k1 only"
        fix = f"set {CORRECTION}.rollout_rs_threshold: 2.0 for token, 1.001 for geometric, say"
        yield f"{CORRECTION}.rollout_rs", rule, fix


def staleness_and_resuming(c: View) -> Broken:
    if c.trainer.max_staleness > 0 and not c.corrects:
        rule = "trains on samples of an older policy, and no rollout correction weighs for it"
        yield "trainer.max_staleness", rule, f"set {CORRECTION}.rollout_is=token, or bypass_mode=True there"
    if c.trainer.max_staleness > 1:
        rule = "is at most 1: the next step's samples are drawn while this one updates, and no earlier"
        yield "trainer.max_staleness", rule, "set 1, or 0 for samples of the policy that they train"
    if c.trainer.resume_mode == "resume_path" and not c.trainer.resume_from_path:
        rule = "is needed with trainer.resume_mode=resume_path"
        yield "trainer.resume_from_path", rule, "name a checkpoint: <run>/global_step_N"


# --- what is sampled ---


def local_is_one_process(c: View) -> Broken:
    for name in ("nnodes", "n_gpus_per_node"):
        key, asked = f"trainer.{name}", getattr(c.trainer, name)
        if c.trainer.backend == "local" and c.gives(key) and asked > 1:
            rule = "asks for several ranks, and trainer.backend=local is one process"
            yield key, rule, "set trainer.backend=ray, or 1"


def training_samples_the_policy(c: View) -> Broken:
    another = "samples from another distribution than the one that trains, and no rollout correction weighs for it"
    differ, greedy = "training needs answers that differ", "greedy validation is val_kwargs.do_sample=False"
    for name, off in (("top_p", 1), ("top_k", -1)):
        fix = f"set {off} (val_kwargs.{name} is free)"
        if getattr(c.rollout, name) != off and not c.corrects:
            weighed = "algorithm.rollout_correction.rollout_is=token weighs for it, at the cost of a biased mean weight"
            yield f"{ROLLOUT}.{name}", another, f"{fix}; {weighed}"
        elif getattr(c.rollout, name) != off and c.correction.bypass_mode:
            rule = "and bypass_mode compare log-probs over the tokens that were kept with those over all: no ratio is 1"
            yield f"{ROLLOUT}.{name}", rule, f"{fix}, or algorithm.rollout_correction.bypass_mode=False"
    if c.rollout.temperature == 0 and c.rollout.do_sample:
        yield f"{ROLLOUT}.temperature", differ, f"set 1.0; {greedy}"
    if not c.rollout.do_sample and not c.trainer.val_only:
        yield f"{ROLLOUT}.do_sample", differ, f"leave it out; {greedy}"


def validation_sampling(c: View) -> Broken:
    if c.val.do_sample and c.val.temperature == 0:
        yield f"{VAL}.temperature", f"contradicts {VAL}.do_sample=True", "set a temperature, or do_sample=False"


# --- engines ---


def the_engine_holds_sequences(c: View) -> Broken:
    tokens, length = c.rollout.max_num_batched_tokens, c.rollout.max_model_len
    serves = "max_model_len" in c.engine.reads
    if serves and length is not None and length < c.longest:
        rule = f"must hold max_prompt_length + max_response_length = {c.longest} tokens"
        yield f"{ROLLOUT}.max_model_len", rule, "raise it, or leave it out"
    if serves and not c.rollout.enable_chunked_prefill and tokens < c.longest:
        rule = f"must hold a sequence of {c.longest} tokens where prefill is not chunked"
        yield f"{ROLLOUT}.max_num_batched_tokens", rule, f"raise it, or {ROLLOUT}.enable_chunked_prefill=True"
    if serves and tokens < c.rollout.max_num_seqs:
        rule = f"must be at least {ROLLOUT}.max_num_seqs={c.rollout.max_num_seqs}: each takes one of them a step"
        yield f"{ROLLOUT}.max_num_batched_tokens", rule, "change one of them"


def options_of_engines(c: View) -> Broken:
    hf = c.rollout.engine_kwargs.get("hf") or {}
    if not c.policy.hybrid_engine and c.trainer.backend == "local":
        rule = "needs a cluster: trainer.backend=local runs learner and engine in one process"
        yield HYBRID, rule, "set trainer.backend=ray, or leave it out; trainer.max_staleness=1 trains one step off"
    if c.rollout.name == "hf" and set(hf if isinstance(hf, Mapping) else [str(hf)]) - set(HF_OPTIONS):
        rule = f"hf has {', '.join(HF_OPTIONS)} and no other option"
        yield f"{ROLLOUT}.engine_kwargs", rule, "leave out what it lacks"
    for section, part, samples in ((ROLLOUT, c.rollout, True), (VAL, c.val, c.val.do_sample)):
        if not c.engine.top_p_within_top_k and samples and part.top_k > 0 and part.top_p < 1:
            rule = f"with {section}.top_p={part.top_p} means something else in {c.rollout.name}"
            yield f"{section}.top_k", rule, f"set one of them, or {ROLLOUT}.name=vllm"


def engine_layers_divide_gpus(c: View) -> Broken:
    gpus = c.trainer.n_gpus_per_node if c.policy.hybrid_engine else c.rollout.n_gpus_per_node
    serves = LAYERS in c.engine.reads and c.needs_engine and c.cluster
    if serves and gpus % c.rollout.tensor_model_parallel_size:
        rule = f"must divide the {gpus} GPUs of a node that engines compute on"
        yield f"{ROLLOUT}.{LAYERS}", rule, "change one of them; a model that fits one GPU needs 1"


# --- episodes ---


def who_plays_episodes(c: View) -> Broken:
    if c.plays_episodes and c.rollout.agent_loop is None:
        rule = f"the trainer of recipe {c.recipe} plays episodes"
        yield f"{ROLLOUT}.agent_loop", rule, "leave it out, or name a loop: tool_agent, path/file.py:Class"


def the_tool_agent(c: View) -> Broken:
    options, loop = c.rollout.multi_turn, c.rollout.agent_loop
    if options.enable and loop != registry.TOOL_AGENT:
        rule = "and multi_turn.enable=True, which is the tool agent, both say how an episode goes"
        yield f"{ROLLOUT}.agent_loop", rule, "leave one out"
    if loop == registry.TOOL_AGENT and not (options.tool_config_path or options.interaction_config_path):
        rule = "or interaction_config_path is needed by the tool agent"
        yield f"{ROLLOUT}.multi_turn.tool_config_path", rule, "name a YAML file with tools (core/rollout/tools.py)"


# --- who grades ---


def who_grades(c: View) -> Broken:
    if c.reward.reward_manager == "batch" and not c.custom.path:
        rule = "calls a function of yours with lists, and there is none"
        yield "reward_model.reward_manager", rule, "set custom_reward_function.path, or use prime"
    if c.reward.memory_limit_mb is not None and c.reward.memory_limit_mb < 256:
        rule = "is too little for a grader that has only started; at least 256"
        yield "reward_model.memory_limit_mb", rule, "raise it, or null for no limit"


def the_reward_model(c: View) -> Broken:
    reward, on = c.reward, c.reward.enable
    if reward.weight and not on:
        fix = "set reward_model.enable=True and reward_model.model.path (or reward_model.judge.url), or leave it out"
        yield "reward_model.weight", "there is no model whose number could be added", fix
    if on and reward.model.input_tokenizer not in (None, "policy", c.model.path, c.model.tokenizer_path):
        rule = "is the tokenizer of what the policy wrote; the reward model's own comes with reward_model.model.path"
        yield "reward_model.model.input_tokenizer", rule, "leave it out, or null where both read the same token ids"
    if on and reward.use_dynamic_bsz is False and not reward.micro_batch_size_per_gpu:
        fix = "give a number of answers a pass, or leave use_dynamic_bsz out"
        yield "reward_model.micro_batch_size_per_gpu", "is needed with reward_model.use_dynamic_bsz=False", fix
    if on and reward.use_dynamic_bsz and reward.forward_max_token_len_per_gpu < reward.max_length:
        rule = f"must hold an answer of reward_model.max_length={reward.max_length} tokens"
        yield "reward_model.forward_max_token_len_per_gpu", rule, "raise it, or lower reward_model.max_length"


def the_judge(c: View) -> Broken:
    judge, on, section = c.judge, c.reward.judged, "reward_model.judge"
    if judge.url is not None and not c.reward.enable:
        fix = "set reward_model.enable=True, or leave the URL out"
        yield f"{section}.url", "would judge nothing with reward_model.enable=False", fix
    if judge.url is not None and not judge.model:
        yield f"{section}.model", f"is needed with {section}.url", "name the model as the server lists it (GET /models)"
    if on and c.reward.on_error == "zero":
        fix = "set reward_model.on_error=mask, which takes it out of its group and the loss, or raise"
        yield "reward_model.on_error", "would score an answer 0 because a server was away", fix


# --- what can run, and is probably not meant ---


def the_kl_is_penalised_twice(c: View) -> Broken:
    if c.actor.use_kl_loss and c.algorithm.use_kl_in_reward:
        rule = "the KL to the reference is penalised twice, in the loss and in the reward"
        yield f"{ACTOR}.use_kl_loss", rule, "switch one off, unless that is meant"


def bounds_and_baselines_of_losses(c: View) -> Broken:
    mode, high = c.actor.policy_loss.loss_mode, c.actor.clip_ratio_high
    if mode == "gspo" and high > 0.05:
        rule = f"clips the ratio of a whole sequence, and clip_ratio_high={high} is never reached"
        yield LOSS, rule, "the paper's bounds are clip_ratio_low=3e-4, clip_ratio_high=4e-4"
    if mode == "kl_cov" and c.actor.ppo_epochs == 1 and c.actor.ppo_mini_batch_size == c.data.train_batch_size:
        rule = "has no gradient with one optimizer step a rollout: this is the plain policy gradient"
        yield LOSS, rule, f"a smaller {ACTOR}.ppo_mini_batch_size, or ppo_epochs above 1"


def greedy_answers_are_alike(c: View) -> Broken:
    if c.val.n > 1 and not c.val.do_sample:
        rule = "greedy answers to a question are all the same"
        yield f"{VAL}.n", rule, f"with {VAL}.do_sample=True they are sampled, as verl's asynchronous rollout does"


def what_engines_change(c: View) -> Broken:
    learner = c.actor.fsdp_config.dtype
    if c.needs_engine and not c.engine.seeded:
        rule = "no answer depends on a seed, so that this run, repeated or resumed, samples others and is another run"
        yield f"{ROLLOUT}.name", rule, "hf and vllm draw from seeds"
    if c.needs_engine and (c.rollout.dtype in FULL_PRECISION) != (learner in FULL_PRECISION):
        rule = f"the engine's precision is not the learner's (fsdp_config.dtype={learner}): log-probs differ"
        yield f"{ROLLOUT}.dtype", rule, "set both"


PROBLEMS = (
    *(episodes_fit, a_model_is_a_hub_id_or_a_path, schedules_have_an_end, the_critic, local_is_one_process),
    *(batches_are_whole, parts_divide_ranks, passes_hold_a_sequence),
    *(answers_are_compared, rollout_correction_fits, staleness_and_resuming),
    *(training_samples_the_policy, validation_sampling, the_engine_holds_sequences, options_of_engines),
    *(engine_layers_divide_gpus, who_plays_episodes, the_tool_agent),
    *(who_grades, the_reward_model, the_judge),
)
WARNINGS = (the_kl_is_penalised_twice, bounds_and_baselines_of_losses, greedy_answers_are_alike, what_engines_change)
