"""The line of a run's cost, only where it is known; which GPU this machine has."""

from __future__ import annotations

import json

import pytest

from core.config import compose
from core.extensions.planning import cost_lines
from core.extensions.planning.cost_lines import gpu_of
from core.extensions.planning.estimate import Plan
from core.extensions.planning.model_shapes import gpu
from core.tracking.step_time import duration

MODEL = "actor_rollout_ref.model.path"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.n=8")
GIB = 2**30


def cost(*overrides):
    """Return the line of a dry run; nothing where there is none."""
    return next(iter(cost_lines.cost_lines(compose("grpo", overrides), dry=True)), "")


def test_memory_and_time_are_those_of_the_plan_and_absent_where_unknown(tmp_path, monkeypatch):
    ray = ("trainer.backend=ray", f"{ROLLOUT}.name=vllm", "trainer.total_training_steps=100")
    arguments = (*SIZES, *ray, f"{MODEL}=Qwen/Qwen2.5-7B", "trainer.n_gpus_per_node=8")
    plan = Plan(compose("grpo", arguments), gpu("H100"))
    seconds, memory = sum(plan.seconds.values()), max(plan.phase_bytes.values()) / GIB
    times = f"a step about {duration(seconds)}, the run about {duration(100 * seconds)}"
    assert cost(*arguments) == f"the cost, estimated: {memory:.0f} GiB a GPU on 8 x H100; {times}"
    monkeypatch.setattr(cost_lines, "gpu_here", lambda config: None)
    assert cost_lines.cost_lines(compose("grpo", arguments), dry=False) == []  # no GPU of the table is here
    monkeypatch.setattr(cost_lines, "gpu_here", lambda config: gpu("H200"))
    assert "on 8 x H200; a step" in cost_lines.cost_lines(compose("grpo", arguments), dry=False)[0]
    assert "does not fit on 1 x H100, DRY_RUN=1 prints the plan;" in cost(*SIZES, f"{MODEL}=Qwen/Qwen2.5-32B")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 9}))
    for model in ("nobody/nothing", "./no/folder", str(tmp_path)):  # unknown, not there yet, a lab's
        assert cost(*SIZES, f"{MODEL}={model}") == ""
    assert cost(*arguments, "trainer.val_only=True") == ""


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
    assert cost_lines.gpu_here(config) is None
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H100 80GB HBM3, 81559'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cost_lines.gpu_here(config).name == "H100"
    assert cost_lines.gpu_here(compose("grpo", ["trainer.device=cpu"])) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cost_lines.gpu_here(config) is None
