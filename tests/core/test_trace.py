"""The recorder of tokens: what it records in a real run, what it costs, how much disk, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from core.ray_trainer import RayPPOTrainer
from core.trace import FOLDER, shown
from results.reporting.run_reader import load_run
from results.reporting.trace_checks import Seen, findings
from results.reporting.trace_reader import read_step, trace_files
from tests.core import scripted_run
from tests.core.scripted_run import configured, scripted
from tests.core.test_run import start
from tests.results.traced_run import made_groups, record, traced_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return scripted_run.prepare(tmp_path_factory.mktemp("trace"))


def numbers(request, version):
    """Answers 0 to 3."""
    return str(request.seed % 4)


def fit(config, respond=numbers):
    run = scripted()(config, respond)
    run.init_workers().fit()
    return Path(config.trainer.default_local_dir)


def files(run):
    return [path.name for path in trace_files(run)]


# --- which steps and groups ---


def test_every_so_many_steps_the_first_the_last_and_those_that_are_named(folder):
    run = fit(configured(folder, "freq", "trainer.trace.freq=3", "trainer.trace.steps=[4]", steps=7))
    assert files(run) == [f"step_00000{step}.npz" for step in (1, 3, 4, 6, 7)]
    rows = {row["step"]: row for row in load_run(run).metrics}
    assert [step for step, row in rows.items() if "perf/trace_cpu_s" in row] == [1, 3, 4, 6, 7]
    assert rows[1]["perf/trace_mb"] * 2**20 == pytest.approx((run / FOLDER / "step_000001.npz").stat().st_size)


def test_the_worst_is_always_among_them_and_questions_recur(tmp_path):
    config = traced_config(tmp_path / "a" / "run", groups=2)
    for step in (1, 2, 3):
        groups = made_groups(step, step, count=20)
        low = tuple(dataclasses.replace(score, value=-1.0) for score in groups[step].scores)
        groups[step] = dataclasses.replace(groups[step], scores=low)
        record(config, step, groups)
    steps = [read_step(path).groups for path in trace_files(tmp_path / "a" / "run")]
    chosen = [[(one.about["chosen"], one.about["uid"]) for one in groups] for groups in steps]
    assert [[uid for why, uid in step if why == "worst"] for step in chosen] == [["q1"], ["q2"], ["q3"]]
    assert set.intersection(*({uid for why, uid in step if why == "question"} for step in chosen))


# --- what is recorded ---


def test_a_real_run_records_what_trained_and_no_check_finds_anything(folder):
    """Two optimizer steps a batch, so there are old log-probs, and a ratio that has moved by the second one."""
    settings = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=0.01")
    (folder / "lengths.py").write_text(
        "def compute_score(*_, solution_str, **__):\n    return float(len(solution_str) % 3)\n"
    )
    settings += (f"custom_reward_function.path={folder / 'lengths.py'}", "actor_rollout_ref.rollout.n=4")
    config = configured(folder, "real", "trainer.trace.freq=1", "trainer.trace.groups=4", *settings, steps=2)
    RayPPOTrainer(config).init_workers().fit()
    run = load_run(config.trainer.default_local_dir)
    for path in trace_files(run.folder):
        step = read_step(path)
        every = [one for group in step.groups for one in group.trajectories]
        assert len(every) == 16
        for group in step.groups:
            assert not [f for one in group.trajectories for f in findings(Seen(one, group, step, run.config))]
        moved = [np.nanmax(np.abs(one.arrays["ratio"] - 1)) for one in every if one.field("ratio") is not None]
        assert len(moved) >= 4 and max(moved) > 1e-4
        for one in every:
            known = one.learner()[one.arrays["response_mask"]]
            np.testing.assert_allclose(known, one.arrays["engine"][one.arrays["response_mask"]], atol=1e-4)


def test_a_token_that_is_no_text_alone_is_its_bytes():
    assert shown("caf", "caf") == "caf" and shown("hi", "▁hi") == " hi" and shown("<eos>", "<eos>") == "<eos>"
    assert shown("\ufffd", "<0xE2>") == {"bytes": "e2"} and shown("\ufffd", "ÃŁ") == {"bytes": "c39f"}
    assert shown("\ufffd", "Ġâ") == {"bytes": "20e2"} and shown("", None) == {"bytes": "", "name": "no such token"}
    assert shown("\ufffd", "日") == {"bytes": "", "name": "日"}  # of no byte-level vocabulary


# --- kills and resuming ---


def test_a_resumed_run_writes_the_steps_that_it_repeats_anew(folder):
    run = fit(configured(folder, "resumed", "trainer.trace.freq=1", "trainer.save_freq=2", steps=4))
    before = {path.name: read_step(path) for path in trace_files(run)}
    (run / FOLDER / "step_000003.npz").write_bytes(b"of a policy that is gone")
    (run / FOLDER / "step_000009.npz.partial").write_bytes(b"half")
    for name in ("latest_checkpointed_iteration.txt",):
        (run / name).write_text("2")
    for path in (run / "global_step_4").rglob("*"):
        if path.is_file():
            path.unlink()
    fit(configured(folder, "resumed", "trainer.trace.freq=1", "trainer.save_freq=2", steps=4))
    after = {path.name: read_step(path) for path in trace_files(run)}
    assert list(after) == [f"step_00000{step}.npz" for step in (1, 2, 3, 4)] == list(before)
    assert not list((run / FOLDER).glob("*.partial"))
    for name, step in before.items():
        assert json.dumps(after[name].meta) == json.dumps(step.meta)
        for old, new in zip(step.groups, after[name].groups, strict=True):
            for one, other in zip(old.trajectories, new.trajectories, strict=True):
                assert all(np.array_equal(one.arrays[k], other.arrays[k], equal_nan=True) for k in one.arrays)


def test_a_full_trace_folder_ends_no_training(tmp_path, caplog):
    """The folder is a file: nothing can be written in it."""
    run = start(tmp_path, "trainer.total_training_steps=2", "trainer.trace.freq=1")
    run.trace.folder = tmp_path / "model" / "config.json"
    run.fit()
    assert run.run.step == 2 and caplog.text.count("could not be written") == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["perf/trace_dropped"] for line in lines] == [1, 1]
