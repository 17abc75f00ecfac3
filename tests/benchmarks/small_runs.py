"""Measures how many small runs two cores do an hour, before studies' runs shared processes and now.

    python -m tests.benchmarks.small_runs [--runs 40] [--steps 4] [--rounds 2]

``command`` is what somebody types: everything is imported anew. ``before`` is a study as it was at commit BEFORE, a
process a run, forked from one that has imported the largest packages. ``shared`` is a study as it is, all runs in two
processes, ``packed`` one whose registration says that sequences are packed. Seconds of a run are CPU seconds: on two
cores that nothing else uses, 7,200 of them pass an hour. ``shared`` and ``packed`` have more runs than the others (a
study has 80 or more), because the first run of each process pays what the later ones share. Every way has the same
data, base model and settings; each round goes through the ways, the next one in the opposite order. It writes
results/benchmarks/small_runs.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from core.tracking.run_manifest import ROOT
from recipes.lab.trails import FAMILY
from results.reporting.study_workers import Ended, Task, run_all

BEFORE = "ec4bb64"  # the first commit with the task, whose runs can still have a process each
ENTRY = "recipes.grpo.main_grpo"
PRELOAD = ("core.ray_trainer", "core.learner", "core.engines.hf", "transformers.models.qwen2.modeling_qwen2")
JOBS, CORES = 2, 2
WAYS = {"command": 2, "before": 6, "shared": 1000, "packed": 1000}  # and at most so many runs of each
PACKED = "actor_rollout_ref.model.use_remove_padding=True"
GOAL = 3.0  # times the runs an hour of ``before``
OUT = Path("results/benchmarks/small_runs")


def arguments(way: str, seed: int, steps: int, folder: Path) -> tuple[str, ...]:
    return (
        "preset=lab_families",
        f"trainer.seed={seed}",
        "trainer.cpu_threads=1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"trainer.default_local_dir={folder}",
        f"data.train_files=./{FAMILY.folder}/train.parquet",
        f"data.val_files=./{FAMILY.folder}/test.parquet",
        "data.max_prompt_length=48",  # the preset's, which had larger ones once
        "data.max_response_length=30",
        f"actor_rollout_ref.model.path=./{FAMILY.folder}/base/seed-1/current",
        *([PACKED] if way == "packed" else []),
    )


def tasks(way: str, runs: int, steps: int, folder: Path) -> Iterator[tuple[int, Task]]:
    for seed in range(1, runs + 1):
        yield seed, Task(arguments(way, seed, steps, folder / f"seed{seed}"), folder / f"seed{seed}.log")


def command(task: Task) -> Ended:
    """Do one run as a command of its own."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", ENTRY, *task.arguments], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(done.returncode, time.monotonic() - started, cpu_s)


def done(way: str, runs: int, steps: int) -> list[Ended]:
    """Do runs of this checkout and return how they ended. Raises RuntimeError where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        each = tasks(way, runs, steps, Path(folder))
        if way == "command":
            ended = [command(task) for _, task in each]
        else:
            most = 1 if way == "before" else float("inf")
            ended = [one for _, one in run_all(each, ENTRY, JOBS, PRELOAD, most)]
    if failed := sum(one.status != 0 for one in ended):
        raise RuntimeError(f"{way}: {failed} of {runs} runs failed")
    return ended


def done_before(runs: int, steps: int) -> list[Ended]:
    """Do runs of an earlier checkout, by this file in it."""
    from tests.benchmarks.commits import export

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        export(BEFORE, tree)
        shutil.copy(__file__, tree / "tests" / "benchmarks")
        (tree / "outputs").symlink_to(ROOT / "outputs")
        asked = ["--one", "before", "--runs", str(runs), "--steps", str(steps)]
        words = [sys.executable, "-m", "tests.benchmarks.small_runs", *asked]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        found = subprocess.run(words, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return [Ended(*one) for one in json.loads(found.stdout.splitlines()[-1])]


def measured(steps: int, runs: int, rounds: int) -> list[dict[str, object]]:
    """Return what a run of each way costs."""
    found: dict[str, list[list[Ended]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            most = min(WAYS[way], runs)
            found[way].append(done_before(most, steps) if way == "before" else done(way, most, steps))
            print(way, [round(one.cpu_s, 2) for one in found[way][-1]], flush=True)
    return [row(way, each) for way, each in found.items()]


def row(way: str, rounds: list[list[Ended]]) -> dict[str, object]:
    mean = statistics.fmean(one.cpu_s for each in rounds for one in each)
    later = statistics.fmean(one.cpu_s for each in rounds for one in (each[JOBS:] or each))
    return {
        "way": way,
        "cpu_s": [[round(one.cpu_s, 2) for one in each] for each in rounds],
        "mean_cpu_s": round(mean, 2),
        "later_cpu_s": round(later, 2) if way in ("shared", "packed") else None,
        "an_hour_on_2_cores": round(CORES * 3600 / mean),
        "resident_mb": [round(rounds[-1][place].resident_mb) for place in (0, -1)],
    }


def page(steps: int, found: list[dict]) -> str:
    base = next(one["mean_cpu_s"] for one in found if one["way"] == "before")
    lines = [
        *("# Small runs", ""),
        f"GRPO on `lab/trails`, {steps} training steps and one validation of 256 questions, one thread a run. Runs an",
        "hour are 7,200 CPU seconds over those of a run: what two cores do that nothing else uses. Generated by",
        f"`python -m tests.benchmarks.small_runs --steps {steps}`, whose head says what the ways are. `before` is",
        f"commit {BEFORE}, `packed` is `shared` with `{PACKED}`. What is saved is saved",
        "once a run: of longer runs, as those of a study in [study_rate.md](study_rate.md), it is little.",
        "",
        "| way | runs | CPU seconds a run | later runs of a process | runs an hour on 2 cores | by `before` | MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        first, last = one["resident_mb"]
        memory, times = (f"{first} to {last}" if first else ""), f"{base / one['mean_cpu_s']:.1f}x"
        runs = sum(map(len, one["cpu_s"]))
        cells = (one["way"], runs, one["mean_cpu_s"], one["later_cpu_s"] or "", one["an_hour_on_2_cores"], times)
        lines.append(f"| {' | '.join(map(str, (*cells, memory)))} |")
    best = base / min(one["mean_cpu_s"] for one in found)
    verdict = "met" if best >= GOAL else "NOT met"
    lines += ["", f"Goal: {GOAL:.0f} times the runs an hour of `before`: {verdict} ({best:.1f} at the best)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.small_runs", description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", choices=WAYS, help="Only print how the runs of this way ended.")
    args = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
    if args.one:
        print(json.dumps(done(args.one, args.runs, args.steps)))
        return
    FAMILY.prepare([1])
    found = measured(args.steps, args.runs, args.rounds)
    OUT.with_suffix(".json").write_text(json.dumps({"steps": args.steps, "ways": found}, indent=1) + "\n")
    OUT.with_suffix(".md").write_text(page(args.steps, found))


if __name__ == "__main__":
    main()
