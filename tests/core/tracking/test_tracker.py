"""The run folder: on disk before the next step, the same after a kill and a resume."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.errors import WriteFailed
from core.tracking import tracker as tracking
from core.tracking.json_lines import read_jsonl
from core.tracking.tracker import Tracker, generation_rows, spread_out
from core.types import Prompt, ScoredGroup, Segment, StepMetrics, Stop, Trajectory
from reward_scores.score import Score
from tests.core.synthetic import configured, make_run, records, sample_rows, step_metrics
from tests.forked import forked

ROOT = Path(__file__).parents[3]


def metrics_of(step: int, **values: float) -> StepMetrics:
    metrics = StepMetrics(step)
    metrics.add(values or {"critic/score/mean": 0.1 * step})
    return metrics


def test_a_step_is_on_disk_when_log_returns_and_steps_rise(tmp_path):
    tracker = Tracker(tmp_path / "grpo" / "run", configured())
    value = 0.1 + 0.2  # a number with no short decimal form
    tracker.log(metrics_of(1, **{"critic/score/mean": value}))
    assert read_jsonl(tracker.run_dir / "metrics.jsonl") == [
        {"step": 1, "critic/score/mean": value}
    ]
    with pytest.raises(ValueError, match="step 1 logged after 1"):
        tracker.log(metrics_of(1))
    tracker.close("finished")


def crash(folder) -> None:
    """Write eight steps, and be killed while the ninth is written."""
    tracker = Tracker(folder, configured())
    for step in range(8):
        tracker.log(step_metrics(step, 1))
        tracker.log_validation(step, records(step, 1, 5))
        tracker.log_samples(step, sample_rows(step))
    with open(tracker.run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "critic/sc')
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_and_resumed_is_the_same_as_never_interrupted(tmp_path):
    def finish(tracker: Tracker, start: int) -> None:
        for step in range(start, 12):
            tracker.log(step_metrics(step, 1))
            tracker.log_validation(step, records(step, 1, 5))
            tracker.log_samples(step, sample_rows(step))
        tracker.close("finished")

    assert forked(crash, tmp_path / "killed").returncode == -signal.SIGKILL
    run_id = json.loads((tmp_path / "killed" / "manifest.json").read_text())["run_id"]
    finish(Tracker(tmp_path / "killed", configured(), resume_step=5), 6)
    finish(Tracker(tmp_path / "whole", configured()), 0)
    for name in [
        "metrics.jsonl",
        "samples.jsonl",
        *(f"validation/{step}.jsonl" for step in range(12)),
    ]:
        assert (tmp_path / "killed" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name
    manifest = json.loads((tmp_path / "killed" / "manifest.json").read_text())
    assert manifest["run_id"] == run_id and manifest["status"] == "finished"
    assert [s["resumed_from_step"] for s in manifest["sessions"]] == [None, 5]
    assert [s["ended"] is None for s in manifest["sessions"]] == [True, False]


def test_what_later_steps_wrote_is_dropped_on_resume_and_a_persons_own_files_stay(tmp_path):
    make_run(tmp_path, steps=10, questions=5)
    (tmp_path / "trace").mkdir()
    for name in (
        "validation/notes.jsonl",
        "trace/step_old.json.gz",
        "trace/step_000008.json.gz",
        "trace/step_000007.json.gz",
    ):
        (tmp_path / name).write_text("")
    Tracker(tmp_path, configured(), resume_step=7).close("stopped")
    kept = sorted(
        path.name for folder in ("validation", "trace") for path in (tmp_path / folder).iterdir()
    )
    assert kept == ["0.jsonl", "5.jsonl", "notes.jsonl", "step_000007.json.gz", "step_old.json.gz"]
    assert {row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")} == {0, 5}
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 7


def test_damaged_lines_are_left_out_on_resume(tmp_path, caplog):
    """A flipped bit, no mapping, nested too deep."""
    make_run(tmp_path, steps=3, questions=5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    damage = [b'{"step": 1, "critic/score/mean": \xb00.1}', b"[1, 2]", b"[" * 100_000]
    path.write_bytes(b"\n".join([lines[0], *damage, *lines[1:]]) + b"\n")
    Tracker(tmp_path, configured(), resume_step=3).close("stopped")
    assert path.read_bytes().splitlines() == lines
    assert "metrics.jsonl: 3 damaged lines" in caplog.text and "line 2: " in caplog.text


def test_a_reader_names_the_damaged_line(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": \n{"a": 2}\n{"a"')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: "):
        read_jsonl(tmp_path / "rows.jsonl")


def test_half_a_surrogate_pair_is_kept_as_an_escape(tmp_path):
    tracker = Tracker(tmp_path, configured())
    tracker.log_samples(1, [{**sample_rows(1)[0], "output": "a\ud800b"}])
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["output"] == "a\ud800b"
    tracker.close("finished")


@contextmanager
def full_disk(limit: int = 0):
    """No file may grow beyond ``limit`` bytes: a write fails with EFBIG, of which the system writes
    what fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_records_and_no_line_of_metrics(tmp_path, caplog):
    tracker = Tracker(tmp_path, configured())
    tracker.log(metrics_of(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with full_disk(len(before) + 7):
        for step in (2, 3):
            tracker.log(metrics_of(step))
            tracker.log_samples(step, sample_rows(step))
            tracker.log_validation(step, records(step, 1, 5))
            tracker.dump(tmp_path / "answers", step, sample_rows(step))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before, "no part of a line"
    assert caplog.text.count("File too large") == 8 and "GiB free" in caplog.text
    assert not list(tmp_path.rglob("*.partial")) and not list((tmp_path / "answers").iterdir())
    tracker.log(metrics_of(4))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    tracker.close("finished")


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path):
    with full_disk(10), pytest.raises(WriteFailed) as raised:
        Tracker(tmp_path, configured())
    text = str(raised.value)
    assert (
        str(tmp_path) in text
        and "File too large" in text
        and "GiB free" in text
        and "\n" not in text
    )


def test_a_fresh_start_sets_the_earlier_run_aside(tmp_path):
    make_run(tmp_path, steps=3, questions=5)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    make_run(tmp_path, steps=1, questions=5)
    make_run(tmp_path, steps=1, questions=5)
    assert (tmp_path / "previous" / "1" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "previous" / "2" / "validation").is_dir()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]


def test_samples_are_kept_for_the_report(tmp_path):
    rows = [
        {"input": f"q{i}", "output": "a", "gts": "b", "score": 0.0, "data_source": "x"}
        for i in range(100)
    ]
    rows += [{**rows[0], "input": "other", "data_source": "y"}]
    tracker = Tracker(tmp_path, configured())
    tracker.log_samples(5, rows)
    tracker.log_samples(6, rows, last=True)
    tracker.close("finished")
    kept = read_jsonl(tmp_path / "samples.jsonl")
    # The last one's whole
    assert [row["input"] for row in kept if row["step"] == 6] == [row["input"] for row in rows]
    kept = [row for row in kept if row["step"] == 5]
    assert len({row["input"] for row in kept}) == len(kept) == tracking.KEPT_SAMPLES + 1
    assert {row["step"] for row in kept} == {5} and kept[-1]["input"] == "other"
    assert [row["input"] for row in spread_out(rows[:10], 3)] == ["q0", "q3", "q6"] and spread_out(
        [], 3
    ) == []


def test_dumps_have_verls_fields(tmp_path):
    prompt = Prompt(3, "gsm8k/3", (1, 2), (), "7", "openai/gsm8k")
    segments = (Segment("policy", "It is "), Segment("tool", "<r>"), Segment("policy", "7"))
    trajectory = Trajectory([1, 2], [3, 4], [True, True], [0.0, 0.0], segments, Stop.LENGTH, 0, 0)
    score = Score(0.5, {"acc": 1.0, "overlong": -0.5}, pred="7")
    tokenizer = SimpleNamespace(decode={(1, 2): "What?"}.get)
    (row,) = generation_rows(4, [ScoredGroup(prompt, (trajectory,), (score,))], tokenizer)
    Tracker(tmp_path / "run", configured()).dump(tmp_path / "dumps", 4, [row])
    (read,) = read_jsonl(tmp_path / "dumps" / "4.jsonl")
    verl = {
        "input": "What?",
        "output": "It is <r>7",
        "gts": "7",
        "score": 0.5,
        "step": 4,
        "acc": 1.0,
    }
    assert verl.items() <= read.items()
    assert read["overlong"] == -0.5 and read["uid"] == "gsm8k/3" and read["stop"] == "length"


def test_statistics_and_reports_import_nothing_heavy():
    code = (
        "import sys, results.reporting.run_report, core.tracking.tracker, "
        "core.tracking.validation\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'matplotlib', 'wandb', 'tensorboard', "
        "'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
