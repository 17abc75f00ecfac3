"""The sigmoid of a run's curve in its report, or the reason why there is none."""

import csv
import shutil
from pathlib import Path

import pytest

from results.reporting.curve_fits import fits
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


def test_a_report_has_the_fit_or_the_reason(copy):
    (_, table, _) = fits([load_run(RUN), load_run(copy(lambda step, value: value if step % 40 == 0 else None))])
    first, second = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert first["asymptote, %"].startswith("99.") and first["midpoint, steps"].startswith("1.4")
    assert float(first["midpoint, tokens"].split()[0].replace(",", "")) == pytest.approx(23_000, rel=0.05)
    assert first["midpoint, hours"].startswith("0.00") and first["why none"] == ""
    assert second["asymptote, %"] == "" and "2 validations after the start are too few" in second["why none"]
    assert "Where the curves level off" in [getattr(block, "text", "") for block in page([load_run(RUN)])[1]]
