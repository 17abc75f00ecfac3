"""What a study found: paired effects over seeds, verdicts by the registered rules, and the report.

Everything here is a function of the study's file, its run records and ``results/references.yaml``; no number is typed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config.yaml_files import read_table
from core.tracking.confidence_intervals import Estimate, t_interval
from core.tracking.run_manifest import ROOT
from results.reporting.comparison import holm, paired_p, seed_interval
from results.reporting.curve_fits import curve_fits
from results.reporting.numbers import with_interval
from results.reporting.pages import (
    Block,
    Curves,
    Fold,
    Gallery,
    Heading,
    Line,
    Table,
    Text,
    without_constants,
    write_pages,
)
from results.reporting.reference_logs import read_references
from results.reporting.study import Check, Claim, Metric, Record, Records, Study, Sweep

ALPHA = 0.05
WORDS = ("confirmed", "refuted", "inconclusive", "not run")
Found = Mapping[tuple[str, int], Record]


@dataclass(frozen=True)
class Effect:
    """Treatment minus control over the seeds that have both. ``p`` is two-sided (paired t), unadjusted."""

    estimate: Estimate
    p: float


@dataclass(frozen=True)
class Verdict:
    word: str  # one of WORDS
    reason: str
    effect: Effect | None
    adjusted_p: float | None  # Holm, over all claims that have a direction
    checks: tuple[str, ...] = ()


# --- effects ---


def differences(claim: Claim, found: Found, seeds: Sequence[int]) -> list[float]:
    """Return treatment minus control for each seed that has both; the metric itself where there is no control."""
    pairs = []
    for seed in seeds:
        treatment = _value(found, claim.treatment, seed, claim.metric)
        control = 0.0 if claim.control is None else _value(found, claim.control, seed, claim.metric)
        if treatment is not None and control is not None:
            pairs.append(treatment - control)
    return pairs


def _value(found: Found, arm: str, seed: int, metric: str) -> float | None:
    record = found.get((arm, seed))
    return record.metrics.get(metric) if record is not None and record.status == "finished" else None


def arm_values(found: Found, arm: str, metric: str, seeds: Sequence[int]) -> list[float]:
    return [value for seed in seeds if (value := _value(found, arm, seed, metric)) is not None]


# --- verdicts ---


def judge(study: Study, found: Found) -> dict[str, Verdict]:
    """Return the verdict of every claim.

    *Confirmed*: the 95 % interval excludes 0 on the claimed side, so does Holm's p at 5 %, the effect is at least the
    minimum, and every check holds. *Refuted*: the interval lies wholly below the minimum in the claimed direction.
    Anything else, a failed check included, is *inconclusive*. For ``equal`` the interval must lie inside the margins to
    confirm and outside them to refute.
    """
    values = {name: differences(claim, found, study.seeds) for name, claim in study.claims.items()}
    effects = {name: Effect(t_interval(v), paired_p(v)) for name, v in values.items() if v}
    directed = [name for name, claim in study.claims.items() if claim.direction != "equal"]
    adjusted = holm({name: effects[name].p if name in effects else 1.0 for name in directed})  # not run yet: as if null
    return {n: _verdict(study, claim, effects.get(n), adjusted.get(n), found) for n, claim in study.claims.items()}


def _verdict(study: Study, claim: Claim, effect: Effect | None, p: float | None, found: Found) -> Verdict:
    if effect is None:
        return Verdict("not run", "no seed has both runs" if claim.control else "no run", None, None)
    checks = [_check(study, check, found) for check in claim.checks]
    texts = tuple(text for text, _ in checks)
    if effect.estimate.n < study.minimum_seeds:
        reason = f"{effect.estimate.n} of at least {study.minimum_seeds} seeds"
        return Verdict("inconclusive", reason, effect, p, texts)
    failed = [text for text, holds in checks if not holds]
    if failed:
        return Verdict("inconclusive", f"a check failed: {'; '.join(failed)}", effect, p, texts)
    return Verdict(*_decide(claim, effect.estimate, p), effect, p, texts)


def _decide(claim: Claim, estimate: Estimate, p: float | None) -> tuple[str, str]:
    value, low, high = estimate.value, estimate.low, estimate.high
    if claim.direction == "equal":
        if -claim.minimum < low and high < claim.minimum:
            return "confirmed", "the interval is inside the margins"
        if low > claim.minimum or high < -claim.minimum:
            return "refuted", "the interval is outside the margins"
        return "inconclusive", "the interval reaches over a margin"
    if claim.direction == "less":
        value, low, high = -value, -high, -low
    if high < claim.minimum:
        return "refuted", "an effect of the minimum size is excluded" if high > 0 else "the effect is the other way"
    if low > 0 and value >= claim.minimum and p is not None and p < ALPHA:
        return "confirmed", "the interval excludes 0 and the effect is at least the minimum"
    return "inconclusive", "the interval is too wide" if low <= 0 else "below the minimum, or not after Holm"


def _check(study: Study, check: Check, found: Found) -> tuple[str, bool]:
    metric, values = study.metrics[check.metric], arm_values(found, check.arm, check.metric, study.seeds)
    bounds = [("at least", check.at_least), ("at most", check.at_most)]
    wanted = " and ".join(f"{word} {_number(bound, metric)}" for word, bound in bounds if bound is not None)
    if not values:
        return f"{metric.label} in {check.arm}: not measured ({wanted})", False
    mean = statistics.fmean(values)
    return f"{metric.label} in {check.arm}: {_number(mean, metric)} ({wanted})", check.holds(mean)


# --- numbers as text ---


def _number(value: float, metric: Metric, sign: str = "") -> str:
    if metric.percent:
        return f"{100 * value:{sign}.1f}"
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"


def _estimate(estimate: Estimate, metric: Metric, sign: str = "") -> str:
    return with_interval(estimate, lambda value, sign: _number(value, metric, sign), sign)


def shown_effect(study: Study, claim: Claim, verdict: Verdict) -> str:
    return _estimate(verdict.effect.estimate, study.metrics[claim.metric], "+") if verdict.effect else ""


def _label(metric: Metric) -> str:
    return f"{metric.label}, %" if metric.percent else metric.label


# --- the report ---


def page(study: Study, found: Found, references: Mapping[str, Any]) -> Iterator[Block]:
    verdicts = judge(study, found)
    finished = sum(record.status == "finished" for record in found.values())
    failed = len(found) - finished
    lines = [line for at, name in enumerate(study.arms) if (line := _mean_curve(study, found, name, at))]
    lines = lines if lines and max(len(line.steps) for line in lines) > 1 else []
    yield Text(_verdicts_in_a_sentence(study, verdicts), strong=True)
    if study.sweep is not None:
        lines = []  # one picture stands first, and here it is the sweep's
        yield from _sweep_picture(study, study.sweep, found)
    elif lines:
        yield Gallery([Curves("Validations", lines, note=f"{study.curve}, mean over the seeds that are finished")])
    yield _claim_table(study, verdicts)
    if study.sweep is not None:
        yield Heading(f"By {study.sweep.x}")
        yield _sweep_table(study, study.sweep, found)
    yield Heading("How it was run")
    yield Text(
        f"{finished} of {len(study.runs)} runs are finished{f', {failed} failed' if failed else ''}: "
        f"{len(study.arms)} arms, {len(study.seeds)} seeds registered. Generated by "
        f"`{study.command} --report`; registration `recipes/{study.recipe}/{study.path.name}`, "
        f"SHA-256 `{study.registration}`, committed before the runs. Every run's record holds that hash."
    )
    for paragraph in study.about:
        yield Text(paragraph)
    yield Heading("How claims are judged")
    yield Text(
        f"Effects are treatment minus control, seed by seed ({_shared(study)}), with Student's 95 % interval over "
        "seeds. Confirmed: the interval excludes 0 on the claimed side, so does p after Holm, the effect is at least "
        "the registered minimum and every check holds. Refuted: the whole interval is below the minimum. All else is "
        "inconclusive."
    )
    yield Table(
        ["claim", "could the technique act?", "why this verdict"],
        [[name, "; ".join(v.checks) or "-", v.reason] for name, v in verdicts.items()],
    )
    yield Heading("Arms")
    yield _arm_table(study, found)
    yield from _elsewhere(study, found, references)
    yield from _fits(lines)
    yield Heading("What this cannot say")
    yield Text("\n".join(f"- {limit}" for limit in study.limits))
    yield Fold("Arms and runs", [_override_table(study), _run_table(study, found)])


def _shared(study: Study) -> str:
    """Say what runs of one seed have in common."""
    shared = "same prompts, same sampling seeds, same base model"
    apart = [name for name, arm in study.arms.items() if any(one.startswith("seed_offset=") for one in arm.overrides)]
    return f"{shared}; of {', '.join(apart)} the same base model alone" if apart else shared


def withdrawn_because(study: Study) -> str:
    """Return why the study's verdicts are withdrawn (``results/withdrawn.yaml``); "" for one that stands."""
    return read_table(ROOT / "results" / "withdrawn.yaml").get(f"{study.recipe}/{study.name}", "")


def void_because(study: Study, verdicts: Mapping[str, Verdict]) -> str:
    """Return why the study carries no verdict, withdrawn or with a control that failed; "" where it carries them."""
    failed = failed_controls(study, verdicts)
    return withdrawn_because(study) or (f"the control {', '.join(failed)} did not hold" if failed else "")


def failed_controls(study: Study, verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the controls that are not confirmed: claims so named, or whose text ends in "(positive control)"."""
    controls = [n for n, c in study.claims.items() if n in ("positive", "negative") or c.text.endswith(" control)")]
    return [name for name in controls if verdicts[name].word not in ("confirmed", "not run")]


def _verdicts_in_a_sentence(study: Study, verdicts: Mapping[str, Verdict]) -> str:
    if withdrawn := withdrawn_because(study):
        return f"Withdrawn: this study carries no verdict, and the table has what the rules alone say. {withdrawn}"
    if failed := failed_controls(study, verdicts):
        said = f"{'Controls' if len(failed) > 1 else 'The control'} {', '.join(failed)} did not hold"
        return f"{said}, so this study carries no verdict: the table has what the rules alone would say."
    names: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        names.setdefault(verdict.word, []).append(name)
    told = [f"{len(names[word])} {word} ({', '.join(names[word])})" for word in WORDS if word in names]
    return f"Of {len(verdicts)} claims: {'; '.join(told)}."


def _sweep_picture(study: Study, sweep: Sweep, found: Found) -> Iterator[Gallery]:
    lines = [
        line
        for at, (label, arms) in enumerate(sweep.lines.items())
        if (line := _sweep_line(study, label, arms, found, at))
    ]
    values = arm_values(found, sweep.baseline, sweep.metric, study.seeds)
    if lines and len(values) > 1:
        places, zero = [min(line.steps[0] for line in lines), max(line.steps[-1] for line in lines)], t_interval(values)
        value, low, high = ([number] * 2 for number in (zero.value, zero.low, zero.high))
        lines.append(Line(study.arms[sweep.baseline].label, places, value, len(lines), low=low, high=high))
    if lines:
        label, note = study.metrics[sweep.metric].label, "mean and 95 % interval over seeds"
        yield Gallery([Curves(label, lines, note=note, x=f"{sweep.x}, log10")])


def _sweep_table(study: Study, sweep: Sweep, found: Found) -> Table:
    names = [sweep.metric, *sweep.beside]
    return Table(
        ["line", sweep.x, *(_label(study.metrics[name]) for name in names), "less the arm at 0", "runs that collapsed"],
        [
            _sweep_row(study, sweep, label, arm, x, found)
            for label, arms in {"": {sweep.baseline: 0.0}, **sweep.lines}.items()
            for arm, x in arms.items()
        ],
        caption=f"A run has collapsed where {study.metrics[sweep.collapse].label} is below 0.",
    )


def _sweep_line(study: Study, label: str, arms: Mapping[str, float], found: Found, at: int) -> Line | None:
    values = {x: arm_values(found, arm, study.sweep.metric, study.seeds) for arm, x in arms.items()}
    points = [(math.log10(x), t_interval(some)) for x, some in sorted(values.items()) if len(some) > 1]
    if not points:
        return None
    places, estimates = zip(*points, strict=True)
    low, high = [one.low for one in estimates], [one.high for one in estimates]
    return Line(label, places, [one.value for one in estimates], at, low=low, high=high)


def _sweep_row(study: Study, sweep: Sweep, label: str, arm: str, x: float, found: Found) -> list[str]:
    names = [sweep.metric, *sweep.beside]
    against = Claim("", arm, sweep.metric, "equal", 1.0, control=sweep.baseline)
    pairs = differences(against, found, study.seeds) if arm != sweep.baseline else []
    ends = arm_values(found, arm, sweep.collapse, study.seeds)
    return [
        label,
        f"{x:g}",
        *(_spread(study, found, arm, name) for name in names),
        _estimate(t_interval(pairs), study.metrics[sweep.metric], "+") if pairs else "",
        f"{sum(value < 0 for value in ends)} of {len(ends)}" if ends else "not run",
    ]


def _claim_table(study: Study, verdicts: Mapping[str, Verdict]) -> Table:
    header = ["claim", "says", "arms", "in", "effect", "minimum", "p (Holm)", "seeds", "verdict"]
    rows = []
    for name, claim in study.claims.items():
        verdict, metric = verdicts[name], study.metrics[claim.metric]
        arms = claim.treatment + (f" − {claim.control}" if claim.control else "")
        effect = shown_effect(study, claim, verdict)
        side = {"greater": "+", "less": "-", "equal": "±"}[claim.direction]
        p = f"{verdict.adjusted_p:.3f}" if verdict.effect and verdict.adjusted_p is not None else ""
        seeds = str(verdict.effect.estimate.n) if verdict.effect else "0"
        row = [name, claim.text, arms, _label(metric), effect, side + _number(claim.minimum, metric), p, seeds]
        rows.append([*row, verdict.word])
    return without_constants(Table(header, rows))


def _arm_table(study: Study, found: Found) -> Table:
    rows = []
    for name, arm in study.arms.items():
        cells = [name, arm.label]
        count = sum((name, seed) in found and found[name, seed].status == "finished" for seed in study.seeds)
        if not count:
            rows.append([*cells, "0", *(["not run"] * len(study.metrics))])
            continue
        rows.append([*cells, str(count), *(_spread(study, found, name, metric) for metric in study.metrics)])
    return without_constants(Table(["arm", "", "seeds", *map(_label, study.metrics.values())], rows))


def _spread(study: Study, found: Found, arm: str, name: str) -> str:
    values = arm_values(found, arm, name, study.seeds)
    if not values:
        return "-"
    estimate, metric = seed_interval(values), study.metrics[name]
    return _number(estimate.value, metric) + (f" ± {_number(estimate.sd, metric)}" if estimate.sd is not None else "")


def _elsewhere(study: Study, found: Found, references: Mapping[str, Any]) -> Iterator[Block]:
    """Yield what others report for the same arms, and their differences beside the claims in the same metric."""
    rows = [ref for ref in references.get("studies", {}).get(study.recipe, ()) if ref["arm"] in study.arms]
    if not rows:
        return
    yield Heading("Reported elsewhere")
    yield Text("Another model, task and size: only signs and orders of size can be set beside each other.")
    yield Table(
        ["arm", "", "reported", "what", "source"],
        [
            [r["arm"], study.arms[r["arm"]].label, f"{r['value']:g}", r["what"], f"{r['source']} [{r['tag']}]"]
            for r in rows
        ],
    )
    beside = []
    for name, claim in study.claims.items():
        for source in dict.fromkeys(ref["source"] for ref in rows):
            same = [ref for ref in rows if ref["source"] == source and ref["metric"] == claim.metric]
            value = {ref["arm"]: ref["value"] for ref in same}
            if claim.treatment in value and claim.control in value:
                step = value[claim.treatment] - value[claim.control]
                here = t_interval(v) if (v := differences(claim, found, study.seeds)) else None
                text = _estimate(here, study.metrics[claim.metric], "+") if here else "not run"
                beside.append([name, f"{claim.treatment} − {claim.control}", f"{step:+g}", source, text])
    if beside:
        yield Table(["claim", "arms", "reported difference", "source", "here"], beside)


def _fits(lines: Sequence[Line]) -> Iterator[Block]:
    if lines:
        yield Heading("Where the curves level off")
        yield curve_fits({line.label: list(zip(line.steps, line.values, strict=True)) for line in lines})
        yield Text(
            "The sigmoid `R0 + (A - R0) / (1 + (M / C)^B)` (arXiv:2510.13786) fitted to the arms' mean curves over "
            "steps: asymptote A, midpoint M, exponent B, medians with 90 % intervals. No claim is judged by it."
        )


def _mean_curve(study: Study, found: Found, name: str, at: int) -> Line | None:
    curves = [dict(map(tuple, r.curve)) for s in study.seeds if (r := found.get((name, s))) and r.curve]
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return Line(name, steps, [statistics.fmean(curve[step] for curve in curves) for step in steps], at % 6, at // 6)


def _override_table(study: Study) -> Table:
    rows = [["every arm", " ".join(study.common)]]
    return Table(["arm", "overrides"], rows + [[name, " ".join(arm.overrides)] for name, arm in study.arms.items()])


def _run_table(study: Study, found: Found) -> Table:
    rows = []
    for arm, seed in study.runs:
        record = found.get((arm, seed))
        status = f"{record.status} {record.reason}".strip() if record else "not run"
        rows.append(
            [arm, str(seed), status, f"{record.seconds:.0f}" if record else "", record.commit if record else ""]
        )
    return Table(["arm", "seed", "status", "seconds in steps", "commit"], rows)


def write_report(study: Study, records: Records, results: Path) -> Path:
    """Write ``results/<recipe>/<name>.md`` and ``.html`` and return the first."""
    references = read_references(results) if (results / "references.yaml").exists() else {}
    blocks = list(page(study, records.read(study), references))
    return write_pages(results / study.recipe, study.name, study.title, blocks)[0]
