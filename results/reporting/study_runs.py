"""Running a study: one process and one record for each run, and the command that recipes' ``study.py`` calls.

A run is a process of its own with one thread, forked from one that has already imported ``preload``. A record is not
made twice: the same command goes on with what is missing. A recipe's ``study.py`` calls :func:`main`:

    python -m recipes.dapo.study [--jobs 2] [--budget-min 45]
    python -m recipes.search_r1.study topk           a recipe with several studies: study_topk.yaml
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from core.tracking.run_manifest import ROOT
from results.reporting.run_reader import NotARun, load_run
from results.reporting.study import Record, Records, Study, StudyError, load_study, record_of, registered
from results.reporting.study_report import write_report


@dataclass(frozen=True)
class _Running:
    arm: str
    seed: int
    folder: Path
    process: multiprocessing.Process
    started: float


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
        done = self.records.read(self.study)
        missing = [key for key in self.study.runs if key not in done or done[key].status != "finished"]
        print(f"{len(self.study.runs) - len(missing)} of {len(self.study.runs)} runs are there", flush=True)
        if not missing:
            return
        for module in self.study.prepare:
            subprocess.run([sys.executable, "-m", module], check=True, env=_environment())
        os.environ.update(_environment())  # what the runs are forked from is started with it
        multiprocessing.get_context("forkserver").set_forkserver_preload([*self.study.preload, __name__])
        self._each(iter(missing), time.monotonic() + self.budget_s)

    def _each(self, missing: Iterator[tuple[str, int]], deadline: float) -> None:
        walls, running = [], []
        while True:
            expected = statistics.fmean(walls) if walls else 0.0
            while len(running) < self.jobs and time.monotonic() + expected < deadline and (key := next(missing, None)):
                running.append(self._start(*key))
            if not running:
                return
            ended = connection.wait([one.process.sentinel for one in running])
            for one in [one for one in running if one.process.sentinel in ended]:
                running.remove(one)
                walls.append(self._end(one))

    def _start(self, arm: str, seed: int) -> _Running:
        folder = self.outputs / f"{arm}-seed{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = (self.study.entry, self.overrides(arm, seed, folder), folder.with_suffix(".log"))
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=arguments)
        process.start()
        return _Running(arm, seed, folder, process, time.monotonic())

    def _end(self, one: _Running) -> float:
        """Record a run that is over and return its seconds."""
        one.process.join()
        record = self._record(one.arm, one.seed, one.folder, one.folder.with_suffix(".log"), one.process.exitcode)
        self.records.write(record)
        seconds = time.monotonic() - one.started
        print(f"{one.arm} seed {one.seed}: {record.status} {record.reason} ({seconds:.0f} s)", flush=True)
        return seconds

    def overrides(self, arm: str, seed: int, folder: Path) -> list[str]:
        own = [f"trainer.seed={seed}", "trainer.cpu_threads=1", f"trainer.default_local_dir={folder}"]
        return [*self.study.common, *self.study.arms[arm].overrides, *own]

    def _record(self, arm: str, seed: int, folder: Path, log: Path, code: int) -> Record:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        try:
            run = load_run(folder) if code == 0 else None
        except NotARun as error:
            lines, run = [str(error)], None
        if run is None or run.status != "finished":
            reason = f"exit status {code}: {lines[-1] if lines else 'no output'}"
            return Record(arm, seed, "failed", self.study.registration, reason=reason)
        return record_of(self.study, arm, seed, run)


def _run(entry: str, arguments: Sequence[str], log: Path) -> None:
    """Do ``python -m entry arguments`` in this process; what it prints goes to ``log``."""
    with open(log, "w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = [entry, *arguments]
    sys.orig_argv = [sys.executable, "-m", entry, *arguments]  # which the run's manifest holds
    runpy.run_module(entry, run_name="__main__", alter_sys=True)


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
