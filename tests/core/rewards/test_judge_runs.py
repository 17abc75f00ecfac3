"""Whole runs under a judge: their rewards, their replay without a server, and the bounds that stop
them."""

from __future__ import annotations

import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.checkpoint.store import CheckpointStore
from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from core.rewards import judge as judge_module
from core.rewards.layer import RewardError
from tests.core.rewards.test_judge import NOBODY, shown
from tests.core.scripted_run import configured, prepare, scripted
from tests.judge_server import MODEL, serve


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(
        judge_module, "HttpOptions", partial(judge_module.HttpOptions, pause_s=0.01)
    )
    prepare(tmp_path)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    for row in rows:  # no scorer knows the source: the judge alone can score
        row["data_source"], row["reward_model"]["style"] = "nobody/knows", "model"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return tmp_path


def config(folder, run, url, *overrides, steps=3, **more):
    keys = {
        "reward_model.enable": True,
        "reward_model.on_error": "mask",
        "reward_model.judge.url": url,
        "reward_model.judge.model": MODEL,
        "reward_model.judge.cache_dir": folder / "kept",
        "custom_reward_function.path": "null",
    }
    given = [f"{key}={value}" for key, value in keys.items()]
    return configured(folder, run, *given, *overrides, steps=steps, **more)


def answer(request, version):
    return str(request.seed % 9)


def generous(number, body):
    """The higher the digit, the better."""
    return f"[[{int(shown(body)[1]) / 10}]]"


def lines(folder, run):
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def judged(found):
    """What the judge's words decided of each step, without what it cost this time."""
    drop = ("perf/", "timing_s/")
    return [
        {name: value for name, value in line.items() if not name.startswith(drop)} for line in found
    ]


def test_a_replay_without_a_server_gives_the_same_rewards(folder):
    with serve(generous) as server:
        scripted()(config(folder, "first", server.url), answer).init_workers().fit()
        asked = len(server.requests)
    first = lines(folder, "first")
    scripted()(config(folder, "again", NOBODY), answer).init_workers().fit()
    again = lines(folder, "again")
    assert judged(again) == judged(first)
    assert all(
        line["reward/crash_rate"] == 0 and 0 < line["critic/score/mean"] < 0.9 for line in first
    )
    sent = sum(
        line["perf/judge_requests"] + line.get("perf/val_judge_requests", 0) for line in first
    )
    assert sent == asked and first[0]["perf/judge_tokens"] > 0
    assert sum(line["perf/judge_requests"] for line in again) == 0 < again[0]["perf/judge_cached"]
    with pytest.raises(InputError, match="cannot be used"):  # nothing is kept elsewhere
        elsewhere = f"reward_model.judge.cache_dir={folder}/other"
        scripted()(config(folder, "new", NOBODY, elsewhere), answer).init_workers()


def test_failures_are_masked_counted_and_told_at_a_bound(folder, caplog):
    """Answers that end in an even number get nothing but refusals: they leave their groups."""

    def reply(number, body):
        return {"status": 400} if shown(body)[1] in "0246" else generous(number, body)

    bound = "trainer.health.scorer_errors"
    with serve(reply) as server:
        scripted()(config(folder, "bad", server.url), answer).init_workers().fit()
    assert f"({bound}.bound=0.1)" in caplog.text
    line = lines(folder, "bad")[-1]
    assert line["reward/crash_rate"] == line["reward/masked_share"] > 0.1
    assert line["perf/judge_failures"] > 0


def test_a_step_without_any_score_stops_the_run_and_keeps_the_step_before(folder):
    """The step before had scores: a run without a single one stops too (test_rewards.py)."""

    def reply(number, body):
        return (
            {"status": 400} if lines(folder, "stopped") else f"[[{len(shown(body)[1]) % 7 / 10}]]"
        )

    with serve(reply) as server:
        trainer = RayPPOTrainer(config(folder, "stopped", server.url, steps=2)).init_workers()
        with pytest.raises(RewardError, match="status 400"):
            trainer.fit()
    assert [line["step"] for line in lines(folder, "stopped")] == [1]
    assert CheckpointStore(folder / "stopped").latest().step == 1
