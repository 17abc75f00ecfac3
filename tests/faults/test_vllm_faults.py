"""A run over Ray whose vLLM engine is of two processes: killed whole or in part, it starts again
and leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults.ray_runs import Watched, disturbed, killing, title
from tests.faults.test_ray_faults import lines
from tests.faults.tiny_run import command, prepare

STEPS = 6
VLLM = (
    *("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.max_restarts=1"),
    *(
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ),
    *(
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.free_cache_engine=False",
    ),
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder, hidden_size=128)  # vLLM's kernels on a CPU want heads of 32
    return folder


def parts(run: Watched) -> list[int]:
    """vLLM's own processes, each of which holds a part of every layer.

    They are told by their parent: the title that vLLM gives them may overwrite their environment,
    and the mark in it.
    """
    engines = run.pids("ray::EngineProcess")
    children = " ".join(
        path.read_text()
        for engine in engines
        for path in Path(f"/proc/{engine}/task").glob("*/children")
    ).split()
    return sorted(pid for pid in map(int, children) if title(pid).startswith("VLLM::Worker"))


def the_engine(run: Watched) -> None:
    run.until(lambda: len(parts(run)) >= 2)
    killing("ray::EngineProcess")(run)


def one_part(run: Watched) -> None:
    run.until(lambda: len(parts(run)) >= 2)
    os.kill(parts(run)[-1], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup says why"
)
@pytest.mark.parametrize("kill", [the_engine, one_part])
def test_a_killed_engine_of_two_processes_costs_a_restart(files, kill):
    run = disturbed(command(files, "grpo", STEPS, *VLLM), files / kill.__name__, kill, after=4)
    assert run.status == 0 and run.nothing_left, run.log
    # after step 2, or after 4 where the kill came when that was saved
    assert re.search(r"restart 1 of 1, after step [24]\b", run.log), run.log
    assert lines(run.folder)[-1]["actor/grad_norm"] > 0
