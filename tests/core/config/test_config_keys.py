"""Keys that are unknown, renamed, unsupported, without effect, or of the wrong type: what is said of each."""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase

import pytest

from core.config import compose, convert, examine, registry, verl_keys
from core.errors import InputError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def lines(*overrides, recipe="ppo", hooks=()):
    return examine(recipe, overrides, hooks).problems


@pytest.mark.parametrize(
    "override, nearest",
    [
        ("data.train_batchsize=4", "data.train_batch_size"),
        ("+data.train_bach_size=4", "data.train_batch_size"),
        ("++data.val_file=x", "data.val_files"),
        ("~data.shufle", "data.shuffle"),
        ("actor.optim.lr=1e-6", f"{ACTOR}.optim.lr"),
        ("rollout.n=8", f"{ROLLOUT}.n"),
        ("train_batch_size=8", "data.train_batch_size"),
        ("trainer.train_batch_size=8", "data.train_batch_size"),
        (f"{ROLLOUT}.temprature=1", f"{ROLLOUT}.temperature"),
        ("actor_rollout_ref.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.n"),
        ("data={train_batch: 8}", "data.train_batch_size"),
    ],
)
def test_an_unknown_key_names_the_nearest(override, nearest):
    (line,) = lines(override)
    assert line.endswith(f": unknown key; the nearest known key is {nearest}")


# What people of verl, TRL, OpenRLHF and Search-R1 type, and what the answer has to name. None: nothing is close, and no
# advice is better than a wrong one.
TYPED = {
    "reward_model.batch_size=8": "reward_model.micro_batch_size_per_gpu",
    "actor.lora.enable=True": "actor_rollout_ref.model.lora_rank",
    "actor.lora.r=16": "actor_rollout_ref.model.lora_rank",
    "lora.r=16": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora.alpha=32": "actor_rollout_ref.model.lora_alpha",
    "critic.model.lora.rank=8": "critic.model.lora_rank",
    "tool_config.timeout=5": f"{ROLLOUT}.multi_turn.tool_timeout_s",
    f"{ROLLOUT}.multi_turn.tool_config.timeout=5": f"{ROLLOUT}.multi_turn.tool_timeout_s",
    f"{ROLLOUT}.agent_loop=tool_agent_loop": f"{ROLLOUT}.multi_turn.enable=True",
    "agent_loop=tool_agent_loop": f"{ROLLOUT}.multi_turn.enable=True",
    "ray_kwargs.ray_init.timeline_json_file=x.json": "use ray_kwargs.timeline_json_file",
    "+ray_init.timeline_json_file=x.json": "use ray_kwargs.timeline_json_file",
    "ray_kwargs.ray_init.ncpus=4": "ncpus: ray.init takes no such argument",
    "+ray_init.num_cpus=4": "ray_kwargs.ray_init.num_cpus",
    "model.path=x": "is actor_rollout_ref.model.path",
    "actor.lr=1e-6": f"is {ACTOR}.optim.lr",
    "critic.lr=1e-5": "is critic.optim.lr",
    "seed=1": "use trainer.seed",
    "trainer.epochs=3": "trainer.total_epochs",
    "trainer.num_gpus=8": "trainer.n_gpus_per_node",
    "wandb.project=x": "trainer.project_name",
    "algorithm.clip_ratio=0.1": f"{ACTOR}.clip_ratio",
    "algorithm.entropy_coeff=0.01": f"{ACTOR}.entropy_coeff",
    f"{ROLLOUT}.max_tokens=512": "data.max_response_length",
    "custom_cls.path=x.py": "write parquet rows",
    "role_worker_mapping=x": "algorithm.adv_estimator",
    "ResourcePoolManager=x": "trainer.n_gpus_per_node",
    "temperature=0.9": f"{ROLLOUT}.temperature",
    "num_generations=8": f"{ROLLOUT}.n",
    "beta=0.04": f"{ACTOR}.kl_loss_coef",
    "epsilon_high=0.28": f"{ACTOR}.clip_ratio_high",
    "scale_rewards=False": "algorithm.norm_adv_by_std_in_grpo",
    "loss_type=dr_grpo": f"{ACTOR}.loss_agg_mode",
    "num_iterations=2": f"{ACTOR}.ppo_epochs",
    "max_completion_length=256": "data.max_response_length",
    "learning_rate=1e-6": f"{ACTOR}.optim.lr",
    "report_to=wandb": "trainer.logger",
    "--num_generations": f"{ROLLOUT}.n",
    "--n_samples_per_prompt=8": f"{ROLLOUT}.n",
    "--init_kl_coef=0.01": "algorithm.kl_ctrl.kl_coef",
    "--rollout_batch_size=128": "data.train_batch_size",
    "--train_batch_size=128": f"{ACTOR}.ppo_mini_batch_size",
    "--eps-clip-low-high": f"{ACTOR}.clip_ratio_low",
    "--dynamic_filtering": "algorithm.filter_groups.enable",
    "pretrain=x": "actor_rollout_ref.model.path",
    f"{ROLLOUT}.n_agent=5": f"{ROLLOUT}.n",
    "retriever_name=e5": "recipes/search_r1/run_retriever.sh",
    "reward_model.retrieval_score=0": "custom_reward_function.reward_kwargs.retrieval_score",
    "zzz=1": None,
    "timeout=3": None,
    "actor.enable=True": None,
    f"{ACTOR}.enable=True": None,
    "reward_model.sandbox.batch=3": None,
    "trainer.gradient_noise=1": None,
    "--unheard-of=3": None,
}


@pytest.mark.parametrize("typed", TYPED)
def test_what_people_type_is_answered_rightly_or_not_at_all(typed):
    (line,) = lines(typed, recipe="grpo")
    if TYPED[typed] is None:
        assert not [key for key in convert.all_keys() if "." in key and key in line.partition(": ")[2]], line
        assert "--help WORD" in line or typed.startswith("-")
    else:
        assert TYPED[typed] in line
    assert "\n" not in line


def test_ray_init_takes_the_arguments_of_the_table():
    ray = pytest.importorskip("ray")
    public = [name for name in inspect.signature(ray.init).parameters if name != "kwargs"]
    assert [name for name in registry.RAY_INIT if not name.startswith("_")] == public
    source = inspect.getsource(inspect.unwrap(ray.init))
    assert all(f'"{name}"' in source for name in registry.RAY_INIT if name.startswith("_"))
    assert not lines(*(f"ray_kwargs.ray_init.{name}=1" for name in registry.RAY_INIT))


@pytest.mark.parametrize(
    "override, said",
    [
        ("algorithm.group_size=8", f"use {ROLLOUT}.n"),
        (f"{ROLLOUT}.n_agent=5", f"use {ROLLOUT}.n"),
        ("max_turns=2", "Search-R1"),
        ("+retriever.topk=3", "Search-R1"),
        ("retriever.url='http://127.0.0.1:8000/retrieve'", "Search-R1"),
        ("algorithm.state_masking=true", f"use {ACTOR}.state_masking"),
        ("algorithm.state_masking.start_state_marker='<information>'", None),
        ("trainer.log_generation_samples=5", "use trainer.log_val_generations"),
        (f"{ACTOR}.ppo_micro_batch_size=64", "use actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("critic.ppo_micro_batch_size=8", "use critic.ppo_micro_batch_size_per_gpu"),
        (f"{ROLLOUT}.log_prob_micro_batch_size=128", "log_prob_micro_batch_size_per_gpu"),
        (f"{ACTOR}.optim.warmup_style=cosine", "use actor_rollout_ref.actor.optim.lr_scheduler_type"),
        ("reward.reward_manager.name=dapo", "use reward_model.reward_manager"),
        ("reward.custom_reward_function.path=x.py", "use custom_reward_function.path"),
        ("+reward.reward_kwargs.overlong_buffer_cfg.len=9", "use reward_model.overlong_buffer.len"),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True", "use reward_model.overlong_buffer.enable"),
        ("reward.num_workers=8", "use reward_model.num_workers"),
        ("trainer.default_hdfs_dir=hdfs://x", "use trainer.default_local_dir"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "Megatron is not supported"),
        ("actor_rollout_ref.model.lora_adapter_path=x", "merge those into the base"),
        ("actor_rollout_ref.model.lora.rank=32", "use actor_rollout_ref.model.lora_rank"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"use {ROLLOUT}.agent_loop, with the same names"),
        ("data.custom_cls.path=x.py", "write parquet rows"),
        ("data.datagen.path=x.py", "a row is a function of its ordinal"),
        ("reward_model.ulysses_sequence_parallel_size=2", "is not supported"),
        ("reward_model.micro_batch_size=8", "use reward_model.micro_batch_size_per_gpu"),
        (f"{ACTOR}.tis_imp_ratio_cap=2.0", "rollout_is_threshold"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", "float32"),
        ("trainer.remove_previous_ckpt_in_save=True", "max_actor_ckpt_to_keep=1"),
        ("hydra.run.dir=x", "trainer.default_local_dir"),
        (f"{ACTOR}.policy_loss.dro_beta=0.5", "write the loss as a function"),
        ("data.train_data_num=100", "use data.train_max_samples"),
        ("algorithm.kl_coef=0.1", "use algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_a_key_of_another_version_says_what_to_do(override, said):
    (line,) = lines(override)
    assert line.startswith(override.lstrip("+").split("=")[0])
    assert "; " in line
    if said is None:
        assert "unknown key" in line
    else:
        assert said in line and "unknown key" not in line


def test_advice_points_at_keys_that_exist():
    for pattern, target in verl_keys.table("renamed").items():
        prefix = target.rstrip("*").rstrip(".")
        assert convert.known(prefix) or prefix in convert.sections() or convert.known(target), (pattern, target)
    patterns = verl_keys.table("no_effect")
    shadowed = [key for key in convert.all_keys() if any(fnmatchcase(key, pattern) for pattern in patterns)]
    assert shadowed == [], "a pattern of what has no effect stands before these keys"
    for table in ("renamed", "unsupported"):
        own = {key for key in verl_keys.table(table) if key in convert.all_keys()}
        assert not own, f"supported, and in a table of what is not: {own}"
    for key in verl_keys.table("hints"):
        assert "*" in key or key in convert.all_keys(), key


@pytest.mark.parametrize(
    "override, reason",
    [
        ("data.return_raw_chat=True", "the chat is always kept"),
        ("actor_rollout_ref.model.enable_activation_offload=False", "asks for nothing"),
        ("reward_model.strategy=fsdp2", "FSDP2 shards the reward model"),
        ("trainer.default_hdfs_dir=null", "asks for nothing"),
        ("actor_rollout_ref.model.lora_adapter_path=null", "asks for nothing"),
        (f"{ACTOR}.ppo_micro_batch_size=null", "asks for nothing"),
        (f"{ACTOR}.entropy_checkpointing=True", "chunks"),
        (f"{ROLLOUT}.mode=async", "asynchronous"),
        (f"{ROLLOUT}.load_format=safetensors", "in memory"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "chunks"),
        (f"{ACTOR}.checkpoint.save_contents=[model]", "holds everything"),
    ],
)
def test_a_key_whose_purpose_is_met_otherwise_is_accepted_and_listed(override, reason):
    composed = examine("ppo", [override])
    assert composed.problems == ()
    key = override.split("=")[0]
    assert reason in composed.unused[key][1]


def test_a_harmless_value_is_harmless_by_type_too():
    sections = convert.sections()
    assert verl_keys.without_effect("actor_rollout_ref.model.enable_activation_offload", 0, sections) is None
    assert verl_keys.without_effect("actor_rollout_ref.model.lora_adapter_path", False, sections) is None


@pytest.mark.parametrize(
    "override, said",
    [
        (f"{ROLLOUT}.agent.num_worker=8", f"the nearest known key is {ROLLOUT}.agent.num_workers"),
        (f"{ROLLOUT}.agent.default_agent_lop=tool_agent", f"{ROLLOUT}.agent.default_agent_loop, which is not the name"),
        (f"{ROLLOUT}.agent.custom_async_server.path=a.py", "engines are those of actor_rollout_ref.rollout.name"),
        (f"{ROLLOUT}.agent.custom_async_server={{path: a.py}}", f"{ROLLOUT}.agent_loop=path/file.py:Class"),
        (f"{ROLLOUT}.agent.activate_agent=True", "agent_loop=tool_agent"),
        (f"{ROLLOUT}.agent.max_turns=9", f"use {ROLLOUT}.multi_turn.max_assistant_turns"),
        (f"{ROLLOUT}.agent.anything=1", f"{ROLLOUT}.agent_loop=path/file.py:Class"),
        (f"{ACTOR}.policy_loss.anything=0.1", "write the loss as a function"),
        (f"{ACTOR}.policy_loss.clip_cov_ration=0.0002", f"the nearest known key is {ACTOR}.policy_loss.clip_cov_ratio"),
        (f"{ACTOR}.policy_loss.tau_neg=1.05", f"use {ACTOR}.tau_neg"),
        (f"{ACTOR}.profiler.enabled=True", f"the nearest known key is {ACTOR}.profiler.enable"),
        (f"{ACTOR}.fsdp_config.wrap_policy.anything=0", "unknown key"),
        ("actor_rollout_ref.model.fused_kernel_options.backend=triton", "unknown key"),
        ("nobody.entropy_checkpointing=True", "unknown key"),
        ("data.custom_cls.anything=null", "write parquet rows"),
        (f"{ROLLOUT}.skip_anything=False", "is not supported"),
        ("reward.num_worker=8", "reward.num_workers, which is not the name here: use reward_model.num_workers"),
    ],
)
def test_no_key_is_swallowed(override, said):
    composed = examine("ppo", [override])
    (line,) = composed.problems
    assert said in line and not composed.unused


def test_only_keys_that_are_named_are_accepted_without_effect():
    accepted = [*verl_keys.table("no_effect")]
    accepted += [key for key, entry in verl_keys.table("unsupported").items() if set(entry) >= {"harmless"}]
    bare = [key.removeprefix("*.") for key in accepted]
    siblings = [f"{key[:-1]}anything" for key in accepted if key.endswith("*")]
    sections = convert.sections()
    assert [key for key in bare if "*" in key and not key.endswith("*")] == ["*lora.enable"]
    assert not [key for key in siblings if any(verl_keys.without_effect(key, one, sections) for one in (None, False))]


@pytest.mark.parametrize(
    "override, rule",
    [
        ("data.train_batch_size=many", "must be a whole number; the default is 1024"),
        ("data.train_batch_size=1.5", "must be a whole number"),
        ("data.train_batch_size=True", "must be a whole number"),
        ("data.train_batch_size=null", "must be a whole number"),
        ("data.train_batch_size=0", "must be at least 1"),
        ("data.gen_batch_size=-1", "must be at least 1, or null"),
        ("data.shuffle=1", "must be True or False"),
        ("data.shuffle=yes", "must be True or False"),
        (f"{ACTOR}.optim.lr=fast", "must be a number"),
        (f"{ACTOR}.optim.lr=nan", "must be a number"),
        (f"{ACTOR}.optim.lr=inf", "must be a number"),
        (f"{ACTOR}.optim.lr=-1", "must be at least 0"),
        (f"{ACTOR}.optim.betas=[0.9]", "must be two numbers in [0, 1)"),
        (f"{ACTOR}.clip_ratio=1.5", "must be at least 0 and below 1"),
        (f"{ACTOR}.clip_ratio_c=1", "must be above 1"),
        (f"{ACTOR}.entropy_coeff=[1]", "must be a number"),
        (
            f"{ACTOR}.loss_agg_mode=mean",
            "one of token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm",
        ),
        (f"{ACTOR}.policy_loss.clip_cov_ratio=0", "must be above 0 and at most 1"),
        (f"{ACTOR}.policy_loss.ppo_kl_coef=-1", "must be at least 0"),
        (f"{ACTOR}.kl_loss_type=k4", "must be one of kl, k1, abs"),
        (f"{ACTOR}.strategy=megatron", "use fsdp2"),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "or your own as package.module:function or path/file.py:function"),
        (f"{ACTOR}.policy_loss.loss_mode='a b:c'", "must be one of vanilla"),
        (f"{ACTOR}.optim.lr_scheduler_type=wsd", "must be one of constant, cosine"),
        ("algorithm.adv_estimator=ppo", "must be one of gae, grpo"),
        ("algorithm.kl_penalty=0.001", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.gamma=1.1", "must be between 0 and 1"),
        (f"{ROLLOUT}.name=tgi", "must be one of hf, vllm, sglang"),
        (f"{ROLLOUT}.top_k=0", "must be -1 (off) or at least 1"),
        (f"{ROLLOUT}.top_p=0", "must be above 0 and at most 1"),
        (f"{ROLLOUT}.val_kwargs.n=0", "must be at least 1"),
        (f"{ROLLOUT}.gpu_memory_utilization=80", "must be above 0 and at most 1"),
        ("trainer.logger=[console,swanlab]", "must be one of console, jsonl, tensorboard, wandb"),
        ("trainer.device=npu", "must be one of cpu, cuda, or null"),
        ("trainer.save_freq=0", "must be -1 (off) or at least 1"),
        ("trainer.experiment_name=1e-6", "must be text"),
        ("data.train_files=", "must be at least one path"),
        ("data.train_files=[]", "must be at least one path"),
        ("data.apply_chat_template_kwargs=3", "must be a mapping"),
        ("data.apply_chat_template_kwargs=[1,2]", "must be a mapping, as in {name: value}; the default is {}"),
        ("critic.model.override_config=[1,2]", "must be a mapping, as in {name: value}, or null; the default is null"),
        ("data.dataset_weights=[1,-1]", "must be above 0, or null"),
        ("reward_model.on_error=ignore", "must be one of zero, mask, raise"),
        ("data=5", "is a section"),
        ("trainer.health.nonfinite.bound=-1", "must be at least 0, or null"),
    ],
)
def test_a_value_that_does_not_fit(override, rule):
    (line,) = lines(override)
    assert rule in line and line.startswith(override.split("=")[0])
    assert "\n" not in line


@pytest.mark.parametrize(
    "override, said",
    [
        ("nonsense", "cannot be read; write key=value"),
        ("--epochs=3", "is not an override"),
        ("-m", "is not an override"),
        ("data.train_files=[~/a, ~/b]", "quote text"),
        ("trainer.seed=1,2", "is a sweep"),
        ("trainer.seed=range(1,4)", "is a sweep"),
        ("group/sub=x", "config groups are not used"),
        ("trainer@x=y", "config groups are not used"),
        ("trainer.rollout_data_dir=${oc.env:NOT_SET_ANYWHERE}", "cannot be resolved"),
        ("trainer.rollout_data_dir=${trainer.nope}", "cannot be resolved"),
        ("trainer.rollout_data_dir=x/${trainer.experiment_name}", "names trainer.experiment_name, which is null"),
        ("trainer.rollout_data_dir=???", "has no default; give it a value"),
    ],
)
def test_what_cannot_be_read(override, said):
    (line,) = lines(override)
    assert said in line and "\n" not in line


def test_a_custom_function_is_a_name_too():
    config = compose(
        "ppo", ["algorithm.adv_estimator=my.module:advantage", f"{ACTOR}.policy_loss.loss_mode=a/b.py:loss"]
    )
    assert config.algorithm.adv_estimator == "my.module:advantage"
    assert config.critic.enable is False


def test_all_problems_come_together():
    with pytest.raises(InputError) as error:
        compose(
            "grpo",
            [
                "data.nope=1",
                "trainer.seed=x",
                "algorithm.group_size=3",
                "a b",
                "preset=zzz",
                f"{ROLLOUT}.n=1",
                "data.train_batch_size=100",
                "trainer.rollout_data_dir=${nope}",
            ],
        )
    found = error.value.problems
    assert len(found) == 8 and str(error.value) == "\n".join(found)
    for key in (
        "data.nope",
        "trainer.seed",
        "algorithm.group_size",
        "a b",
        "preset",
        f"{ROLLOUT}.n=1",
        "data.train_batch_size",
    ):
        assert any(line.startswith(key) for line in found), key


def test_a_refused_value_does_not_cause_other_problems():
    # The default of 1024 that takes its place is no multiple of 48; nobody wrote 1024.
    (line,) = lines("data.train_batch_size=x", f"{ACTOR}.ppo_mini_batch_size=48")
    assert line.startswith("data.train_batch_size=x")


def test_the_same_problem_is_said_once():
    assert len(lines("data.nope=1", "data.nope=1")) == 1
