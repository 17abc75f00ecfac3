"""Episodes over Ray: the loop and its tools stay with the driver, turns and updates cross
processes.

The engine decodes elsewhere, so what decodes together depends on when tools answer: a run repeats
up to rounding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.config.composition import compose
from recipes.search_r1.search_r1_ray_trainer import SearchR1Trainer
from tests.core.ray_cluster import local_ray
from tests.recipes.test_search_r1 import files as search_files  # noqa: F401
from tests.recipes.test_search_r1 import run_command
from tests.search import Server

# Minutes, and one Ray, however many test processes
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(8):
        yield


def search_run(
    files: Path, folder: Path, url: str, *overrides: str
) -> tuple[list[dict], list[list[str]]]:
    """Metrics and answers, step by step, of a run that asks the server before its turns. A random
    model takes no action, so every episode has a second turn after the complaint."""
    overrides = (
        *overrides,
        "trainer.total_training_steps=3",
        f"trainer.rollout_data_dir={folder}/answers",
    )
    arguments = run_command(files, *overrides)(folder / "run")[3:]
    arguments = [
        a
        for a in arguments
        if not a.startswith(("retriever.url", "+retriever.local", "trainer.total"))
    ]
    arguments += [f"retriever.url='{url}'", "trainer.total_training_steps=3"]
    SearchR1Trainer(compose("search_r1", arguments)).init_workers().fit()
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    answers = [
        [
            json.loads(line)["output"]
            for line in (folder / "answers" / f"{step}.jsonl").read_text().splitlines()
        ]
        for step in (1, 2, 3)
    ]
    return [line for line in lines if "rollout_corr/logp_diff_max" in line], answers


def check_searching(steps: list[dict]) -> None:
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert (
            step["tool_call_counts/mean"] == 1
            and step["num_turns/min"] == step["num_turns/max"] == 2
        )
        # The learners read the very tokens that were sampled
        assert step["rollout_corr/logp_diff_max"] < 1e-4
        assert step["retrieval/searches"] >= 12 and step["retrieval/errors"] == 0


def test_search_episodes_over_ray_are_those_of_one_process(search_files, tmp_path):  # noqa: F811
    with Server(search_files / "index", "--backend", "random") as server:
        local, ray_run = (
            search_run(search_files, tmp_path / name, server.url, f"trainer.backend={name}")
            for name in ("local", "ray")
        )
    check_searching(ray_run[0])
    # Every answer of the first step, before an update could round
    assert ray_run[1][0] == local[1][0]
    for there, here in zip(ray_run[0], local[0], strict=True):
        assert there["critic/score/mean"] == pytest.approx(here["critic/score/mean"], abs=0.05)
        assert there["actor/grad_norm"] == pytest.approx(here["actor/grad_norm"], rel=0.2)
