"""The rules between keys (see :mod:`core.config.rules`): those that protect an objective, or a long
run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.config import registry
from core.config.section import FULL_PRECISION

if TYPE_CHECKING:
    from core.config.rules import View

Broken = Iterator[tuple[str, str, str]]  # key, rule, fix
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
ULYSSES, LAYERS = "ulysses_sequence_parallel_size", "tensor_model_parallel_size"
VAL, JUDGE = f"{ROLLOUT}.val_kwargs", "reward_model.judge"
# vllm.SamplingParams raises what is lower, and refuses what is higher
VLLM_TEMPERATURES = (0.01, 2.0)


def schedules_have_an_end(c: View) -> Broken:
    if c.trainer.total_training_steps is not None or not c.drops_groups:
        return
    needs = "needs the number of training steps, which filtering leaves open"
    for section, optim, runs in (
        (ACTOR, c.actor.optim, True),
        ("critic", c.critic.optim, c.critic.enable),
    ):
        if runs and optim.lr_scheduler_type == "cosine":
            yield f"{section}.optim.lr_scheduler_type", needs, "set trainer.total_training_steps"
        if runs and optim.lr_warmup_steps < 0 < optim.lr_warmup_steps_ratio:
            yield (
                f"{section}.optim.lr_warmup_steps_ratio",
                needs,
                ("give lr_warmup_steps or total_training_steps"),
            )


def the_critic(c: View) -> Broken:
    if c.critic.enable != c.estimator.critic:
        rule = (
            f"algorithm.adv_estimator={c.algorithm.adv_estimator} decides: a critic is there "
            f"with gae alone"
        )
        yield "critic.enable", rule, "leave it out"


# --- sizes that have to divide or hold each other ---


def batches_are_whole(c: View) -> Broken:
    prompts, mini, n = c.data.train_batch_size, c.actor.ppo_mini_batch_size, c.rollout.n
    if prompts % mini:
        rule = f"must be a multiple of {ACTOR}.ppo_mini_batch_size={mini}"
        yield (
            "data.train_batch_size",
            rule,
            (f"set {ACTOR}.ppo_mini_batch_size={prompts}, say, for one update a batch"),
        )
    own = c.critic.ppo_mini_batch_size
    if c.critic.enable and own != mini and prompts % own:
        rule = f"must be a multiple of critic.ppo_mini_batch_size={own}"
        yield (
            "data.train_batch_size",
            rule,
            ("change one of them; left out, the critic's follows the actor's"),
        )
    for key, size in (("data.train_batch_size", prompts), (f"{ACTOR}.ppo_mini_batch_size", mini)):
        if size * n % c.data_ranks:
            rule = (
                f"times {ROLLOUT}.n={n} must be a multiple of the {c.data_ranks} ranks that "
                f"share it"
            )
            yield (
                key,
                f"{rule} (trainer.nnodes * trainer.n_gpus_per_node / {ULYSSES} / {LAYERS})",
                "change one of them",
            )
            return


def parts_divide_ranks(c: View) -> Broken:
    """Check the ranks of a sequence and of a layer; a reference that follows the actor is not named
    twice."""
    parts = [(ACTOR, c.actor, c.model, True), ("critic", c.critic, c.critic.model, c.critic.enable)]
    parts.append(
        (
            "actor_rollout_ref.ref",
            c.ref,
            c.model,
            c.needs_ref and c.ref.together != c.actor.together,
        )
    )
    for section, part, model, runs in parts:
        ulysses, layers = getattr(part, ULYSSES), getattr(part, LAYERS)
        if c.cluster and runs and c.ranks % part.together:
            rule = f"{ULYSSES}={ulysses} times {LAYERS}={layers} must divide the {c.ranks} ranks"
            yield f"{section}.{ULYSSES if layers == 1 else LAYERS}", rule, "change one of them"
        size = (c.critic.model if part is c.critic else part).fsdp_config.fsdp_size
        if c.cluster and runs and 0 < size < c.ranks and (c.ranks % size or size % layers):
            rule = f"must divide the {c.ranks} ranks, and be a multiple of {LAYERS}={layers}"
            yield (
                f"{section}.{'model.' if part is c.critic else ''}fsdp_config.fsdp_size",
                rule,
                "set -1 for all ranks",
            )
        if c.cluster and runs and layers > 1 and model.lora_rank:
            rule = f"does not split adapters, and its model has lora_rank={model.lora_rank}"
            yield f"{section}.{LAYERS}", rule, "set it to 1, or lora_rank=0"


def passes_hold_a_sequence(c: View) -> Broken:
    """Check the size of passes: a number of trajectories, or of tokens."""
    for section, part, runs in ((ACTOR, c.actor, True), ("critic", c.critic, c.critic.enable)):
        if runs and not part.use_dynamic_bsz and part.ppo_micro_batch_size_per_gpu is None:
            fix = (
                "give a number of trajectories a pass, or leave use_dynamic_bsz out: passes are "
                "then packed by tokens"
            )
            yield (
                f"{section}.ppo_micro_batch_size_per_gpu",
                (f"is needed with {section}.use_dynamic_bsz=False"),
                fix,
            )
            return  # the critic follows the actor
        if (
            runs
            and part.use_dynamic_bsz
            and part.ppo_max_token_len_per_gpu * getattr(part, ULYSSES) < c.longest
        ):
            rule = (
                f"(times {ULYSSES}) must hold max_prompt_length + max_response_length = "
                f"{c.longest} tokens"
            )
            yield (
                f"{section}.ppo_max_token_len_per_gpu",
                rule,
                (f"raise it to {c.longest}, or shorten the sequences"),
            )


def episodes_fit(c: View) -> Broken:
    limit = c.data.max_prompt_length
    if c.data.max_start_length is not None and c.data.max_start_length > limit:
        rule = f"must be at most data.max_prompt_length={limit}, which holds prompt and episode"
        yield "data.max_start_length", rule, "lower it, or leave it out"


# --- the objective ---


def answers_are_compared(c: View) -> Broken:
    if c.generates and c.rollout.n == 1 and c.estimator.groups:
        others = " or ".join(
            sorted(name for name, entry in registry.ESTIMATORS.items() if not entry.groups)
        )
        rule = (
            f"algorithm.adv_estimator={c.algorithm.adv_estimator} compares at least 2 answers "
            f"to a prompt"
        )
        yield f"{ROLLOUT}.n", rule, f"set {ROLLOUT}.n=5, say, or use {others}"


def bypassing_reads_no_old_log_probs(c: View) -> Broken:
    """Check that nothing reads the log-probs that bypass_mode skips."""
    readers = {
        "rollout_rs": c.correction.rollout_rs is not None,
        "rollout_token_veto_threshold": c.correction.rollout_token_veto_threshold is not None,
        "algorithm.use_kl_in_reward": c.algorithm.use_kl_in_reward,
    }
    for what in (name for name, on in readers.items() if on and c.correction.bypass_mode):
        rule = f"skips the learner's log-probs before the update, which {what} reads"
        yield f"{CORRECTION}.bypass_mode", rule, f"set {CORRECTION}.bypass_mode=False"


def staleness_and_resuming(c: View) -> Broken:
    if c.trainer.max_staleness > 0 and not c.corrects:
        rule = "trains on samples of an older policy, and no rollout correction weighs for it"
        yield (
            "trainer.max_staleness",
            rule,
            (f"set {CORRECTION}.rollout_is=token, or bypass_mode=True there"),
        )
    if c.trainer.max_staleness > 1:
        rule = (
            "is at most 1: the next step's samples are drawn while this one updates, and no earlier"
        )
        yield "trainer.max_staleness", rule, "set 1, or 0 for samples of the policy that they train"
    if c.trainer.val_only and not c.data.val_files:
        rule = "validates by answering questions, and data.val_files names none"
        yield "trainer.val_only", rule, "give parquet files of questions, or leave it out"
    if c.trainer.resume_mode == "resume_path" and not c.trainer.resume_from_path:
        rule = "is needed with trainer.resume_mode=resume_path"
        yield "trainer.resume_from_path", rule, "name a checkpoint: <run>/global_step_N"


def training_samples_the_policy(c: View) -> Broken:
    another = (
        "samples from another distribution than the one that trains, and no rollout "
        "correction weighs for it"
    )
    differ, greedy = (
        "training needs answers that differ",
        ("greedy validation is val_kwargs.do_sample=False"),
    )
    for name, off in (("top_p", 1), ("top_k", -1)):
        fix = f"set {off} (val_kwargs.{name} is free)"
        if getattr(c.rollout, name) != off and not c.corrects:
            weighed = (
                "algorithm.rollout_correction.rollout_is=token weighs for it, at the cost "
                "of a biased mean weight"
            )
            yield f"{ROLLOUT}.{name}", another, f"{fix}; {weighed}"
        elif getattr(c.rollout, name) != off and c.correction.bypass_mode:
            rule = (
                "and bypass_mode compare log-probs over the tokens that were kept with those "
                "over all: no ratio is 1"
            )
            yield (
                f"{ROLLOUT}.{name}",
                rule,
                (f"{fix}, or algorithm.rollout_correction.bypass_mode=False"),
            )
    if c.rollout.temperature == 0 and c.rollout.do_sample:
        yield f"{ROLLOUT}.temperature", differ, f"set 1.0; {greedy}"
    if not c.rollout.do_sample and not c.trainer.val_only:
        yield f"{ROLLOUT}.do_sample", differ, f"leave it out; {greedy}"
    if c.val.do_sample and c.val.temperature == 0:
        yield (
            f"{VAL}.temperature",
            f"contradicts {VAL}.do_sample=True",
            ("set a temperature, or do_sample=False"),
        )


# --- where it runs, and who plays episodes ---


def vllm_draws_at_the_temperature(c: View) -> Broken:
    low, high = VLLM_TEMPERATURES
    for key, section in ((ROLLOUT, c.rollout), (VAL, c.val)):
        samples = c.needs_engine and c.rollout.name == "vllm" and section.do_sample
        if samples and section.temperature and not low <= section.temperature <= high:
            rule = (
                f"vLLM samples at {low:g} to {high:g}: it raises what is lower, and refuses "
                f"what is higher"
            )
            yield f"{key}.temperature", rule, f"set one of these, or {ROLLOUT}.name=hf"


def places_fit(c: View) -> Broken:
    local = c.trainer.backend == "local"
    for name in ("nnodes", "n_gpus_per_node"):
        key, asked = f"trainer.{name}", getattr(c.trainer, name)
        if local and key in c.given and asked > 1:
            rule = "asks for several ranks, and trainer.backend=local is one process"
            yield key, rule, "set trainer.backend=ray, or 1"
    if local and not c.policy.hybrid_engine:
        rule = "needs a cluster: trainer.backend=local runs learner and engine in one process"
        fix = (
            "set trainer.backend=ray, or leave it out; trainer.max_staleness=1 trains one step off"
        )
        yield "actor_rollout_ref.hybrid_engine", rule, fix
    gpus = c.trainer.n_gpus_per_node if c.policy.hybrid_engine else c.rollout.n_gpus_per_node
    serves = LAYERS in c.engine.reads and c.needs_engine
    if serves and c.cluster and gpus % c.rollout.tensor_model_parallel_size:
        rule = f"must divide the {gpus} GPUs of a node that engines compute on"
        yield f"{ROLLOUT}.{LAYERS}", rule, "change one of them; a model that fits one GPU needs 1"


def who_plays_episodes(c: View) -> Broken:
    options, loop = c.rollout.multi_turn, c.rollout.agent_loop
    if c.plays_episodes and loop is None:
        rule = f"the trainer of recipe {c.recipe} plays episodes"
        yield (
            f"{ROLLOUT}.agent_loop",
            rule,
            ("leave it out, or name a loop: tool_agent, path/file.py:Class"),
        )
    if options.enable and loop != registry.TOOL_AGENT:
        yield (
            f"{ROLLOUT}.agent_loop",
            "and multi_turn.enable=True both name who plays episodes",
            "leave one out",
        )
    if loop == registry.TOOL_AGENT and not (
        options.tool_config_path or options.interaction_config_path
    ):
        rule = "or interaction_config_path is needed by the tool agent"
        yield (
            f"{ROLLOUT}.multi_turn.tool_config_path",
            rule,
            ("name a YAML file with tools (core/rollout/tools.py)"),
        )


# --- who grades ---


def who_grades(c: View) -> Broken:
    reward, on, judge = c.reward, c.reward.enable, c.reward.judge
    if reward.reward_manager == "batch" and not c.custom.path:
        rule = "calls a function of yours with lists, and there is none"
        yield "reward_model.reward_manager", rule, "set custom_reward_function.path, or use prime"
    if reward.weight and not on:
        fix = (
            "set reward_model.enable=True and reward_model.model.path (or "
            "reward_model.judge.url), or leave it out"
        )
        yield "reward_model.weight", "there is no model whose number could be added", fix
    if on and reward.model.input_tokenizer not in (
        None,
        "policy",
        c.model.path,
        c.model.tokenizer_path,
    ):
        rule = (
            "is the tokenizer of what the policy wrote; the reward model's own comes with "
            "reward_model.model.path"
        )
        yield (
            "reward_model.model.input_tokenizer",
            rule,
            ("leave it out, or null where both read the same token ids"),
        )
    if judge.url is not None and not on:
        fix = "set reward_model.enable=True, or leave the URL out"
        yield f"{JUDGE}.url", "would judge nothing with reward_model.enable=False", fix
    if judge.url is not None and not judge.model:
        yield (
            f"{JUDGE}.model",
            f"is needed with {JUDGE}.url",
            ("name the model as the server lists it (GET /models)"),
        )
    if reward.judged and reward.on_error == "zero":
        fix = (
            "set reward_model.on_error=mask, which takes it out of its group and the loss, or raise"
        )
        yield "reward_model.on_error", "would score an answer 0 because a server was away", fix


# --- what can run, and is probably not meant ---


def the_kl_is_penalised_twice(c: View) -> Broken:
    if c.actor.use_kl_loss and c.algorithm.use_kl_in_reward:
        rule = "the KL to the reference is penalised twice, in the loss and in the reward"
        yield f"{ACTOR}.use_kl_loss", rule, "switch one off, unless that is meant"


def greedy_answers_are_alike(c: View) -> Broken:
    if c.val.n > 1 and not c.val.do_sample:
        rule = "greedy answers to a question are all the same"
        yield (
            f"{VAL}.n",
            rule,
            (f"with {VAL}.do_sample=True they are sampled, as verl's asynchronous rollout does"),
        )


def what_engines_change(c: View) -> Broken:
    learner = c.actor.fsdp_config.dtype
    if c.needs_engine and not c.engine.seeded:
        rule = (
            "no answer depends on a seed, so that this run, repeated or resumed, samples "
            "others and is another run"
        )
        yield f"{ROLLOUT}.name", rule, "hf and vllm draw from seeds"
    if c.needs_engine and (c.rollout.dtype in FULL_PRECISION) != (learner in FULL_PRECISION):
        rule = (
            f"the engine's precision is not the learner's (fsdp_config.dtype={learner}): "
            f"log-probs differ"
        )
        yield f"{ROLLOUT}.dtype", rule, "set both"


PROBLEMS = (
    *(schedules_have_an_end, the_critic, batches_are_whole, parts_divide_ranks),
    *(
        passes_hold_a_sequence,
        episodes_fit,
        answers_are_compared,
        bypassing_reads_no_old_log_probs,
        staleness_and_resuming,
    ),
    *(training_samples_the_policy, vllm_draws_at_the_temperature, places_fit),
    *(who_plays_episodes, who_grades),
)
WARNINGS = (the_kl_is_penalised_twice, greedy_answers_are_alike, what_engines_change)
