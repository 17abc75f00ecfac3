"""Keys of verl's other versions: what is read, what is already the behaviour, and what is refused
with which advice."""

from __future__ import annotations

import pytest

from core.config import convert, recipes
from core.config.composition import examine
from core.config.schema import Config
from core.config.unknown_keys import of_trl
from core.config.verl_names import CONVERSIONS, Line, read, read_value, table

ACTOR, ROLLOUT, REF = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
)
HYBRID = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")


def lines(*overrides, recipe="ppo"):
    return examine(recipe, overrides).problems


@pytest.mark.parametrize(
    "overrides, settings",
    [
        ([f"{ROLLOUT}.n_agent=5"], {f"{ROLLOUT}.n": 5}),
        (
            [f"{ROLLOUT}.n_val=16", f"{ROLLOUT}.val_temperature=0.6"],
            {
                f"{ROLLOUT}.val_kwargs.n": 16,
                f"{ROLLOUT}.val_kwargs.do_sample": True,
                f"{ROLLOUT}.temperature": 1.0,
            },
        ),
        ([f"{ACTOR}.optim.warmup_style=cosine"], {f"{ACTOR}.optim.lr_scheduler_type": "cosine"}),
        (
            [f"{ACTOR}.ppo_micro_batch_size=64", *HYBRID],
            {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4},
        ),
        ([f"{ACTOR}.policy_loss.tau_neg=1.1"], {f"{ACTOR}.tau_neg": 1.1}),
        (
            ["reward={reward_manager: {name: prime}, num_workers: 3}"],
            {"reward_model.num_workers": 3},
        ),
        (
            ["reward.reward_kwargs.gsm8k.method=flexible"],
            {"reward_model.reward_kwargs": {"gsm8k": {"method": "flexible"}}},
        ),
        (
            ["trainer.remove_previous_ckpt_in_save=True", "trainer.save_freq=5"],
            {"trainer.max_actor_ckpt_to_keep": 1},
        ),
        (["trainer.logger=[console,swanlab]"], {"trainer.logger": ("console", "jsonl")}),
        (
            ["algorithm.adv_estimator=grpo_vectorized", f"{ROLLOUT}.n=4"],
            {"algorithm.adv_estimator": "grpo"},
        ),
        (["max_steps=7"], {"trainer.total_training_steps": 7}),
        ([f"{ROLLOUT}.top_k=0"], {f"{ROLLOUT}.top_k": -1}),
        (["trainer.test_freq=0"], {"trainer.test_freq": -1}),
        (
            [
                f"algorithm.rollout_is{end}"
                for end in ("_level=sequence", "_threshold=3.0", "=True")
            ],
            {
                "algorithm.rollout_correction.rollout_is": "sequence",
                "algorithm.rollout_correction.rollout_is_threshold": 3.0,
            },
        ),
        (
            [f"{ROLLOUT}.multi_turn.max_user_turns=1"],
            {f"{ROLLOUT}.multi_turn.max_assistant_turns": 2},
        ),
        (
            [
                f"{ROLLOUT}.multi_turn.max_{whose}_turns={n}"
                for whose, n in (("assistant", 9), ("user", 1))
            ],
            {f"{ROLLOUT}.multi_turn.max_assistant_turns": 2},
        ),
        (["+ray_init.num_cpus=4"], {"ray_kwargs.ray_init": {"num_cpus": 4}}),
    ],
)
def test_another_name_is_read_and_said(overrides, settings):
    composed = examine("ppo", overrides)
    assert composed.problems == ()
    for key, value in settings.items():
        assert convert.get(composed.config, key) == value
    assert composed.read


def test_weights_that_verl_only_measures_do_not_train():
    old = "algorithm.rollout_is"
    for is_on, threshold in ("False", "2.0"), ("False", "null"):
        typed = [f"{old}={is_on}", f"{old}_threshold={threshold}", f"{old}_level=token"]
        composed = examine("grpo", typed)
        assert composed.problems == () and len(composed.unused) >= 3
        assert composed.config.algorithm.rollout_correction.rollout_is is None
    (problem,) = examine("grpo", [f"{old}=True"]).problems
    assert "has no effect in verl without algorithm.rollout_is_threshold" in problem


def test_two_names_of_one_thing_may_not_differ():
    assert lines(f"{ROLLOUT}.prompt_length=99", "data.max_prompt_length=99") == ()
    kwarg = "reward.reward_kwargs.max_resp_len"  # from which the length penalty of a fork counts
    assert lines(f"{kwarg}=99", "data.max_response_length=98")[0].startswith(f"{kwarg}=99: means ")
    (line,) = lines(f"{ROLLOUT}.prompt_length=99", "data.max_prompt_length=98")
    assert "means data.max_prompt_length=99, and data.max_prompt_length=98 is given too" in line


def test_what_asks_for_nothing_is_accepted_and_listed():
    for override, reason in {
        f"{ACTOR}.optim.total_training_steps=9": "trainer.total_training_steps is",
        f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=0": "FSDP2 wraps",
        "trainer.default_hdfs_dir=null": "already the behaviour",
        f"{ACTOR}.ppo_micro_batch_size=null": "already the behaviour",
        f"{ACTOR}.fsdp_config.model_dtype=bf16": "master weights stay in float32",
        f"{ROLLOUT}.mode=async": "already the behaviour",
        f"{ACTOR}.checkpoint.save_contents=[model]": "holds everything",
        f"{ROLLOUT}.log_prob_micro_batch_size=64": "as large as the actor's",
        "do_search=False": "is off",
        "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable is off",
    }.items():
        composed = examine("ppo", [override])
        assert composed.problems == () and reason in composed.unused[override.split("=")[0]][1], (
            override
        )


def test_what_is_not_here_is_refused_with_one_thing_to_do():
    for override, said in {
        f"{ACTOR}.megatron.tensor_model_parallel_size=2": "models train with FSDP2",
        "actor_rollout_ref.model.lora_adapter_path=False": "merge those into the base",
        f"{ROLLOUT}.agent.default_agent_loop=my_agent": f"{ROLLOUT}.agent_loop=path/file.py:Class",
        f"{ACTOR}.policy_loss.dro_beta=0.5": "write the loss as a function",
        f"{ACTOR}.strategy=megatron": "use fsdp2",
        "algorithm.adv_estimator=gppo": "the nearest name is grpo",
        "trainer.logger=wanddb": "the nearest name is wandb",
        "algorithm.kl_penalty=0.001": "algorithm.kl_ctrl.kl_coef",
        "trainer.default_hdfs_dir=hdfs://x": "use trainer.default_local_dir",
        "hydra.sweep.dir=x": "leave it out",
        f"{ROLLOUT}.mode=sync_with_tool": "requests are asynchronous",
        "data.return_raw_chats=True": "unknown key",
    }.items():
        composed = examine("ppo", [override])
        (line,) = composed.problems
        assert said in line and line.startswith(override.split("=")[0]) and "\n" not in line
        assert not composed.read and "already the behaviour" not in str(composed.unused)


@pytest.mark.parametrize("recipe", ["ppo", "sft"])
def test_the_tables_name_keys_that_exist_and_no_key_of_the_schema(recipe):
    schema, names = recipes.schema_of(recipe), table(recipe)
    for there, here in names["same"].items():
        target = here.removesuffix(".*")
        schemas = (schema, Config)  # a key of reinforcement learning is not in SFT's
        assert (
            any(target in convert.sections(each) for each in schemas)
            or any(convert.known(target, each) for each in schemas)
            or recipes.owner_of(target)
            or recipes.owner_of(f"{target}.enable")
        )
        assert there not in convert.all_keys(schema), there
    for key, values in names["values"].items():
        assert values and key in convert.all_keys(schema) | convert.all_keys()
    assert not [
        key
        for key in (*names["no_effect"], *names["asks_nothing"])
        if key in convert.all_keys(schema)
    ]
    accepted = [*names["no_effect"], *names["asks_nothing"]]
    assert not [key for key in accepted if "*" in key.removeprefix("*.")], (
        "what is accepted is named"
    )


def test_the_tree_of_the_sft_trainers_is_read():
    line = [
        "model.partial_pretrain=org/m",
        "data.max_length=2048",
        "data.micro_batch_size_per_gpu=4",
        "optim.lr=1e-4",
    ]
    line += [
        "data.prompt_key=extra_info",
        "data.prompt_dict_keys=[question]",
        "data.response_key=extra_info",
    ]
    line += [
        "+data.response_dict_keys=['answer']",
        "use_remove_padding=true",
        "ulysses_sequence_parallel_size=1",
    ]
    composed = examine("sft", line)
    config = composed.config
    assert composed.problems == ()
    assert (config.data.prompt_key, config.data.response_key) == (
        "extra_info.question",
        "extra_info.answer",
    )
    assert config.data.max_prompt_length + config.data.max_response_length == 2048
    assert (
        config.actor_rollout_ref.model.path == "org/m"
        and config.actor_rollout_ref.actor.optim.lr == 1e-4
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    later = examine(
        "sft",
        [
            "model=hf_model",
            "model.path=org/m",
            "engine=fsdp",
            "optim=fsdp",
            "optim.betas=[0.9,0.95]",
        ],
    )
    optim = later.config.actor_rollout_ref.actor.optim
    assert later.problems == () and (optim.lr_scheduler_type, optim.betas) == (
        "constant",
        (0.9, 0.95),
    )


@pytest.mark.parametrize("recipe", ["ppo", "sft"])
def test_any_value_of_any_name_of_the_tables_is_read_or_refused(recipe):
    names, own = table(recipe), recipes.module_of(recipe, "verl_keys")
    keys = {key for kind in ("same", "means", "no_effect", "asks_nothing") for key in names[kind]}
    keys |= {*CONVERSIONS, *(own.CONVERSIONS if own else ())}
    for value in (None, True, -1, 3, 2.5, "x", [], [1, {"a": 2}], {"a": [1]}, "${trainer.seed}"):
        line = Line(recipe, dict.fromkeys(keys, value))
        for key in keys:
            found = read(key.replace("*", ACTOR), value, line)
            assert found is None or found.settings or found.unused or found.rule
        for key in (*names["values"], "trainer.logger", *names["hints"]):
            read_value(key, value, line)


def test_a_name_of_trl_is_told_by_the_table_for_its_users():
    expected = {
        "learning_rate": "actor_rollout_ref.actor.optim.lr",
        "num_generations": "actor_rollout_ref.rollout.n",
        "max_completion_length": "data.max_response_length",
    }
    for name, key in expected.items():
        (problem,) = lines(f"{name}=1", recipe="grpo")
        assert problem == f"{name}=1: is a name of TRL; here: {key}"
    assert "actor_rollout_ref.actor.kl_loss_coef" in lines("beta=0.04", recipe="grpo")[0]
    assert len(of_trl()) > 30
