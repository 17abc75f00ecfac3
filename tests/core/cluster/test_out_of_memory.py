"""A run that runs out of memory ends with one line: phase, process, knobs, amounts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from core.cluster.workers import LocalWorkers
from core.command_line import work
from core.config.composition import compose
from core.engines.hf import HFEngine
from core.errors import MEMORY_KEYS, out_of_memory
from core.learner import step_models
from core.learner.learner import Actor
from tests.faults.tiny_run import command, prepare

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 18.00 GiB. GPU 3 has a total capacity of 79.10 GiB of "
    "which 2.90 GiB is "
    "free. Process 41 has 1.20 GiB memory in use. Including non-PyTorch memory, this process has "
    "76.20 GiB memory in "
    "use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by "
    "PyTorch but "
    "unallocated."
)
TRAINER = "core.ray_trainer:RayPPOTrainer"


def fail(*_, **__):
    raise torch.OutOfMemoryError(ON_A_GPU)


# phase -> what is planted: an owner and its method that fails
PLANTED = {
    "load": (step_models, "load_critic"),
    "gen": (HFEngine, "sample"),
    "update_actor": (Actor, "update"),
    "save_checkpoint": (LocalWorkers, "save"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder)
    return folder


@pytest.mark.parametrize("phase", PLANTED)
def test_the_run_ends_with_a_line_that_names_phase_and_knob(
    files, tmp_path, monkeypatch, capsys, phase
):
    monkeypatch.setattr(*PLANTED[phase], fail)
    more = [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.max_restarts=3",
        "trainer.val_before_train=False",
    ]
    config = compose("ppo", command(files, "ppo", 2, *more)(tmp_path / "run")[3:])
    with pytest.raises(SystemExit) as ended:
        work(TRAINER, config)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "restart" not in told
    line = told.splitlines()[-1]
    assert (
        line.startswith(f"out of memory in phase {phase} in this process: lower ")
        and ON_A_GPU[:100] in line
    )
    assert MEMORY_KEYS.get(phase, "gpu_memory_utilization") in line and "TROUBLESHOOTING.md" in line
    if phase != "load":
        assert json.loads((tmp_path / "run/manifest.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("library", [torch, np], ids=["torch", "numpy"])
def test_a_real_failure_of_an_allocator_is_known_with_its_amount(library):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        library.empty(2**58, dtype=library.uint8)
    found = out_of_memory(caught.value, "update_actor", "on learner rank 3")
    assert re.match(
        r"out of memory in phase update_actor on learner rank 3: lower .*(28823\d+ bytes|256\. "
        r"PiB)",
        str(found),
    )
    assert "MemoryError" in str(out_of_memory(MemoryError(), "gen"))
    assert (
        out_of_memory(ValueError("memory"), "gen") is None and out_of_memory(found, "gen") is None
    )
