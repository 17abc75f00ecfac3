"""The command that shows runs: reports of run folders, and the tables of ``results/``.

    python -m results.report A [B C ...] [--baseline NAME] [--out DIR]     report.md and
    report.html; the last line is the verdict
    python -m results.report --index [--check]             results/README.md and the tables in
    README.md

A is a run folder (``outputs/<recipe>/<run>``, or its URL, whose report is written to the copy
here), a published copy (``results/<recipe>/<run>``, made by ``python -m results.publish``) or a
folder of such folders, as of seeds. Runs that differ in their seeds only are one experiment: mean,
spread and interval over seeds. Experiments are compared with the baseline, by question where both
have records. A may also be a file of scored answers (``*.scores-*.jsonl``), which is compared with
the other files, or a paper's table (``results/tables/*.md``), whose statements are printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from core.errors import InputError, printable
from core.files import write_atomic, written_here
from results.reporting import readme_tables, real_pages
from results.reporting.commands import repeat
from results.reporting.comparison_report import verdicts, with_baseline
from results.reporting.run_reader import RecordedRun, load_run, run_copy, told_apart
from results.reporting.run_report import headline, write_report
from results.reporting.summaries import group_name, group_runs
from results.tables import page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m results.report", description="Reports of recorded runs."
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="*",
        metavar="A",
        help="Run folders, folders of seeds, files of scored answers, tables of papers.",
    )
    add(
        "--baseline",
        metavar="NAME",
        help="The run or experiment to compare with (default: the first one named).",
    )
    add(
        "--out",
        type=written_here,
        help="The folder for the report (default: the run's, or one in outputs/reports).",
    )
    add(
        "--index",
        action="store_true",
        help="Write results/README.md and the README's tables again.",
    )
    add(
        "--check",
        action="store_true",
        help="With --index: write nothing, and exit with 1 where they are out of date.",
    )
    add("--results", type=Path, default=Path("results"), help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line names and return the exit status: 2 for bad input, 1 for tables out
    of date."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if not (args.runs or args.index):
        parser.error("name a run folder, or use --index")
    bad: list[str] = []
    try:
        if args.runs:
            print(_report(args, bad), end="")
        status = update(args.results, check=args.check) if args.index else 0
    except InputError as error:
        bad.append(str(error))
    for problem in bad:
        print(printable(f"error: {problem}"), file=sys.stderr)
    return 2 if bad else status


def update(results: Path, check: bool = False) -> int:
    """Write the generated pages; with ``check`` only return 1 where one is out of date.

    The README has several generated blocks, each of which is put into what is then on disk.
    """
    of_papers = page.generated() if results.resolve() == page.PAGES.parent else ()
    wanted = chain(of_papers, readme_tables.generated(results), real_pages.generated(results))
    stale = [path for path, text in wanted if _renew(path, text, check)]
    return int(check and bool(stale))


def _renew(path: Path, text: str, check: bool) -> bool:
    """Write a file that has another text, or say so with ``check``; return whether it had one."""
    if path.exists() and page.is_same(path.read_text(encoding="utf-8"), text):
        return False
    if check:
        print(f"{path} is out of date: run python -m results.report --index", file=sys.stderr)
    else:
        write_atomic(path, text)
        print(f"wrote {path}")
    return True


def _report(args: argparse.Namespace, bad: list[str]) -> str:
    """Write the report of what can be shown, and return what is printed of it.

    What is wrong with the others is added to ``bad``. Raises InputError.
    """
    runs: list[RecordedRun] = []
    scores: list[Path] = []
    tables: list[page.Made] = []
    lines: list[str] = []
    for name in args.runs:
        if name.endswith(".jsonl"):
            scores.append(Path(name))
            continue
        if Path(name).suffix in (".md", ".json", ".yaml"):
            tables.append(_table(Path(name)))
            continue
        for folder in _run_folders(run_copy(name)):
            try:
                runs.append(load_run(folder))
            except InputError as error:
                bad.append(str(error))
    for table, numbers in tables:
        lines += page.verdicts(table, numbers)
    if tables:
        lines.append(page.counted(tables))
    if runs:
        lines += _run_lines(told_apart(runs), args)
    if scores:
        from results.reporting import accuracies

        lines.append(accuracies.report(scores))
    return printable("\n".join([*lines, ""])) if lines else ""


def _run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder that is none itself, else the folder."""
    if (folder / "manifest.json").exists() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/manifest.json")) or [folder]


def _table(path: Path) -> page.Made:
    """Return the table of this page or definition, with its numbers. Raises InputError."""
    for table, numbers in page.made():
        definition = table.recipe, "tables", f"{table.name}.yaml"
        if path.stem == table.id or path.parts[-3:] == definition:
            return table, numbers
    raise InputError(f"{path}: is no table of a paper that has run; results/README.md lists them")


def _run_lines(runs: Sequence[RecordedRun], args: argparse.Namespace) -> list[str]:
    """Write the report of the runs; return its first lines, its path and the verdicts."""
    path = write_report(runs, args.out or _default_folder(runs), args.baseline)
    last = verdicts(with_baseline(group_runs(runs), args.baseline))
    again = [f"again: {repeat(runs[0])}"] if len(runs) == 1 else []
    return [headline(runs), f"report: {path}", *again, *last]


def _default_folder(runs: Sequence[RecordedRun]) -> Path:
    """Return the only run's own folder, or one of ``outputs/reports/`` named after the
    experiments."""
    if len(runs) == 1 and runs[0].folder.is_dir():
        return runs[0].folder
    names = (group_name([run.name for run in group]) for group in group_runs(runs))
    return Path("outputs/reports") / "_".join(name.replace("/", "-") for name in names)[:100]


if __name__ == "__main__":
    sys.exit(main())
