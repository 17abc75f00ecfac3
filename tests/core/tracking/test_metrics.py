"""Numbers of a step: its data under verl's names, and its seconds, which add up; how far work
is."""

from __future__ import annotations

import io
import time

import pytest
import torch

from core.config.composition import compose
from core.tracking import loggers
from core.tracking.loggers import progress
from core.tracking.metrics import PARTS, REST, BusyClock, data_metrics, progress_metrics, time_parts
from core.types import Prompt, ScoredGroup, Segment, StepMetrics, Stop, Trajectory
from results.reporting.run_reader import load_run
from reward_scores.score import Score, ScoreStatus
from tests.core.scripted_run import configured, prepare, scripted
from tests.padded import batch_of_padded


def test_throughput_is_a_gpus_share_as_verl_counts_it():
    """verl's compute_throughout_metrics: total_num_tokens / (time * n_gpus)."""
    config = compose(
        "grpo", ["trainer.backend=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    )
    metrics = StepMetrics(3)
    metrics.add({"timing_s/step": 20.0})
    answer = Trajectory(
        [1] * 10, [2] * 5, [True] * 5, [0.0] * 5, (Segment("policy", "x"),), Stop.EOS, 2, 0
    )
    groups = [
        ScoredGroup(
            Prompt(0, 0, 0, (1,) * 10, "", {}), (answer,) * 4, (Score(1.0, {"score": 1.0}),) * 4
        )
    ]
    fields = {"attention_mask": torch.ones(4, 15, dtype=torch.bool), "reward": torch.ones(4)}
    metrics.add(
        data_metrics(
            groups, batch_of_padded(**fields, response_mask=torch.arange(15).expand(4, -1) >= 10)
        )
    )
    # An answer has a status
    assert sum(value for name, value in metrics.values.items() if name.endswith("_rate")) == 1
    assert progress_metrics(metrics, 0, config.learner_ranks)["perf/throughput"] == pytest.approx(
        60 / 20 / 8
    )


def share_of_equal_groups(*groups: tuple[Score, ...]) -> float:
    answer = Trajectory([1], [2], [True], [0.0], (Segment("policy", "x"),), Stop.EOS, 2, 0)
    prompt = Prompt(0, "0", (1,), (), "", "x")
    scored = [
        ScoredGroup(prompt, (answer,) * len(group), tuple(s.keeping_raw() for s in group))
        for group in groups
    ]
    rows = sum(map(len, groups))
    fields = {"attention_mask": torch.ones(rows, 2, dtype=torch.bool), "reward": torch.ones(rows)}
    mask = torch.tensor([[False, True]]).expand(rows, -1)
    return data_metrics(scored, batch_of_padded(**fields, response_mask=mask))[
        "reward/zero_variance_share"
    ]


def test_groups_of_equal_scores_are_those_whose_scores_train_nothing():
    """A dense score beside an accuracy of 0 trains; a penalty makes equal scores differ; a failure
    is no score."""
    wrong, near = Score(0.2, {"acc": 0.0}), Score(0.5, {"acc": 0.0})
    failed = Score(0.0, {"acc": 0.0}, ScoreStatus.CRASH, masked=True)
    assert share_of_equal_groups((wrong, near), (near, wrong)) == 0.0
    assert share_of_equal_groups((wrong, wrong), (near, wrong)) == 0.5
    assert share_of_equal_groups((Score(1.0), Score(1.0).plus("overlong", -0.25))) == 0.0
    assert share_of_equal_groups((Score(0.3, {"acc": 1.0}), Score(0.3, {"acc": 0.0}))) == 1.0
    assert share_of_equal_groups((near, failed), (failed, failed)) == 1.0


# --- seconds ---


class Now:
    value = 0.0

    def __call__(self):
        return self.value


def play(clock, now, events, blocks):
    """``events``: (seconds until it, activity, +1 begins or -1 ends); ``blocks`` are those that
    have begun already."""
    for wait, activity, change in events:
        now.value += wait
        if change > 0:
            block = clock.busy(activity)
            block.__enter__()
            blocks.setdefault(activity, []).append(block)
        else:
            blocks[activity].pop().__exit__(None, None, None)


def test_scoring_behind_decoding_is_not_counted_twice():
    now, begun = Now(), {}
    clock = BusyClock("decode", "reward", now=now)
    first = [
        (1, "decode", 1),
        (2, "decode", 1),
        (3, "reward", 1),
        (4, "decode", -1),
        (5, "decode", -1),
    ]
    play(clock, now, first, begun)
    # 2 + 3 + 4 + 5, though two samples decoded for 7 of them
    assert clock.take() == {"decode": 14, "reward": 0}
    play(clock, now, [(6, "reward", -1), (7, "decode", 1), (8, "decode", -1)], begun)
    assert clock.take() == {"decode": 8, "reward": 6}  # nobody was at work for 7
    # Scoring in the engine's own process holds it up
    blocking = BusyClock("reward", "decode", now=now)
    play(
        blocking,
        now,
        [(0, "decode", 1), (2, "reward", 1), (3, "reward", -1), (4, "decode", -1)],
        {},
    )
    assert blocking.take() == {"decode": 6, "reward": 3}


def test_a_line_adds_up_to_its_whole():
    seconds = {"whole": 10.0, "step": 8.0, "gen": 4.0, "decode": 3.0, "reward": 0.5}
    seconds |= {"update_actor": 2.0, "update_critic": 1.0, "testing": 1.5}
    found = time_parts({f"timing_s/{name}": value for name, value in seconds.items()})
    assert found == {"decode": 3.0, "score": 0.5, "update": 3.0, "validation": 1.5, REST: 2.0}
    assert list(found) == [name for name in (*PARTS, REST) if name in found]
    assert time_parts({"timing_s/testing": 1.0}) == {}  # the validation before the first step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("times"))


@pytest.fixture(scope="module")
def finished(folder):
    config = configured(
        folder, "run", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=True"
    )
    run = scripted()(config, lambda request, version: str(request.seed % 5)).init_workers()
    run.fit()
    return run.run.run_dir


def test_every_steps_parts_are_the_time_since_the_line_before(finished):
    rows = [row for row in load_run(finished).metrics if row["step"]]
    for row in rows:
        found = time_parts(row)
        assert sum(found.values()) == pytest.approx(row["timing_s/whole"], rel=1e-9)
        assert found[REST] == pytest.approx(row["timing_s/other"], abs=1e-9) and found[REST] >= 0
        assert (
            row["timing_s/decode"] + row["timing_s/reward"]
            <= row["timing_s/gen"]
            <= row["timing_s/step"]
        )
        assert row["timing_s/step"] < row["timing_s/whole"]
    assert [row["step"] for row in rows if "timing_s/testing" in row] == [3, 6]
    # The line after 2 and 4
    assert [row["step"] for row in rows if "timing_s/save_checkpoint" in row] == [3, 5]


# --- progress ---


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_terminal_shows_a_bar_of_work_that_is_not_short(monkeypatch, pause):
    monkeypatch.setattr(loggers, "BAR_DELAY_S", 0.05)
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", out)
    with progress("validation", 2, "prompt") as count:
        time.sleep(pause)
        count()
        time.sleep(0.15 if pause else 0)
        count()
        count()  # one more than was expected is no error
    count()  # nor is one that comes late
    assert ("validation" in out.getvalue()) == (pause > 0)
    assert "3/2" not in out.getvalue()


def test_a_log_gets_a_line_a_tenth_and_none_in_between(monkeypatch):
    now = Now()
    monkeypatch.setattr(loggers.time, "monotonic", now)
    monkeypatch.setattr("sys.stderr", out := io.StringIO())
    with progress("validation", 40, "prompt") as count:
        for _ in range(48):  # more than were expected
            now.value += 20.0  # a tenth takes 80 s
            count()
    assert out.getvalue().splitlines() == [
        f"validation: {done} of 40 prompts" for done in range(4, 44, 4)
    ]
