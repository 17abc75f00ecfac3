"""Running a study: one record for each run, and the command that recipes' ``study.py`` calls.

The runs share :mod:`results.reporting.study_workers`' processes. A run's folder is named by its content: the settings,
the seed and the code. A record is not made twice, and a run that has finished is not repeated where its record is
missing, because the study was killed: the same command goes on with what is missing. A recipe's ``study.py`` calls
:func:`main`:

    python -m recipes.dapo.study [--jobs 2] [--budget-min 45]
    python -m recipes.search_r1.study topk           a recipe with several studies: study_topk.yaml
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from core.tracking.run_manifest import ROOT
from results.reporting.run_reader import NotARun, RecordedRun, load_run
from results.reporting.study import Record, Records, Study, StudyError, load_study, record_of, registered
from results.reporting.study_report import write_report
from results.reporting.study_workers import Ended, Task, run_all

CODE = ("core", "recipes", "reward_scores", "data_preprocess")  # what a run's numbers depend on


@cache
def code_digest() -> str:
    """Return a hash of the code that runs are made of, and of its configuration files."""
    digest = hashlib.sha256()
    for path in sorted(one for part in CODE for one in (ROOT / part).rglob("*") if one.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Runner:
    """The runner of what is missing: ``jobs`` processes side by side, until ``budget_s`` is spent.

    A run is not started where it would outlast the budget if it took the mean time of the finished ones. A run that
    was started is left to finish.
    """

    study: Study
    records: Records
    outputs: Path
    jobs: int = 2
    budget_s: float = float("inf")

    def run(self) -> None:
        started, done = time.monotonic(), self.records.read(self.study)
        missing = [key for key in self.study.runs if key not in done or done[key].status != "finished"]
        print(f"{len(self.study.runs) - len(missing)} of {len(self.study.runs)} runs are there", flush=True)
        if not missing:
            return
        for module in self.study.prepare:
            subprocess.run([sys.executable, "-m", module], check=True, env=_environment())
        os.environ.update(_environment())  # what the runs are forked from is started with it
        known = {key: record.wall_s for key, record in done.items() if record.wall_s}
        warm, forecast = len(known), self._forecast(missing, known)
        tasks = self._tasks(missing, known, started + self.budget_s)
        for key, ended in run_all(tasks, self.study.entry, self.jobs, self.study.preload):
            record = self._record(*key, ended)
            self.records.write(record)
            missing.remove(key)
            warm += 1
            if warm > self.jobs:  # the first run of a process loads what the later ones find
                known[key] = ended.seconds
            print(f"{key[0]} seed {key[1]}: {record.status} {record.reason} ({ended.seconds:.0f} s)", flush=True)
            if forecast is None and len(known) >= self.jobs:
                forecast = self._forecast(missing, known, time.monotonic() - started)
        took = time.monotonic() - started
        if forecast and not missing:
            print(f"took {took / 60:.1f} min, {100 * (took / forecast - 1):+.0f} % of what was said", flush=True)
        if missing:
            print(f"not run: {', '.join(f'{arm} seed {seed}' for arm, seed in missing)}", flush=True)

    def _forecast(
        self, missing: list[tuple[str, int]], known: Mapping[tuple[str, int], float], spent: float = 0.0
    ) -> float | None:
        """Print and return how many seconds the whole command takes; None where no run has been timed yet."""
        if not known or not missing:
            return None
        total = spent + expected_seconds(missing, known, self.jobs, self.steps)
        within = f", the budget is {self.budget_s / 60:.1f}" if total > self.budget_s else ""
        print(f"{len(missing)} runs are missing: about {total / 60:.1f} min in all{within}", flush=True)
        return total

    def _tasks(
        self, missing: list[tuple[str, int]], known: Mapping[tuple[str, int], float], deadline: float
    ) -> Iterator[tuple[tuple[str, int], Task]]:
        """Yield what is missing until the deadline, but for what has finished before: that needs its record alone."""
        for arm, seed in list(missing):
            folder = self.folder(arm, seed)
            if _finished(folder) is not None:
                self.records.write(self._record(arm, seed, Ended(0, 0.0)))
                missing.remove((arm, seed))
                continue
            if time.monotonic() + (statistics.fmean(known.values()) if known else 0.0) >= deadline:
                return
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            yield (arm, seed), Task(self.overrides(arm, seed), folder.with_suffix(".log"))

    def steps(self, arm: str) -> float:
        """Return the arm's training steps where the study states them for every arm, and 1 where it does not."""
        key = "trainer.total_training_steps="
        if not any(one.startswith(key) for one in self.study.common):
            return 1.0
        overrides = (*self.study.common, *self.study.arms[arm].overrides)
        return [float(one.removeprefix(key)) for one in overrides if one.startswith(key)][-1]

    def settings(self, arm: str, seed: int) -> list[str]:
        own = [f"trainer.seed={seed}", "trainer.cpu_threads=1"]
        return [*self.study.common, *self.study.arms[arm].overrides, *own]

    def content(self, arm: str, seed: int) -> str:
        """Return a hash of the run's settings, seed and code."""
        said = json.dumps([self.study.entry, self.settings(arm, seed), code_digest()])
        return hashlib.sha256(said.encode()).hexdigest()

    def folder(self, arm: str, seed: int) -> Path:
        return self.outputs / f"{arm}-seed{seed}-{self.content(arm, seed)[:12]}"

    def overrides(self, arm: str, seed: int) -> tuple[str, ...]:
        return (*self.settings(arm, seed), f"trainer.default_local_dir={self.folder(arm, seed)}")

    def _record(self, arm: str, seed: int, ended: Ended) -> Record:
        folder = self.folder(arm, seed)
        run = _finished(folder) if ended.status == 0 else None
        if run is None:
            lines = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = f"exit status {ended.status}: {lines[-1] if lines else 'no output'}"
            return Record(arm, seed, "failed", self.study.registration, reason=reason)
        return record_of(self.study, arm, seed, run, round(ended.seconds, 3), self.content(arm, seed))


def _finished(folder: Path) -> RecordedRun | None:
    try:
        run = load_run(folder)
    except NotARun:
        return None
    return run if run.status == "finished" else None


def expected_seconds(
    missing: Iterable[tuple[str, int]],
    known: Mapping[tuple[str, int], float],
    jobs: int,
    steps: Callable[[str], float] = lambda arm: 1.0,
) -> float:
    """Return the seconds that the missing runs take: each the mean of its arm's timed runs.

    An arm without a timed run takes, by its ``steps``, as long as the others do.
    """
    arms: dict[str, list[float]] = {}
    for (arm, _), seconds in known.items():
        arms.setdefault(arm, []).append(seconds)
    of_step = sum(known.values()) / sum(steps(arm) for arm, _ in known)
    return sum(statistics.fmean(arms.get(arm, [of_step * steps(arm)])) for arm, _ in missing) / jobs


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def _parser(study: Study) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=study.command, description=f"{study.title}. Starts missing runs.")
    parser.add_argument("--jobs", type=int, default=2, help="The processes side by side, one thread each.")
    parser.add_argument("--budget-min", type=float, default=float("inf"), help="Start no run beyond these minutes.")
    parser.add_argument("--report", action="store_true", help="Run nothing, and write the report of what is there.")
    parser.add_argument("--results", type=Path, default=Path("results"), help=argparse.SUPPRESS)
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help=argparse.SUPPRESS)
    return parser


def chosen(folder: Path, arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the study that the first argument names, ``study_<part>.yaml`` or else ``study.yaml``, and the rest."""
    part = folder / f"study_{arguments[0]}.yaml" if arguments else folder
    return (part, list(arguments[1:])) if part.is_file() else (folder / "study.yaml", list(arguments))


def main(path: Path, arguments: Sequence[str]) -> int:
    """Run what is missing of a study, then write ``results/<recipe>/<name>.{md,html}``: the command of a ``study.py``.

    Returns the exit status: 2 where the study's file is at fault or is not committed.
    """
    try:
        study = load_study(path)
        args = _parser(study).parse_args(arguments)
        records = Records(args.results / study.recipe / study.name)
        if not args.report:
            if registered(path) is False:
                raise StudyError(f"{path} is not committed: a study is registered before its runs")
            outputs = args.outputs / study.recipe / study.name / study.registration[:12]
            Runner(study, records, outputs, args.jobs, 60 * args.budget_min).run()
        print(f"report: {write_report(study, records, args.results)}")
    except StudyError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
