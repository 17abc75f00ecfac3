"""What a run prints first: a step in numbers, its length, its places."""

from __future__ import annotations

import pytest

from core.command_line import prepare
from core.config import compose
from core.tracking.first_lines import first_lines

MODEL = "actor_rollout_ref.model.path"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.n=8")
HOOKS = ("keep_group", "shape_reward", "compute_advantages")


def lines(*overrides, recipe="grpo", hooks=HOOKS):
    return first_lines(compose(recipe, overrides, hooks))


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


@pytest.mark.needs("tools")
def test_tools_are_named():
    tools = f"{ROLLOUT}.multi_turn"
    found = step(*SIZES, f"{tools}.enable=True", f"{tools}.tool_config_path=x.yaml", f"{tools}.max_assistant_turns=3")
    assert "trajectories, episodes with tools of at most 3 turns;" in found


def test_a_validation_trains_nothing():
    found = lines(
        "trainer.val_only=True",
        f"{ROLLOUT}.val_kwargs.n=4",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
    )
    assert found[0] == "the run: one validation on 1 file, 4 answers a question; trainer.val_only trains nothing"
    assert not any(line.startswith("a step") for line in found) and found[1].startswith("writes to outputs/")


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
