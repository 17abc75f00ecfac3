"""Repeat a table of a paper, or the lab: data, training, evaluation, publishing, the table.

    bash recipes/dapo/reproduce.sh                     lists the tables and their rows
    bash recipes/dapo/reproduce.sh table1 [ROW ...]    repeats rows of a table (all that can be)
    bash recipes/dapo/reproduce.sh released [ROW ...]  evaluates the checkpoints that the authors
    released
    bash recipes/dapo/reproduce.sh node8 [ROW ...]     a smaller run for one node of 8 GPUs: a
    departure from the paper
    bash recipes/dapo/reproduce.sh lab                 the recipe on a laptop, in minutes

DRY_RUN=1 prints every stage and whether it is done. Repeating the command continues: a stage that
is done is not repeated, and training continues from its last checkpoint. What stands after ``--``
is added to the training command. ``recipes/<recipe>/reproduce.yaml`` holds the tables, and the
server that some of them need (Search-R1's retriever).
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from core.dry_run import is_dry_run
from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting import readme_tables
from results.reproduction.rows import Row, Service, overview, rows_of, service_of
from results.reproduction.stages import SCORES, Stage, stages

AGAIN = "the same command goes on from here"
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


def work(
    rows: Sequence[Row], seeds: Sequence[int], typed: Sequence[str], service: Service | None
) -> int:
    """Run what is not done, row by row; return the status of the first stage that fails, else 0.

    Raises InputError for a service that does not answer.
    """
    for row in rows:
        for seed in seeds:
            print(f"\n{row.recipe}, {row.name}, seed {seed}; reported: {row.reported}", flush=True)
            if status := repeat(list(stages(row, seed, typed, service is not None)), service):
                return status
    return 0


def repeat(found: Sequence[Stage], service: Service | None) -> int:
    """Run the stages that are not done, or print all of them in a dry run; return a failed one's
    status, else 0."""
    for stage in found:
        done = stage.done()
        print(stage, flush=True)
        if done or is_dry_run():
            continue
        if stage.needs_service:
            service.require()
        if status := run(stage.command):
            print(f"{stage.name} ended with status {status}; {AGAIN}", file=sys.stderr)
            return status
        if not stage.done():
            made = "what it should have made is not there"
            print(
                f"{stage.name} ended with status 0, and {made}: look at its output", file=sys.stderr
            )
            return 1
    return 0


def run(command: str) -> int:
    """Run a shell command to its end and return its exit status, INTERRUPTED where a person or a
    scheduler ended it.

    A terminal's Ctrl-C reaches the command too. It is waited for: a training run saves a checkpoint
    first. SIGTERM and SIGHUP, which reach this process alone, are passed on.
    """
    process, interrupted, early = None, False, False

    def pass_on(number: int, _: object) -> None:
        nonlocal interrupted, early
        interrupted = True
        if number != signal.SIGINT and process is not None:
            process.send_signal(signal.SIGINT)
        else:  # the command may run before Popen has returned
            early = early or number != signal.SIGINT

    # Before the command starts: it inherits what is ignored here, as SIGINT is in a background job,
    # and could not trap it. nohup's ignored SIGHUP stays ignored.
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        process = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL)
        if early:
            process.send_signal(signal.SIGINT)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if interrupted else status


def show_table(rows: Sequence[Row], seeds: Sequence[int]) -> int:
    """Write the tables of results/ again, and print what was measured beside what is reported."""
    from results.reporting.accuracies import report

    readme_tables.update(ROOT / "results")
    for row in rows:
        print(f"\n{row.recipe}, {row.name}; reported: {row.reported}; here:")
        folders = (
            [f"released-{row.name}"]
            if row.released
            else [f"{row.name}-seed{seed}" for seed in seeds]
        )
        outputs = Path("outputs") / row.recipe
        scores = [outputs / folder / SCORES for folder in folders]
        scores += sorted((outputs / f"eval-{row.name}").glob("*.scores-exact_match.jsonl"))
        print(report([path for path in scores if path.exists()]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line names and return the exit status: 2 for bad input, a failed stage's
    own status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    typed = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(prog="python -m results.reproduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "recipe", help="The recipe whose table is repeated: ppo, grpo, dapo or search_r1."
    )
    parser.add_argument(
        "table", nargs="?", help="The table, released or lab. Without one the tables are listed."
    )
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        help="Rows of the table (default: all that can be repeated).",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1], help="The seeds, a run each (default: 1)."
    )
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    try:
        if args.table is None:
            print(overview(args.recipe))
            return 0
        rows = rows_of(args.recipe, args.table, args.rows)
        service = service_of(args.recipe, typed)
        return work(rows, args.seeds, typed, service) or (
            0 if is_dry_run() else show_table(rows, args.seeds)
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
