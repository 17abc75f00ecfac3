"""A run on several nodes names its cluster, or ends in one line that says what to type."""

from __future__ import annotations

import pytest
import torch

from core import command_line
from core.cluster import ray_pools
from core.config import compose
from core.config.paths import address_problem, cluster_address
from core.errors import InputError

RAY, POOL = "trainer.backend=ray", "actor_rollout_ref.hybrid_engine=False"
NODES = "actor_rollout_ref.rollout.nnodes=3"
APART = (POOL, NODES, "actor_rollout_ref.rollout.n_gpus_per_node=1")
ADDRESS = "+ray_kwargs.ray_init.address"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def problem(*overrides: str) -> str:
    return str(address_problem(compose("grpo", [RAY, *overrides])) or "")


def test_several_nodes_need_an_address(monkeypatch):
    text = problem("trainer.nnodes=2")
    assert text.startswith("trainer.nnodes=2: needs a Ray cluster, and neither RAY_ADDRESS nor")
    assert "`ray start --head" in text and "`ray start --address=" in text and "\n" not in text
    assert problem("trainer.nnodes=2", f"{ADDRESS}=local") == text
    assert problem(*APART).startswith("actor_rollout_ref.rollout.nnodes=3: needs a Ray cluster")
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert problem("trainer.nnodes=2") == text
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not problem("trainer.nnodes=2") and not problem(*APART)
    assert problem("trainer.nnodes=2", f"{ADDRESS}=local") == text  # the key wins over the variable


def test_one_node_a_cpu_and_one_process_need_none():
    assert not problem() and not problem(POOL)
    assert not problem("trainer.nnodes=2", "trainer.device=cpu")
    assert not problem("trainer.nnodes=2", f"{ADDRESS}=auto")
    assert not problem("trainer.nnodes=2", "trainer.backend=local")


def test_the_key_wins_over_the_variable(monkeypatch):
    there, local = (compose("grpo", [RAY, f"{ADDRESS}={value}"]) for value in ("10.0.0.1:1", "local"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert cluster_address(there) == "10.0.0.1:1" and cluster_address(local) is None
    assert cluster_address(compose("grpo", [RAY])) == "auto"


def test_nothing_starts_without_it(monkeypatch, capsys, tmp_path):
    """Neither the command nor, from Python, the connection."""
    ours = ["trainer.nnodes=16", "trainer.n_gpus_per_node=8", f"trainer.default_local_dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["main_grpo", RAY, *ours])
    with pytest.raises(SystemExit) as ended:
        command_line.main("grpo", trainer="never.imported:Trainer")
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and any(line.startswith("trainer.nnodes=16: needs a Ray cluster") for line in told)
    monkeypatch.setattr(ray_pools.ray, "init", lambda **_: pytest.fail("it connects"))
    with pytest.raises(InputError, match="RAY_ADDRESS"):
        ray_pools.connect(compose("grpo", [RAY, "trainer.nnodes=2"]), torch.device("cuda"))


def test_a_dry_run_mentions_it(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setattr("sys.argv", ["main_grpo", RAY, "trainer.nnodes=2"])
    with pytest.raises(SystemExit) as ended:
        command_line.main("grpo", trainer="never.imported:Trainer")
    assert ended.value.code == 0
    assert "\n  cluster: trainer.nnodes=2: needs a Ray cluster, and neither RAY_ADDRESS" in capsys.readouterr().out
