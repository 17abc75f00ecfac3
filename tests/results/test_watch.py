"""The screen of runs: states, time left, dead runs, two hundred folders, and that nothing is changed by looking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from core.checkpoint.store import LOCK
from results import watch
from results.reporting.watching import Followed, Watch, bar, duration, find_runs, holds_lock, screen

NOW = 1_800_000_000.0


def make(folder, status="running", steps=5, total=10, age=0.0, **more):
    """A run folder that last wrote something ``age`` seconds before NOW."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"status": status, "total_steps": total, **more}))
    rows = [
        {"step": s, "timing_s/whole": 4.0, "critic/rewards/mean": s / 10, "health/crossed_bounds": 0}
        for s in range(1, steps + 1)
    ]
    for row in rows[::2]:
        row["val-core/lab/acc/mean@1"] = row["step"] / 10
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"step": steps, "input": "How much?", "output": "it is \x1b[2J7", "gts": "7", "score": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (NOW - age, NOW - age))
    return folder


def text_of(states, width=140, height=40):
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(screen(states, width, height))
    return console.export_text()


def test_progress_time_left_numbers_and_the_last_answer_are_on_one_screen(tmp_path):
    make(tmp_path / "grpo" / "a")
    (one,) = Watch([tmp_path]).look(NOW)
    assert (one.name, one.state, one.step, one.total, one.seconds_left) == ("grpo/a", "running", 5, 10, 20.0)
    assert one.accuracy == [0.1, 0.3, 0.5] and one.health == ""
    text = text_of([one])
    assert (
        "1 running" in text
        and "████░░░░ 5/10" in text
        and "20 s" in text
        and "50.0%" in text
        and "reward 0.500" in text
    )
    assert "last answer of grpo/a, step 5, score 1.0" in text and "it is \\x1b[2J7" in text and "\x1b" not in text
    assert text.rstrip().splitlines()[-1].endswith("expected  7")


def test_a_run_whose_process_is_gone_is_dead_and_one_that_only_waits_is_silent(tmp_path):
    make(tmp_path / "grpo" / "new", age=100)  # ten steps of four seconds, and two minutes at the least
    make(tmp_path / "grpo" / "gone", age=130)
    make(tmp_path / "grpo" / "begins", steps=0, age=600)
    make(tmp_path / "grpo" / "never", steps=0, age=1000)
    make(tmp_path / "grpo" / "done", status="finished", steps=10, age=9999)
    make(tmp_path / "grpo" / "ill", status="stopped", age=10, stopped_because="entropy 0 is below 0.1")
    held = make(tmp_path / "grpo" / "held", age=500)
    take = "f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    holder = f"import fcntl, sys\n{take}; print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(held / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        os.utime(held, (NOW - 500, NOW - 500))
        states = {one.name: one for one in Watch([tmp_path]).look(NOW)}
        assert holds_lock(held)
    finally:
        process.communicate()
    assert {name.removeprefix("grpo/"): one.state for name, one in states.items()} == {
        **{"new": "running", "gone": "dead", "begins": "running", "never": "dead", "done": "finished"},
        **{"ill": "stopped", "held": "silent"},
    }
    assert "no line for 2 min 10 s" in states["grpo/gone"].why and states["grpo/gone"].seconds_left is None
    assert states["grpo/ill"].why == "entropy 0 is below 0.1" and "its process is there" in states["grpo/held"].why
    assert not holds_lock(held)
    order = [one.state for one in Watch([tmp_path]).look(NOW)]
    assert order == ["running", "running", "dead", "dead", "dead", "stopped", "finished"]
    text = text_of(Watch([tmp_path]).look(NOW))
    assert "2 running · 3 dead · 1 stopped · 1 finished" in text and "the same command" in " ".join(text.split())


def test_a_crossed_bound_is_shown(tmp_path):
    folder = make(tmp_path / "a" / "b")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps(
                {"step": 6, "health/crossed_bounds": 2, "health/last_healthy_step": 5, "actor/skipped_updates": 1}
            )
            + "\n"
        )
    (one,) = Watch([tmp_path]).look(NOW)
    assert one.health == "2 bounds crossed, healthy until step 5; updates skipped: gradients are not finite"


def test_two_hundred_runs_fit_one_screen_and_are_read_once(tmp_path, monkeypatch):
    for index in range(200):
        make(tmp_path / "grpo" / f"run{index:03}", status="finished" if index else "running", age=float(index))
    looked = Watch([tmp_path])
    states = looked.look(NOW)
    assert len(states) == 200 and states[0].name == "grpo/run000"
    for width, height in ((140, 40), (80, 24), (60, 12)):
        lines = text_of(states, width, height).rstrip("\n").splitlines()
        assert len(lines) <= height and max(map(len, lines)) <= width
        assert any(f"and {200 - sum(line.startswith(' grpo/') for line in lines)} more" in line for line in lines)
    opened = []
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened.append(str(path)) or real(path, *a, **k))
    looked.look(NOW + 1)
    assert not [path for path in opened if path.endswith(".jsonl")]  # nothing was added, so nothing is read again


def test_only_what_was_added_is_read_and_a_half_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    followed = Followed(path)
    assert list(followed.read()) == [{"step": 1}]
    with open(path, "a") as file:
        file.write('}\n{"step": 3}\n')
    assert [row["step"] for row in followed.read()] == [1, 2, 3]
    path.write_text('{"step": 1}\n')  # a resumed run went back
    assert [row["step"] for row in followed.read()] == [1]
    path.unlink()
    assert [row["step"] for row in followed.read()] == [1]


def test_what_cannot_be_read_is_shown_as_such(tmp_path):
    make(tmp_path / "a" / "good")
    (make(tmp_path / "a" / "bad") / "manifest.json").write_text('{"status": ')
    (tmp_path / "a" / "none").mkdir()
    states = {one.name: one for one in Watch([tmp_path]).look(NOW)}
    assert states["a/bad"].state == "unreadable" and "manifest.json" in states["a/bad"].why and "a/none" not in states
    assert find_runs([tmp_path / "a" / "good"]) == [tmp_path / "a" / "good"]


BAD_ROWS = (
    "7",
    "[1]",
    '{"step": "five"}',
    '{"step": NaN}',
    '{"step": null, "critic/rewards/mean": "high"}',
    '{"critic/rewards/mean": []}',
    '{"step": 6, "val-core/lab/acc/mean@1": "all", "timing_s/whole": {}}',
    '{"step": 6, "val-core/lab/acc/mean@1": NaN}',
    '{"step": 6, "health/crossed_bounds": 2}',
    "[" * 100_000,
)


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: row[:40])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_one_bad_row_ends_no_watch(row, name, tmp_path):
    make(tmp_path / "a" / "good")
    with open(make(tmp_path / "a" / "bad") / name, "a") as file:
        file.write(row + "\n")
    text = text_of(Watch([tmp_path]).look(NOW))
    assert "a/good" in text and "a/bad" in text


@pytest.mark.parametrize("manifest", ['{"status": ["running"]}', '{"status": "running", "total_steps": "many"}', "[]"])
def test_one_bad_manifest_ends_no_watch(manifest, tmp_path):
    make(tmp_path / "a" / "good")
    (make(tmp_path / "a" / "bad") / "manifest.json").write_text(manifest)
    text = text_of(Watch([tmp_path]).look(NOW))
    assert "a/good" in text and "a/bad" in text


def test_no_text_of_a_run_acts_on_the_terminal(tmp_path):
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\u202e\r\x9b2J"
    run = make(tmp_path / "a" / f"b{evil}", status="failed", stopped_because=f"the scorer said {evil}")
    (run / "samples.jsonl").write_text(json.dumps({"step": evil, "input": evil, "output": evil, "gts": evil}) + "\n")
    text = text_of(Watch([tmp_path]).look(NOW))
    assert not {*evil} & {*text} & {"\x1b", "\x07", "\x9b", "\u202e", "\r"} and "\\x1b]52" in text


def test_looking_changes_nothing(tmp_path):
    make(tmp_path / "a" / "b")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    text_of(Watch([tmp_path]).look(NOW))
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before


def test_the_command_prints_one_screen_without_a_terminal(tmp_path, capsys):
    make(tmp_path / "outputs" / "grpo" / "a", status="finished")
    assert watch.main([str(tmp_path / "outputs")]) == 0
    assert "grpo/a" in capsys.readouterr().out
    assert watch.main([str(tmp_path / "nowhere")]) == 2 and "is no folder" in capsys.readouterr().err
    assert watch.main([str(tmp_path), "--every", "0"]) == 2 and "must be above 0" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert watch.main([str(tmp_path / "empty")]) == 0 and "no run" in capsys.readouterr().out


def test_it_imports_no_heavy_package():
    code = """
        import sys, results.watch, results.trace
        print([name for name in ("torch", "transformers", "ray", "vllm", "matplotlib", "rich") if name in sys.modules])
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (130, "2 min 10 s"), (3660, "1 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_bars():
    assert bar(0.5) == "████░░░░" and bar(2.0) == "████████" and bar(0.0) == "░░░░░░░░"
