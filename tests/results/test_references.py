"""Runs beside the numbers of others: which run stands in which row, and what every row of this
repository holds."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from core.config import convert, examine
from core.tracking.tracker import Tracker
from core.tracking.validation import validation_metrics
from core.types import StepMetrics
from results import report
from results.publish import publish
from results.reporting import run_scripts
from results.reporting.references import (
    differing_table,
    named_runs,
    read_references,
    reference_table,
    set_table,
    sources,
)
from results.reporting.run_scripts import read_script
from results.reporting.summaries import read_summaries
from tests.core.synthetic import configured, make_run, records

ROOT = Path(__file__).resolve().parents[2]
LAB = {
    "recipe": "grpo",
    "model": "outputs/lab/base",
    "method": "GRPO",
    "source": "a paper, table 1",
    "tag": "R",
}
SETTINGS = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
}
DEPARTURES = [
    {"key": "actor_rollout_ref.actor.optim.lr", "here": 2e-6, "why": "the paper's text has it"},
    {"what": "each prompt occurs once", "why": "the file there repeats them"},
]
COMMAND = {
    "command": "bash recipes/grpo/run_lab.sh",
    "settings": SETTINGS,
    "departures": DEPARTURES,
}
ROW = {
    **LAB,
    **COMMAND,
    "id": "grpo-lab",
    "data_source": "lab/hops",
    "value": 90.0,
    "questions": 100,
}
OTHER = {
    **ROW,
    "id": "grpo-lab-other",
    "source": "another paper",
    "settings": {"algorithm.adv_estimator": "rloo"},
}
SETS = {**LAB, **COMMAND, "id": "sets", "data_source": "a, b", "value": 50.0}
SETS |= {"values": {"a": 60.0, "b": 40.0}, "questions": {"a": 20, "b": 80}}
CLOSED = {
    **{k: v for k, v in ROW.items() if k != "command"},
    "id": "closed",
    "not_reproducible": "it is secret",
}


@pytest.fixture
def results(tmp_path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    table = {"tags": {"R": "read"}, "references": [ROW, OTHER, SETS, CLOSED]}
    (folder / "references.yaml").write_text(yaml.safe_dump(table))
    return folder


def add(
    results: Path,
    name: str = "grpo/run",
    *,
    reference="grpo-lab",
    changes=(),
    total_steps=0,
    **options,
) -> None:
    config = configured({"trainer.reference": reference, **dict(changes)})
    folder = make_run(results.parent / "outputs" / name, config, **{"questions": 100, **options})
    if total_steps:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "total_steps": total_steps}))
    publish(folder, results / name)


def tables(results: Path) -> tuple[dict[str, list[str]], list[list[str]], list[list[str]]]:
    """The rows of references by id, the runs that differ from their row, and the rows by question
    set."""
    known = read_references(results)
    named = named_runs(results, read_summaries(results), known)
    rows = {row[0]: row for row in reference_table(known, named).rows}
    return rows, differing_table(named).rows, set_table(known, named).rows


def test_a_right_run_fills_its_row_and_no_other(results):
    add(results)
    summary = json.loads((results / "grpo/run/summary.json").read_text())
    value = 100 * summary["results"][0]["after"]["estimate"]["value"]
    rows, differing, _ = tables(results)
    line = rows["grpo-lab"]
    assert line[6].startswith(f"{value:.1f} [") and line[6].endswith("(grpo/run)")
    assert line[7] == f"{value - 90:+.1f}" and line[8] == "each prompt occurs once"
    assert line[9] == f"measured (1 seed, {summary['commit']})"
    assert rows["grpo-lab-other"][6] == rows["sets"][6] == "" and not differing


def test_seeds_of_one_experiment_are_one_line_and_a_departure_of_the_row_is_allowed_and_shown(
    results,
):
    for seed in (1, 2):
        add(
            results,
            f"grpo/run-seed{seed}",
            changes={"trainer.seed": seed, "actor_rollout_ref.actor.optim.lr": 2e-6},
        )
    line = tables(results)[0]["grpo-lab"]
    assert (
        "±" in line[6]
        and line[6].endswith("(grpo/run)")
        and line[9].startswith("measured (2 seeds, ")
    )
    assert "optim.lr is 2e-06 here, 1e-06 there (the paper's text has it); each prompt" in line[8]


def test_a_wrong_run_is_listed_with_the_reason_and_fills_nothing(results):
    val, model = "actor_rollout_ref.rollout.val_kwargs.do_sample", "actor_rollout_ref.model.path"
    for name, changes, options, reason in (
        (
            "grpo/run",
            {"algorithm.adv_estimator": "rloo"},
            {},
            "algorithm.adv_estimator is rloo here, grpo there",
        ),
        ("grpo/run", {model: "o/m"}, {}, "model.path is o/m here, outputs/lab/base there"),
        ("grpo/run", {}, {"status": "stopped"}, "its status is stopped"),
        ("grpo/run", {val: True}, {}, "val_kwargs.do_sample is true here, false there"),
        (
            "grpo/run",
            {"data.train_batch_size": 512},
            {},
            "data.train_batch_size is 512 here, 1024 there",
        ),
        (
            "grpo/run",
            {"actor_rollout_ref.actor.optim.lr": 3e-6},
            {},
            "optim.lr is 3e-06 here, 1e-06 there",
        ),
        ("grpo/run", {}, {"questions": 60}, "lab/hops has 60 questions here, 100 there"),
        ("grpo/run", {}, {"total_steps": 40}, "its status is finished at step 20 of 40"),
        ("grpo/run", {"trainer.val_only": True}, {}, "it only validates, the model of step 20"),
        ("dapo/run", {}, {}, "the recipe is dapo here, grpo there"),
    ):
        for folder in (results / name.partition("/")[0], results.parent / "outputs"):
            shutil.rmtree(folder, ignore_errors=True)
        add(results, name, changes=changes, **options)
        rows, differing, _ = tables(results)
        assert not any(row[6] for row in rows.values()), reason
        ((_, row, reasons),) = differing
        assert row == "grpo-lab" and reasons.endswith(reason) and ";" not in reasons, reasons
        shutil.rmtree(results / name.partition("/")[0])


def test_several_sets_have_a_line_each_and_their_mean(results):
    folder = results.parent / "outputs/grpo/sets"
    config = configured({"trainer.reference": "sets"})
    tracker = Tracker(folder, config)
    tracker.set_total(5)
    rows = [*records(5, 1, 20, source="a"), *records(5, 1, 80, source="b")]
    metrics = StepMetrics(5)
    metrics.add(validation_metrics(rows))
    tracker.log_validation(5, rows)
    tracker.log(metrics)
    tracker.close("finished")
    publish(folder, results / "grpo/sets")
    summary = json.loads((results / "grpo/sets/summary.json").read_text())
    found = {one["data_source"]: one["after"]["estimate"] for one in summary["results"]}
    mean = 50 * (found["a"]["value"] + found["b"]["value"])
    half = (
        25
        * (
            (found["a"]["high"] - found["a"]["low"]) ** 2
            + (found["b"]["high"] - found["b"]["low"]) ** 2
        )
        ** 0.5
    )
    rows, _, sets = tables(results)
    line = rows["sets"]
    assert line[6] == f"{mean:.1f} [{mean - half:.1f}, {mean + half:.1f}] (grpo/sets)"
    assert line[7] == f"{mean - 50:+.1f}"
    assert [(row[2], row[3], row[5]) for row in sets] == [
        ("a", "60.0 [38.7, 78.1]", f"{100 * found['a']['value'] - 60:+.1f}"),
        ("b", "40.0 [30.0, 51.0]", f"{100 * found['b']['value'] - 40:+.1f}"),
    ]


def test_a_row_that_does_not_exist_ends_in_one_line_and_nothing_is_written(results, capsys):
    add(results, reference="grpo-lap")
    assert report.main(["--index", "--results", str(results)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "grpo/run: trainer.reference=grpo-lap: " in error
    assert not (results / "README.md").exists()


def test_the_page_has_each_evidence_and_one_seed_apart(results):
    add(results, "grpo/one")
    for seed in (1, 2, 3):
        changes = {"trainer.seed": seed, "data.train_batch_size": 8}
        add(results, f"grpo/three-seed{seed}", reference=None, changes=changes)
    recorded = json.loads((results / "grpo/three-seed1/summary.json").read_text())["commit"]
    repeated = {
        "run": "three-seed1",
        "by": "tests/x.py::test_x",
        "date": "2026-01-02",
        "commit": "abc",
    }
    entries = [
        {"experiment": "grpo/three", "recorded": recorded, **repeated},
        {"experiment": "grpo/one", "recorded": "an earlier recording", **repeated},
    ]
    (results / "verified.yaml").write_text(yaml.safe_dump(entries))
    assert report.main(["--index", "--results", str(results)]) == 0
    text = (results / "README.md").read_text()
    several, single = (
        text.split("## Experiments of one seed")[0],
        text.split("## Experiments of one seed")[1],
    )
    verified = "verified by tests/x.py::test_x, three-seed1 on 2026-01-02 at abc (3 seeds, "
    assert "| grpo/three |" in several and verified in several
    assert "| grpo/one |" in single.split("## Runs")[0] and "grpo/one" not in several
    assert "| measured (1 seed, " in single and "not run (`bash recipes/grpo/run_lab.sh`)" in single
    assert "it is secret" in single.split("### Not to be reproduced")[1]


# --- the rows of this repository ---


@pytest.fixture(scope="module")
def known() -> dict:
    return read_references(ROOT / "results")


def test_a_row_has_its_source_and_either_a_command_with_settings_or_the_reason_for_none(known):
    for row in known["references"]:
        name = row["id"]
        assert {
            "recipe",
            "model",
            "method",
            "data_source",
            "value",
            "source",
            "tag",
        } <= row.keys(), name
        assert row["tag"] in known["tags"] and 0 < row["value"] <= 100, name
        closed = "not_reproducible" in row
        assert closed != ("command" in row) and closed != ("settings" in row), name
        if "values" in row:
            assert list(row["values"]) == sources(row) == list(row["questions"]), name
            assert (
                abs(sum(row["values"].values()) / len(row["values"]) - row["value"]) < 0.11
                or "note" in row
            ), name
        else:
            assert len(sources(row)) == 1, name


def commands(known, evaluated: bool) -> list[dict]:
    rows = [row for row in known["references"] if "command" in row]
    return [row for row in rows if ("eval.sh" in row["command"]) == evaluated]


def test_the_command_of_a_row_dry_runs_with_the_rows_settings(known, monkeypatch):
    monkeypatch.setattr(run_scripts, "compose", examine)  # composed once, with what it warns of
    for row in commands(known, False):
        words = shlex.split(row["command"])
        assert words[0] == "bash" and "$" not in row["command"]
        examined = read_script(ROOT / words[1], words[2:]).config
        assert examined.config.trainer.reference == row["id"]
        assert not examined.problems and not examined.warnings, row["id"]
        heads = convert.get(examined.config, "actor_rollout_ref.rollout.tensor_model_parallel_size")
        # VLLM splits the 14 heads of this model evenly
        assert 14 % heads == 0 or "0.5B" not in row["model"]


def test_the_numbers_by_set_are_those_of_the_papers_tables(known):
    tables = json.loads((ROOT / "results/search_r1/paper_tables.json").read_text())["tables"]
    printed = {tuple(cells[1:]) for each in tables for cells in each["rows"]}
    rows = [row for row in known["references"] if "values" in row]
    assert len(rows) > 30 and {(*row["values"].values(), row["value"]) for row in rows} <= printed
