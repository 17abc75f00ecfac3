"""The command that a page prints of a run composes what the run recorded."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from core.config import convert
from core.tracking.run_manifest import ROOT
from results.reporting.commands import repeat
from results.reporting.run_reader import RecordedRun, settings_of
from results.reporting.run_scripts import read_script
from results.reporting.summaries import grouped_summaries, read_summaries

RESULTS = ROOT / "results"


def first_seeds() -> list[str]:
    """The folders of the runs whose command is printed: the first of each experiment."""
    groups = grouped_summaries(read_summaries(RESULTS))
    return [f"{group[0]['recipe']}/{group[0]['run']}" for group in groups]


@pytest.fixture(autouse=True)
def fresh_shell(monkeypatch):
    """Nothing is in the environment that a stranger's lacks."""
    for name in ("REAL_DTYPE", "REAL_DEVICE", "REAL_MODEL", "LAB_PORT", "REAL_PORT"):
        monkeypatch.delenv(name, raising=False)


def typed(command: str, run: RecordedRun) -> RecordedRun:
    """The run that this command would record, by its script's dry run."""
    bash, script, *words = shlex.split(command)
    assert bash == "bash"
    config = convert.as_json(read_script(Path(ROOT, script), words).config)
    here = {key: value for key, value in config.items() if str(value).startswith(f"{ROOT}/")}
    relative = {key: str(Path(value).relative_to(ROOT)) for key, value in here.items()}
    return replace(run, config=config | relative)


@pytest.mark.parametrize("name", first_seeds())
def test_a_printed_command_composes_the_recorded_identity(name):
    run = settings_of(RESULTS / name)
    again = typed(repeat(run), run)
    assert again.decisive == run.decisive and again.seed == run.seed
    assert again.experiment == run.experiment


def test_a_setting_that_the_script_lost_since_is_typed_in_the_command():
    run = settings_of(RESULTS / "grpo/lab-seed1")
    changed = replace(run, config={**run.config, "actor_rollout_ref.actor.clip_ratio_high": 0.28})
    assert repeat(run) == "bash recipes/grpo/run_lab.sh"
    assert repeat(changed) == f"{repeat(run)} actor_rollout_ref.actor.clip_ratio_high=0.28"


def test_a_seed_is_typed_and_a_name_is_not():
    run = settings_of(RESULTS / "grpo/lab-seed3")
    assert repeat(run) == "bash recipes/grpo/run_lab.sh trainer.seed=3"
