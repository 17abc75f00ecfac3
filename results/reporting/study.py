"""Studies: arms x seeds of one recipe, run against claims that were registered before the first run.

A recipe's ``study.yaml`` holds arms (configuration overrides), seeds, metrics and claims with their margins. It is
committed before the runs; its hash goes into every run's record and into the report
(:mod:`results.reporting.study_report`). A run's record is ``results/<recipe>/study/<arm>-seed<seed>.json``, written
when the run is done. This module reads and checks studies and their run records; :mod:`results.reporting.study_runs`
starts the runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from core.files.durable_files import write_atomic
from results.reporting.run_reader import RecordedRun

REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "mean": statistics.fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "tail": lambda values: statistics.fmean(values[-max(1, len(values) // 10) :]),  # the last tenth
    "last3": lambda values: statistics.fmean(values[-3:]),
    "gain": lambda values: values[-1] - values[0],
}
DIRECTIONS = ("greater", "less", "equal")


class StudyError(ValueError):
    """The study's file holds something that cannot be run or judged."""


@dataclass(frozen=True)
class Metric:
    """A number a run: ``reduce`` of the values that the run logged as ``key``, in the order of steps.

    With ``until={key: sum}`` only the steps count up to which the values of that key add up to ``sum`` at most: two
    arms can be compared after equal numbers of prompts.
    """

    key: str
    reduce: str
    label: str
    percent: bool = False  # shown in hundredths
    minus: str | None = None  # a second key, whose reduction is subtracted
    until: Mapping[str, float] | None = None

    def of(self, run: RecordedRun) -> float | None:
        """Return the number; None where the run did not log the key, or the subtracted one, within ``until``."""
        last = min((_reached(run, *limit) for limit in (self.until or {}).items()), default=math.inf)
        found = []
        for key in (self.key, self.minus):
            if key is not None:
                found.append([value for step, value in zip(*run.series(key), strict=True) if step <= last])
        if not all(found):
            return None
        first, *rest = (float(REDUCTIONS[self.reduce](values)) for values in found)
        return first - sum(rest)


def _reached(run: RecordedRun, key: str, limit: float) -> float:
    """Return the last step up to which ``key`` adds up to ``limit`` at most; -1 where the first one is beyond it."""
    steps, values = run.series(key)
    sums = zip(steps, itertools.accumulate(values), strict=True)
    return max((step for step, total in sums if total <= limit), default=-1)


@dataclass(frozen=True)
class Arm:
    label: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """Whether a technique could act at all: a bound on a metric's mean over the arm's seeds."""

    arm: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, mean: float) -> bool:
        return (self.at_least is None or mean >= self.at_least) and (self.at_most is None or mean <= self.at_most)


@dataclass(frozen=True)
class Claim:
    """``treatment`` minus ``control`` in ``metric``, seed by seed, is ``direction`` by ``minimum`` or more.

    Without a control the metric itself is compared with zero. For ``equal``, ``minimum`` is the margin on both sides.
    """

    text: str
    treatment: str
    metric: str
    direction: str
    minimum: float
    control: str | None = None
    checks: tuple[Check, ...] = ()
    sources: tuple[str, ...] = ()  # who reports this sign of large models; none: the claim is about the task itself


@dataclass(frozen=True)
class Sweep:
    """Arms that differ in one number. The report draws ``metric`` over it, on a logarithmic axis."""

    x: str  # what the number is, with its unit
    metric: str
    baseline: str  # the arm where the number is 0
    collapse: str  # the metric that is below 0 where a run has collapsed
    lines: Mapping[str, Mapping[str, float]]  # line -> arm -> number, above 0
    beside: tuple[str, ...] = ()  # metrics that the table shows too


@dataclass(frozen=True)
class Study:
    path: Path
    title: str
    recipe: str
    entry: str  # the module that trains
    seeds: tuple[int, ...]
    minimum_seeds: int  # with fewer finished pairs nothing is confirmed or refuted
    arms: Mapping[str, Arm]
    metrics: Mapping[str, Metric]
    claims: Mapping[str, Claim]
    common: tuple[str, ...] = ()  # overrides of every arm
    prepare: tuple[str, ...] = ()  # modules that make data and models, run once before the first run
    preload: tuple[str, ...] = ()  # modules that every run imports, and that take seconds
    stages: tuple[tuple[str, ...], ...] = ()  # arms in the order in which they are run; none: all at once
    sweep: Sweep | None = None
    curve: str | None = None  # a logged key whose whole course is recorded
    about: tuple[str, ...] = ()  # paragraphs of the report
    limits: tuple[str, ...] = ()  # what the study cannot say

    @property
    def name(self) -> str:
        """Of its records and its report: the file's name without its ending, ``study`` or ``study_<part>``."""
        return self.path.stem

    @property
    def command(self) -> str:
        return " ".join([f"python -m recipes.{self.recipe}.study", *self.name.split("_", 1)[1:]])

    @property
    def registration(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(arm, seed), stage by stage and in it seed by seed: a study that is cut short has whole comparisons."""
        stages = self.stages or (tuple(self.arms),)
        return [(arm, seed) for stage in stages for seed in self.seeds for arm in stage]


# --- reading ---


def load_study(path: Path) -> Study:
    """Read and check a study.

    Raises:
        StudyError: with every problem, a line each.
    """
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        claims = {
            name: Claim(
                **{
                    **claim,
                    "checks": tuple(Check(**check) for check in claim.get("checks", ())),
                    "sources": tuple(claim.get("sources", ())),
                }
            )
            for name, claim in tree.pop("claims").items()
        }
        arms = {name: Arm(arm["label"], tuple(arm.get("overrides", ()))) for name, arm in tree.pop("arms").items()}
        metrics = {name: Metric(**metric) for name, metric in tree.pop("metrics").items()}
        if sweep := tree.pop("sweep", None):
            tree["sweep"] = Sweep(**{**sweep, "beside": tuple(sweep.get("beside", ()))})
        tree["stages"] = [tuple(stage) for stage in tree.get("stages", ())]
        rest = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
        study = Study(path, arms=arms, metrics=metrics, claims=claims, **rest)
    except (TypeError, KeyError, AttributeError) as error:
        raise StudyError(f"{path}: {error}") from error
    problems = _problems(study)
    if problems:
        raise StudyError("\n".join(f"{path}: {problem}" for problem in problems))
    return study


def _problems(study: Study) -> list[str]:
    found = [f"metrics.{n}.reduce={m.reduce}: is none of {', '.join(REDUCTIONS)}" for n, m in study.metrics.items()
             if m.reduce not in REDUCTIONS]  # fmt: skip
    for name, claim in study.claims.items():
        arms = {claim.treatment, claim.control or claim.treatment, *(check.arm for check in claim.checks)}
        metrics = {claim.metric, *(check.metric for check in claim.checks)}
        found += [f"claims.{name}: there is no arm {arm}" for arm in sorted(arms - set(study.arms))]
        found += [f"claims.{name}: there is no metric {metric}" for metric in sorted(metrics - set(study.metrics))]
        if claim.direction not in DIRECTIONS:
            found.append(f"claims.{name}.direction={claim.direction}: is none of {', '.join(DIRECTIONS)}")
        if claim.minimum <= 0:
            found.append(f"claims.{name}.minimum={claim.minimum}: the smallest effect that counts must be above 0")
    if study.stages and sorted(arm for stage in study.stages for arm in stage) != sorted(study.arms):
        found.append("stages: must hold every arm once")
    if study.sweep is not None:
        found += _sweep_problems(study, study.sweep)
    if len(set(study.seeds)) < max(2, study.minimum_seeds):
        found.append(f"seeds={list(study.seeds)}: a paired interval needs {max(2, study.minimum_seeds)} or more")
    return found


def _sweep_problems(study: Study, sweep: Sweep) -> list[str]:
    arms = {sweep.baseline, *(arm for line in sweep.lines.values() for arm in line)}
    metrics = {sweep.metric, sweep.collapse, *sweep.beside}
    found = [f"sweep: there is no arm {arm}" for arm in sorted(arms - set(study.arms))]
    found += [f"sweep: there is no metric {metric}" for metric in sorted(metrics - set(study.metrics))]
    numbers = [(name, arm, x) for name, line in sweep.lines.items() for arm, x in line.items()]
    return found + [f"sweep.lines.{name}.{arm}={x}: must be above 0" for name, arm, x in numbers if x <= 0]


# --- records ---


@dataclass(frozen=True)
class Record:
    """The run record, what a study keeps of a run. ``registration`` is the hash of the study's file when it ran."""

    arm: str
    seed: int
    status: str  # finished, or failed
    registration: str
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    curve: Sequence[Sequence[float]] = ()  # [step, value]
    seconds: float = 0.0  # in training steps
    commit: str = ""
    reason: str = ""  # of a failure
    wall_s: float = 0.0  # from its start to its end
    content: str = ""  # a hash of its settings, its seed and the code that ran


class Records:
    """The folder of a study's run records."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-seed{seed}.json"

    def read(self, study: Study) -> dict[tuple[str, int], Record]:
        """Return the records of this registration. Another one's are refused: numbers of two designs must not meet."""
        found = {}
        for arm, seed in study.runs:
            if self.path(arm, seed).exists():
                record = Record(**json.loads(self.path(arm, seed).read_text(encoding="utf-8")))
                if record.registration != study.registration:
                    raise StudyError(
                        f"{self.path(arm, seed)} was made under registration {record.registration[:12]}, {study.path} "
                        f"is {study.registration[:12]}: a study is not changed after its runs; move its records away"
                    )
                found[arm, seed] = record
        return found

    def write(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(record.arm, record.seed)
        write_atomic(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def record_of(study: Study, arm: str, seed: int, run: RecordedRun, wall_s: float = 0.0, content: str = "") -> Record:
    """Return the run record of a finished run."""
    git = run.session["git"]
    steps, values = run.series(study.curve) if study.curve else ([], [])
    return Record(
        arm,
        seed,
        run.status,
        study.registration,
        {name: metric.of(run) for name, metric in study.metrics.items()},
        [[step, value] for step, value in zip(steps, values, strict=True)],
        round(run.seconds, 1),
        (git["commit"] or "unknown")[:10] + (" with changes" if git["dirty"] else ""),
        wall_s=wall_s,
        content=content,
    )


# --- running ---


def registered(path: Path) -> bool | None:
    """Return whether the file is as the last commit has it; None outside a git checkout."""
    try:
        git = ["git", "-C", str(path.parent)]
        subprocess.run([*git, "rev-parse"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    shown = subprocess.run([*git, "show", f"HEAD:./{path.name}"], capture_output=True)
    return shown.returncode == 0 and shown.stdout == path.read_bytes()
