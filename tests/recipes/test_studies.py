"""Every recipe's study: its arms are valid configurations, and its report is what its records give."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from core.config import examine
from results.reporting.study import Records, load_study
from results.reporting.study_report import judge, write_report

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "recipes").glob("*/study*.yaml"))
named = pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}-{path.stem}")


@named
def test_every_arm_is_a_valid_configuration_and_no_two_are_the_same(path):
    study = load_study(path)
    hooks = getattr(importlib.import_module(study.entry), "HOOKS", ())
    configs = []
    for name, arm in study.arms.items():
        composed = examine(study.recipe, [*study.common, *arm.overrides], hooks)
        assert not composed.problems, name
        assert not [key for override in arm.overrides if (key := override.split("=")[0]) in composed.unused], name
        configs.append(composed.config)
    assert all(a != b for at, a in enumerate(configs) for b in configs[:at])


@named
def test_the_report_is_what_the_records_give(path, tmp_path):
    study = load_study(path)
    committed = ROOT / "results" / study.recipe / f"{study.name}.md"
    shutil.copy(ROOT / "results" / "references.yaml", tmp_path)
    records = Records(ROOT / "results" / study.recipe / study.name)
    assert write_report(study, records, tmp_path).read_text() == committed.read_text()
    words = {verdict.word for verdict in judge(study, records.read(study)).values()}
    assert words <= {"confirmed", "refuted", "inconclusive", "not run"}
