"""The comparison of a report: the baseline, the axes, what cannot be paired, and what the tables
state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from core.errors import InputError
from results import report
from results.reporting import comparison_report
from results.reporting.comparison_report import (
    comparison,
    verdicts,
    why_not_compared,
    with_baseline,
)
from results.reporting.curves import own_metrics, panels
from results.reporting.pages import Fold, Table, Text
from results.reporting.run_reader import RecordedRun, load_run
from results.reporting.run_report import headline
from results.reporting.summaries import group_runs
from results.tables import page
from tests.core.synthetic import configured, make_run

ALL = {
    "grpo/lab_s1": (1, 0.2),
    "grpo/lab_s2": (2, 0.2),
    "grpo/slow": (1, 0.02),
    "ppo/other": (1, 0.1),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Three experiments: grpo/lab of two seeds, grpo/slow and ppo/other of one."""
    root = tmp_path_factory.mktemp("outputs")
    for name, (seed, rate) in ALL.items():
        changes = {
            "trainer.experiment_name": Path(name).name,
            "trainer.seed": seed,
            "algorithm.kl_ctrl.kl_coef": rate,
        }
        make_run(root / name, configured(changes), rate=rate)
    return root


def loaded(root: Path, *names: str) -> list[list[RecordedRun]]:
    return group_runs([load_run(root / name) for name in names or ALL])


def first_table(groups) -> list[list[str]]:
    return next(block for block in comparison(groups) if isinstance(block, Table)).rows


def other_run(folder: Path, change) -> Path:
    """A run with another setting, whose last validation was changed as a text."""
    run = make_run(folder, configured({"algorithm.kl_ctrl.kl_coef": 0.5}))
    path = run / "validation" / "20.jsonl"
    path.write_text(change(path.read_text()))
    return run


def test_a_trained_model_is_not_compared_by_what_it_was_before_its_training(root, tmp_path):
    run = make_run(tmp_path / "grpo" / "blind", configured({"algorithm.kl_ctrl.kl_coef": 0.5}))
    for file in (run / "validation").iterdir():
        if file.stem != "0":
            file.unlink()
    (line,) = verdicts(group_runs([load_run(root / "grpo/slow"), load_run(run)]))
    assert "grpo/blind was validated before its training alone: set trainer.test_freq" in line


# --- the baseline ---


def test_the_baseline_is_found_by_experiment_run_or_folder(root):
    for name in ("grpo/slow", "grpo/slow/", f"{root}/grpo/slow"):
        rows = first_table(with_baseline(loaded(root), name))
        assert [row[0] for row in rows] == ["grpo/lab − grpo/slow", "ppo/other − grpo/slow"], name
    # A seed names its experiment
    assert with_baseline(loaded(root), "grpo/lab_s2")[0][0].name == "grpo/lab_s1"
    assert [row[0] for row in first_table(loaded(root))] == [
        "grpo/slow − grpo/lab",
        "ppo/other − grpo/lab",
    ]
    with pytest.raises(InputError, match="--baseline grpo/slaw: .*near it: grpo/slow"):
        with_baseline(loaded(root), "grpo/slaw")


# --- what cannot be paired ---


def test_runs_without_a_shared_question_are_refused_in_the_table(root, tmp_path):
    other = other_run(
        tmp_path / "grpo" / "elsewhere", lambda text: text.replace("lab/hops/", "else/")
    )
    assert report.main([str(root / "grpo/slow"), str(other), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert (
        "grpo/elsewhere and grpo/slow are not compared on lab/hops: they share no question" in text
    )
    row = next(line for line in text.splitlines() if "grpo/elsewhere − grpo/slow" in line)
    assert "none is shared" in row and "none possible" in row and "+" not in row


def test_other_files_scorers_and_decoding_are_not_compared(root):
    a, b = loaded(root, "grpo/slow", "ppo/other")

    def pair(hashes: str, path: str, **config):
        """Both runs with a file of these hashes."""
        files = [{"data": [{"path": path, "sha256": one}]} for one in hashes]
        return [
            [
                dataclasses.replace(
                    g[0], config={**g[0].config, **config}, manifest={**g[0].manifest, **data}
                )
            ]
            for g, data in zip((a, b), files, strict=True)
        ]

    other, same = (
        pair(hashes, "test.parquet", **{"data.val_files": ["test.parquet"]})
        for hashes in ("01", "00")
    )
    (line,) = verdicts(other)
    assert "not compared: evaluated on different files" in line
    assert line in " ".join(block.text for block in comparison(other) if isinstance(block, Text))
    assert "is better on these questions" in verdicts(same)[0]
    mine = {"custom_reward_function.path": "mine.py"}
    assert "different functions" in why_not_compared(*pair("12", "mine.py", **mine))
    assert why_not_compared(*pair("11", "mine.py", **mine)) == why_not_compared(a, b) == ""
    for change, why in (
        (mine, "different functions"),
        ({"reward_model.reward_kwargs.gsm8k.method": "robust"}, "different functions"),
        ({"data.max_response_length": 7}, "decoded differently"),
    ):
        assert why in why_not_compared(
            a, [dataclasses.replace(b[0], config={**b[0].config, **change})]
        )


def test_a_score_is_no_accuracy_and_equal_names_are_told_apart(root, tmp_path, capsys):
    runs = []
    for place, value in (("a", 0.3), ("b", 0.1)):

        def scored(text, value=value):
            return "".join(
                json.dumps({**json.loads(row), "acc": [value]}) + "\n" for row in text.splitlines()
            )

        runs.append(str(other_run(tmp_path / place / "grpo" / "one", scored)))
    assert report.main([*runs, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out.replace(str(tmp_path), "")
    assert (
        "score on lab/hops" in text
        and "accuracy" not in text
        and "%" not in text
        and "points" not in text
    )
    last = text.splitlines()[-1]
    assert (
        last.startswith("b/grpo/one − a/grpo/one on lab/hops: -0.2")
        and "b/grpo/one is worse" in last
    )


def test_runs_of_other_tasks_share_one_line(root):
    """Five runs of five tasks had four refusals above the picture."""
    groups = loaded(root, "grpo/slow", "ppo/other")

    def renamed(task: str):
        run = groups[1][0]
        metrics = [
            {name.replace("lab/hops", task): value for name, value in row.items()}
            for row in run.metrics
        ]
        config = {**run.config, "data.max_response_length": 99, "task": task}
        manifest = {**run.manifest, "run": task.replace("/", "-")}
        return [
            dataclasses.replace(
                run, metrics=metrics, config=config, manifest=manifest, validation={}
            )
        ]

    lines = verdicts([*groups, renamed("task/b"), renamed("task/c")])
    assert len(lines) == 3 and lines[0].startswith("ppo/task-b, ppo/task-c: listed beside grpo/")
    assert lines[2] == (
        "against grpo/slow on lab/hops: better: ppo/other; not compared: ppo/task-b, ppo/task-c"
    )


def test_a_dense_score_has_its_line_its_curve_and_its_verdict(root, tmp_path):
    """A scorer that gives half points beside an accuracy: only the accuracy was shown."""
    groups = []
    for name, gain in (("plain", 0.0), ("dense", 0.2)):
        keys = {"trainer.experiment_name": name, "algorithm.kl_ctrl.kl_coef": 0.1 + gain}
        read = load_run(make_run(tmp_path / name, configured(keys)))
        metric = "val-aux/lab/hops/reward/mean@1"
        metrics = [
            {**row, metric: 0.3 + gain + row["step"] / 100} if metric in row else dict(row)
            for row in read.metrics
        ]
        validation = {
            step: [
                dataclasses.replace(
                    each, values={**each.values, "reward": (0.3 + gain + i % 7 / 100,)}
                )
                for i, each in enumerate(records)
            ]
            for step, records in read.validation.items()
        }
        groups.append([dataclasses.replace(read, metrics=metrics, validation=validation)])
    assert "reward on lab/hops 0.3" in headline(groups[0])
    assert "Validation reward" in [panel.title for panel in panels(groups)]
    (line,) = [line for line in verdicts(groups) if "(reward)" in line]
    assert "/dense − " in line and "+0.2 [" in line and "is better" in line


def test_what_a_scorer_a_hook_or_a_recipe_adds_has_curves(root):
    run = loaded(root, "grpo/slow")[0][0]
    own = {"reward/format/mean": 0.1, "env/number_of_valid_search": 2.0, "reward/ok_rate": 0.3}
    metrics = [
        {**row, **{name: value * row["step"] for name, value in own.items()}, "env/same": 1.0}
        for row in run.metrics
    ]
    groups = [[dataclasses.replace(run, metrics=metrics)]]
    assert own_metrics(groups) == ["env/number_of_valid_search", "reward/format/mean"]
    assert "reward/format/mean" in [panel.title for panel in panels(groups)]


# --- one command ---


def test_a_folder_of_seeds_stands_for_its_runs(root, tmp_path, capsys):
    assert report.main([str(root / "grpo"), str(root / "ppo"), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith("grpo/lab: ") and "2 seeds" in line for line in out)
    assert out[-1].startswith("against grpo/lab on lab/hops: ")


def test_a_papers_table_is_printed_with_its_verdicts(capsys):
    table, numbers = page.made()[0]
    for name in (f"{table.id}.md", f"{table.id}.json"):
        assert report.main([str(page.PAGES / name)]) == 0
        *_, line, last = capsys.readouterr().out.splitlines()
        assert line.endswith(f": {table.verdict(numbers, table.statements[-1])}")
        assert last.startswith(f"{len(table.statements)} statements of papers: ")
    assert report.main(["results/none.md"]) == 2


# --- what the tables state ---


def test_the_verdict_of_one_seed_is_of_these_policies_and_the_last_line(root, tmp_path, capsys):
    row = first_table(loaded(root, "grpo/slow", "ppo/other"))[0]
    assert row[-1] == "better on these questions; another seed may not be" and row[5:7] == ["", ""]
    assert (
        report.main([str(root / "grpo/slow"), str(root / "ppo/other"), "--out", str(tmp_path)]) == 0
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.startswith("ppo/other − grpo/slow on lab/hops: +")
        and "points" in last
        and "shared questions" in last
    )


def test_rows_are_corrected_for_their_number(root):
    """Six questions up have p 0.031: a difference as the only row, and none as one of three."""
    base = loaded(root, "grpo/slow")[0]
    wrong = [record.uid for record in base[0].validation[20] if record.values["acc"] == (0.0,)]

    def changed(name: str, count: int):
        rows = [
            dataclasses.replace(record, values={"acc": (1.0,)})
            if record.uid in wrong[:count]
            else record
            for record in base[0].validation[20]
        ]
        named = {
            "manifest": {**base[0].manifest, "run": name},
            "config": {**base[0].config, "x": name},
        }
        return [dataclasses.replace(base[0], validation={20: rows}, **named)]

    six = changed("six", 6)
    assert [row[-1] for row in first_table([base, six])] == [
        "better on these questions; another seed may not be"
    ]
    rows = first_table([base, six, changed("one", 1), changed("two", 2)])
    assert [row[-1] for row in rows] == ["no difference was shown"] * 3
    (fold,) = [block for block in comparison([base, six]) if isinstance(block, Fold)][:1]
    assert fold.title.endswith("(6 up, 0 down)") and len(fold.blocks[0].rows) == 6


def test_all_comparisons_are_corrected_as_one_family(root, monkeypatch):
    families = []
    monkeypatch.setattr(comparison_report, "holm", lambda p: families.append(p) or p)
    pairs = comparison_report.compared(loaded(root))
    assert [len(family) for family in families] == [len(pairs)] and len(pairs) > 1
    side = comparison_report.Side([], [], {str(i): 0.0 for i in range(40)})
    said = comparison_report.Compared("s", "acc", side, side, 0.03, None, corrected=0.06)
    assert (said.outcome, said.raw_p, said.p) == ("", 0.03, 0.06)


def test_a_run_that_ended_early_is_not_compared_with_one_that_did_not(root):
    (base,) = loaded(root, "grpo/slow")[:1]
    manifest = {**base[0].manifest, "status": "failed", "run": "killed"}
    killed = [dataclasses.replace(base[0], metrics=base[0].metrics[:-1], manifest=manifest)]
    why = comparison_report.why_not_compared(base, killed)
    assert "killed ended early (failed at step" in why
    assert not comparison_report.why_not_compared(base, [dataclasses.replace(base[0])])
