"""Keys that this repository lacks but people write: what they are called here, or why they are not here.

Three kinds. **Renamed** keys, of other versions and tutorials, and **unsupported** ones are errors that say what to do.
**Without effect** are keys whose whole purpose is met in another way; they are accepted, and listed at start. So is
an unsupported key at a value that asks for nothing (``algorithm.use_pf_ppo=False``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))


@dataclass(frozen=True)
class Advice:
    rule: str
    fix: str
    harmless: tuple[Any, ...] = ()


def _per_gpu(key: str) -> Advice:
    fix = f"use {key}_per_gpu: trajectories in one pass of one rank, so this number divided by the ranks"
    return Advice("counts over all ranks, which is not supported", fix, (None,))


# pattern -> the key here
RENAMED: Mapping[str, str] = {
    "algorithm.group_size": f"{ROLLOUT}.n",
    "algorithm.n": f"{ROLLOUT}.n",
    f"{ROLLOUT}.n_agent": f"{ROLLOUT}.n",
    f"{ROLLOUT}.multi_turn.max_turns": f"{ROLLOUT}.multi_turn.max_assistant_turns",
    "algorithm.state_masking": f"{ACTOR}.state_masking",
    f"{ROLLOUT}.group_size": f"{ROLLOUT}.n",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    f"{ROLLOUT}.seed": "trainer.seed",
    f"{ROLLOUT}.max_new_tokens": "data.max_response_length",
    f"{ROLLOUT}.chat_template": f"{MODEL}.custom_chat_template",
    f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    "critic.optim.clip_grad": "critic.grad_clip",
    f"{ACTOR}.use_remove_padding": f"{MODEL}.use_remove_padding",
    f"{ACTOR}.kl_coef": f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.loss_mode": f"{ACTOR}.policy_loss.loss_mode",
    f"{MODEL}.attn_implementation": f"{MODEL}.override_config.attn_implementation",
    "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": "algorithm.rollout_correction.bypass_mode",
    "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_level": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_is_threshold_lower": "algorithm.rollout_correction.rollout_rs_threshold_lower",
    "algorithm.rollout_is_veto_threshold": "algorithm.rollout_correction.rollout_token_veto_threshold",
    "algorithm.filter_groups.max_num_batches": "algorithm.filter_groups.max_num_gen_batches",
    "data.batch_size": "data.train_batch_size",
    "data.train_data_num": "data.train_max_samples",
    "data.val_data_num": "data.val_max_samples",
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.overlong_buffer.*": "reward_model.overlong_buffer.*",
    "trainer.log_generation_samples": "trainer.log_val_generations",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "trainer.health.max_nonfinite_in_row": "trainer.health.nonfinite.bound",
    "trainer.profile_steps": "global_profiler.steps",
    "trainer.max_steps": "trainer.total_training_steps",
    "trainer.total_steps": "trainer.total_training_steps",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.output_dir": "trainer.default_local_dir",
    "trainer.run_name": "trainer.experiment_name",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.source": "reward_model.source",
    "reward.reward_manager.module.*": "reward_model.module.*",
    "reward.num_workers": "reward_model.num_workers",
    "reward.custom_reward_function.*": "custom_reward_function.*",
    "reward.reward_kwargs.overlong_buffer_cfg.*": "reward_model.overlong_buffer.*",
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": "reward_model.overlong_buffer.*",
    "reward.reward_kwargs.*": "reward_model.reward_kwargs.*",
    "reward_model.custom_reward_function.*": "custom_reward_function.*",
    "ray_init.*": "ray_kwargs.ray_init.*",
}

# pattern -> why not, and what instead; harmless: values at which the key asks for nothing
UNSUPPORTED: Mapping[str, Advice] = {
    **{
        key: _per_gpu(key)
        for key in (
            *(f"{ACTOR}.ppo_micro_batch_size", "critic.ppo_micro_batch_size", "critic.forward_micro_batch_size"),
            *(f"{ROLLOUT}.log_prob_micro_batch_size", f"{REF}.log_prob_micro_batch_size"),
        )
    },
    "*.optim.total_training_steps": Advice("is set by the trainer", "use trainer.total_training_steps", (-1, None)),
    "*.megatron.*": Advice("Megatron is not supported", f"models train with FSDP2: {ACTOR}.strategy=fsdp2"),
    "*.model.lora_adapter_path": Advice(
        "adapters start fresh", "merge those into the base with peft and name the result in model.path", (None,)
    ),
    "*.model.lora.*": Advice("is not the name here", f"use {MODEL}.lora_rank, lora_alpha, target_modules"),
    "*.fsdp_config.model_dtype": Advice("the master weights are float32", "leave it out", ("fp32", "float32")),
    "*.fsdp_config.grad_offload": Advice("FSDP2 has no switch for it", "use optimizer_offload", (False,)),
    f"{MODEL}.enable_activation_offload": Advice(
        "is not supported", f"{MODEL}.enable_gradient_checkpointing", (False,)
    ),
    "critic.model.enable_activation_offload": Advice("is not supported", "leave it out", (False,)),
    f"{ACTOR}.policy_loss.*": Advice(
        "belongs to a policy loss that is not here",
        f"write the loss as a function and name it: {ACTOR}.policy_loss.loss_mode=path/file.py:function",
        (0.0002, 1.0, 5.0, 0.1, None),
    ),
    f"{ACTOR}.checkpoint.async_save": Advice("is not supported", "leave it out", (False,)),
    "critic.checkpoint.async_save": Advice("is not supported", "leave it out", (False,)),
    "global_profiler.profile_continuous_steps": Advice(
        "is not supported: each step has its own profile", "leave it out", (False,)
    ),
    "global_profiler.global_tool_config.nsys.discrete": Advice("is not supported", "leave it out", (False,)),
    "global_profiler.global_tool_config.nsys.controller_nsight_options.*": Advice(
        "the driver does no work of its own on a GPU", "leave it out"
    ),
    "global_profiler.global_tool_config.torch_memory.*": Advice("is not supported", "use global_profiler.tool=torch"),
    f"{ROLLOUT}.multi_turn.interaction_config_path": Advice(
        "is not supported", f"write the other side as a loop: {ROLLOUT}.agent_loop=path/file.py:Class", (None,)
    ),
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts": Advice("is not supported", f"use {ROLLOUT}.n", (None,)),
    f"{ROLLOUT}.agent.default_agent_loop": Advice(
        "has another form",
        f"use {ROLLOUT}.multi_turn.enable=True, or a class of your own: {ROLLOUT}.agent_loop=path/file.py:Class",
        ("single_turn_agent", None),
    ),
    f"{ROLLOUT}.agent.agent_loop_config_path": Advice(
        "has another form", f"name the class: {ROLLOUT}.agent_loop=path/file.py:Class", (None,)
    ),
    f"{ROLLOUT}.skip_*": Advice("is not supported", "leave it out", (False, None)),
    f"{REF}.model.*": Advice("the reference is the starting policy", "leave it out", (None,)),
    f"{REF}.model": Advice("the reference is the starting policy", "leave it out", (None,)),
    "algorithm.rollout_correction.loss_type": Advice(
        "the loss is the actor's",
        f"use {ACTOR}.policy_loss.loss_mode; cispo with bypass_mode=True is a policy gradient with a truncated weight",
        ("ppo_clip",),
    ),
    **{
        f"algorithm.rollout_correction.{name}": Advice(
            "the loss is the actor's",
            f"use {ACTOR}.policy_loss.loss_mode=cispo: a policy gradient with a truncated weight",
            (False,),
        )
        for name in ("use_policy_gradient", "use_pure_rollout_correction")
    },
    f"{ACTOR}.tis_imp_ratio_cap": Advice(
        "is an older name",
        "use algorithm.rollout_correction.rollout_is=token and rollout_is_threshold there",
        (-1, None),
    ),
    "algorithm.use_pf_ppo": Advice("is not supported", "leave it out", (False,)),
    "algorithm.pf_ppo.*": Advice("is not supported", "leave it out"),
    "algorithm.filter_groups.max_inflight_gen_batches": Advice(
        "collecting streams, it has no waves", "data.gen_batch_size bounds the prompts in flight", (1,)
    ),
    "data.tokenizer": Advice("belongs to the model here", f"use {MODEL}.tokenizer_path", (None,)),
    "data.trust_remote_code": Advice("belongs to the model here", f"use {MODEL}.trust_remote_code", (False,)),
    "data.custom_cls.*": Advice("a data set class of your own is not supported", "write parquet rows", (None,)),
    "data.sampler.*": Advice(
        "a sampler of your own is not supported", "use data.curriculum, data.dataset_weights", (None,)
    ),
    "data.datagen.*": Advice(
        "data that is made up while training is not supported: a row is a function of its ordinal",
        "write the rows beforehand, or order them with data.curriculum",
        (None,),
    ),
    "data.image_key": Advice("models of text only are supported", "leave it out", ("images",)),
    "data.video_key": Advice("models of text only are supported", "leave it out", ("videos",)),
    "data.tool_config_path": Advice("belongs to the rollout", f"use {ROLLOUT}.multi_turn.tool_config_path", (None,)),
    "reward_model.micro_batch_size": _per_gpu("reward_model.micro_batch_size"),
    **{
        f"reward_model.{name}": Advice(
            "has no pool of nodes: one process holds the reward model", "leave it out", (none,)
        )
        for name, none in (("enable_resource_pool", False), ("n_gpus_per_node", 0), ("nnodes", 0))
    },
    "reward_model.ulysses_sequence_parallel_size": Advice("is not supported", "leave it out", (1,)),
    "reward_model.reward_kwargs.max_resp_len": Advice(
        "the overlong penalty reads data.max_response_length", "leave it out"
    ),
    "reward.*": Advice("is a key of verl's main branch", "the keys here are v0.6.1's: reward_model.*"),
    "trainer.default_hdfs_dir": Advice(
        "checkpoints are written locally", "use trainer.default_local_dir and copy afterwards", (None,)
    ),
    "trainer.del_local_ckpt_after_load": Advice(
        "is not supported", "trainer.max_actor_ckpt_to_keep bounds them", (False,)
    ),
    "trainer.remove_previous_ckpt_in_save": Advice(
        "has another form", "use trainer.max_actor_ckpt_to_keep=1", (False,)
    ),
    "trainer.esi_redundant_time": Advice("is not supported", "leave it out", (0,)),
    "trainer.val_kwargs.*": Advice("belongs to the rollout", f"use {ROLLOUT}.val_kwargs.*"),
    "algorithm.no_think_rl": Advice("is not supported, nor by the published code", "leave it out", (False,)),
    "hydra.*": Advice("Hydra's own folders and launchers are off", "a run writes to trainer.default_local_dir"),
    "distillation.*": Advice("is not supported", "leave it out"),
    "transfer_queue.*": Advice("is not supported", "leave it out", (False,)),
}

# pattern -> how the key's purpose is met instead
NO_EFFECT: Mapping[str, str] = {
    "*.profiler.*": "every process is profiled in the steps of global_profiler.steps",
    "data.return_raw_chat": "the chat is always kept",
    "data.return_raw_input_ids": "token ids go from sampler to loss as they are",
    "data.return_full_prompt": "the prompt is always kept",
    "data.return_multi_modal_inputs": "models of text only",
    "data.use_shm": "files are read where they are",
    "data.val_batch_size": "validation prompts stream through the engine",
    "data.dataloader_num_workers": "a row is tokenised when it is drawn; there is no loader process",
    "data.filter_overlong_prompts_workers": "the tokenizer's own threads measure the prompts",
    f"{MODEL}.use_shm": "weights are read where they are",
    f"{MODEL}.use_liger": "PyTorch's own kernels are used",
    f"{MODEL}.use_fused_kernels": "the head is always computed in chunks, without the logits of a whole batch",
    f"{MODEL}.fused_kernel_options.*": "the head is always computed in chunks",
    "critic.model.use_shm": "weights are read where they are",
    "critic.model.tokenizer_path": "the critic reads the policy's tokens",
    "critic.rollout_n": f"it is {ROLLOUT}.n",
    "critic.forward_max_token_len_per_gpu": "values are computed with critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "values are computed with critic.ppo_micro_batch_size_per_gpu",
    "*.wrap_policy.*": "FSDP2 wraps each layer",
    "*.fsdp_config.use_orig_params": "FSDP2 has no flat parameters",
    "*.use_torch_compile": "nothing is compiled",
    f"{REF}.strategy": f"it is {ACTOR}.strategy",
    f"{ACTOR}.calculate_entropy": "the entropy is measured in every step",
    f"{ACTOR}.rollout_n": f"it is {ROLLOUT}.n",
    "*.entropy_checkpointing": "the head is always computed in chunks",
    "*.entropy_from_logits_with_chunking": "the head is always computed in chunks",
    "*.entropy_from_logits_chunk_size": "the head chooses its chunks",
    "*.use_fused_kernels": "the head is always computed in chunks",
    "*.checkpoint.save_contents": "a checkpoint holds everything, with a Hugging Face folder",
    "*.checkpoint.load_contents": "a checkpoint is loaded whole",
    f"{ROLLOUT}.mode": "requests are always asynchronous",
    f"{ROLLOUT}.load_format": "weights go to the engine in memory",
    f"{ROLLOUT}.max_loras": "adapters are merged into what the engine gets",
    f"{ROLLOUT}.layered_summon": "weights go to the engine tensor by tensor",
    f"{ROLLOUT}.calculate_log_probs": "the engine's log-probs are always kept",
    f"{ROLLOUT}.logprobs_mode": "log-probs are always those of the distribution sampled from",
    f"{ROLLOUT}.disable_log_stats": "the engine's own log is off",
    f"{ROLLOUT}.agent.*": "samples are requested one by one",
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "nothing is decoded and encoded again",
    f"{ROLLOUT}.multi_turn.use_inference_chat_template": "a turn is continued as it was sampled",
    f"{ROLLOUT}.update_weights_bucket_megabytes": "weights go to the engine tensor by tensor",
    f"{ROLLOUT}.multi_stage_wake_up": "the engine decides",
    f"{ROLLOUT}.over_sample_rate": "collecting is steered by the share of groups that pass",
    "reward_model.launch_reward_fn_async": "answers are scored while others still decode",
    "reward_model.strategy": "one process holds the reward model",
    "reward_model.model.use_shm": "weights are read where they are",
    "reward_model.model.use_remove_padding": "answers of similar length share a pass instead",
    "reward_model.model.use_fused_kernels": "the head is one number a token",
    "actor_rollout_ref.nccl_timeout": "the backend sets its own deadlines",
    "trainer.max_critic_ckpt_to_keep": "actor and critic are kept together: trainer.max_actor_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": "there is no register center",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.use_v1": "there is one trainer",
}

# pattern of a supported key -> what to say of a value that it refuses
HINTS: Mapping[str, str] = {
    "algorithm.kl_penalty": "it names the estimate of the KL; its coefficient is algorithm.kl_ctrl.kl_coef (in the "
    f"reward) or {ACTOR}.kl_loss_coef (in the loss)",
    "*.strategy": "Megatron and others are not supported: use fsdp2",
    f"{ROLLOUT}.name": "use vllm in place of sglang and others",
    "trainer.logger": "every run also writes metrics.jsonl, which other trackers can read",
    f"{ACTOR}.policy_loss.loss_mode": "a loss of your own needs no change here",
    "algorithm.adv_estimator": "an estimator of your own needs no change here",
}


def _lookup(table: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    if key in table:
        return key, table[key]
    return next(((pattern, found) for pattern, found in table.items() if fnmatchcase(key, pattern)), None)


def advice(key: str) -> Advice | None:
    """What to say of a key that is renamed or unsupported; None for one that nobody has heard of."""
    if found := _lookup(RENAMED, key):
        pattern, target = found
        if pattern.endswith("*"):
            target = target[:-1] + key[len(pattern) - 1 :]
        return Advice("is not the name here", f"use {target}")
    found = _lookup(UNSUPPORTED, key)
    return found[1] if found else None


def without_effect(key: str, value: Any) -> str | None:
    """Why the key at this value may stand there and does nothing, or None."""
    found = _lookup(UNSUPPORTED, key)
    if found and any(value == harmless and type(value) is type(harmless) for harmless in found[1].harmless):
        return "asks for nothing that is not done anyway"
    if advice(key) is None and (found := _lookup(NO_EFFECT, key)):
        return found[1]
    return None


def hint(key: str, value: Any) -> str | None:
    """What to do about a value that the key's type refuses."""
    found = _lookup(HINTS, key)
    return found[1] if found else None


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key that was probably meant: the same ending, else the same last name, else the closest spelling."""
    known, last = list(known), _last(key)
    same_ending = [other for other in known if other.endswith(f".{key}")]
    same_name = [other for other in known if _last(other) == last]
    alike = [other for other in known if _alike(_last(other), last) > 0.75]
    for candidates in (same_ending, same_name, alike):
        if candidates:
            return max(candidates, key=lambda other: (_alike(_last(other), last), _alike(other, key)))
    return max(known, key=lambda other: _alike(other, key))


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
