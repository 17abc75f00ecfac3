"""The comparison of a report: the baseline, the axes, what cannot be paired, and what the tables state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from core.errors import InputError
from results import report
from results.reporting.comparison_report import comparison, verdicts, why_not_compared, with_baseline
from results.reporting.pages import Fold, Table, Text
from results.reporting.run_reader import RecordedRun, load_run
from results.reporting.summaries import group_runs
from tests.core.synthetic import configured, make_run


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Three experiments: grpo/lab of two seeds, grpo/slow and ppo/other of one."""
    root = tmp_path_factory.mktemp("outputs")
    for name, seed, rate in (
        ("grpo/lab_s1", 1, 0.2),
        ("grpo/lab_s2", 2, 0.2),
        ("grpo/slow", 1, 0.02),
        ("ppo/other", 1, 0.1),
    ):
        changes = {"trainer.experiment_name": Path(name).name, "trainer.seed": seed, "algorithm.kl_ctrl.kl_coef": rate}
        make_run(root / name, configured(changes), rate=rate)
    return root


def loaded(root: Path, *names: str) -> list[list[RecordedRun]]:
    return group_runs([load_run(root / name) for name in names])


ALL = ("grpo/lab_s1", "grpo/lab_s2", "grpo/slow", "ppo/other")


def first_table(blocks) -> list[list[str]]:
    return next(block for block in blocks if isinstance(block, Table)).rows


# --- the baseline ---


@pytest.mark.parametrize("name", ["grpo/slow", "grpo/slow/", "{root}/grpo/slow"])
def test_the_baseline_is_found_by_experiment_run_or_folder(root, name):
    groups = with_baseline(loaded(root, *ALL), name.format(root=root))
    assert [row[0] for row in first_table(comparison(groups))] == ["grpo/lab − grpo/slow", "ppo/other − grpo/slow"]


def test_a_seed_of_an_experiment_names_it_and_the_default_is_the_first(root):
    assert with_baseline(loaded(root, *ALL), "grpo/lab_s2")[0][0].name == "grpo/lab_s1"
    assert [row[0] for row in first_table(comparison(loaded(root, *ALL)))] == [
        "grpo/slow − grpo/lab",
        "ppo/other − grpo/lab",
    ]


def test_an_unknown_baseline_names_the_nearest(root, tmp_path, capsys):
    folders = [str(root / name) for name in ALL]
    assert report.main([*folders, "--baseline", "grpo/slaw", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--baseline grpo/slaw: no run on the command line has this name; near it: grpo/slow" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="near it: grpo/lab, grpo/slow, ppo/other"):
        with_baseline(loaded(root, *ALL), "zzz")


# --- what cannot be paired ---


def test_runs_without_a_shared_question_are_refused_in_the_table(root, tmp_path):
    other = make_run(tmp_path / "grpo" / "elsewhere", configured({"algorithm.kl_ctrl.kl_coef": 0.5}))
    path = other / "validation" / "20.jsonl"
    path.write_text(path.read_text().replace("lab/hops/", "else/"))
    assert report.main([str(root / "grpo/slow"), str(other), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "grpo/elsewhere and grpo/slow are not compared on lab/hops: they share no question" in text
    row = next(line for line in text.splitlines() if "grpo/elsewhere − grpo/slow" in line)
    assert "none is shared" in row and "none possible" in row and "+" not in row


def test_a_half_written_record_leaves_the_complete_questions(root, tmp_path):
    other = make_run(tmp_path / "grpo" / "cut", configured({"algorithm.kl_ctrl.kl_coef": 0.5}))
    path = other / "validation" / "20.jsonl"
    path.write_text(path.read_text()[:-10])
    rows = first_table(comparison([*loaded(root, "grpo/slow"), *group_runs([load_run(other)])]))
    assert rows[0][2] == "199, of 200 and 199"


def test_other_validation_files_are_not_compared(root):
    groups = loaded(root, "grpo/slow", "ppo/other")
    run = groups[1][0]
    files = {"data.val_files": ["test.parquet"]}

    def texts(sha: str) -> str:
        manifests = [
            {**group[0].manifest, "data": [{"path": "test.parquet", "sha256": one}]}
            for group, one in zip(groups, ("0", sha), strict=True)
        ]
        changed = [
            [dataclasses.replace(group[0], manifest=manifest, config={**group[0].config, **files})]
            for group, manifest in zip(groups, manifests, strict=True)
        ]
        assert (
            "\n".join(verdicts(changed)) in " ".join(b.text for b in comparison(changed) if isinstance(b, Text))
            or sha == "0"
        )
        return verdicts(changed)

    assert run.name == "ppo/other"
    assert len(texts("1")) == 1 and "not compared: evaluated on different files" in texts("1")[0]
    assert "is better on these questions" in texts("0")[0]


def test_other_scorers_and_other_decoding_are_not_compared(root):
    a, b = loaded(root, "grpo/slow", "ppo/other")

    def why(**changes):
        config = {**b[0].config, **{key.replace("__", "."): value for key, value in changes.items()}}
        return why_not_compared(a, [dataclasses.replace(b[0], config=config)])

    assert why() == ""
    assert "different functions" in why(custom_reward_function__path="mine.py") and "mine.py" in why(
        custom_reward_function__path="mine.py"
    )
    assert "different functions" in why(reward_model__reward_kwargs__gsm8k__method="robust")
    assert "decoded differently" in why(data__max_response_length=7)
    data = [{"path": "mine.py", "sha256": "1"}], [{"path": "mine.py", "sha256": "2"}]
    same_path = [
        [
            dataclasses.replace(
                g[0],
                config={**g[0].config, "custom_reward_function.path": "mine.py"},
                manifest={**g[0].manifest, "data": d},
            )
        ]
        for g, d in zip((a, b), data, strict=True)
    ]
    assert "different functions" in why_not_compared(*same_path)


def test_the_verdict_is_the_last_line_and_the_first_of_the_page(root, tmp_path, capsys):
    assert report.main([str(root / "grpo/slow"), str(root / "ppo/other"), "--out", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ppo/other − grpo/slow on lab/hops: +") and "points" in last and "shared questions" in last
    assert (tmp_path / "report.md").read_text().index(last) < (tmp_path / "report.md").read_text().index("accuracy on")


def test_a_score_is_no_accuracy_and_equal_names_are_told_apart(root, tmp_path, capsys):
    for place in ("a", "b"):
        run = make_run(tmp_path / place / "grpo" / "one", configured({"algorithm.kl_ctrl.kl_coef": 0.5}))
        path = run / "validation" / "20.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "acc": [0.3 if place == "a" else 0.1]}) + "\n" for row in rows))
    assert report.main([str(tmp_path / "a/grpo/one"), str(tmp_path / "b/grpo/one"), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out.replace(str(tmp_path), "")
    assert "score on lab/hops" in text and "accuracy" not in text and "%" not in text and "points" not in text
    last = text.splitlines()[-1]
    assert last.startswith("b/grpo/one − a/grpo/one on lab/hops: -0.2") and "b/grpo/one is worse" in last
    plain = str(root / "grpo/slow")  # a percentage beside the score of the same source would be read in its unit
    assert report.main([str(tmp_path / "a/grpo/one"), plain, "--out", str(tmp_path)]) == 0
    assert "%" not in capsys.readouterr().out


# --- what the tables state ---


def test_one_seed_gives_a_verdict_on_these_policies_only(root):
    rows = first_table(comparison(loaded(root, "grpo/slow", "ppo/other")))
    assert rows[0][-1] == "better on these questions; another seed may not be" and rows[0][5:7] == ["", ""]


def test_several_seeds_decide_over_seeds(root):
    a = loaded(root, "grpo/lab_s1", "grpo/lab_s2")[0]
    twin = [
        dataclasses.replace(run, config={**run.config, "x": 1}, manifest={**run.manifest, "run": f"twin{i}"})
        for i, run in enumerate(a)
    ]
    blocks = [block for block in comparison([a, twin]) if isinstance(block, Table)]
    assert blocks[0].rows[0][-1] == "no difference was shown over seeds"


def test_rows_are_corrected_for_their_number(root):
    """Six questions up have p 0.031: a difference as the only row, and none as one of three."""
    base = loaded(root, "grpo/slow")[0]
    records = base[0].validation[20]

    def changed(name: str, count: int):
        rows, left = [], count
        for record in records:
            wrong = record.values["acc"] == (0.0,)
            rows.append(dataclasses.replace(record, values={"acc": (1.0,)}) if wrong and left else record)
            left -= wrong and left > 0
        manifest = {**base[0].manifest, "run": name}
        return [
            dataclasses.replace(base[0], validation={20: rows}, manifest=manifest, config={**base[0].config, "x": name})
        ]

    def in_table(*groups):
        return [row[-1] for row in first_table(comparison([base, *groups]))]

    assert in_table(changed("six", 6)) == ["better on these questions; another seed may not be"]
    assert in_table(changed("six", 6), changed("one", 1), changed("two", 2)) == ["no difference was shown"] * 3
    folds = [block for block in comparison([base, changed("six", 6)]) if isinstance(block, Fold)]
    assert folds[0].title.endswith("(6 up, 0 down)") and len(folds[0].blocks[0].rows) == 6


def test_one_run_lists_what_changed_while_it_trained(root, tmp_path):
    assert report.main([str(root / "grpo/slow"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    change = json.loads(json.dumps(text.split("Questions that flipped: grpo/slow, lab/hops (")[1].split(")")[0]))
    up, down = (int(word.split()[0]) for word in change.split(", ")[:2])
    assert f"{up} up, {down} down |" in text and up > down
