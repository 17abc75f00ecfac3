"""What the lab's tasks can tell apart: results/lab/discrimination.{json,md}, from the run records of their studies.

    python -m recipes.lab.study trails       runs what is missing of a task's study
    python -m recipes.lab.discrimination     writes the scores of what is there

A task's study trains one right algorithm, wrong ones (bugs of the museum) and one that is known to be better. AUC is
the share of pairs of runs, one of each side, in which the better side ends higher; ties count half. The task's score is
the least AUC of all comparisons. From 0.9 on a task carries claims, if its controls hold: the baseline against itself
with other seeds must show nothing (negative), and a bug that destroys learning must show (positive).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from core.files.durable_files import write_atomic
from core.tracking.run_manifest import ROOT
from results.reporting.study import Claim, Records, Study, load_study
from results.reporting.study_report import arm_values, failed_controls, judge

BOUND = 0.9  # of the score
ROOM = (0.4, 0.8)  # where the baseline must end
NEGATIVE, POSITIVE, BASELINE, METRIC = "negative", "positive", "baseline", "accuracy"


@dataclass(frozen=True)
class Comparison:
    """A claim of the study: the ``better`` arm against the ``worse`` one. ``auc`` is None where runs are missing."""

    name: str
    text: str
    better: str
    worse: str
    runs: tuple[int, int]
    auc: float | None = None
    p: float | None = None  # exact, of a rank-sum test on both sides


def auc(better: Sequence[float], worse: Sequence[float]) -> float:
    """Return the share of pairs in which ``better`` is higher; ties count half (Mann and Whitney 1947)."""
    pairs = [(a > b) + (a == b) / 2 for a, b in itertools.product(better, worse)]
    return statistics.fmean(pairs)


def rank_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the exact two-sided p-value: the share of ways to deal out the values whose AUC is as far from 1/2."""
    values = sorted([*a, *b])
    twice = {v: 2 * values.index(v) + values.count(v) + 1 for v in values}  # middle ranks, doubled: whole numbers
    ranks, expected = [twice[v] for v in [*a, *b]], len(a) * (len(values) + 1)
    ways = Counter({(0, 0): 1})  # (values dealt to a, sum of their ranks) -> ways
    for rank in ranks:
        ways.update({(dealt + 1, total + rank): count for (dealt, total), count in list(ways.items())})
    found = abs(sum(ranks[: len(a)]) - expected)
    far = sum(n for (dealt, total), n in ways.items() if dealt == len(a) and abs(total - expected) >= found)
    return far / math.comb(len(values), len(a))


def comparisons(study: Study, records: Records) -> list[Comparison]:
    """Return a comparison for each claim about the task; one whose arms lack a run of ``minimum_seeds`` has no AUC."""
    found, compared = records.read(study), []
    for name, claim in about_the_task(study).items():
        better, worse = claim.treatment, claim.control or claim.treatment
        a, b = (list(arm_values(found, arm, claim.metric, study.seeds)) for arm in (better, worse))
        one = (name, claim.text, better, worse, (len(a), len(b)))
        enough = min(len(a), len(b)) >= study.minimum_seeds
        compared.append(Comparison(*one, auc(a, b), rank_p(a, b)) if enough else Comparison(*one))
    return compared


def about_the_task(study: Study) -> dict[str, Claim]:
    """Return the claims that say what the task can tell apart: both controls, and what is better by construction.

    The others are about algorithms: they name a source, or say that two end alike.
    """
    controls = (NEGATIVE, POSITIVE)
    return {
        name: claim
        for name, claim in study.claims.items()
        if name in controls or (claim.direction == "greater" and not claim.sources)
    }


def is_of_a_task(study: Study) -> bool:
    """Whether the study says what its task can tell apart: its baseline against more than both controls."""
    return BASELINE in study.arms and {NEGATIVE, POSITIVE} < about_the_task(study).keys()


def score_of(found: Sequence[Comparison]) -> float | None:
    """Return the least AUC of the comparisons that should show something; None where one was not run."""
    values = [one.auc for one in found if one.name != NEGATIVE]
    return None if None in values else min(values)


def verdict(found: Sequence[Comparison], baseline: Sequence[float], failed: Sequence[str] = ()) -> str:
    """Return what the task may be used for; ``failed`` are controls that the study itself does not confirm."""
    missing = [one.name for one in found if one.auc is None]
    if missing:
        return f"carries no claim: not run ({', '.join(missing)})"
    if failed:
        return f"carries no claim: by its registered margin the control {', '.join(failed)} did not hold"
    controls = {one.name: one for one in found}
    if controls[NEGATIVE].p < 0.05:
        return f"carries no claim: the negative control fails (p = {controls[NEGATIVE].p:.3f})"
    if controls[POSITIVE].auc < BOUND:
        return f"carries no claim: the positive control fails (AUC {controls[POSITIVE].auc:.2f})"
    ends = statistics.fmean(baseline)
    if not ROOM[0] <= ends <= ROOM[1]:
        return f"carries no claim: the baseline ends at {ends:.0%}, outside {ROOM[0]:.0%} to {ROOM[1]:.0%}"
    score = score_of(found)
    if score < BOUND:
        blind = [one.name for one in found if one.name != NEGATIVE and one.auc < BOUND]
        return f"carries no claim: its score {score:.2f} is below {BOUND} ({', '.join(blind)})"
    return f"carries claims: its score is {score:.2f}"


def task(study: Study, results: Path) -> dict:
    """Return a task's entry of the table."""
    records = Records(results / study.recipe / study.name)
    found, read = comparisons(study, records), records.read(study)
    baseline = list(arm_values(read, BASELINE, METRIC, study.seeds))
    finished = [record for record in read.values() if record.status == "finished"]
    compared = {arm for claim in about_the_task(study).values() for arm in (claim.treatment, claim.control)}
    arms = {arm: list(arm_values(read, arm, METRIC, study.seeds)) for arm in study.arms if arm in compared}
    seconds = [record.seconds for record in finished if record.arm == BASELINE]
    return {
        "task": study.name.partition("_")[2] if study.recipe == "lab" else f"{study.recipe}/{study.name}",
        "registration": study.registration,
        "runs": [len(finished), len(study.runs)],
        "codes": sorted({record.content and record.commit for record in finished}),
        "accuracy": {arm: [round(value, 4) for value in values] for arm, values in arms.items()},
        "baseline_seconds": round(statistics.fmean(seconds), 1) if seconds else None,
        "comparisons": [asdict(one) for one in found],
        "score": score_of(found),
        "verdict": verdict(found, baseline, failed_controls(study, judge(study, read))),
    }


def page(tasks: Sequence[dict]) -> str:
    about = (__doc__ or "").split("\n\n")[2].strip()
    lines = [
        *("# What the lab's tasks can tell apart", "", about, ""),
        "Generated by `python -m recipes.lab.discrimination` from the run records of the studies that compare a",
        "baseline with more than both controls. A run's accuracy is its study's metric of that name. p is exact",
        "(rank-sum test, two-sided) and is not corrected for the number of comparisons.",
        "",
        "| task | runs | baseline ends at | its seconds | score | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in tasks:
        ends = [100 * value for value in one["accuracy"][BASELINE]]
        spread = f"{statistics.fmean(ends):.1f} % ({min(ends):.0f} to {max(ends):.0f})" if ends else "not run"
        score = "not run" if one["score"] is None else f"{one['score']:.2f}"
        row = (one["task"], f"{one['runs'][0]} of {one['runs'][1]}", spread, one["baseline_seconds"] or "", score)
        lines.append(f"| {' | '.join(map(str, row))} | {one['verdict']} |")
    return "\n".join([*lines, *(line for one in tasks for line in _part(one))]) + "\n"


def _part(one: dict) -> list[str]:
    """Return the lines of one task: its comparisons and the accuracies."""
    lines = ["", f"## {one['task']}", "", f"Registration SHA-256 `{one['registration']}`.", ""]
    lines += ["| comparison | says | higher | lower | runs | AUC | p |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for each in one["comparisons"]:
        numbers = ("not run", "") if each["auc"] is None else (f"{each['auc']:.2f}", f"{each['p']:.4f}")
        runs = f"{each['runs'][0]}, {each['runs'][1]}"
        row = (each["name"], each["text"], each["better"], each["worse"], runs, *numbers)
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| arm | accuracy of each run, % |", "| --- | --- |"]
    for arm, values in one["accuracy"].items():
        lines.append(f"| {arm} | {' '.join(f'{100 * value:.0f}' for value in values) or 'not run'} |")
    return lines


def write(results: Path) -> Path:
    """Write the table of every registered task and return its page."""
    studies = (load_study(path) for path in sorted((ROOT / "recipes").glob("*/study_*.yaml")))
    tasks = [task(study, results) for study in studies if is_of_a_task(study)]
    target = results / "lab" / "discrimination.md"
    write_atomic(target.with_suffix(".json"), json.dumps(tasks, indent=1) + "\n")
    write_atomic(target, page(tasks))
    return target


if __name__ == "__main__":
    text = "Writes what the lab's tasks can tell apart, from the records of their studies."
    argparse.ArgumentParser("python -m recipes.lab.discrimination", description=text).parse_args()
    print(f"table: {write(Path('results'))}")
