# ruff: noqa: F811  (fixtures of another file)
"""Accuracies of scored answers: each data set and their mean, with intervals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from core import evaluate
from core.tracking.validation import Estimate
from results import report
from results.reporting import accuracies
from results.reporting.accuracies import macro_average, summary
from tests.core.test_evaluate import (  # noqa: F401
    MODULUS,
    answers,
    copied,
    files,
    generate,
    own,
)


def refused(arguments: list[str], capsys) -> str:
    assert accuracies.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def scores(files, copied) -> Path:
    assert evaluate.main(["score", str(copied), own(files)]) == 0
    return copied.parent / "shared.scores-reward.jsonl"


def test_a_report_has_each_set_and_their_macro_average(scores, capsys):
    capsys.readouterr()
    assert accuracies.main([str(scores), "--k", "1", "3"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.endswith("| metric | tests/letters | tests/digits | macro average |")
    assert [row.split(" | ")[3] for row in rows] == ["mean@4", "pass@1", "pass@3", "maj@4"]
    found = summary(scores, [1, 3])
    letters, digits, macro = *found.sources.values(), found.macro
    assert letters["mean@4"].n == 9 and digits["mean@4"].n == 4
    assert letters["pass@1"].value == pytest.approx(letters["mean@4"].value)
    assert macro["mean@4"].value == pytest.approx(
        (letters["mean@4"].value + digits["mean@4"].value) / 2
    )
    stored = json.loads(scores.with_suffix(".report.json").read_text())
    assert stored["macro_average"]["mean@4"]["low"] == macro["mean@4"].low
    assert f"{100 * macro['mean@4'].value:.1f} [" in rows[0]


def test_the_reports_command_compares_files_of_scores_and_ends_with_the_verdict(
    files, copied, scores, capsys
):
    assert evaluate.main(["score", str(copied), own(files), "--name", "three", MODULUS]) == 0
    out = capsys.readouterr().out.splitlines()
    other = copied.parent / "shared.scores-three.jsonl"
    assert out[-1].startswith(f"next: python -m results.report {other}")
    assert any(line.startswith("  tests/letters, acc mean@4: ") and " % (9" in line for line in out)
    assert report.main([str(scores), str(other)]) == 0
    *_, letters, digits, last = capsys.readouterr().out.splitlines()
    assert letters.startswith(f"{other.name} − {scores.name} on tests/letters: ")
    assert "4 shared questions" in digits
    assert last.startswith(f"against {scores.name} on tests/letters: ")
    assert report.main([str(copied)]) == 2
    assert "python -m core.evaluate score" in capsys.readouterr().err


def test_files_of_two_models_that_were_decoded_differently_are_not_compared(scores, capsys):
    """As runs are not: greedy answers of one against samples of the other looked like a verdict."""
    other = scores.with_name("other.scores-reward.jsonl")
    shutil.copy(scores, other)
    manifest = json.loads(scores.with_suffix(".manifest.json").read_text())
    manifest["settings"] |= {"actor_rollout_ref.rollout.val_kwargs.do_sample": False}
    other.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert report.main([str(scores), str(other)]) == 0
    assert "decoded differently" not in capsys.readouterr().out  # one model, decoded in two ways
    manifest["settings"]["model"] = "sha256:0"
    other.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    assert report.main([str(scores), str(other)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "not compared: decoded differently (T=1" in last and last.endswith("; greedy)")


def test_files_of_two_models_are_compared_if_only_the_models_differ(scores, capsys):
    other = scores.with_name("other.scores-reward.jsonl")
    shutil.copy(scores, other)
    manifest = json.loads(scores.with_suffix(".manifest.json").read_text())
    manifest["settings"]["model"] = "sha256:0"
    length = {**manifest["settings"], "data.max_response_length": 8192}
    rewards = {**manifest["rewards"], "reward_model.reward_kwargs": {"gsm8k": {"method": "robust"}}}
    for changed, said in (
        ({}, ""),
        ({"settings": length}, "answered under other settings (data.max_response_length="),
        ({"rewards": rewards}, "scored differently"),
    ):
        other.with_suffix(".manifest.json").write_text(json.dumps(manifest | changed))
        capsys.readouterr()
        assert report.main([str(scores), str(other)]) == 0
        out = capsys.readouterr().out
        assert said in out and ("not compared" in out) is bool(said), changed


def test_other_options_of_a_scorer_do_not_take_the_place_of_scores(copied, scores, files, capsys):
    before = scores.read_text()
    options = ["reward_model.reward_kwargs.gsm8k.method=robust"]
    assert evaluate.main(["score", str(copied), own(files), *options]) == 2
    assert "give another --name" in capsys.readouterr().err and scores.read_text() == before
    assert evaluate.main(["score", str(copied), own(files), *options, "--name", "two"]) == 0


def test_several_tables_end_with_the_count_of_their_verdicts(capsys):
    names = ["dapo-table1", "grpo-figure5"]
    assert report.main([f"results/tables/{name}.md" for name in names]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(lines)} statements of papers: holds ")


def test_the_macro_average_weighs_sets_equally_and_adds_up_variances():
    macro = macro_average([Estimate(0.2, 0.1, 0.3, 100), Estimate(0.6, 0.5, 0.7, 4)])
    assert (macro.value, macro.n) == (pytest.approx(0.4), 104)
    assert macro.high - macro.low == pytest.approx(0.2 / 2**0.5)
    assert macro_average([Estimate(0.2, 0.1, 0.3, 100), Estimate(1.0, None, None, 1)]).low is None


def test_reports_that_cannot_be_made(files, scores, tmp_path, capsys):
    assert "--k=5: must lie between 1 and the 4 samples" in refused(
        [str(scores), "--k", "2", "5"], capsys
    )
    assert generate(files, tmp_path / "few.jsonl", f"data.val_files=[{files}/letters.parquet]") == 0
    assert evaluate.main(["score", str(tmp_path / "few.jsonl"), own(files)]) == 0
    capsys.readouterr()
    line = refused([str(scores), str(tmp_path / "few.scores-reward.jsonl")], capsys)
    assert "4 questions are in it or in" in line and "of 13 and 9" in line
    assert not list(tmp_path.glob("*.report.json"))
    kept = scores.read_text().splitlines(keepends=True)[:-1]
    scores.write_text("".join(kept))
    assert "holds 12 of 13 questions" in refused([str(scores)], capsys)
