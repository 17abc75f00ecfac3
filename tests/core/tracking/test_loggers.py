"""Loggers: what each shows, where one that fails costs its own numbers alone."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from core.config.composition import examine
from core.config.schema import Config
from core.errors import InputError
from core.tracking import loggers
from core.tracking.json_lines import read_jsonl
from core.tracking.loggers import ConsoleLogger, print_examples
from core.tracking.tracker import Tracker
from core.types import StepMetrics
from tests.core.scripted_run import configured as scripted_config
from tests.core.scripted_run import prepare, scripted
from tests.core.synthetic import configured, step_metrics


def metrics_of(step: int, **values: float) -> StepMetrics:
    metrics = StepMetrics(step)
    metrics.add(values or {"critic/score/mean": 0.1 * step})
    return metrics


def with_trainer(**changes) -> Config:
    return configured({f"trainer.{name}": value for name, value in changes.items()})


def test_the_console_shows_one_line_a_step(tmp_path, capsys):
    tracker = Tracker(tmp_path, with_trainer(logger=("console",)))
    tracker.set_total(20)
    metrics = step_metrics(3, 1)
    metrics.add({"val-core/lab/hops/acc/mean@1": 0.5, "val-aux/lab/hops/acc/mean@1/ci_low": 0.4})
    tracker.log(metrics)
    tracker.close("finished")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 3/20 | reward 0.6")
    for label in ("acc 0.", "length ", "entropy ", "kl ", "time 1.", "lab/hops/acc/mean@1 0.500"):
        assert label in line
    assert "ci_low" not in line


def test_the_console_shows_what_failed(tmp_path, capsys):
    tracker = Tracker(tmp_path, with_trainer(logger=("console",)))
    tracker.log(metrics_of(3, **{"reward/failed_rate": 0.125, "reward/val_failed_rate": 0.0}))
    tracker.close("finished")
    assert capsys.readouterr().out.strip() == "step 3 | scorer failed on 12.5%"


def test_a_score_beyond_0_and_1_is_no_accuracy_on_the_console(tmp_path, capsys):
    tracker = Tracker(tmp_path, with_trainer(logger=("console",)))
    scores = {
        "critic/score/mean": -1.07,
        "reward/acc/mean": -1.07,
        "val-core/mine/add/acc/mean@1": -2.0,
    }
    tracker.log(metrics_of(3, **scores))
    tracker.close("finished")
    assert capsys.readouterr().out.strip() == (
        "step 3 | reward -1.070 | mine/add/score/mean@1 -2.000"
    )


def test_tensorboard_has_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(tmp_path, with_trainer(logger=("tensorboard",)))
    for step in range(1, 4):
        tracker.log(metrics_of(step, reward=float(step)))
    tracker.close("failed")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_wandb_works_offline_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = with_trainer(logger=("wandb",))
    tracker = Tracker(tmp_path, config)
    tracker.log(metrics_of(1))
    run_id = tracker.manifest["run_id"]
    tracker.close("finished")
    Tracker(tmp_path, config, resume_step=1).close("finished")
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    # wandb puts a number behind the id of a second run that starts within the same second
    assert runs and all(run_id in name for name in runs)


OWN_LOGGER = """
import json


class Lines:
    fails = ()

    def __init__(self, run):
        self.path = run.run_dir / "own.jsonl"

    def write(self, what):
        if what in self.fails:
            raise ERROR
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")

    def log(self, step, values):
        self.write(step)

    def close(self, failed):
        self.write("failed" if failed else "closed")


class Away(Lines):
    fails = (2, 3, 4)


class Absent(Lines):
    def __init__(self, run):
        raise ConnectionError("no route to host")
"""


def own(tmp_path, name: str, error: str = "None", **changes) -> Tracker:
    path = tmp_path / "own_logger.py"
    path.write_text(OWN_LOGGER.replace("ERROR", error))
    return Tracker(tmp_path / "run", with_trainer(logger=(f"{path}:{name}",), **changes))


def logged(tmp_path) -> list:
    return [json.loads(line) for line in (tmp_path / "run" / "own.jsonl").read_text().splitlines()]


def test_a_logger_of_ones_own_is_named_by_its_path(tmp_path):
    tracker = own(tmp_path, "Lines")
    tracker.log(metrics_of(1))
    tracker.close("finished")
    assert logged(tmp_path) == [1, "closed"]
    composed = examine("grpo", ["trainer.logger=[console,my_pkg.my_logger:MyLogger]"])
    assert composed.problems == () and composed.config.trainer.logger == (
        "console",
        "my_pkg.my_logger:MyLogger",
    )
    with pytest.raises(InputError, match="trainer.logger=nowhere.at_all:X: no module 'nowhere'"):
        Tracker(tmp_path / "other", with_trainer(logger=("nowhere.at_all:X",)))


@pytest.mark.parametrize("error", ["ConnectionError('no route to host')", "SystemExit(0)"])
def test_a_logger_that_fails_is_switched_off_and_the_run_goes_on(tmp_path, capsys, error):
    tracker = own(tmp_path, "Away", error=error)
    for step in range(1, 7):
        tracker.log(metrics_of(step))
    tracker.close("finished")
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert logged(tmp_path) == [1] and tracker.manifest["status"] == "finished"
    (warning,) = capsys.readouterr().err.splitlines()
    assert (
        "trainer.logger=" in warning
        and "switched off" in warning
        and error.partition("(")[0] in warning
    )


def test_a_logger_that_is_not_installed_is_a_line_before_a_model_loads(tmp_path, monkeypatch):
    """Of a service, and of a class of one's own; both are named at once."""
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    keys = ("trainer.logger=[console,wandb,nowhere.at_all:X]",)
    trainer = scripted()(scripted_config(prepare(tmp_path), "run", *keys), lambda *_: "1")
    trainer.make_workers = lambda device: pytest.fail("a model loads")
    with pytest.raises(InputError) as refused:
        trainer.init_workers()
    installed, own_class = refused.value.problems
    assert installed.startswith("trainer.logger=wandb: ") and "pip install wandb" in installed
    assert own_class.startswith("trainer.logger=nowhere.at_all:X: ")


def test_a_logger_that_cannot_begin_ends_the_run(tmp_path):
    with pytest.raises(
        InputError,
        match=r"Absent: could not begin \(ConnectionError: no route to "
        r"host\)",
    ):
        own(tmp_path, "Absent")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"


def test_printed_answers_are_the_first_of_each_source(capsys):
    rows = [
        {"data_source": source, "input": f"q{i}", "output": "o", "gts": "g", "score": 0.5}
        for i, source in enumerate("aabb")
    ]
    print_examples(rows, 1)
    text = capsys.readouterr().out
    assert text.splitlines()[:4] == [
        "[prompt] q0",
        "[response] o",
        "[ground_truth] g",
        "[score] 0.5",
    ]
    assert text.count("[prompt]") == 2 and "[prompt] q2" in text
    print_examples(rows, 0)
    print_examples([], 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("field", ["input", "output", "gts"])
def test_no_answer_acts_on_the_terminal(field, capsys):
    """Write to the clipboard, clear the screen, turn the text round, overwrite the line, ring, half
    a character."""
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\u202egnp\u2066\rover\x08\x9b2J\ud800"
    row = {
        "data_source": "a",
        "input": "q",
        "output": "o",
        "gts": "g",
        "score": 0.5,
        field: f"two\nlines\t{evil}é中",
    }
    print_examples([row], 1)
    text = capsys.readouterr().out
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert (
        "two\nlines\t\\x1b]52;c;aGk=\\x07\\x1b[2J\\u202egnp\\u2066\\rover" in text
        and "\\ud800é中" in text
    )
    console = ConsoleLogger(SimpleNamespace(manifest={}))
    for turns, calls, shown in ((1, 0.0, False), (3, 0.0, True), (1, 0.5, True)):
        console.log(1, {"num_turns/max": turns, "tool_call_counts/mean": calls})
        assert (f"tool calls {calls:.2f}" in capsys.readouterr().out) == shown
    console.log(1, {f"val-core/{evil}/acc/mean@1": 1.0})
    assert all(c.isprintable() or c in "\n\t" for c in capsys.readouterr().out)
