"""Forecasts of a run's end: from its first half alone, with what such forecasts have been worth beside them."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from results import forecast
from results.reporting.forecasts import MEASURED, fits, forecast_run, measure, published, write_measured
from results.reporting.run_reader import load_run
from results.reporting.run_report import page

RESULTS = Path(__file__).resolve().parents[2] / "results"
RUN, ACCURACY = RESULTS / "grpo" / "lab-seed1", "val-core/lab/hops/acc/mean@1"


@pytest.fixture
def copy(tmp_path):
    """Return a function that copies the published run with other accuracies: ``change(step, value)``, None: none."""

    def made(change, steps=None) -> Path:
        folder = tmp_path / "run"
        shutil.copytree(RUN, folder)
        with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if steps is None or float(row["step"]) <= steps]
        for row in rows:
            if row[ACCURACY] != "":
                value = change(float(row["step"]), float(row[ACCURACY]))
                row[ACCURACY] = "" if value is None else str(value)
        with open(folder / "metrics.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return folder

    return made


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = forecast.main([*map(str, arguments), "--results", str(RESULTS)])
    return status, *capsys.readouterr()


def test_a_forecast_is_printed_with_what_forecasts_were_worth(capsys):
    status, out, _ = run(capsys, RUN)
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith("grpo/lab-seed1, lab/hops: 97.")
    assert "at step 80 (90 % interval), from 8 validations of its first half" in lines[0]
    assert lines[0].endswith("it ended at 99.2 %")
    rows = {row["of"]: row for row in json.loads(MEASURED.read_text())["measured"]}
    for kind in ("runs", "all"):
        assert f"Of {rows[kind]['forecasts']} " in lines[1] and f", {rows[kind]['covered']} ended inside" in lines[1]


def test_the_second_half_is_not_read(copy):
    (whole,) = forecast_run(load_run(RUN))
    (other,) = forecast_run(load_run(copy(lambda step, value: 0.01 if step > 40 else value)))
    assert other == dataclasses.replace(whole, ended=0.01)


def test_a_run_that_goes_on_is_forecast_at_its_planned_end(copy):
    (whole,) = forecast_run(load_run(RUN))
    (going,) = forecast_run(load_run(copy(lambda step, value: value, steps=47)))
    assert going == dataclasses.replace(whole, ended=None) and going.last_step == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step, value: None, "no validation was recorded; set trainer.test_freq"),
        (lambda step, value: value if step % 20 == 0 else None, "from its first 40 of 80 steps: 2 validations"),
        (lambda step, value: 0.3, "did not rise by more than its questions' noise"),
        (lambda step, value: 0.99, "the first validation has 99.0 % already"),
    ],
)
def test_a_run_that_cannot_be_forecast_is_refused_and_others_are_not(copy, capsys, change, message):
    status, out, said = run(capsys, copy(change), RUN)
    assert status == 2 and message in said and said.startswith("error: grpo/lab-seed1")
    assert out.startswith("grpo/lab-seed1, lab/hops: 97.")


def test_bad_input(capsys, tmp_path):
    for folder, message in ((tmp_path, "is not a run folder"), (tmp_path / "none", "is not a run folder")):
        status, out, said = run(capsys, folder)
        assert status == 2 and message in said and out == ""
    for arguments in ([], [str(RUN), "--measure"]):
        with pytest.raises(SystemExit):
            forecast.main(arguments)
    assert "name run folders, or use --measure" in capsys.readouterr().err


def test_without_a_measurement_the_command_is_named(capsys, tmp_path):
    assert forecast.main([str(RUN), "--results", str(tmp_path)]) == 0
    assert "was not measured: python -m results.forecast --measure" in capsys.readouterr().out


def test_the_stored_forecasts_are_what_the_code_gives():
    """Some of them; ``test_the_measurement_is_reproduced`` makes all again."""
    stored = {(one["run"], one["source"]): one for one in json.loads(MEASURED.read_text())["forecasts"]}
    for name in ("grpo/lab-gpg", "dapo/lab-seed2", "ppo/lab-seed3"):
        (now,) = forecast_run(load_run(RESULTS / name))
        then = stored[name, now.source]
        assert now.ended == then["ended"] and now.points == then["points"]
        for end in ("low", "value", "high"):
            assert getattr(now.expected, end) == pytest.approx(then["expected"][end], abs=1e-6)


@pytest.mark.slow
def test_the_measurement_is_reproduced(tmp_path):
    """Every published run and record of a study again, to the letter of the page."""
    for path in (*RESULTS.glob("*/*/metrics.csv"), *RESULTS.glob("*/study*/*.json")):
        (tmp_path / path.relative_to(RESULTS)).parent.mkdir(parents=True, exist_ok=True)
        for one in path.parent.iterdir() if path.suffix == ".csv" else [path]:
            shutil.copy(one, tmp_path / one.relative_to(RESULTS))
    (tmp_path / "benchmarks").mkdir()
    assert write_measured(tmp_path).read_text() == MEASURED.with_suffix(".md").read_text()


def test_runs_that_cannot_be_forecast_are_counted_with_the_reason(copy, tmp_path):
    folder = copy(lambda step, value: 0.3)
    (tmp_path / "results" / "grpo").mkdir(parents=True)
    shutil.move(folder, tmp_path / "results" / "grpo" / "flat")
    shutil.copytree(RUN, tmp_path / "results" / "grpo" / "lab-seed1")
    rows, made = measure(tmp_path / "results")
    assert [(row.of, row.forecasts, row.refused) for row in rows] == [
        ("runs", 1, {"did not rise": 1}),
        ("all", 1, {"did not rise": 1}),
    ]
    assert len(made) == 1 and len(list(published(tmp_path / "results"))) == 2


def test_a_report_has_the_fit_or_the_reason(copy):
    (_, table, _) = fits([load_run(RUN), load_run(copy(lambda step, value: value if step % 40 == 0 else None))])
    first, second = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert first["asymptote, %"].startswith("99.") and first["midpoint, steps"].startswith("6.")
    assert float(first["midpoint, tokens"].split()[0].replace(",", "")) == pytest.approx(1e5, rel=0.05)
    assert first["midpoint, hours"].startswith("0.00") and first["why none"] == ""
    assert second["asymptote, %"] == "" and "2 validations after the start are too few" in second["why none"]
    assert "Where the curves level off" in [getattr(block, "text", "") for block in page([load_run(RUN)])[1]]
