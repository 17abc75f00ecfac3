"""Papers' tables: what a file may hold, the rule of the verdicts, and the generated pages."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from core.errors import InputError
from core.tracking.run_manifest import ROOT
from recipes.grpo import measures
from recipes.lab.controls import coin, with_rewards_of_others
from recipes.sft.measures import log_likelihood
from results.tables import page, runner
from results.tables.table import PAGES, Measure, Statement, Table, read_table, tables_of

FILE = {
    "paper": {"title": "A", "table": "table 1", "link": "arXiv:1", "unit": "%"},
    "rows": {
        "first": {"label": "a", "paper": 40.0, "script": "run.sh"},
        "second": {"label": "b", "paper": 30.0, "against": "first", "keys": ["data.seed=3"]},
    },
    "statements": [{"says": "b is worse", "row": "second", "against": "first", "expects": "below"}],
    "lab": {
        "about": "x",
        "preset": "lab",
        "seeds": 4,
        "controls": ["again", "rewards_of_others"],
        "measures": {"accuracy": {"metric": "val", "over": "last 2"}},
    },
}
VALUES = {
    "first": [80.0, 82.0, 81.0, 83.0],
    "second": [70.0, 71.0, 72.0, 71.0],
    "again": [81.0, 81.0, 82.0, 82.0],
    "rewards_of_others": [10.0, 12.0, 11.0, 13.0],
}


def written(folder: Path, **changes) -> Path:
    path = folder / "recipes" / "paper" / "tables" / "one.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


@pytest.fixture
def table(tmp_path) -> Table:
    return read_table(written(tmp_path))


def numbers(table: Table, **values) -> dict:
    facts = {"seeds": [1, 2, 3, 4], "cpu_seconds": 660, "commits": ["abc"]}
    return {**facts, "base": ["f" * 64], "values": {"accuracy": {**VALUES, **values}}}


def test_a_planted_bug_turns_the_verdict_and_a_failed_control_takes_it_away(table):
    statement = table.statements[0]
    assert table.verdict(numbers(table), statement) == "holds"
    swapped = numbers(table, first=VALUES["second"], second=VALUES["first"], again=VALUES["second"])
    assert table.verdict(swapped, statement) == "fails"
    assert table.verdict(numbers(table, second=[80.0, 83.0, 80.0, 84.0]), statement) == "not seen"
    learns = numbers(table, rewards_of_others=VALUES["again"])
    other = numbers(table, again=[60.0, 61.0, 60.0, 62.0])
    assert table.fails(learns, "rewards_of_others") and not table.fails(learns, "again")
    assert table.fails(other, "again") and not table.fails(other, "rewards_of_others")
    assert table.verdict(learns, statement) == table.verdict(other, statement) != "holds"
    assert "| **holds** |" not in page.render(table, learns)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.4, -0.3, 0.2, 0.1], "holds"),
        ([4.0, 4.1, 3.9, 4.2], "fails"),
        ([-4.0, -4.1, -3.9, -4.2], "fails"),
        ([1.0, 3.5, -1.0, 2.0], "not seen"),
    ],
)
def test_equality_is_judged_by_its_margin(table, differences, verdict):
    said = {"says": "same", "row": "second", "against": "first", "expects": "equal", "margin": 2.0}
    shifted = [a + d for a, d in zip(VALUES["first"], differences, strict=True)]
    assert table.verdict(numbers(table, second=shifted), Statement(**said)) == verdict


def test_a_measure_that_is_a_difference_is_compared_with_0(table):
    said = Statement(says="gain", row="second", expects="above", measure="gain")
    for value, verdict in ((3.0, "holds"), (-3.0, "fails"), (0.0, "not seen")):
        gains = [value + noise for noise in (0.1, -0.2, 0.3, -0.1)]
        made = numbers(table)
        made["values"]["gain"] = {**VALUES, "second": gains}
        assert table.verdict(made, said) == verdict
    assert table.paper_gap("second", "") is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lab": {**FILE["lab"], "sweep": 1}}, "lab.sweep=1"),
        ({"rows": {"first": {"label": "a", "against": "third"}}}, "=third"),
        ({"rows": {**FILE["rows"], "third": {"label": "c", "keys": ["x"]}}}, "rows.third.keys=x"),
        ({"statements": [{**FILE["statements"][0], "expects": "equal"}]}, "statements.0.margin=0"),
        ({"statements": [{**FILE["statements"][0], "measure": "b"}]}, "statements.0.measure=b"),
        ({"statements": [{**FILE["statements"][0], "against": ""}]}, "statements.0.against"),
        ({"lab": {**FILE["lab"], "measures": {"a": {}}}}, "lab.measures.a"),
        (
            {"lab": {**FILE["lab"], "measures": {"a": {"metric": "v", "over": "best"}}}},
            "over='best'",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_fix(tmp_path, changes, key):
    path = written(tmp_path, **changes)
    with pytest.raises(InputError) as error:
        read_table(path)
    assert all(line.startswith(f"{path}: ") and "; " in line for line in error.value.problems)
    assert key in str(error.value)


def test_the_difference_of_the_paper_is_of_the_first_measure_alone(table):
    assert table.paper_gap("second", "first") == -10
    assert table.paper_gap("second", "first", "pass@8") is None


def test_numbers_of_another_version_of_the_file_are_nobody_s(table, tmp_path, monkeypatch):
    monkeypatch.setattr("results.tables.table.PAGES", tmp_path)
    (tmp_path / "paper-one.json").write_text(json.dumps({"digest": table.digest}))
    assert table.numbers() is not None
    words = table.model_copy(update={"paper": table.paper.model_copy(update={"note": "other"})})
    assert words.digest == table.digest
    longer = table.lab.model_copy(update={"keys": ("trainer.total_training_steps=9",)})
    assert table.model_copy(update={"lab": longer}).numbers() is None


def test_no_group_of_the_control_holds_a_reward_of_its_own():
    @dataclass(frozen=True)
    class Group:
        scores: tuple[int, ...]

    class Trainer:
        def make_batch(self, groups_P):
            return groups_P

    trainer = with_rewards_of_others(Trainer)()
    planted = trainer.make_batch([Group((1, 2)), Group((3, 4, 5)), Group((6, 7))])
    assert [group.scores for group in planted] == [(3, 4), (6, 7, 6), (1, 2)]
    with pytest.raises(ValueError, match="one question"):
        trainer.make_batch([Group((1, 2))])


def test_a_coin_pays_half_of_the_answers_whether_they_are_right_or_not():
    graded = [
        (letter == "d", coin("lab/hops", f"abc#{letter}", "d", {"index": index}))
        for index in range(400)
        for letter in "dx"
    ]
    for right in (True, False):
        scores = [parts["score"] for is_right, parts in graded if is_right is right]
        assert 0.4 < sum(scores) / len(scores) < 0.6 and set(scores) == {0.0, 1.0}
        assert {parts["acc"] for is_right, parts in graded if is_right is right} == {float(right)}
    assert all(parts["chain"] == 1.0 for _, parts in graded)


def test_every_committed_page_is_what_its_file_and_its_numbers_give():
    ids = {table.id for table in tables_of() if table.numbers()}
    assert ids == {path.stem for path in PAGES.glob("*.json")}
    for path, text in page.generated():
        assert page.is_same(path.read_text(encoding="utf-8"), text), (
            f"{path}: run python -m results.report --index"
        )


def test_a_table_without_statements_is_in_no_picture(tmp_path):
    table = read_table(written(tmp_path, statements=[]))
    assert "no statement" not in page.statements_picture([(table, numbers(table))])
    assert page.counted([(table, numbers(table))]).startswith("0 statements")


def test_results_readme_has_the_headlines_and_counts_all_statements(tmp_path):
    said = [{**FILE["statements"][0], "says": "a headline", "headline": True}, *FILE["statements"]]
    table = read_table(written(tmp_path, statements=said))
    lines = page.headline_lines([(table, numbers(table))])
    assert "| a headline |" in lines and "b is worse" not in lines
    assert ": 2/2 |" in lines and "2 statements of papers: holds 2." in lines
    assert "b is worse" in page.statement_lines([(table, numbers(table))], "")


def test_pages_may_differ_in_a_recipe_s_lines_of_python_alone():
    row = "| [DAPO](dapo/README.md) | 269 | A statement. | holds | 31 |"
    assert page.is_same(row, row.replace("269", "270"))
    assert not page.is_same(row, row.replace("31", "32")) and not page.is_same(row, "")


@pytest.mark.parametrize("table", tables_of(), ids=lambda table: table.id)
def test_every_run_of_a_miniature_composes_and_every_script_exists(table):
    if table.lab:
        runner.check(table, [*table.rows, *table.lab.controls])
    for row in table.rows.values():
        assert not row.script or (ROOT / "recipes" / table.recipe / row.script).exists(), row.script


def test_the_table_of_recipes_readme_is_one(tmp_path):
    readme = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    block = readme.partition("## Your own table")[2].partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "dppo" / "tables" / "ends_above.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(block, encoding="utf-8")
    table = read_table(path)
    runner.check(table, [*table.rows, *table.lab.controls])
    assert runner.arguments(table, ("clip", 1)) != runner.arguments(table, ("mine", 1))


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("actor_rollout_ref.actor.clip_ratoi=0.3", "unknown key"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gpgg", "the nearest name is gpg"),
        ("algorithm.adv_estimator='recipes.nsr.functions:tokn'", "has no 'tokn'"),
    ],
)
def test_a_wrong_key_of_a_row_is_refused_before_any_run(key, problem):
    table = next(table for table in tables_of("grpo") if table.name == "two_grpo")
    name = list(table.rows)[-1]
    row = table.rows[name].model_copy(update={"keys": (key,)})
    broken = table.model_copy(update={"rows": {**table.rows, name: row}})
    with pytest.raises(InputError, match=f"{name}: .*{problem}"):
        runner.check(broken, list(table.rows))


def test_a_dry_run_lists_what_is_missing_and_a_record_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = next(table for table in tables_of("search_r1") if table.name == "masking")
    record = runner.record_file(table, ("masked", 1))
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    command = [
        sys.executable,
        "-m",
        "results.tables.runner",
        "search_r1",
        "masking",
        "--seeds",
        "1",
    ]
    environment = {"PYTHONPATH": str(ROOT), "DRY_RUN": "1", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "train unmasked, seed 1" in shown.stdout and "train masked, seed 1" not in shown.stdout


def test_a_reader_that_has_enough_of_the_list_sees_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "results.tables.runner", "grpo"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_every_row_takes_the_value_of_the_sweep_that_is_best_for_the_first_row(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sweep = {"key": "actor_rollout_ref.actor.optim.lr", "values": ["1.0e-4", "3.0e-4"]}
    table = read_table(written(tmp_path, lab={**FILE["lab"], "sweep": sweep}))
    assert table.digest != read_table(written(tmp_path)).digest
    reached = (("1.0e-4", (0.6, 0.89999)), ("3.0e-4", (0.7, 0.8)))  # both of 75.0, once rounded
    for value, accuracy in reached:
        for seed, reached in zip(table.lab.sweep.seeds, accuracy, strict=True):
            run = f"{sweep['key']}={value}", seed
            assert runner.arguments(table, run)[-1] == run[0]
            record = runner.record_file(table, run)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps({"metrics": [{"val": reached}]}))
    settled, means, records = runner.swept(table, 1)
    best = f"{sweep['key']}=3.0e-4"
    assert list(means.values()) == [75.0, 75.0] and len(records) == 4
    assert best in runner.arguments(settled, ("second", 1))
    assert best in runner.arguments(settled, ("again", 1))
    assert best not in runner.arguments(table, ("second", 1))
    shown = page.render(table, {**numbers(table), "sweep": means})
    assert "1.0e-4: 75.0; 3.0e-4: 75.0." in shown and "20 runs took" in shown


def test_a_row_takes_the_best_of_its_own_sweep_whose_run_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key = "actor_rollout_ref.actor.optim.lr"
    rows = {name: {**row, "sweep": ["1.0e-4", "3.0e-4"]} for name, row in FILE["rows"].items()}
    lab = {**FILE["lab"], "sweep": {"key": key, "seeds": [1]}, "controls": [], "seeds": 2}
    table = read_table(written(tmp_path, rows=rows, lab=lab))
    reached = {"first 1.0e-4": 0.7, "first 3.0e-4": 0.5, "second 1.0e-4": 0.2, "second 3.0e-4": 0.4}
    Path(runner.OUTPUTS, table.recipe).mkdir(parents=True)

    def make(made_of: Table, run: runner.Run, accuracy: float) -> None:
        facts = {"cpu_seconds": 60, "commit": "abc", "base": "f"}
        row = {"metrics": [{"val": accuracy}]}
        runner.record_file(made_of, run).write_text(json.dumps(facts | row))

    for arm, accuracy in reached.items():
        make(table, (arm.replace(" ", f" {key}="), 1), accuracy)
    settled, means, sweep_records = runner.swept(table, 1)
    assert list(means.values()) == [70.0, 50.0, 20.0, 40.0]
    assert runner.arguments(settled, ("first", 1))[-1] == f"{key}=1.0e-4"
    assert runner.arguments(settled, ("second", 1))[-1] == f"{key}=3.0e-4"
    for name in rows:
        make(settled, (name, 2), 0.6)
    records = runner.complete(settled, list(rows), (1, 2), 1)
    collected = runner.collect(table, (1, 2), records, sweep_records)
    assert collected["values"] == {"accuracy": {"first": [70.0, 60.0], "second": [40.0, 60.0]}}
    assert (collected["runs"], collected["cpu_seconds"]) == (6, 360)
    shown = page.render(table, collected | {"sweep": means})
    assert "with each row and seed 1" in shown and "second 3.0e-4: 40.0." in shown
    assert "6 runs took" in shown and "## Controls" not in shown


def test_a_measure_is_the_mean_of_the_last_validations_in_percent(table):
    rows = [{"val": 0.1}, {"loss": 1.0}, {"val": 0.3}, {"val": 0.5}]
    measure = table.lab.measures["accuracy"]
    assert runner.measured(measure, rows) == 40.0
    assert runner.measured(measure.model_copy(update={"over": "all"}), rows) == 30.0


def test_the_entropy_law_is_told_from_a_line_in_the_logarithm_of_the_step():
    """Accuracy that follows the entropy exactly, and then the logarithm of the step."""
    entropies = [2.0, 1.9, 1.2, 1.1, 1.0, 0.6, 0.5, 0.4, 0.2, 0.1, 0.1]
    law = [0.9 - 0.1 * math.exp(entropy) for entropy in entropies[1:]]
    rows = [{"actor/entropy": entropy} for entropy in entropies]
    following = [row | {measures.ACCURACY: acc} for row, acc in zip(rows, [*law, 0], strict=True)]
    assert measures.entropy_law_gain(following) > 5
    assert measures.entropy_slope(following) == pytest.approx(-10)
    assert measures.prediction_error(following) == pytest.approx(0, abs=1e-9)
    steps = [{measures.ACCURACY: 0.2 * math.log(step)} for step in range(1, 12)]
    by_step = [row | step for row, step in zip(rows, steps, strict=True)]
    assert measures.entropy_law_gain(by_step) < -5 and measures.prediction_error(by_step) > 5


def test_the_lengths_of_right_and_wrong_answers_are_told_apart():
    """Of four answers one is right and has 8 steps; the wrong ones have 2, 3 and 4."""
    aux = {"val-aux/lab/maze/steps/mean@16": 17 / 4, "val-aux/lab/maze/wrong_steps/mean@16": 9 / 4}
    rows = [{"val-core/lab/maze/acc/mean@16": 0.25, **aux}, {"actor/entropy": 1.0}]
    assert measures.steps_of_wrong_answers(rows) == pytest.approx(3)
    assert measures.steps_of_right_answers(rows) == pytest.approx(8)


def test_fine_tuning_is_measured_by_the_last_steps():
    rows = [{"actor/nll": 9.0}, *({"actor/nll": 1 + step / 10} for step in range(10))]
    assert log_likelihood(rows) == pytest.approx(-145)


def test_a_measure_may_be_a_function_of_the_whole_run(table):
    named = Measure(function="recipes.grpo.measures:entropy_slope")
    rows = [{"actor/entropy": e, measures.ACCURACY: 1 - e} for e in (0.5, 0.4, 0.3)]
    assert runner.measured(named, rows) == round(measures.entropy_slope(rows), 3) < 0


def test_only_the_first_measure_is_taken_of_a_control(tmp_path):
    """The length of right answers, as one, is undefined where no answer is right."""
    lab = FILE["lab"] | {
        "measures": {
            "accuracy": {"metric": "val-core/lab/maze/acc/mean@16"},
            "steps": {"function": "recipes.grpo.measures:steps_of_right_answers"},
        }
    }
    table = read_table(written(tmp_path, lab=lab))

    def record(accuracy: float, file: str) -> dict:
        validation = {"acc": accuracy, "steps": 12.0, "wrong_steps": 6.0}
        row = {f"val-aux/lab/maze/{part}/mean@16": value for part, value in validation.items()}
        row["val-core/lab/maze/acc/mean@16"] = accuracy
        facts = {"cpu_seconds": 1, "commit": "abc", "base": "f", "file": file}
        return facts | {"metrics": [row]}

    accuracies = {"first": 0.5, "second": 0.25, "again": 0.5, "rewards_of_others": 0.0}
    runs = [(arm, seed) for arm in accuracies for seed in (1, 2)]
    records = {run: record(accuracies[run[0]], str(run)) for run in runs}
    values = runner.collect(table, (1, 2), records, {})["values"]
    assert values["steps"] == {"first": [12.0, 12.0], "second": [24.0, 24.0]}
    assert values["accuracy"]["rewards_of_others"] == [0.0, 0.0] and len(values["accuracy"]) == 4


def test_a_record_of_other_code_or_of_another_control_is_not_used(monkeypatch):
    table = next(table for table in tables_of("search_r1") if table.name == "masking")
    record = runner.record_file(table, ("masked", 1))
    assert record != runner.record_file(table, ("rewards_of_others", 1))
    assert record.name != runner.record_file(table, ("again", 1)).name
    monkeypatch.setattr(runner, "code_digest", lambda: "planted")
    assert record != runner.record_file(table, ("masked", 1))


def test_a_metric_that_no_run_logs_ends_the_table_with_its_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "OUTPUTS", tmp_path)
    table = read_table(written(tmp_path))
    runs = [("first", 1), ("first", 2)]
    runner.check_measures(table, runs)  # none is done
    (measure,) = table.lab.measures.values()
    file = runner.record_file(table, runs[1])
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"metrics": [{measure.metric: 0.5}]}))
    runner.check_measures(table, runs)
    file.write_text(json.dumps({"metrics": [{"val-core/lab/hops/acc/mean@2": 0.5}]}))
    with pytest.raises(InputError, match="no row has it; there are val-core.*mean@2"):
        runner.check_measures(table, runs)


def test_a_page_says_that_its_numbers_are_of_a_changed_checkout(monkeypatch):
    for dirty, said in (True, "abcdef0123 with changes"), (False, "abcdef0123"):
        state = {"commit": "abcdef012345", "dirty": dirty}
        monkeypatch.setattr(runner, "git_state", state.copy)
        assert runner.commit() == said


def test_what_a_killed_run_left_is_out_of_the_way_of_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "OUTPUTS", tmp_path)
    table = read_table(written(tmp_path))
    folder = runner.record_file(table, ("first", 1)).with_suffix("")
    (folder / "global_step_20").mkdir(parents=True)

    def prepare(*_):
        raise SystemExit(int(folder.exists()))

    monkeypatch.setattr(runner.os, "dup2", lambda *_: None)
    monkeypatch.setattr(runner.command_line, "prepare", prepare)
    with pytest.raises(SystemExit) as ended:
        runner.train(table, ("first", 1))
    assert ended.value.code == 0


def test_what_is_imported_before_the_forks_exists():
    assert all(importlib.util.find_spec(module) for module in runner.PRELOADED)
