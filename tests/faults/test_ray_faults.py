"""A run over Ray whose processes are killed: started again from its checkpoint, it ends as if
nothing had happened."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.kill_and_resume import compare_runs, read_lines, run_uninterrupted
from tests.faults.ray_runs import Run, Watched, disturbed, killing, ordinals
from tests.faults.striking import KINDS, PHASES, VARIABLE
from tests.faults.tiny_run import PROMPTS, command

STEPS = 6
RAY = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.max_restarts=1")


def over_ray(files: Path, *overrides: str, ranks: int = 2) -> Callable[[Path], list[str]]:
    return command(files, "ppo", STEPS, *RAY, f"trainer.n_gpus_per_node={ranks}", *overrides)


def lines(run: Path, count: int = STEPS) -> list[dict[str, float]]:
    """The metrics of every step, each of which is there once."""
    found = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
    assert [line["step"] for line in found] == list(range(count + 1))
    return found


@pytest.fixture(scope="module")
def whole(files) -> Path:
    return run_uninterrupted(over_ray(files), files / "whole").folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layers", [False, True], ids=["whole", "shared_layers"])
def test_a_killed_learner_costs_a_restart_and_no_bit(files, whole, layers):
    """Two ranks, also with half of each matrix: one is killed after step 3 of 6; a checkpoint is
    every other step."""
    parts = ("actor_rollout_ref.actor", "critic") if layers else ()
    factory = over_ray(files, *(f"{part}.tensor_model_parallel_size=2" for part in parts))
    undisturbed = run_uninterrupted(factory, files / "layers").folder if layers else whole
    run = disturbed(factory, files / f"killed-{layers}", killing("ray::LearnerProcess"), after=4)
    assert run.status == 0 and run.nothing_left, run.log
    assert re.search(r"learner rank \d died in phase \w+", run.log)
    # 4 where the kill came when that was saved
    assert re.search(r"restart 1 of 1, after step [24]\b", run.log)
    assert compare_runs(undisturbed, run.folder) == []
    assert lines(run.folder)[-1]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_without_restarts_a_death_is_one_clear_line(files):
    factory = over_ray(files, "trainer.max_restarts=0")
    run = disturbed(factory, files / "given-up", killing("ray::EngineProcess"), after=4)
    assert run.seconds < 120 and run.nothing_left
    assert run.status == 1 and "engine 0 died in phase" in run.log and "Traceback" not in run.log


@pytest.mark.slow
def test_ctrl_c_at_the_whole_group_saves_and_resumes(files, whole):
    """A terminal sends SIGINT to every process of the run, not only to the driver."""

    def interrupt(run: Watched) -> None:
        for pid in run.pids():
            os.kill(pid, signal.SIGINT)

    run = disturbed(over_ray(files), files / "interrupted", interrupt, after=4)
    assert run.status == 0 and "stopped after step" in run.log and run.nothing_left, run.log
    run_uninterrupted(over_ray(files), run.folder)
    assert compare_runs(whole, run.folder) == []


@pytest.mark.slow
def test_a_killed_driver_takes_everything_with_it(files):
    run = disturbed(
        over_ray(files), files / "whole-driver", lambda run: run.process.kill(), after=4
    )
    assert run.status == -signal.SIGKILL and run.nothing_left


# -- every kind of process in every phase


STRIKE_STEPS = 8
AT = {"rollout": 2, "log-probs": 3, "update": 4, "sync": 5, "validation": 6, "checkpoint": 7}
OFTEN = ("trainer.save_freq=1", "reward_model.reward_manager=prime", "reward_model.num_workers=2")
# A scoring process has something in hand when it is struck
SLOW = "custom_reward_function.name=slowly"


def striking(files: Path, kind: str) -> Callable[[Path], list[str]]:
    """PPO, in the trainer that strikes."""
    settings = [f"trainer.max_restarts={len(AT) + 2}", "trainer.test_freq=6", *OFTEN]
    settings += [SLOW] if kind == "grader" else []

    def factory(run: Path) -> list[str]:
        plain = command(
            files, "ppo", STRIKE_STEPS, *RAY, *settings, f"trainer.rollout_data_dir={run}-rollouts"
        )(run)
        return [
            "tests.faults.striking" if part == "recipes.ppo.main_ppo" else part for part in plain
        ]

    return factory


def orders(files: Path, kind: str, at: dict[str, int]) -> dict[str, str]:
    return {
        VARIABLE: json.dumps({"kind": kind, "at": at, "journal": str(files / f"{kind}.journal")})
    }


@pytest.fixture(scope="module")
def struck(files) -> Callable[[str], tuple[Run, list[dict]]]:
    """One run a kind, in which one process of that kind is killed in each phase in turn, and its
    journal."""

    @functools.cache
    def of(kind: str) -> tuple[Run, list[dict]]:
        run = disturbed(
            striking(files, kind), files / f"struck-{kind}", env=orders(files, kind, AT)
        )
        return run, [json.loads(line) for line in read_lines(files / f"{kind}.journal")]

    return of


@pytest.fixture(scope="module")
def unstruck(files) -> Path:
    return run_uninterrupted(
        striking(files, "nobody"), files / "nobody", env=orders(files, "nobody", {})
    ).folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_in_a_phase_is_over_within_two_minutes(struck, kind, phase):
    _, journal = struck(kind)
    (at,) = (index for index, line in enumerate(journal) if line.get("phase") == phase)
    strike, *later = journal[at:]
    assert strike["step"] == AT[phase]
    following = next(line for line in later if line["what"] == "step")
    assert following["time"] - strike["time"] < 120
    if kind == "grader":  # a new one takes over
        assert later[0]["what"] == "step"
    else:
        # From the last checkpoint, of the step before, or of the one before that where its writers
        # died at work
        writes = kind != "engine" and phase != "checkpoint"
        assert later[0]["what"] == "begun"
        assert later[0]["step"] in (strike["step"] - 1, *([strike["step"] - 2] if writes else []))
        assert following["step"] == later[0]["step"] + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_after_all_deaths_the_run_is_the_undisturbed_one(files, struck, unstruck, kind):
    run, _ = struck(kind)
    assert run.status == 0 and run.nothing_left, run.log
    assert ordinals(Path(f"{run.folder}-rollouts")) == list(range(STRIKE_STEPS * PROMPTS))
    assert len(lines(run.folder, STRIKE_STEPS)) == STRIKE_STEPS + 1
    assert compare_runs(unstruck, run.folder) == []
