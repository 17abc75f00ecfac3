"""Run what is missing of a paper's table, and print its page: ``recipes/<paper>/reproduce.sh``.

A run of the miniature is forked from one process that has imported everything. Its record is kept
under a hash of its arguments and of the code, so that tables share runs, a stopped command goes on,
and a change of the code makes every run anew.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from core import command_line
from core.config import code_by_path, recipes
from core.config.composition import examine
from core.config.paths import run_folder
from core.dry_run import is_dry_run
from core.errors import InputError
from core.files import write_atomic
from core.tracking.loggers import progress
from core.tracking.run_manifest import ROOT, git_state
from results.reporting.run_scripts import read_script
from results.tables import page
from results.tables.table import PAGES, Measure, Numbers, Table, tables_of

OUTPUTS = Path("outputs/tables")
AGAIN_SEED = 100  # added to a row's seed in the control `again`
PRELOADED = ("core.engines.hf", "transformers.models.qwen2.modeling_qwen2")
EXECUTION = ("trainer.backend=local", "trainer.cpu_threads=1", "trainer.save_freq=0")
CODE = (
    *("core/**/*.py", "core/**/*.yaml", "data_preprocess/**/*.py"),
    *("recipes/**/*.py", "recipes/*/config/**/*.yaml", "reward_scores/**/*.py"),
)
OTHERS = "questions"  # whose rewards train in rewards_of_others; before, those of other answers
PLANTED = "recipes.lab.controls:with_rewards_of_others"
# An arm and a seed. An arm is a row, a control of the first row, or a value of a sweep: "key=value"
# of the common one, "row key=value" of a row's own
Run = tuple[str, int]
Record = Mapping[str, Any]
Records = Mapping[Run, Record]


# --- the miniature ---


def seed_of(run: Run) -> int:
    return run[1] + AGAIN_SEED * (run[0] == "again")


def arguments(table: Table, run: Run) -> list[str]:
    """Return the command line of a run, without its folder."""
    name, _, value = run[0].rpartition(" ")
    first = next(iter(table.rows.values()))
    row = table.rows.get(name or run[0], first)  # controls and a common sweep are of the first row
    swept = [value] if "=" in value else []
    execution = [f"preset={table.lab.preset}", *EXECUTION, f"trainer.seed={seed_of(run)}"]
    return [*execution, *table.lab.keys, *row.keys, *row.lab_keys, *swept]


@functools.cache
def code_digest() -> str:
    """Return a hash of the code and the presets that decide a run."""
    files = sorted(path for pattern in CODE for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def record_file(table: Table, run: Run) -> Path:
    content = [code_digest(), *arguments(table, run), run[0] == "rewards_of_others"]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return OUTPUTS / table.recipe / f"{digest}.json"


def measured(measure: Measure, rows: Sequence[Mapping[str, float]]) -> float:
    """Return a measure in percent, from the rows of ``metrics.jsonl``.

    Raises InputError for a metric that no row has.
    """
    if measure.function:
        return round(code_by_path.load_object(measure.function)(rows), 3)
    values = [row[measure.metric] for row in rows if measure.metric in row]
    if not values:
        known = sorted({name for row in rows for name in row if name.startswith("val")})
        names = ", ".join(known) or "no validation"
        raise InputError(f"measures.metric={measure.metric}: no row has it; there are {names}")
    last = len(values) if measure.over == "all" else int(measure.over.split()[1])
    return round(100 * statistics.fmean(values[-last:]), 3)


def train(table: Table, run: Run) -> None:
    """Train a run in this process, which was forked for it, and write its record."""
    path = record_file(table, run)
    folder = path.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before its record
    with open(path.with_suffix(".log"), "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    own = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
    config = command_line.prepare(table.recipe, [*arguments(table, run), *own])
    trainer = code_by_path.load_object(recipes.trainer_of(table.recipe))
    if run[0] == "rewards_of_others":
        trainer = code_by_path.load_object(PLANTED)(trainer)
    command_line.train(trainer, config)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["status"] != "finished":
        raise SystemExit(f"the run is {manifest['status']}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    record = {
        "metrics": [json.loads(line) for line in lines],
        "cpu_seconds": round(time.process_time(), 1),
        "commit": commit(),
        "base": manifest["models"]["actor"]["sha256"],
    }
    write_atomic(path, json.dumps(record) + "\n")


def commit() -> str:
    """Return the commit that runs, and whether its checkout has changes."""
    git = git_state()
    return (git["commit"] or "unknown")[:10] + (" with changes" if git["dirty"] else "")


def run_all(table: Table, runs: Sequence[Run], jobs: int) -> None:
    """Train these runs, ``jobs`` side by side. Raises InputError if the first one lacks a measure.

    No pool of threads may start in this process, and pyarrow starts one: a fork copies its locks,
    and not its threads.
    """
    for module in (*PRELOADED, recipes.trainer_of(table.recipe).partition(":")[0]):
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    waiting, running = list(runs), {}
    with progress(table.id, len(runs), "run") as count:
        while waiting or running:
            while waiting and len(running) < jobs:
                process = context.Process(target=train, args=(table, waiting.pop(0)))
                process.start()
                running[process.sentinel] = process
            for sentinel in wait(list(running)):
                running.pop(sentinel).join()
                count()
            try:
                check_measures(table, runs)
            except InputError:
                for process in running.values():
                    process.kill()
                raise


def check_measures(table: Table, runs: Sequence[Run]) -> None:
    """Raise InputError if the first of the runs that are done lacks a measure."""
    for run in [run for run in runs if record_file(table, run).exists()][:1]:
        metrics = json.loads(record_file(table, run).read_text(encoding="utf-8"))["metrics"]
        for measure in table.lab.measures.values():
            measured(measure, metrics)


def check(table: Table, arms: Sequence[str]) -> None:
    """Raise InputError, a line a problem, if the configuration of an arm is wrong."""
    problems = []
    for arm in arms:
        argv = arguments(table, (arm, 1))
        problems += [f"{arm}: {problem}" for problem in examine(table.recipe, argv).problems]
        for key, _, value in (argument.partition("=") for argument in argv):
            if re.fullmatch(r"'?[\w.]+:\w+'?", value):  # a function by its path
                try:
                    code_by_path.load_object(value.strip("'"), key)
                except InputError as error:
                    problems.append(f"{arm}: {error}")
    if problems:
        raise InputError(problems)


def complete(table: Table, arms: Sequence[str], seeds: Sequence[int], jobs: int) -> Records:
    """Run what is missing of these arms and return their records; with DRY_RUN those that are made.

    Raises InputError: a command that prepares the runs failed, or a run did not finish.
    """
    files = {(arm, seed): record_file(table, (arm, seed)) for seed in seeds for arm in arms}
    missing = [run for run, file in files.items() if not file.exists()]
    print(f"{len(missing)} of {len(files)} runs are missing", flush=True)
    numbers = " ".join(map(str, sorted(set(map(seed_of, missing)))))
    commands = [text.replace("{seeds}", numbers) for text in table.lab.prepare if missing]
    if is_dry_run():
        print("\n".join([*commands, *(f"train {arm}, seed {seed}" for arm, seed in missing)]))
        files = {run: file for run, file in files.items() if run not in missing}
    elif missing:
        if failed := [text for text in commands if shell(text)]:
            raise InputError(
                f"{failed[0]}: it failed; mend what it names and type the command again"
            )
        (OUTPUTS / table.recipe).mkdir(parents=True, exist_ok=True)
        run_all(table, missing, jobs)
    if lost := [str(file.with_suffix(".log")) for file in files.values() if not file.exists()]:
        raise InputError(f"{len(lost)} runs did not finish: see {' '.join(lost)}")
    made = {run: json.loads(file.read_text(encoding="utf-8")) for run, file in files.items()}
    return {run: record | {"file": files[run].name} for run, record in made.items()}


def swept(table: Table, jobs: int) -> tuple[Table, dict[str, float], Records]:
    """Return the table with the best values of its sweeps among its keys, and the sweeps' means."""
    key, measure = table.lab.sweep.key, next(iter(table.lab.measures.values()))
    values = {"": table.lab.sweep.values} | {n: r.sweep for n, r in table.rows.items() if r.sweep}
    arms = {name: [f"{name} {key}={v}".strip() for v in of] for name, of in values.items() if of}
    records = complete(table, sum(arms.values(), []), table.lab.sweep.seeds, jobs)
    reached: dict[str, list[float]] = {}
    for (arm, _), record in records.items():
        reached.setdefault(arm, []).append(measured(measure, record["metrics"]))
    means = {arm: statistics.fmean(numbers) for arm, numbers in reached.items()}
    best = {name: max(of, key=lambda arm: means.get(arm, -math.inf)) for name, of in arms.items()}
    common = best.pop("", "").split()
    lab = table.lab.model_copy(update={"keys": (*table.lab.keys, *common)})
    rows = dict(table.rows)
    for name, arm in best.items():
        keys = (*rows[name].lab_keys, arm.split()[1])
        rows[name] = rows[name].model_copy(update={"lab_keys": keys})
    shown = {arm: round(mean, 1) for arm, mean in means.items()}
    return table.model_copy(update={"lab": lab, "rows": rows}), shown, records


def work(table: Table, seeds: Sequence[int], jobs: int) -> None:
    """Run what is missing of the miniature and print the page."""
    print(page.summary(table))
    check(table, [*table.rows, *table.lab.controls])
    if commit().endswith("changes"):
        print("this checkout has changes: commit first, or nobody can repeat the numbers")
    settled, means, sweep_records = table, {}, {}
    if table.lab.sweep:
        settled, means, sweep_records = swept(table, jobs)
    records = complete(settled, [*table.rows, *table.lab.controls], seeds, jobs)
    if is_dry_run():
        return
    collected = collect(table, seeds, records, sweep_records) | ({"sweep": means} if means else {})
    is_pilot = len(seeds) != table.lab.seeds
    if is_pilot:
        print(f"A pilot of {len(seeds)} seeds, of which no file is written:\n", flush=True)
    else:
        write_atomic(PAGES / f"{table.id}.json", json.dumps(collected, indent=1) + "\n")
        page.update()
    print(page.render(table, collected), flush=True)


def collect(table: Table, seeds: Sequence[int], records: Records, others: Records) -> Numbers:
    """Return what is committed of a table: each seed's measures, and where they come from."""
    first = next(iter(table.lab.measures))
    values = {
        name: {
            arm: [measured(measure, records[arm, seed]["metrics"]) for seed in seeds]
            # Controls are compared by the first measure; another one may be undefined for them
            for arm in (*table.rows, *(table.lab.controls if name == first else ()))
        }
        for name, measure in table.lab.measures.items()
    }
    # A sweep may hold runs of the rows
    every = {record["file"]: record for record in (*others.values(), *records.values())}.values()
    return {
        "digest": table.digest,
        "seeds": list(seeds),
        "runs": len(every),
        "cpu_seconds": round(sum(record["cpu_seconds"] for record in every)),
        "commits": sorted({record["commit"] for record in every}),
        "base": sorted({record["base"] for record in every}),
        "others": OTHERS,
        "values": values,
    }


# --- the paper's size ---


def stages(table: Table, name: str) -> list[tuple[str, str, list[Path]]]:
    """Return what a row takes at the paper's size: names, commands, and the files they make."""
    words = [f"recipes/{table.recipe}/{table.rows[name].script}", *table.rows[name].keys]
    words.append(f"trainer.experiment_name={table.name}-{name}")
    config = read_script(Path(words[0]), words[1:]).config
    data = [Path(file).expanduser() for file in (*config.data.train_files, *config.data.val_files)]
    trainer = config.trainer
    gpus = f"{trainer.nnodes * trainer.n_gpus_per_node} GPUs"
    where = gpus if trainer.backend == "ray" else "this machine"
    folder = run_folder(config)
    answers = folder / "evaluation/answers.jsonl"
    export = f"{shlex.join(['bash', *words])} && python -m core.export {folder} {folder}/export"
    generate = f"python -m core.evaluate generate {table.recipe} --run {folder} --out {answers}"
    generate += " data.val_max_samples=-1"  # a script validates on a part of the questions
    score = f"python -m core.evaluate score {answers} --name own"
    made = [("data", " && ".join(table.paper.data), data)] if table.paper.data else []
    return [
        *made,
        (f"train on {where}, export", export, [folder / "export"]),
        ("evaluate", f"{generate} && {score}", [answers.with_suffix(".scores-own.jsonl")]),
    ]


def work_at_paper_scale(table: Table) -> int:
    """Run what is missing of the rows that have a script; return the first status that is not 0."""
    print(f"needs {table.paper.needs}")
    for name, row in table.rows.items():
        for stage, command, makes in stages(table, name) if row.script else ():
            missing = [str(path) for path in makes if not path.exists()]
            print(f"{name}, {stage}: {'missing' if missing else 'done'}\n  {command}", flush=True)
            if missing and not is_dry_run() and (status := shell(command)):
                return status
    return 0


def shell(command: str) -> int:
    """Run a command with this Python and return its status. Its output goes to stderr."""
    text = command.replace("python ", f"{sys.executable} ")
    return subprocess.run(["bash", "-c", text], stdout=sys.stderr).returncode


def main() -> int:
    """Do what the command line names and return the exit status: 2 for bad input."""
    parser = argparse.ArgumentParser("python -m results.tables.runner", description=__doc__)
    parser.add_argument("recipe", help="folder of the paper, as dapo; its reproduce.sh gives it")
    parser.add_argument("table", nargs="?", help="without one the paper's tables are listed")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (default 2)")
    parser.add_argument("--seeds", type=int, help="fewer than the table's: a pilot without a page")
    args = parser.parse_args()
    at_paper_scale = os.environ.get("SCALE") == "paper"
    try:
        tables = {table.name: table for table in tables_of(args.recipe)}
        if args.table is None:
            print("\n".join(map(page.summary, tables.values())), flush=True)
            return 0
        table = tables.get(args.table)
        if table is None or not (table.lab or at_paper_scale):
            rule = "is no table" if table is None else "has no miniature, set SCALE=paper"
            raise InputError(f"table={args.table}: {rule}; choose one of {', '.join(tables)}")
        if at_paper_scale:
            return work_at_paper_scale(table)
        work(table, range(1, (args.seeds or table.lab.seeds) + 1), args.jobs)
        return 0
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, as head, has enough; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
