"""Where a step's seconds went: counted once, adding up, in the metrics and in the report; and the profiles of steps."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import examine
from core.ray_trainer import RayPPOTrainer
from core.tracking import step_time
from core.tracking.step_time import PARTS, REST, BusyClock, parts
from results import report
from results.reporting.run_reader import load_run
from tests.core.scripted_run import configured, prepare, scripted


class Now:
    def __init__(self):
        self.value = 0.0

    def __call__(self):
        return self.value


def play(clock, now, events, blocks=None):
    """``events``: (seconds until it, activity, +1 begins or -1 ends); ``blocks`` are those that have begun already."""
    blocks = {} if blocks is None else blocks
    for wait, activity, change in events:
        now.value += wait
        if change > 0:
            block = clock.busy(activity)
            block.__enter__()
            blocks.setdefault(activity, []).append(block)
        else:
            blocks[activity].pop().__exit__(None, None, None)


def test_scoring_behind_decoding_is_not_counted_twice():
    now = Now()
    clock = BusyClock("decode", "reward", now=now)
    begun = {}
    first = [(1, "decode", 1), (2, "decode", 1), (3, "reward", 1), (4, "decode", -1), (5, "decode", -1)]
    play(clock, now, first, begun)
    assert clock.take() == {"decode": 14, "reward": 0}  # 2 + 3 + 4 + 5, though two samples decoded for 7 of them
    play(clock, now, [(6, "reward", -1), (7, "decode", 1), (8, "decode", -1)], begun)
    assert clock.take() == {"decode": 8, "reward": 6}  # nobody was at work for 7
    blocking = BusyClock("reward", "decode", now=now)  # scoring in the engine's own process holds it up
    play(blocking, now, [(0, "decode", 1), (2, "reward", 1), (3, "reward", -1), (4, "decode", -1)])
    assert blocking.take() == {"decode": 6, "reward": 3}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_clock_never_counts_more_than_there_was(seed):
    rng, now = random.Random(seed), Now()
    clock, going_on, busy = BusyClock("a", "b", now=now), {"a": 0, "b": 0}, 0.0
    events = []
    for _ in range(40):
        wait, activity = rng.randrange(5), rng.choice("ab")
        change = -1 if going_on[activity] and rng.random() < 0.5 else 1
        busy += wait * any(going_on.values())
        going_on[activity] += change
        events.append((wait, activity, change))
    play(clock, now, events)
    assert sum(clock.take().values()) == busy <= now.value


def test_a_line_adds_up_to_its_whole():
    row = {"timing_s/whole": 10.0, "timing_s/step": 8.0, "timing_s/gen": 4.0, "timing_s/decode": 3.0}
    row |= {
        "timing_s/reward": 0.5,
        "timing_s/update_actor": 2.0,
        "timing_s/update_critic": 1.0,
        "timing_s/testing": 1.5,
    }
    found = parts(row)
    assert found == {"decode": 3.0, "score": 0.5, "update": 3.0, "validation": 1.5, REST: 2.0}
    assert list(found) == [name for name in (*PARTS, REST) if name in found]
    assert parts({"timing_s/testing": 1.0}) == {}  # the validation before the first step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("times"))


@pytest.fixture(scope="module")
def finished(folder):
    config = configured(folder, "run", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=True")
    run = scripted()(config, lambda request, version: str(request.seed % 5)).init_workers()
    run.fit()
    return run.run.run_dir


def test_every_step_s_parts_are_the_time_since_the_line_before(finished):
    rows = [row for row in load_run(finished).metrics if row["step"]]
    for row in rows:
        found = parts(row)
        assert sum(found.values()) == pytest.approx(row["timing_s/whole"], rel=1e-9)
        assert found[REST] == pytest.approx(row["timing_s/other"], abs=1e-9) and found[REST] >= 0
        assert row["timing_s/decode"] + row["timing_s/reward"] <= row["timing_s/gen"] <= row["timing_s/step"]
        assert row["timing_s/step"] < row["timing_s/whole"]
    assert [row["step"] for row in rows if "timing_s/testing" in row] == [3, 6]
    assert [row["step"] for row in rows if "timing_s/save_checkpoint" in row] == [3, 5]  # the line after 2 and 4


def test_the_report_shows_a_table_that_adds_up(finished, tmp_path):
    assert report.main([str(finished), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "Where a step's time goes" in (tmp_path / "report.html").read_text().replace("&#39;", "'")
    lines = text.partition("## Where a step's time goes")[2].partition("Means over steps")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    table = {name: float(value.split()[0]) for name, value in cells}
    assert {"decode", "update", "checkpoint", "validation", REST} <= set(table)
    total = table.pop("all")
    assert sum(table.values()) == pytest.approx(total, abs=0.0005 * len(table) + 0.0005)
    rows = [row for row in load_run(finished).metrics if row["step"]]
    assert total == pytest.approx(sum(row["timing_s/whole"] for row in rows) / len(rows), abs=0.0006)


# --- profiles ---


def test_torch_writes_a_trace_of_the_chosen_step(folder):
    config = configured(folder, "traced", "global_profiler.tool=torch", "global_profiler.steps=[2]", steps=3)
    run = RayPPOTrainer(config).init_workers()
    run.fit()
    (trace,) = (run.run.run_dir / "profile").iterdir()
    assert trace.name == "step_2.json"
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    assert "Optimizer.step#AdamW.step" in names  # the update is in it


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            ["global_profiler.tool=torch", "global_profiler.steps=[90]", "trainer.total_training_steps=20"],
            "goes beyond",
        ),
        (["global_profiler.tool=nsys"], "global_profiler.tool=nsys"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused(settings, said):
    (line,) = examine("grpo", ["preset=lab", *settings]).problems
    assert said in line


def test_a_tool_without_a_step_is_warned_of():
    (line,) = examine("grpo", ["preset=lab", "global_profiler.tool=torch"]).warnings
    assert "names no step" in line


def test_what_does_nothing_is_listed():
    assert set(examine("grpo", ["preset=lab", "global_profiler.steps=[1]"]).unused) == {"global_profiler.steps"}
    assert not step_time.parts({})
