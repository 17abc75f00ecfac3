"""Rules on data, models, updates, the objective and the run (see :mod:`core.config.rules`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from core.config import registry

if TYPE_CHECKING:
    from core.config.rules import View

Broken = Iterator[tuple[str, str, str]]  # key, rule, fix
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
ULYSSES, LAYERS = "ulysses_sequence_parallel_size", "tensor_model_parallel_size"
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
    for name in ("path", "tokenizer_path"):
        if c.no_model(getattr(c.model, name)):
            yield f"actor_rollout_ref.model.{name}", A_MODEL, "write ./ in front of a relative folder"


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
    if c.critic.model.path != c.model.path and c.no_model(c.critic.model.path):
        yield "critic.model.path", A_MODEL, "write ./ in front of a relative folder, or leave it out for the policy's"


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


def covariance_bounds_leave_room(c: View) -> Broken:
    loss = c.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        rule = f"leaves no covariance below clip_cov_ub={loss.clip_cov_ub}: clip_cov would drop no token"
        yield f"{ACTOR}.policy_loss.clip_cov_lb", rule, "verl's are clip_cov_lb=1.0 and clip_cov_ub=5.0"


def answers_are_compared(c: View) -> Broken:
    if c.generates and c.rollout.n == 1 and c.estimator.groups:
        others = " or ".join(sorted(name for name, entry in registry.ESTIMATORS.items() if not entry.groups))
        rule = f"algorithm.adv_estimator={c.algorithm.adv_estimator} compares at least 2 answers to a prompt"
        yield f"{ROLLOUT}.n", rule, f"set {ROLLOUT}.n=5, say, or use {others}"


def the_kl_controller(c: View) -> Broken:
    adaptive = "with algorithm.kl_ctrl.type=adaptive"
    for name in ("horizon", "target_kl"):
        if c.kl.type == "adaptive" and getattr(c.kl, name) <= 0:
            yield f"algorithm.kl_ctrl.{name}", f"must be above 0 {adaptive}", "leave it out for verl's default"
    if c.kl.type == "adaptive" and c.kl.kl_coef == 0 and c.algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.kl_coef", f"is multiplied {adaptive}, so it stays 0", "set 0.001, say"


def no_pass_for_old_log_probs(c: View) -> Broken:
    without_pass = "skips the learner's log-probs before the update, which"
    readers = {
        "rollout_rs compares with the engine's": c.correction.rollout_rs is not None,
        "rollout_token_veto_threshold bounds": c.correction.rollout_token_veto_threshold is not None,
        "the KL penalty in the reward is made of": c.algorithm.use_kl_in_reward,
    }
    for what, is_on in readers.items():
        if c.correction.bypass_mode and is_on:
            yield f"{CORRECTION}.bypass_mode", f"{without_pass} {what}", f"set {CORRECTION}.bypass_mode=False"


def what_fits_together(c: View) -> Broken:
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


PROBLEMS = (
    *(episodes_fit, a_model_is_a_hub_id_or_a_path, schedules_have_an_end, the_critic),
    *(batches_are_whole, parts_divide_ranks, passes_hold_a_sequence),
    *(covariance_bounds_leave_room, answers_are_compared, the_kl_controller, no_pass_for_old_log_probs),
    *(what_fits_together, staleness_and_resuming),
)
WARNINGS = (the_kl_is_penalised_twice, bounds_and_baselines_of_losses)
