"""Studies: what is registered cannot change, what is there is not run twice, and verdicts follow the rules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import statistics
import subprocess

import pytest
import yaml

from results import studies as everything
from results.reporting import study as studies
from results.reporting import study_runs
from results.reporting.comparison import holm, paired_p
from results.reporting.study import Record, Records, StudyError, load_study, registered
from results.reporting.study_report import judge, write_report
from results.reporting.study_runs import Runner, expected_seconds

SPEC = {
    "title": "Toy study",
    "recipe": "toy",
    "entry": "tests.results.study_run",
    "seeds": [1, 2, 3, 4],
    "minimum_seeds": 4,
    "curve": "acc",
    "arms": {
        "base": {"label": "baseline"},
        "better": {"label": "with lift", "overrides": ["test.lift=0.2"]},
        "same": {"label": "without effect", "overrides": ["test.lift=0.001"]},
    },
    "metrics": {
        "accuracy": {"key": "acc", "reduce": "last", "label": "accuracy", "percent": True},
        "clip": {"key": "clip", "reduce": "mean", "label": "clipped", "percent": True},
        "absent": {"key": "never logged", "reduce": "mean", "label": "absent"},
    },
    "claims": {
        "C1": {
            "text": "lift helps",
            "treatment": "better",
            "control": "base",
            "metric": "accuracy",
            "direction": "greater",
            "minimum": 0.1,
            "checks": [{"arm": "base", "metric": "clip", "at_least": 0.005}],
        }
    },
    "limits": ["everything else"],
}


SWEEP = {
    "x": "lift",
    "metric": "accuracy",
    "baseline": "base",
    "collapse": "clip",
    "lines": {"plain": {"same": 0.01, "better": 0.2}},
}


def claim(**changed) -> dict:
    return {**SPEC["claims"]["C1"], "checks": [], **changed}


def study(tmp_path, **changed) -> studies.Study:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **changed}, sort_keys=False))
    return load_study(path)


def records(tmp_path, toy, values: dict[str, list[float]], **metrics: float) -> Records:
    """Finished runs whose accuracies are ``values[arm][i]`` for the i-th seed."""
    kept = Records(tmp_path / "results" / "toy" / "study")
    for arm, accuracies in values.items():
        for seed, accuracy in zip(toy.seeds, accuracies, strict=False):
            kept.write(Record(arm, seed, "finished", toy.registration, {"accuracy": accuracy, **metrics}))
    return kept


def word(tmp_path, treatment: list[float], **changed) -> tuple[str, str]:
    shutil.rmtree(tmp_path / "results", ignore_errors=True)
    toy = study(tmp_path, claims={"C1": claim(**changed)})
    control = [0.50, 0.52, 0.48, 0.51][: len(treatment)]
    shifted = [a + b for a, b in zip(control, treatment, strict=True)]
    kept = records(tmp_path, toy, {"base": control, "better": shifted}, clip=0.01)
    verdict = judge(toy, kept.read(toy))["C1"]
    return verdict.word, verdict.reason


# --- verdicts ---


def test_a_clear_effect_of_the_minimum_size_is_confirmed(tmp_path):
    assert word(tmp_path, [0.2, 0.22, 0.19, 0.21])[0] == "confirmed"
    assert word(tmp_path, [-0.2, -0.22, -0.19, -0.21], direction="less")[0] == "confirmed"


def test_an_effect_that_excludes_the_minimum_is_refuted(tmp_path):
    assert word(tmp_path, [0.01, 0.012, 0.009, 0.011]) == ("refuted", "an effect of the minimum size is excluded")
    assert word(tmp_path, [-0.2, -0.22, -0.19, -0.21]) == ("refuted", "the effect is the other way")


def test_what_could_be_either_is_inconclusive(tmp_path):
    assert word(tmp_path, [0.5, -0.3, 0.4, -0.1])[0] == "inconclusive"
    assert word(tmp_path, [0.02, 0.15, 0.05, 0.12])[0] == "inconclusive"  # above 0, the mean below the minimum
    assert word(tmp_path, [0.2, 0.22, 0.19]) == ("inconclusive", "3 of at least 4 seeds")


def test_a_failed_check_leaves_the_claim_open(tmp_path):
    checks = [{"arm": "base", "metric": "clip", "at_least": 0.02}]
    verdict = word(tmp_path, [0.2, 0.22, 0.19, 0.21], checks=checks)
    assert verdict == ("inconclusive", "a check failed: clipped in base: 1.0 (at least 2.0)")
    unmeasured = [{"arm": "base", "metric": "absent", "at_most": 1}]
    assert word(tmp_path, [0.2, 0.22, 0.19, 0.21], checks=unmeasured)[0] == "inconclusive"


def test_equality_is_judged_by_margins(tmp_path):
    assert word(tmp_path, [0.01, -0.01, 0.005, 0.0], direction="equal", minimum=0.05)[0] == "confirmed"
    assert word(tmp_path, [0.2, 0.22, 0.19, 0.21], direction="equal", minimum=0.05)[0] == "refuted"
    assert word(tmp_path, [0.05, 0.02, 0.06, 0.04], direction="equal", minimum=0.05)[0] == "inconclusive"


def test_nothing_run_says_so(tmp_path):
    assert word(tmp_path, []) == ("not run", "no seed has both runs")


def test_several_claims_share_one_error_rate(tmp_path):
    """p of one claim alone is below 5 %; of twelve such claims Holm confirms none."""
    differences = [0.2, 0.5, 0.15, 0.1]
    assert 0.05 / 12 < paired_p(differences) < 0.1 and paired_p([0.2, 0.21, 0.2, 0.19]) < 0.001
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "c": 0.06, "b": 0.06}
    tight = [0.2, 0.3, 0.15, 0.2]
    assert word(tmp_path, tight)[0] == "confirmed"
    toy = study(tmp_path, claims={f"C{i}": claim() for i in range(12)})
    kept = records(tmp_path, toy, {"base": [0.5] * 4, "better": [0.5 + d for d in tight]})
    assert {v.word for v in judge(toy, kept.read(toy)).values()} == {"inconclusive"}


def test_the_interval_is_over_paired_seeds(tmp_path):
    """Seeds differ by far more than the arms: unpaired, nothing would be seen."""
    toy = study(tmp_path)
    base = [0.1, 0.4, 0.7, 0.9]
    kept = records(
        tmp_path,
        toy,
        {"base": base, "better": [x + d for x, d in zip(base, (0.2, 0.21, 0.19, 0.2), strict=True)]},
        clip=1,
    )
    verdict = judge(toy, kept.read(toy))["C1"]
    half = 3.182446 * statistics.stdev([0.2, 0.21, 0.19, 0.2]) / 2
    assert verdict.word == "confirmed" and verdict.effect.estimate.low == pytest.approx(0.2 - half, abs=1e-6)


def test_a_run_without_its_partner_is_left_out(tmp_path):
    toy = study(tmp_path, claims={"C1": claim()})
    kept = records(tmp_path, toy, {"base": [0.5, 0.6, 0.4, 0.5], "better": [0.7, 0.8]})
    assert judge(toy, kept.read(toy))["C1"].effect.estimate.n == 2


# --- running ---


def test_runs_are_recorded_once_and_a_cut_study_goes_on(tmp_path):
    toy = study(tmp_path)
    kept = Records(tmp_path / "results" / "toy" / "study")
    Runner(toy, kept, tmp_path / "outputs", jobs=2, budget_s=0).run()
    assert not kept.read(toy)
    Runner(toy, kept, tmp_path / "outputs", jobs=2).run()
    done = kept.read(toy)
    assert len(done) == 12 and {record.status for record in done.values()} == {"finished"}
    record = done["better", 2]
    assert record.metrics["accuracy"] - done["base", 2].metrics["accuracy"] == pytest.approx(0.2)
    assert record.curve[-1] == [10, record.metrics["accuracy"]] and record.metrics["absent"] is None
    log = Runner(toy, kept, tmp_path / "outputs").folder("base", 1).with_suffix(".log")
    assert log.read_text().split() == ["1", "1", "-m", toy.entry]
    before = kept.path("base", 1).stat().st_mtime_ns
    for finished in (True, False):  # the study was killed before it wrote the record, or in the run
        kept.path("better", 2).unlink()
        if not finished:
            shutil.rmtree(Runner(toy, kept, tmp_path / "outputs").folder("better", 2))
        Runner(toy, kept, tmp_path / "outputs").run()
        again = kept.read(toy)["better", 2]
        assert dataclasses.replace(again, wall_s=record.wall_s) == record and (again.wall_s == 0) == finished
    assert kept.path("base", 1).stat().st_mtime_ns == before


def test_a_study_says_how_long_it_takes_and_what_a_budget_leaves(tmp_path, capsys, monkeypatch):
    known = {("base", 1): 10.0, ("base", 2): 20.0, ("better", 1): 30.0}
    left = [("base", 3), ("better", 3), ("same", 3)]
    assert expected_seconds(left, known, 2) == (15 + 30 + 20) / 2  # an arm that was never timed takes the mean
    longer = {"same": 2.0}.get  # of twice the steps
    assert expected_seconds(left, known, 2, lambda arm: longer(arm, 1.0)) == (15 + 30 + 40) / 2
    twice = {"label": "longer", "overrides": ["trainer.total_training_steps=20"]}
    stated = study(tmp_path, arms={**SPEC["arms"], "twice": twice}, common=["trainer.total_training_steps=10"])
    steps = Runner(stated, Records(tmp_path / "unused"), tmp_path / "outputs").steps
    assert (steps("base"), steps("twice")) == (10, 20)
    assert Runner(study(tmp_path), Records(tmp_path / "unused"), tmp_path / "outputs").steps("better") == 1
    clock = itertools.count(step=10)  # every look at the clock is 10 s later
    monkeypatch.setattr(study_runs.time, "monotonic", lambda: float(next(clock)))
    ended = study_runs.Ended(0, 60.0)
    monkeypatch.setattr(study_runs, "run_all", lambda tasks, *_: ((key, ended) for key, _ in tasks))
    monkeypatch.setattr(Runner, "_record", lambda self, arm, seed, _: Record(arm, seed, "finished", toy.registration))
    toy, kept = study(tmp_path), Records(tmp_path / "results")
    Runner(toy, kept, tmp_path / "outputs", jobs=2, budget_s=150).run()
    said = capsys.readouterr().out
    assert re.search(r"\d+ runs are missing: about .* min in all, the budget is 2.5", said)
    done = kept.read(toy)
    unfinished = [f"{arm} seed {seed}" for arm, seed in toy.runs if (arm, seed) not in done]
    assert unfinished and said.strip().endswith(f"not run: {', '.join(unfinished)}")


def test_all_studies_share_one_budget(monkeypatch, capsys):
    assert everything.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "python -m recipes.dapo.study: all 72 runs are there" in listed
    started = []

    def run(command, **_):
        started.append(command[1:])
        return subprocess.CompletedProcess(command, int("topk" in command))

    monkeypatch.setattr(everything.subprocess, "run", run)
    monkeypatch.setattr(everything, "missing", lambda study, _: int(study.recipe == "search_r1"))
    assert everything.main(["--budget-min", "0"]) == 0 and not started
    assert everything.main(["--budget-min", "30"]) == 1
    command = ["-m", "recipes.search_r1.study", "--jobs", "2", "--budget-min", "30.0"]
    assert started == [command, *([*command[:2], part, *command[2:]] for part in ("conflicts", "topk"))]
    assert "python -m recipes.search_r1.study topk: 1 of 24 runs are missing" in capsys.readouterr().out


def test_a_run_of_other_settings_or_code_is_another_run(tmp_path, monkeypatch):
    toy, changed = study(tmp_path), {**SPEC["arms"], "base": {"label": "baseline", "overrides": ["test.lift=0"]}}
    runner = Runner(toy, Records(tmp_path / "results"), tmp_path / "outputs")
    first = runner.content("base", 1)
    assert first == runner.content("base", 1) and first != runner.content("base", 2)
    other = study(tmp_path, arms=changed)
    assert Runner(other, runner.records, tmp_path / "outputs").content("base", 1) != first
    monkeypatch.setattr(study_runs, "code_digest", lambda: "another")
    assert runner.content("base", 1) != first


def test_stages_are_run_one_after_the_other(tmp_path):
    toy = study(tmp_path, stages=[["same", "base"], ["better"]], seeds=[1, 2], minimum_seeds=2)
    assert toy.runs == [("same", 1), ("base", 1), ("same", 2), ("base", 2), ("better", 1), ("better", 2)]
    assert study(tmp_path, seeds=[1, 2], minimum_seeds=2).runs[:4] == [
        *(("base", 1), ("better", 1), ("same", 1)),
        ("base", 2),
    ]


def test_a_failed_run_says_why_and_is_tried_again(tmp_path):
    arms = {**SPEC["arms"], "better": {"label": "fails", "overrides": ["test.fails=3"]}}
    toy = study(tmp_path, arms=arms)
    kept = Records(tmp_path / "results" / "toy" / "study")
    Runner(toy, kept, tmp_path / "outputs").run()
    failed = kept.read(toy)["better", 3]
    assert (failed.status, failed.reason) == ("failed", "exit status 2: the data are missing")
    text = write_report(toy, kept, tmp_path / "results").read_text()
    assert "11 of 12 runs are finished, 1 failed" in text and "3 of at least 4 seeds" in text
    before = kept.path("better", 3).stat().st_mtime_ns
    Runner(toy, kept, tmp_path / "outputs").run()
    assert kept.path("better", 3).stat().st_mtime_ns != before


def test_records_of_another_registration_are_refused(tmp_path):
    toy = study(tmp_path)
    kept, first = records(tmp_path, toy, {"base": [0.5]}), toy.registration
    changed = study(tmp_path, minimum_seeds=3)
    with pytest.raises(StudyError, match=f"made under registration {first[:12]}"):
        kept.read(changed)


def test_a_study_must_be_committed_before_it_runs(tmp_path, capsys):
    toy = study(tmp_path)
    assert registered(toy.path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert registered(toy.path) is False
    assert study_runs.main(toy.path, ["--results", str(tmp_path / "results")]) == 2
    assert "not committed" in capsys.readouterr().err
    subprocess.run([*git, "add", "study.yaml"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "registered"], check=True)
    assert registered(toy.path) is True
    toy.path.write_text(toy.path.read_text() + "\n")
    assert registered(toy.path) is False


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"claims": {"C1": claim(control="none")}}, "claims.C1: there is no arm none"),
        ({"claims": {"C1": claim(metric="none")}}, "there is no metric none"),
        ({"claims": {"C1": claim(minimum=0)}}, "must be above 0"),
        ({"claims": {"C1": claim(direction="up")}}, "is none of greater, less, equal"),
        ({"stages": [["base", "same"]]}, "stages: must hold every arm once"),
        ({"seeds": [1]}, "a paired interval needs 4 or more"),
        ({"metrics": {"accuracy": {"key": "acc", "reduce": "best", "label": ""}}}, "is none of first, last"),
        ({"sweep": {**SWEEP, "baseline": "none"}}, "sweep: there is no arm none"),
        ({"sweep": {**SWEEP, "beside": ["none"]}}, "sweep: there is no metric none"),
        ({"sweep": {**SWEEP, "lines": {"": {"same": 0}}}}, "must be above 0"),
        ({"unknown": 1}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, changed, says):
    with pytest.raises(StudyError, match=says):
        study(tmp_path, **changed)


# --- the report ---


def test_the_report_shows_claims_arms_and_what_others_report(tmp_path):
    toy = study(tmp_path, claims={**SPEC["claims"], "C2": claim(metric="clip")})
    kept = records(tmp_path, toy, {"base": [0.5, 0.52, 0.48, 0.51], "better": [0.7, 0.74, 0.67, 0.72]}, clip=0.01)
    reported = [
        {"arm": arm, "value": value, "what": "avg", "metric": "accuracy", "source": "its paper", "tag": "P"}
        for arm, value in (("base", 30), ("better", 36.5))
    ]
    path = tmp_path / "results" / "references.yaml"
    path.write_text(yaml.safe_dump({"studies": {"toy": reported}}))
    text = write_report(toy, kept, tmp_path / "results").read_text()
    assert toy.registration in text and "8 of 12 runs are finished" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| C1 |") and "confirmed" in line]
    assert row == "| C1 | accuracy, % | +20.5 [+18.4, +22.6] | 0.000 | confirmed |"
    assert "In all rows: says lift helps, arms better − base, minimum +10.0, seeds 4." in text
    assert text.startswith("# Toy study\n\n**Of 2 claims: 1 confirmed (C1); 1 refuted (C2).**"), "it stands first"
    assert "| same | without effect | 0 | not run | not run | not run |" in text
    assert "| C1 | better − base | +6.5 | its paper | +20.5 [+18.4, +22.6] |" in text
    assert "| C2 | better − base | +6.5" not in text, "what is reported is another metric"
    assert "<html" in (tmp_path / "results" / "toy" / "study.html").read_text()
    assert write_report(toy, kept, tmp_path / "results").read_text() == text


def test_a_sweep_is_drawn_over_its_number(tmp_path):
    toy = study(tmp_path, sweep={**SWEEP, "beside": ["clip"]})
    values = {"base": [0.50, 0.52, 0.48, 0.51], "same": [0.50, 0.52, 0.48, 0.51], "better": [0.7, 0.74, 0.67, 0.72]}
    kept = records(tmp_path, toy, values, clip=0.01)
    kept.write(Record("better", 4, "finished", toy.registration, {"accuracy": 0.1, "clip": -0.01}))
    text = write_report(toy, kept, tmp_path / "results").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    found = {row[1]: row for row in rows if row[0] in ("", "plain") and len(row) == 6}
    assert found["0"][4:] == ["", "0 of 4"] and found["0.01"][4:] == ["+0.0 [+0.0, +0.0]", "0 of 4"]
    assert found["0.2"][4].startswith("+5.") and found["0.2"][5] == "1 of 4"
    page = (tmp_path / "results" / "toy" / "study.html").read_text()
    assert page.count("<svg") == 1 and "lift, log10" in page
    empty = write_report(study(tmp_path, sweep=SWEEP), Records(tmp_path / "none"), tmp_path / "results").read_text()
    assert "not run" in empty


def test_a_control_that_fails_leaves_no_verdict(tmp_path):
    values = {"base": [0.50, 0.52, 0.48, 0.51], "better": [0.7, 0.74, 0.67, 0.72], "same": [0.50, 0.52, 0.48, 0.51]}
    for treatment, failed in (("same", True), ("better", False)):
        control = claim(treatment=treatment, text="lift helps (positive control)")
        toy = study(tmp_path, claims={"P": control, "C1": claim()})
        text = write_report(toy, records(tmp_path, toy, values, clip=0.01), tmp_path / "results").read_text()
        assert ("The control P did not hold, so this study carries no verdict" in text) is failed
        assert ("Of 2 claims: 2 confirmed" in text) is not failed
        assert "| C1 | lift helps |" in text


def test_a_command_names_the_study_that_it_means(tmp_path):
    (tmp_path / "study_part.yaml").touch()
    assert study_runs.chosen(tmp_path, ["part", "--report"]) == (tmp_path / "study_part.yaml", ["--report"])
    for arguments in ([], ["--report"], ["other"]):
        assert study_runs.chosen(tmp_path, arguments) == (tmp_path / "study.yaml", arguments)


def test_records_are_plain_json(tmp_path):
    toy = study(tmp_path)
    kept = records(tmp_path, toy, {"base": [0.5]})
    assert json.loads(kept.path("base", 1).read_text())["metrics"] == {"accuracy": 0.5}


def test_a_metric_may_be_the_difference_of_two_keys():
    class Run:
        def series(self, name):
            values = {"a": [1.0, 5.0], "b": [1.0, 2.0], "c": []}[name]
            return [1, 2][: len(values)], values

    assert studies.Metric("a", "last", "a - b", minus="b").of(Run()) == 3.0
    assert studies.Metric("a", "gain", "a - b", minus="b").of(Run()) == 3.0
    assert studies.Metric("a", "last", "a - c", minus="c").of(Run()) is None
    assert studies.Metric("a", "last", "a").of(Run()) == 5.0


def test_a_metric_may_end_where_another_key_adds_up_to_a_sum():
    class Run:
        def series(self, name):
            return {
                "acc": ([0, 2, 4, 6], [0.1, 0.2, 0.4, 0.8]),
                "drawn": ([1, 2, 3, 4, 5, 6], [10, 10, 10, 50, 10, 10]),
            }[name]

    def value(limit, reduce="last"):
        return studies.Metric("acc", reduce, "", until={"drawn": limit}).of(Run())

    assert [value(limit) for limit in (20, 79, 80, 1000)] == [0.2, 0.2, 0.4, 0.8]
    assert value(5) is None and value(80, "last3") == pytest.approx(0.7 / 3)
    assert studies.Metric("acc", "last3", "").of(Run()) == pytest.approx(1.4 / 3)
