"""The plan: sizes of models, what shares or offloads the state, what does not fit. ``tests/scale``
has the passes."""

from __future__ import annotations

import json
import os
import statistics

import pytest
import torch

from core import plan, plan_time
from core.command_line import prepare
from core.config import convert, recipes
from core.config.composition import compose, examine
from core.errors import InputError
from core.model_shapes import TABLE, Shape, shape_of
from core.plan import Plan, block_bytes, head_bytes, plan_lines
from core.tracking.run_manifest import ROOT
from core.vision import pictures
from results.reporting.run_reader import load_run

MODEL = "actor_rollout_ref.model.path"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TENSOR, ULYSSES = "tensor_model_parallel_size", "ulysses_sequence_parallel_size"
SMALL = Shape(hidden=8, layers=3, heads=4, kv_heads=2, mlp=16, vocab=32, tied=False, bias=True)
SMOLLM = Shape(
    hidden=576, layers=30, heads=9, kv_heads=3, mlp=1536, vocab=49152, tied=True, bias=False
)
LAB = Shape(hidden=128, layers=3, heads=4, kv_heads=4, mlp=256, vocab=48, tied=True, bias=True)
RAY = ("trainer.backend=ray", f"{ROLLOUT}.name=vllm")
OFFLOAD = (f"{ACTOR}.fsdp_config.param_offload=True",)
ALONE = ("trainer.backend=local", f"{ROLLOUT}.name=hf")


def planned(
    *overrides: str, model: str = "Qwen/Qwen2.5-7B", on: str | None = "H100", recipe: str = "grpo"
):
    config = compose(recipe, [f"{MODEL}={model}", *overrides])
    return Plan(config, on)


def size(found: plan.Plan, role: str, words: str) -> float:
    (part,) = [p for p in found.parts if p.role == role and words in p.what]
    return part.bytes


# --- sizes of models ---


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "deepseek-ai/deepseek-llm-7b"]
)
def test_parameters_are_those_that_transformers_makes(name):
    import transformers

    shape = shape_of(name)
    kind = "Qwen2" if shape.bias else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **{
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "intermediate_size": shape.mlp,
        },
        **{
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": shape.vocab,
        },
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        config.num_labels = 1
        critic = getattr(transformers, f"{kind}ForTokenClassification")(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.critic_parameters == sum(p.numel() for p in critic.parameters())


def test_a_local_folder_is_read_and_an_unknown_name_has_a_nearest(tmp_path):
    fields = {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = {
        **fields,
        "intermediate_size": 16,
        "vocab_size": 32,
        "tie_word_embeddings": False,
        "model_type": "qwen2",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == SMALL
    assert shape_of(str(tmp_path), {"num_hidden_layers": 5}).layers == 5
    with pytest.raises(InputError, match=r"Qwen/Qwen2.5-7B"):
        shape_of("Qwen/Qwen25-7B")


@pytest.mark.parametrize(
    "text", ['{"hidden_size": 0}', '{"vision_config": {}}', "", "[]", "\udcff"]
)
def test_a_damaged_configuration_of_a_model_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match="config.json"):
        shape_of(str(tmp_path))


# --- formulas ---


def test_the_formulas_at_hand_made_values():
    """h 8, q 8, kv 4, m 16, L 3, V 32: every term differs, so a term that is lost shows."""
    assert (
        SMALL.block == 2 * 8 * 8 + 2 * 8 * 4 + (8 + 8) + 3 * 8 * 16 + 16
        and SMALL.ends == 2 * 32 * 8 + 8
    )
    assert SMALL.kv_bytes(2) == 2 * 3 * 4 * 2
    assert block_bytes(SMALL, 2) == 16 * (4 + 2 + 2) + (24 + 8) * 2 + 4 * 16 * 2
    head = head_bytes(SMALL, 10, 2)
    assert (
        head
        == 3 * 4 * 10 * 32 + 4 * 32 * 8 + 2 * 10 * 8 * 2
        == head_bytes(SMALL, 10, 2, trains=False) + 1024
    )


# --- plans ---


def test_state_is_shared_by_the_ranks_or_leaves_the_gpu():
    alone, eight = planned(), planned(*RAY)
    weights, moments = 4.0 * alone.shape.parameters, 8.0 * alone.shape.parameters
    assert (
        size(alone, "policy", "optimizer") == moments
        and size(eight, "policy", "optimizer") == moments / 8
    )
    half = planned(*RAY, f"{ACTOR}.fsdp_config.fsdp_size=2")
    assert size(half, "policy", "optimizer") == moments / 2
    between, both, always = (
        planned(*RAY, *(f"{ACTOR}.fsdp_config.{name}=True" for name in names))
        for names in (
            ("optimizer_offload",),
            ("optimizer_offload", "param_offload"),
            ("offload_policy",),
        )
    )
    found = [one.host_bytes for one in (eight, between, both, always)]
    assert found == [0, moments / 8, (weights + moments) / 8, (weights + moments) / 8]
    least = [one.phase_bytes["generate"] for one in (eight, between, both)]
    assert [least[0] - other for other in least[1:]] == pytest.approx(
        [moments / 8, (weights + moments) / 8]
    )
    assert both.phase_bytes["update"] == pytest.approx(eight.phase_bytes["update"])


def test_adapters_and_split_sequences_take_less():
    whole, lora = planned(*RAY), planned(*RAY, "actor_rollout_ref.model.lora_rank=32")
    adapters = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert whole.shape.adapters(32) == adapters
    assert size(lora, "policy", "optimizer") == 8.0 * adapters / 8
    assert lora.checkpoint_bytes == 12.0 * adapters
    longer = ("data.max_response_length=32256", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    shared = planned(
        *RAY, *longer, f"{ACTOR}.{ULYSSES}=2", "actor_rollout_ref.model.use_remove_padding=True"
    )
    assert "activations of 16384 tokens" in "".join(part.what for part in shared.parts)


def test_the_cache_holds_what_is_left_beside_the_weights():
    found = planned(*RAY, f"{ROLLOUT}.{TENSOR}=2")
    room = 0.5 * found.memory - found.shape.parameters  # two bytes a parameter, over two GPUs
    assert size(found, "engine", "KV cache") == pytest.approx(room)
    assert found.kv_sequences == int(room // (found.shape.kv_bytes(2) / 2 * 1024))
    crowded = planned(*RAY, f"{ROLLOUT}.gpu_memory_utilization=0.1", model="Qwen/Qwen2.5-32B")
    assert not crowded.fits and f"{ROLLOUT}.{TENSOR}" in "\n".join(plan.lines(crowded))


def test_a_critic_updates_after_the_policy_and_each_role_is_offloaded_by_its_own_key():
    found = planned(*RAY, recipe="ppo")
    critic = [part for part in found.parts if part.role == "critic"]
    assert [part.phases for part in critic] == [plan.PHASES] * 2 + [("critic update",)]
    assert not [
        p for p in found.parts if p.role == "policy" and not p.state and "critic update" in p.phases
    ]
    state = 12.0 * found.shape.critic_parameters / 8
    away = planned(
        *RAY,
        *(f"critic.model.fsdp_config.{name}_offload=True" for name in ("param", "optimizer")),
        recipe="ppo",
    )
    assert away.host_bytes == state and found.host_bytes == 0
    assert found.phase_bytes["critic update"] == pytest.approx(away.phase_bytes["critic update"])
    assert found.phase_bytes["update"] - away.phase_bytes["update"] == pytest.approx(state)
    assert found.checkpoint_bytes == 12.0 * (found.shape.parameters + found.shape.critic_parameters)


def test_a_critic_with_adapters_trains_and_saves_these_and_its_head():
    found = planned(*RAY, "critic.model.lora_rank=32", recipe="ppo")
    trained = found.shape.adapters(32) + found.shape.hidden + 1
    assert size(found, "critic", "optimizer") == 8.0 * trained / 8
    assert size(found, "critic", "weights in") == 4.0 * found.shape.critic_parameters / 8
    assert found.checkpoint_bytes == 12.0 * (found.shape.parameters + trained)
    whole = planned(*RAY, recipe="ppo")
    assert size(found, "critic", "gradients") < size(whole, "critic", "gradients")


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        (["total_training_steps=50", "save_freq=20"], 3),  # the last step writes one
        (["total_training_steps=50", "save_freq=20", "max_actor_ckpt_to_keep=1"], 2),
        (["total_training_steps=50", "save_freq=20", "max_actor_ckpt_to_keep=9"], 3),
        (["save_freq=20", "max_actor_ckpt_to_keep=2"], 3),
        (["save_freq=-1"], 1),
        (["save_freq=0"], 0),
        (["save_freq=after_each_epoch", "total_epochs=4"], 4),
        (["save_freq=20"], None),
        (["save_freq=after_each_epoch", "total_training_steps=9"], None),
    ],
)
def test_the_disk_holds_every_checkpoint_that_is_kept_and_the_one_being_written(keys, count):
    found = planned(*RAY, *(f"trainer.{key}" for key in keys))
    assert found.checkpoints == count
    (line,) = [line for line in plan.lines(found) if line.startswith("  disk")]
    bytes_needed = found.checkpoint_bytes * (1 if count is None else count)
    assert f"{bytes_needed / 2**30:.1f} GiB" in line


def test_without_a_gpu_this_machine_is_planned_and_its_ranks_share_the_memory(monkeypatch):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(plan, "has_accelerator", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = planned(*ALONE, on=None)
    four = planned("trainer.backend=ray", *OFFLOAD, "trainer.n_gpus_per_node=4", on=None)
    assert [alone.memory, four.memory] == [memory, memory / 4]
    assert four.host_bytes == 0  # there is no second memory to leave for
    assert "H100" not in "\n".join(plan.lines(alone))
    for keys in (
        [*RAY, "trainer.nnodes=2"],
        ["trainer.device=cuda"],
        [*RAY, "ray_kwargs.ray_init.address=head:6379"],
    ):
        assert planned(*keys, on=None).gpu == "H100"
    monkeypatch.setattr(plan, "has_accelerator", lambda: True)
    assert planned(*ALONE, on=None).gpu == "H100"
    assert planned(*ALONE, "trainer.device=cpu", on=None).memory == memory


@pytest.mark.parametrize(
    ("key", "recipe", "phase"),
    [
        (f"{ACTOR}.ppo_max_token_len_per_gpu", "grpo", "update"),
        ("critic.ppo_max_token_len_per_gpu", "ppo", "critic update"),
    ],
)
def test_what_does_not_fit_names_the_key_that_helps(key, recipe, phase):
    found = planned(*RAY, f"{key}=262144", recipe=recipe)
    assert found.over == [phase] and not found.fits
    assert f"{phase}: lower {key}" in "\n".join(plan.lines(found))


def test_the_command_says_whether_it_fits(capsys):
    arguments = ["grpo", f"{MODEL}=Qwen/Qwen2.5-0.5B", "trainer.n_gpus_per_node=1"]
    assert plan.main([*arguments, "--gpu", "H200"]) == 0
    assert capsys.readouterr().out.startswith("The run fits on 1 x H200: ")
    assert plan.main(["grpo", f"{MODEL}=Qwen/Qwen2.5-32B"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    for wrong, named in (
        (["grpo", f"{MODEL}=nobody/nothing"], "nobody/nothing"),
        ([*arguments, "--gpu", "H999"], "--gpu=H999"),
        (["grpo", "data.nope=1"], "data.nope"),
    ):
        assert plan.main(wrong) == 2 and named in capsys.readouterr().err


def test_a_dry_run_prints_the_plan(capsys, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit):
        prepare("grpo", [f"{MODEL}=Qwen/Qwen2.5-7B", "trainer.device=cuda"])
    out = capsys.readouterr().out
    assert "plan (python -m core.plan grpo" in out and "The run DOES NOT FIT on 1 x H100" in out
    with pytest.raises(SystemExit):  # GPUs that are asked for are planned, wherever they are
        prepare("grpo", [f"{MODEL}=Qwen/Qwen2.5-7B", *RAY, "trainer.n_gpus_per_node=8"])
    assert " on 8 x H100: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        prepare("grpo", [f"{MODEL}=./outputs/nothing", "--"])
    assert "plan (" not in capsys.readouterr().out  # a folder that is not there yet
    assert plan_lines(compose("grpo", [f"{MODEL}=nobody/nothing"]))[0].startswith("none: ")


def problems(*keys: str, recipe: str = "grpo") -> list[str]:
    return list(map(str, pictures.problems(compose(recipe, [*RAY, *keys]))))


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        (["algorithm.adv_estimator=gae"], "grpo"),
        (["reward_model.enable=true", "reward_model.model.path=x/y"], "grpo"),
        ([f"{ROLLOUT}.name=sglang"], "grpo"),
        ([], "sft"),
    ],
)
def test_what_does_not_read_pictures_yet_is_refused(keys, recipe):
    model = f"{MODEL}=Qwen/Qwen2.5-VL-7B-Instruct"
    (told,) = problems(model, *ALONE, *keys, recipe=recipe)
    assert told.startswith(f"{(keys or [model])[0]}: ")


def test_a_model_that_reads_pictures_is_not_split():
    model = f"{MODEL}=Qwen/Qwen2.5-VL-7B-Instruct"
    assert not problems(model, *ALONE)
    for key in (f"{ACTOR}.{ULYSSES}=2", f"{ACTOR}.{TENSOR}=2"):
        (told,) = problems(
            model, f"{ROLLOUT}.{TENSOR}=1", key, "actor_rollout_ref.model.use_remove_padding=True"
        )
        assert told.startswith(f"{key}: ")


def test_a_start_ends_with_the_problems(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit) as ended:
        prepare(
            "grpo", [f"{MODEL}=Qwen/Qwen2.5-VL-7B-Instruct", *ALONE, "algorithm.adv_estimator=gae"]
        )
    assert ended.value.code == 2 and "algorithm.adv_estimator=gae" in capsys.readouterr().err


def test_the_cache_of_hf_has_a_bound_of_its_own():
    long = f"{ACTOR}.ppo_max_token_len_per_gpu=33792"
    keys = (*ALONE, long, "data.max_prompt_length=1024", "data.max_response_length=32768")
    small = planned(*keys, model="Qwen/Qwen2.5-0.5B")
    key = "actor_rollout_ref.rollout.engine_kwargs"
    tiny = planned(*keys, f"{key}={{hf: {{cache_gib: 0.25}}}}", model="Qwen/Qwen2.5-0.5B")
    assert small.kv_sequences == int(4 * 2**30 // (small.shape.kv_bytes(4) * 33_792))
    assert tiny.kv_sequences == 0 and not tiny.fits
    assert any("engine_kwargs.hf.cache_gib" in line for line in plan.lines(tiny))


# --- times ---


def test_two_published_runs_lie_in_the_range_that_would_have_been_said():
    for devices, seconds, (likely, fast, slow) in plan_time.published():
        assert fast < seconds < slow and 0.5 < likely / seconds < 2, devices


@pytest.mark.parametrize(
    "name", ["grpo/lab-seed1", "ppo/lab-seed1", "grpo/real-instructions-seed2"]
)
def test_recorded_runs_on_two_cores_lie_in_the_range(name, monkeypatch):
    """Their time in the phases; a plan on a laptop is for the laptop."""
    monkeypatch.setattr(plan_time.os, "cpu_count", lambda: 2)
    run = load_run(ROOT / "results" / name)
    recipe, _, _ = name.partition("/")
    known = convert.all_keys(recipes.schema_of(recipe))
    settings = {key: value for key, value in run.config.items() if key in known}
    config = examine(recipe, (), settings).config
    shape = SMOLLM if "real" in name else LAB
    work = plan_time.work_of(config, shape, 1, None)
    fast, slow = (sum(work.seconds(each).values()) for each in (plan_time.FAST, plan_time.SLOW))
    timers = ("gen", "old_log_prob", "ref", "update_actor", "update_critic")
    means = [statistics.fmean(run.series(f"timing_s/{t}")[1] or [0.0]) for t in timers]
    assert fast < sum(means) < slow


def test_hours_follow_gpus_steps_and_lengths():
    keys = (*RAY, "trainer.total_training_steps=10", "data.max_response_length=4096")

    def times(gpus: int, mean_answer: int | None = None, *more: str):
        found = planned(*keys, *more, f"trainer.n_gpus_per_node={gpus}")
        return plan_time.work_of(found.config, found.shape, gpus, "H100", mean_answer)

    one, two = times(4).seconds(plan_time.LIKELY), times(8).seconds(plan_time.LIKELY)
    assert two["update"] == pytest.approx(one["update"] / 2)
    # The longest answer alone is as long on any number of GPUs
    assert one["generate"] > two["generate"] > one["generate"] / 2
    shorter, longer = (times(4, mean).seconds(plan_time.LIKELY)["update"] for mean in (100, 1000))
    assert 2 < longer / shorter < 10
    critic = times(4, None, "algorithm.adv_estimator=gae").seconds(plan_time.LIKELY)
    assert critic["update"] > 1.9 * one["update"]
    text = "\n".join(plan.lines(planned(*keys)))
    assert "The run of 10 steps takes" in text and "GPU-hours" in text and "790 s a step" in text


def test_every_gpu_has_a_speed():
    assert TABLE["speeds"].keys() == TABLE["gpus"].keys()
