"""The report on golden vectors: it is up to date, it counts what fails, and no file is passed over in silence."""

import json
import os
import re

import pytest

from tests import conformance
from tests.golden_io import golden_dir


def without_deviations(report: str) -> str:
    return re.sub(r"< 1e[+-]?\d+", "0", report)


@pytest.mark.skipif("GOLDEN_DIR" in os.environ, reason="the committed report is of the committed vectors")
def test_golden_report_is_what_the_command_writes():
    committed = conformance.DEFAULT_OUT.read_text(encoding="utf-8")
    fresh = conformance.render(*conformance.run_all())
    assert without_deviations(committed) == without_deviations(fresh), "run python -m tests.conformance"


def test_a_wrong_vector_is_counted_and_shown(tmp_path, monkeypatch):
    source = json.loads((golden_dir() / "kl_controller.json").read_text())
    source["cases"][0]["expected_f64"]["value_after_each_update"][0] += 1e-3
    (tmp_path / "kl_controller.json").write_text(json.dumps(source))
    (tmp_path / "somebody_s_new_loss.json").write_text('{"cases": []}')
    monkeypatch.setenv("GOLDEN_DIR", str(tmp_path))
    results, missing = conformance.run_all()
    assert [(r.passed, r.vectors) for r in results] == [(len(source["cases"]) - 1, len(source["cases"]))]
    assert missing == ["somebody_s_new_loss"]
    report = conformance.render(results, missing)
    assert "## Failures" in report and "value_after_each_update deviates by 0.001" in report
    assert "somebody_s_new_loss: no function here" in report
