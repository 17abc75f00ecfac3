"""What a run prints first: a step in numbers, its length, its places; memory and time only where they are known."""

from __future__ import annotations

import json

import pytest

from core.command_line import prepare
from core.config import compose
from core.extensions.planning import first_lines
from core.extensions.planning.estimate import Plan
from core.extensions.planning.first_lines import gpu_of
from core.extensions.planning.model_shapes import gpu

MODEL = "actor_rollout_ref.model.path"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.n=8")
HOOKS = ("keep_group", "shape_reward", "compute_advantages")
GIB = 2**30


def lines(*overrides, recipe="grpo", on=None, hooks=HOOKS):
    return first_lines.first_lines(compose(recipe, overrides, hooks), on and gpu(on))


def step(*overrides, **kwargs):
    return lines(*overrides, **kwargs)[0]


def test_a_step_is_counted():
    assert step(*SIZES) == "a step: 64 prompts x 8 answers = 512 trajectories; 4 updates of 128"
    twice = "8 updates of 128 (2 epochs of 4)"
    assert step(*SIZES, f"{ACTOR}.ppo_epochs=2") == f"a step: 64 prompts x 8 answers = 512 trajectories; {twice}"
    once = step(*SIZES[:1], f"{ACTOR}.ppo_mini_batch_size=64", f"{ROLLOUT}.n=1", recipe="ppo")
    assert once == "a step: 64 prompts x 1 answer = 64 trajectories; 1 update of 64, and as many of the critic"
    others = step(*SIZES, "critic.ppo_mini_batch_size=32", "critic.ppo_epochs=3", recipe="ppo")
    assert others.endswith("; 4 updates of 128, and 6 updates of 256 (3 epochs of 2) of the critic")


def test_filtering_and_episodes_are_named():
    filters = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=5")
    drawn = "of groups whose acc differs, from at most 960 prompts drawn"
    assert f"512 trajectories {drawn}; 4 updates" in step(*SIZES, *filters, "data.gen_batch_size=192", recipe="dapo")
    assert "drawn" not in step(*SIZES, "algorithm.filter_groups.enable=False", recipe="dapo")
    search = ("data.max_start_length=1024", "max_turns=2", *SIZES)
    assert "trajectories, episodes of at most 3 turns;" in step(*search, recipe="search_r1", hooks=(*HOOKS, "generate"))
    tools = f"{ROLLOUT}.multi_turn"
    found = step(*SIZES, f"{tools}.enable=True", f"{tools}.tool_config_path=x.yaml", f"{tools}.max_assistant_turns=3")
    assert "trajectories, episodes with tools of at most 3 turns;" in found


def test_a_validation_trains_nothing():
    found = lines(
        "trainer.val_only=True",
        f"{ROLLOUT}.val_kwargs.n=4",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        on="H100",
    )
    assert found[0] == "the run: one validation on 1 file, 4 answers a question; trainer.val_only trains nothing"
    assert not any(line.startswith("a step") for line in found) and found[1].startswith("writes to outputs/")


def test_memory_and_time_are_those_of_the_plan_and_absent_where_unknown(tmp_path):
    ray = ("trainer.backend=ray", f"{ROLLOUT}.name=vllm", "trainer.total_training_steps=100")
    arguments = (*SIZES, *ray, f"{MODEL}=Qwen/Qwen2.5-7B", "trainer.n_gpus_per_node=8")
    plan = Plan(compose("grpo", arguments), gpu("H200"))
    told, run, *_ = lines(*arguments, on="H200")
    seconds = sum(plan.seconds.values())
    assert f"; about {max(plan.phase_bytes.values()) / GIB:.0f} GiB a GPU on 8 x H200; about " in told
    assert told.endswith(first_lines.duration(seconds)) and first_lines.duration(100 * seconds) in run
    assert "GiB" not in step(*arguments) and "about" not in lines(*arguments)[1]
    assert "it does not fit on 1 x H100" in step(*SIZES, f"{MODEL}=Qwen/Qwen2.5-32B", on="H100")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "intermediate_size": 8,
                "vocab_size": 9,
            }
        )
    )
    for model in ("nobody/nothing", "./no/folder", str(tmp_path)):  # unknown, not there yet, a lab's
        assert step(*SIZES, f"{MODEL}={model}", on="H100") == step(*SIZES)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (90, "90 s"), (840, "14 min"), (3.5 * 3600, "3.5 h"), (9.5 * 86400, "9.5 days")],
)
def testdurations_are_short(seconds, text):
    assert first_lines.duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        *[("NVIDIA H100 80GB HBM3", 79.6, "H100"), ("NVIDIA H200", 140.4, "H200"), ("NVIDIA H20", 95.6, "H20")],
        *[("NVIDIA A100-SXM4-80GB", 80, "A100"), ("NVIDIA A100-SXM4-40GB", 40, "A100-40")],
        *[("NVIDIA GeForce RTX 4090", 24, "RTX4090"), ("NVIDIA L40S", 45, "L40S")],
        *[("NVIDIA H100 NVL", 94, None), ("Tesla T4", 15, None)],
    ],
)
def test_a_drivers_name_and_memory_are_a_gpu_of_the_table(name, gib, known):
    found = gpu_of(name, gib * GIB)
    assert (found and found.name) == known


def test_the_gpu_is_asked_of_the_driver_unless_none_is_used(tmp_path, monkeypatch):
    config = compose("grpo", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_lines.gpu_here(config) is None
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H100 80GB HBM3, 81559'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_lines.gpu_here(config).name == "H100"
    assert first_lines.gpu_here(compose("grpo", ["trainer.device=cpu"])) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert first_lines.gpu_here(config) is None


def test_places_are_named_and_a_start_prints_the_lines_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRY_RUN", raising=False)
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    data = ["data.train_files=train.parquet", "data.val_files=test.parquet", f"{MODEL}=Qwen/Qwen2.5-0.5B"]
    prepare("grpo", [*data, *SIZES, "trainer.device=cpu", "trainer.experiment_name=mine", "trainer.test_freq=5"])
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "a step: 64 prompts x 8 answers = 512 trajectories; 4 updates of 128",
        "the run: 30 epochs of the data; a validation every 5 steps; no checkpoint",
        "writes to outputs/grpo/mine: metrics.jsonl has a line a step, samples.jsonl some answers of each validation",
        "to watch it: this log, tail -f outputs/grpo/mine/metrics.jsonl, tensorboard --logdir outputs",
    ]
    assert shown.err == ""
    other = "tensorboard --logdir outputs (with trainer.logger=[console,tensorboard])"
    assert lines("trainer.logger=[console]")[-1].endswith(other)
