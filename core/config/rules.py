"""Rules between keys: those that protect an objective, or a long run.

A rule is a generator over a configuration: it yields key, rule and fix. Those of ``PROBLEMS``
refuse what cannot work or cannot be meant. What published scripts set and what can run is in
``WARNINGS``, however doubtful it is. A recipe's rules are in its ``config_rules.py``; the bounds of
a single key belong to the key's type.
"""

from collections.abc import Iterator

from core.config import convert, recipes, registry
from core.config.schema import Config
from core.config.section import FULL_PRECISION, Problem
from core.config.training_keys import ACTOR, LAYERS, ULYSSES, LearnerConfig

Broken = Iterator[tuple[str, str, str]]  # key, rule, fix
ROLLOUT = "actor_rollout_ref.rollout"
VAL = f"{ROLLOUT}.val_kwargs"
CORRECTION = "algorithm.rollout_correction"
JUDGE = "reward_model.judge"
VLLM_TEMPERATURES = (0.01, 2.0)  # vllm.SamplingParams raises what is lower, refuses what is higher


def broken(which: str, config: Config, recipe: str) -> list[Problem]:
    """Return what the ``PROBLEMS`` or the ``WARNINGS`` of core and of the recipe report."""
    recipe_rules = getattr(recipes.module_of(recipe, "config_rules"), which, ())
    rules = {"PROBLEMS": PROBLEMS, "WARNINGS": WARNINGS}[which]
    return [
        Problem(key, convert.get(config, key), text, fix)
        for rule in (*rules, *recipe_rules)
        for key, text, fix in rule(config)
    ]


def trained(config: Config) -> dict[str, LearnerConfig]:
    """Return section -> settings of the models that train."""
    learners: dict[str, LearnerConfig] = {ACTOR: config.actor_rollout_ref.actor}
    if config.has_critic:
        learners["critic"] = config.critic
    return learners


def schedules_have_an_end(config: Config) -> Broken:
    if config.trainer.total_training_steps is not None or not config.drops_groups:
        return
    rule = "needs the number of training steps, which filtering leaves open"
    for section, learner in trained(config).items():
        optim = learner.optim
        if optim.lr_scheduler_type == "cosine":
            yield f"{section}.optim.lr_scheduler_type", rule, "set trainer.total_training_steps"
        if optim.lr_warmup_steps < 0 < optim.lr_warmup_steps_ratio:
            fix = "give lr_warmup_steps or total_training_steps"
            yield f"{section}.optim.lr_warmup_steps_ratio", rule, fix


def the_critic(config: Config) -> Broken:
    if config.critic.enable != config.has_critic:
        estimator = config.algorithm.adv_estimator
        rule = f"algorithm.adv_estimator={estimator} decides: a critic is there with gae alone"
        yield "critic.enable", rule, "leave it out"


# --- sizes that have to divide or hold each other ---


def batches_are_whole(config: Config) -> Broken:
    prompts = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    n = config.actor_rollout_ref.rollout.n
    sizes = {"data.train_batch_size": prompts}
    if mini < prompts:
        sizes[f"{ACTOR}.ppo_mini_batch_size"] = mini
    for key, size in sizes.items():
        if size * n % config.data_ranks:
            rule = (
                f"times {ROLLOUT}.n={n} must be a multiple of the {config.data_ranks} ranks that "
                f"share it (trainer.nnodes * trainer.n_gpus_per_node / {ULYSSES} / {LAYERS})"
            )
            yield key, rule, "change one of them"
            return


def parts_divide_ranks(config: Config) -> Broken:
    """Check the ranks of a sequence, a layer and a copy, of each learner that runs over Ray."""
    if config.trainer.backend != "ray":
        return
    models = config.actor_rollout_ref
    ranks = config.learner_ranks
    learners = [(ACTOR, ACTOR, models.actor, models.actor.fsdp_config, models.model)]
    if config.has_critic:
        critic = config.critic
        learners.append(("critic", "critic.model", critic, critic.model.fsdp_config, critic.model))
    # A reference that follows the actor is not named twice
    if config.needs_ref and models.ref.together != models.actor.together:
        ref = "actor_rollout_ref.ref"
        learners.append((ref, ref, models.ref, models.ref.fsdp_config, models.model))
    for section, fsdp_section, learner, fsdp, model in learners:
        ulysses = getattr(learner, ULYSSES)
        layers = getattr(learner, LAYERS)
        if ranks % learner.together:
            rule = f"{ULYSSES}={ulysses} times {LAYERS}={layers} must divide the {ranks} ranks"
            yield f"{section}.{ULYSSES if layers == 1 else LAYERS}", rule, "change one of them"
        size = fsdp.fsdp_size
        if 0 < size < ranks and (ranks % size or size % layers):
            rule = f"must divide the {ranks} ranks, and be a multiple of {LAYERS}={layers}"
            yield f"{fsdp_section}.fsdp_config.fsdp_size", rule, "set -1 for all ranks"
        if layers > 1 and model.lora_rank:
            rule = f"does not split adapters, and its model has lora_rank={model.lora_rank}"
            yield f"{section}.{LAYERS}", rule, "set it to 1, or lora_rank=0"


def passes_hold_a_sequence(config: Config) -> Broken:
    """Check the size of passes: a number of trajectories, or of tokens."""
    longest = config.longest_sequence
    for section, learner in trained(config).items():
        if not learner.use_dynamic_bsz and learner.ppo_micro_batch_size_per_gpu is None:
            fix = (
                "give a number of trajectories a pass, or leave use_dynamic_bsz out: passes are "
                "then packed by tokens"
            )
            rule = f"is needed with {section}.use_dynamic_bsz=False"
            yield f"{section}.ppo_micro_batch_size_per_gpu", rule, fix
            return  # the critic follows the actor
        tokens = learner.ppo_max_token_len_per_gpu * getattr(learner, ULYSSES)
        if learner.use_dynamic_bsz and tokens < longest:
            rule = (
                f"(times {ULYSSES}) must hold max_prompt_length + max_response_length = {longest} "
                f"tokens"
            )
            fix = f"raise it to {longest}, or shorten the sequences"
            yield f"{section}.ppo_max_token_len_per_gpu", rule, fix
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    tokens = actor.ppo_max_token_len_per_gpu * getattr(ref, ULYSSES)
    reads = config.needs_ref or config.frozen_models
    is_narrower = getattr(ref, ULYSSES) < getattr(actor, ULYSSES)
    if reads and is_narrower and actor.use_dynamic_bsz and tokens < longest:
        rule = f"leaves {tokens} tokens a pass, and a sequence may have {longest}"
        fix = f"raise {ACTOR}.ppo_max_token_len_per_gpu, or leave it out: it follows the actor's"
        yield f"actor_rollout_ref.ref.{ULYSSES}", rule, fix


# --- the objective ---


def best_answers_are_compared(config: Config) -> Broken:
    if config.actor_rollout_ref.rollout.n == 1 and config.algorithm.estimator.fails_alone:
        rule = f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares two answers"
        yield f"{ROLLOUT}.n", rule, f"set {ROLLOUT}.n=5, say, or use grpo"


def bypassing_reads_no_old_log_probs(config: Config) -> Broken:
    """Check that nothing reads the log-probs that bypass_mode skips."""
    correction = config.algorithm.rollout_correction
    readers = {
        "rollout_rs": correction.rollout_rs is not None,
        "rollout_token_veto_threshold": correction.rollout_token_veto_threshold is not None,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
    }
    for reader, reads in readers.items():
        if reads and correction.bypass_mode:
            rule = f"skips the learner's log-probs before the update, which {reader} reads"
            yield f"{CORRECTION}.bypass_mode", rule, f"set {CORRECTION}.bypass_mode=False"


def stale_samples_are_weighed(config: Config) -> Broken:
    staleness = config.trainer.max_staleness
    if staleness > 0 and not config.corrects:
        rule = "trains on samples of an older policy, and no rollout correction weighs for it"
        fix = f"set {CORRECTION}.rollout_is=token, or bypass_mode=True there"
        yield "trainer.max_staleness", rule, fix


def training_samples_answers(config: Config) -> Broken:
    rollout = config.actor_rollout_ref.rollout
    if rollout.kept_sets and not registry.ENGINES[rollout.name].kept_sets:
        rule = f"needs the ids that truncation kept, and {ROLLOUT}.name={rollout.name} returns none"
        yield f"{ROLLOUT}.kept_sets", rule, f"set it to False, or {ROLLOUT}.name=hf or vllm"
    if rollout.kept_sets and rollout.top_k == 1:
        rule = f"and {ROLLOUT}.top_k=1 leave one id: its log-prob is 0, and nothing trains"
        yield f"{ROLLOUT}.kept_sets", rule, "set it to False"
    rule = "training needs answers that differ"
    greedy = "greedy validation is val_kwargs.do_sample=False"
    if rollout.temperature == 0 and rollout.do_sample:
        yield f"{ROLLOUT}.temperature", rule, f"set 1.0; {greedy}"
    if not rollout.do_sample and not config.trainer.val_only:
        yield f"{ROLLOUT}.do_sample", rule, f"leave it out; {greedy}"


# --- validation and resuming ---


def validation_can_answer(config: Config) -> Broken:
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        fix = "set a temperature, or do_sample=False"
        yield f"{VAL}.temperature", f"contradicts {VAL}.do_sample=True", fix
    if config.trainer.val_only and not config.data.val_files:
        rule = "validates by answering questions, and data.val_files names none"
        yield "trainer.val_only", rule, "give parquet files of questions, or leave it out"


def a_checkpoint_is_named(config: Config) -> Broken:
    if config.trainer.resume_mode == "resume_path" and not config.trainer.resume_from_path:
        rule = "is needed with trainer.resume_mode=resume_path"
        yield "trainer.resume_from_path", rule, "name a checkpoint: <run>/global_step_N"


# --- where it runs, and who plays episodes ---


def vllm_draws_at_the_temperature(config: Config) -> Broken:
    low, high = VLLM_TEMPERATURES
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or not config.needs_engine:
        return
    for section, sampling in ((ROLLOUT, rollout), (VAL, rollout.val_kwargs)):
        temperature = sampling.temperature
        if sampling.do_sample and temperature and not low <= temperature <= high:
            rule = (
                f"vLLM samples at {low:g} to {high:g}: it raises what is lower, and refuses what "
                f"is higher"
            )
            yield f"{section}.temperature", rule, f"set one of these, or {ROLLOUT}.name=hf"


def places_fit(config: Config) -> Broken:
    models = config.actor_rollout_ref
    rollout = models.rollout
    if config.trainer.backend == "local" and not models.hybrid_engine:
        rule = "needs a cluster: trainer.backend=local runs learner and engine in one process"
        fix = (
            "set trainer.backend=ray, or leave it out; trainer.max_staleness=1 trains one step off"
        )
        yield "actor_rollout_ref.hybrid_engine", rule, fix
    serves = LAYERS in registry.ENGINES[rollout.name].reads and config.needs_engine
    gpus = (config.trainer if models.hybrid_engine else rollout).n_gpus_per_node
    if serves and config.trainer.backend == "ray" and gpus % rollout.tensor_model_parallel_size:
        rule = f"must divide the {gpus} GPUs of a node that engines compute on"
        fix = "change one of them; a model that fits one GPU needs 1"
        yield f"{ROLLOUT}.{LAYERS}", rule, fix


def who_plays_episodes(config: Config) -> Broken:
    options = config.actor_rollout_ref.rollout.multi_turn
    loop = config.actor_rollout_ref.rollout.agent_loop
    if options.enable and loop != registry.TOOL_AGENT:
        rule = "and multi_turn.enable=True both name who plays episodes"
        yield f"{ROLLOUT}.agent_loop", rule, "leave one out"
    agent = config.actor_rollout_ref.rollout.agent
    if agent.path and agent.command:
        yield f"{ROLLOUT}.agent.command", "and agent.path both name who plays", "leave one out"
    if agent.plays != (loop == registry.OUTSIDE_AGENT):
        rule = f"is {registry.OUTSIDE_AGENT} where agent.path or agent.command is set"
        yield f"{ROLLOUT}.agent_loop", rule, "leave it out"
    named = options.tool_config_path or options.interaction_config_path
    if loop == registry.TOOL_AGENT and not named:
        rule = "or interaction_config_path is needed by the tool agent"
        fix = "name a YAML file with tools (core/rollout/tools.py)"
        yield f"{ROLLOUT}.multi_turn.tool_config_path", rule, fix


# --- who grades ---


def scorers_are_there(config: Config) -> Broken:
    reward = config.reward_model
    if reward.reward_manager == "batch" and not config.custom_reward_function.path:
        rule = "calls a function of yours with lists, and there is none"
        yield "reward_model.reward_manager", rule, "set custom_reward_function.path, or use prime"
    if reward.weight and not reward.enable:
        fix = (
            "set reward_model.enable=True and reward_model.model.path (or reward_model.judge.url), "
            "or leave it out"
        )
        yield "reward_model.weight", "there is no model whose number could be added", fix
    policy = config.actor_rollout_ref.model
    readable = (None, "policy", policy.path, policy.tokenizer_path)
    if reward.enable and reward.model.input_tokenizer not in readable:
        rule = (
            "is the tokenizer of what the policy wrote; the reward model's own comes with "
            "reward_model.model.path"
        )
        fix = "leave it out, or null where both read the same token ids"
        yield "reward_model.model.input_tokenizer", rule, fix


def the_judge_is_reached(config: Config) -> Broken:
    reward = config.reward_model
    if reward.judge.url is not None and not reward.enable:
        fix = "set reward_model.enable=True, or leave the URL out"
        yield f"{JUDGE}.url", "would judge nothing with reward_model.enable=False", fix
    if reward.judge.url is not None and not reward.judge.model:
        fix = "name the model as the server lists it (GET /models)"
        yield f"{JUDGE}.model", f"is needed with {JUDGE}.url", fix
    if reward.judged and reward.on_error == "zero":
        fix = (
            "set reward_model.on_error=mask, which takes it out of its group and the loss, or raise"
        )
        yield "reward_model.on_error", "would score an answer 0 because a server was away", fix


# --- what can run, and is probably not meant ---


def the_kl_is_penalised_twice(config: Config) -> Broken:
    if config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        rule = "the KL to the reference is penalised twice, in the loss and in the reward"
        yield f"{ACTOR}.use_kl_loss", rule, "switch one off, unless that is meant"


def updates_are_equal(config: Config) -> Broken:
    prompts = config.data.train_batch_size
    learners = {ACTOR: config.actor_rollout_ref.actor}
    actor_mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.has_critic and config.critic.ppo_mini_batch_size != actor_mini:
        learners["critic"] = config.critic
    for section, learner in learners.items():
        mini = learner.ppo_mini_batch_size
        if prompts % mini == 0:
            continue
        rule = f"is not a multiple of {section}.ppo_mini_batch_size={mini}: the last update of a "
        if mini > prompts:
            rule = f"is less than {section}.ppo_mini_batch_size={mini}: the only update of a "
        rule += f"step trains on {prompts % mini} prompts"
        fix = f"set {section}.ppo_mini_batch_size={prompts} for one update a step"
        yield "data.train_batch_size", rule, fix


def answers_are_compared(config: Config) -> Broken:
    estimator = config.algorithm.estimator
    if config.actor_rollout_ref.rollout.n > 1 or not estimator.groups or estimator.fails_alone:
        return
    rule = (
        f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares answers to a prompt: "
        "a single answer keeps its reward, without a baseline"
    )
    yield f"{ROLLOUT}.n", rule, f"set {ROLLOUT}.n=5, say, or use gae"


def truncated_samples_are_weighed(config: Config) -> Broken:
    rollout = config.actor_rollout_ref.rollout
    bypass = config.algorithm.rollout_correction.bypass_mode
    if not rollout.truncates or rollout.kept_sets or (config.corrects and not bypass):
        return
    rule = (
        "samples from a truncated distribution, and log-probs are over all tokens: the ratio is "
        "not 1 before the first update"
    )
    fix = f"set {CORRECTION}.rollout_is=token"
    if rollout.top_k != 1:
        fix = f"set {ROLLOUT}.kept_sets=True (hf, vllm), or {CORRECTION}.rollout_is=token"
    yield f"{ROLLOUT}.{'top_p' if rollout.top_p < 1 else 'top_k'}", rule, fix


def greedy_answers_are_alike(config: Config) -> Broken:
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and not val.do_sample:
        rule = "greedy answers to a question are all the same"
        fix = f"with {VAL}.do_sample=True they are sampled, as verl's asynchronous rollout does"
        yield f"{VAL}.n", rule, fix


def what_engines_change(config: Config) -> Broken:
    if not config.needs_engine:
        return
    rollout = config.actor_rollout_ref.rollout
    if not registry.ENGINES[rollout.name].seeded:
        rule = (
            "no answer depends on a seed, so that this run, repeated or resumed, samples others "
            "and is another run"
        )
        yield f"{ROLLOUT}.name", rule, "hf and vllm draw from seeds"
    learner = config.actor_rollout_ref.actor.fsdp_config.dtype
    if (rollout.dtype in FULL_PRECISION) != (learner in FULL_PRECISION):
        rule = (
            f"the engine's precision is not the learner's (fsdp_config.dtype={learner}): log-probs "
            f"differ"
        )
        yield f"{ROLLOUT}.dtype", rule, "set both"


PROBLEMS = (
    *(schedules_have_an_end, the_critic, batches_are_whole, parts_divide_ranks),
    *(passes_hold_a_sequence, best_answers_are_compared),
    *(bypassing_reads_no_old_log_probs, stale_samples_are_weighed, training_samples_answers),
    *(validation_can_answer, a_checkpoint_is_named, vllm_draws_at_the_temperature, places_fit),
    *(who_plays_episodes, scorers_are_there, the_judge_is_reached),
)
WARNINGS = (
    *(updates_are_equal, answers_are_compared, truncated_samples_are_weighed),
    *(the_kl_is_penalised_twice, greedy_answers_are_alike, what_engines_change),
)
