"""The example of recipes/README.md: exactly its blocks are a recipe that checks, trains on the lab
and is reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.lab import prepare
from recipes.lab.hops import RECIPE, HopsRecipe
from results import report

ROOT = Path(__file__).resolve().parents[2]
MODEL = HopsRecipe(
    hidden_size=16, intermediate_size=16, layers=1, heads=2, batch_size=4, task_steps=2, mixture_steps=2, hold_steps=1,
    warmup_steps=1, loss_bound=99.0, test_questions=12,
)  # fmt: skip


def blocks() -> dict[str, str]:
    """File name below the folder of the recipe -> its text, as the document has it."""
    section = (
        (ROOT / "recipes/README.md").read_text(encoding="utf-8").partition("## Your own recipe")[2]
    )
    section = section.partition("\n## ")[0]
    found = {}
    for text in re.findall(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        (name,) = re.findall(r"^# mine/(\S+)$", text, re.MULTILINE)
        found[name] = text
    return found


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder outside of the repository with nothing but the blocks."""
    for name, text in blocks().items():
        path = tmp_path / "project" / "recipes" / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "project"


def run(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # Where the checkout has no .venv
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DRY_RUN")
    }
    return subprocess.run(
        ["bash", "recipes/mine/run_lab.sh", *arguments],
        cwd=project,
        env={**inherited, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_dry_run_checks_the_recipe_inside_and_outside_of_the_repository(project, tmp_path):
    outside = run(project, DRY_RUN="1", RLREPRO=str(ROOT))
    assert outside.returncode == 0, outside.stderr
    assert "recipes.mine.functions:capped" in outside.stdout
    for package in ("core", "recipes", "reward_scores"):
        shutil.copytree(
            ROOT / package,
            tmp_path / "clone" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copytree(project / "recipes/mine", tmp_path / "clone/recipes/mine")
    inside = run(tmp_path / "clone", DRY_RUN="1")
    assert inside.returncode == 0 and inside.stdout == outside.stdout, inside.stderr
    misspelt = run(project, "data.train_batch_sise=4", DRY_RUN="1", RLREPRO=str(ROOT))
    assert misspelt.returncode == 2 and misspelt.stderr.startswith(
        "data.train_batch_sise=4: unknown key"
    )
    assert not (project / "outputs").exists()


@pytest.mark.processes
def test_loss_hook_and_scorer_act_in_a_run_that_is_reported(project, capsys):
    lab = project / prepare.FOLDER
    made = MODEL.build(lab / "base")  # not warmed up, under the real one's name
    made.rename(lab / "base" / RECIPE.digest)
    few = [
        *(
            "trainer.backend=local",
            "trainer.total_training_steps=2",
            "trainer.test_freq=2",
            "trainer.cpu_threads=1",
        ),
        *(
            "data.train_batch_size=4",
            "data.val_max_samples=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ),
        *("actor_rollout_ref.rollout.n=4", "trainer.rollout_data_dir=rollouts"),
        # Far enough for the second optimizer step to meet the cap
        *("actor_rollout_ref.actor.optim.lr=0.1",),
    ]
    done = run(project, *few, RLREPRO=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    folder = project / "outputs/mine/lab-seed1"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        rows = [
            json.loads(row)
            for row in (project / f"rollouts/{line['step']}.jsonl").read_text().splitlines()
        ]
        marked = [float("#" in row["output"]) for row in rows]
        assert 0 < sum(marked) < len(marked) == 16
        assert line["reward/marked/mean"] == pytest.approx(sum(marked) / 16)  # the scorer
        # The hook
        assert line["reward/length/mean"] == pytest.approx(-0.01 * line["response_length/mean"])
        assert line["critic/rewards/mean"] == pytest.approx(
            line["critic/score/mean"] + line["reward/length/mean"]
        )
        right, marked_share = line["critic/acc/mean"], line["reward/marked/mean"]
        assert line["critic/score/mean"] == pytest.approx(right + 0.1 * (marked_share - right))
        assert "actor/capped" in line and "actor/pg_clipfrac" not in line  # the loss
    assert any(line["actor/capped"] > 0 for line in lines[1:])
    assert any("marked" in name for name in lines[0]) and not any(
        "/length/" in name for name in lines[0]
    )
    accuracy, reward = done.stdout.strip().splitlines()[-2:]
    assert accuracy.startswith("mine/lab-seed1: accuracy on lab/hops ")
    assert reward.startswith("mine/lab-seed1: reward on lab/hops ")  # which is dense here
    assert report.main([str(folder)]) == 0
    assert "mine/lab-seed1" in capsys.readouterr().out and (folder / "report.html").exists()


SCHEMA = """
from core.config.schema import Config
from core.config.section import Section, key
class MineConfig(Section):
    bonus: float = key(0.5, "added to the reward of short answers")
class SCHEMA(Config):
    mine: MineConfig = MineConfig()
"""
RULES = """
def bonus_is_small(config):
    if config.mine.bonus > 1:
        yield "mine.bonus", "must be at most 1", "lower it"
PROBLEMS = (bonus_is_small,)
"""


def test_keys_and_rules_of_its_own(project):
    (project / "recipes/mine/config_schema.py").write_text(SCHEMA)
    (project / "recipes/mine/config_rules.py").write_text(RULES)
    refused = run(project, "mine.bonus=2", DRY_RUN="1", RLREPRO=str(ROOT))
    assert (
        refused.returncode == 2 and "mine.bonus=2.0: must be at most 1; lower it" in refused.stderr
    )
    helped = run(project, "--help", "bonus", RLREPRO=str(ROOT))
    assert not (project / "outputs").exists()  # help needs neither data nor a model
    assert (
        "mine.bonus=0.5" in helped.stdout
        and "Added to the reward of short answers" in helped.stdout
    )
