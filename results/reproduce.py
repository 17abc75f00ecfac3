"""Repeat a table of a paper, or the lab: data, training, evaluation, publishing, the table.

    bash recipes/dapo/reproduce.sh                     lists the tables and their rows
    bash recipes/dapo/reproduce.sh table1 [ROW ...]    repeats rows of a table (all that can be)
    bash recipes/dapo/reproduce.sh released [ROW ...]  evaluates the checkpoints that the authors released
    bash recipes/dapo/reproduce.sh node8 [ROW ...]     a smaller run for one node of 8 GPUs: a departure from the paper
    bash recipes/dapo/reproduce.sh lab                 the recipe on a laptop, in minutes

DRY_RUN=1 prints every stage with its cost and whether it is done. Repeating the command continues: a stage that is done
is not repeated, and training continues from its last checkpoint. What stands after ``--`` is added to the training
command. ``recipes/<recipe>/reproduce.yaml`` holds the tables.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.command_line import is_dry_run
from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting import tables
from results.reporting.feasibility import Script, read_script
from results.reporting.references import planned, read_references

LAB = "lab-repeated"
SCORES = "evaluation/answers.scores-own.jsonl"  # in a run's folder, what core.evaluate score writes
SPECIAL = ("released", "lab")  # in the place of a table


@dataclass(frozen=True)
class Stage:
    """A shell command, whether what it makes is there, and what it costs."""

    name: str
    command: str
    done: Callable[[], bool]
    cost: str = ""

    def __str__(self) -> str:
        state = "done" if self.done() else "to do" + (f", {self.cost}" if self.cost else "")
        return f"  {self.name}: {state}\n    {self.command}"


@dataclass(frozen=True)
class Row:
    """A row of a table: the command that trains it, or the released model that is evaluated in its place."""

    recipe: str
    name: str
    command: str
    reported: str
    cost: str
    named: bool = False  # a row of references.yaml, which the run is to name
    released: str | None = None


# --- the tables of a recipe ---


def read_tables(recipe: str) -> Mapping[str, Any]:
    """Return what ``recipes/<recipe>/reproduce.yaml`` holds. Raises InputError for another recipe."""
    path = ROOT / "recipes" / recipe / "reproduce.yaml"
    if not path.exists():
        known = ", ".join(sorted(one.parent.name for one in ROOT.glob("recipes/*/reproduce.yaml")))
        raise InputError(f"{recipe}: has no reproduce.yaml; choose one of {known}")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rows_of(recipe: str, table: str, wanted: Sequence[str]) -> list[Row]:
    """Return the rows of a table that can be repeated, or those ``wanted``.

    Raises:
        InputError: the table or a row is unknown, or a wanted row cannot be repeated.
    """
    found, references = read_tables(recipe), {one["id"]: one for one in read_references(ROOT / "results")["references"]}
    names = [*found["tables"], *(name for name in SPECIAL if name in found)]
    if table not in names:
        raise InputError(f"table={table}: is not a table of {recipe}; choose one of {', '.join(names)}")
    if table == "lab":
        lab = found["lab"]
        rows = [Row(recipe, LAB, lab["command"], "the published seeds, in results/README.md", lab["takes"])]
    elif table == "released":
        rows = [_referenced(recipe, references[name], model) for name, model in found["released"].items()]
    else:
        entries = found["tables"][table]["rows"]
        rows = [
            _own(recipe, one) if isinstance(one, Mapping) else _referenced(recipe, references[one]) for one in entries
        ]
    known = {row.name: row for row in rows}
    for name in wanted:
        if name not in known:
            raise InputError(f"row={name}: is not in {table} of {recipe}; choose one of {', '.join(known)}")
        if not known[name].command:
            raise InputError(f"row={name}: cannot be repeated: {references[name]['not_reproducible']}")
    return [known[name] for name in wanted] or [row for row in rows if row.command]


def _referenced(recipe: str, row: Mapping[str, Any], released: str | None = None) -> Row:
    command = "" if "not_reproducible" in row else row["command"]
    cost = "an evaluation" if released else planned(row) if command else ""
    return Row(recipe, row["id"], command, f"{row['value']:.1f} ({row['source']})", cost, not released, released)


def _own(recipe: str, entry: Mapping[str, Any]) -> Row:
    reported = f"none; it departs from the paper: {entry['departs']}"
    return Row(recipe, entry["id"], entry["command"], reported, planned(entry))


# --- the stages of a row ---


def stages(row: Row, seed: int, typed: Sequence[str]) -> Iterator[Stage]:
    """Yield what is done for a row with one seed, in order. ``typed`` is added to the training command."""
    words = shlex.split(row.command)
    at = words.index("bash") + 1
    if Path(words[at]).name == "eval.sh":  # nothing is trained
        yield Stage("evaluate", row.command, lambda: False, row.cost)
        return
    own = [f"trainer.experiment_name={row.name}-seed{seed}", f"trainer.seed={seed}"]
    own += [f"trainer.reference={row.name}"] if row.named else []
    script = settings(words[at:], [*own, *typed])
    files = [Path(name).expanduser() for name in (*script.config.data.train_files, *script.config.data.val_files)]
    for command in read_tables(row.recipe)["data"] if row.name != LAB else ():
        command = re.sub("^python ", f"{python()} ", command)
        yield Stage("data", command, lambda: all(path.exists() for path in files))
    if row.released:
        folder = Path("outputs") / row.recipe / f"released-{row.name}"
        keys = [word for word in script.arguments if word != "--" and not word.startswith("trainer.")]
        yield from evaluation(row.recipe, folder, ["--model", row.released, *keys, *typed], row.cost)
        return
    folder = Path(script.config.trainer.default_local_dir)
    keys = {word.partition("=")[0] for word in own}
    words = [word for word in words if word.partition("=")[0] not in keys]
    yield Stage("train", shlex.join([*words, *own, *typed]), lambda: finished(folder), row.cost)
    yield from evaluation(row.recipe, folder, ["--run", str(folder)], "")
    target = ROOT / "results" / row.recipe / folder.name
    publish = f"{python()} -m results.publish {folder} --as {row.recipe}/{folder.name}"
    yield Stage("publish", publish, lambda: run_of(folder) is not None and run_of(folder) == run_of(target))


def evaluation(recipe: str, folder: Path, source: Sequence[str], cost: str) -> Iterator[Stage]:
    """Yield generating, scoring and reporting; ``source`` is the model or the run, with its settings."""
    answers, scores = folder / "evaluation/answers.jsonl", folder / SCORES
    command = f"{python()} -m core.evaluate"
    generate = shlex.join(["generate", recipe, "--out", str(answers), *source])
    yield Stage("generate", f"{command} {generate}", lambda: scores.exists(), cost)
    yield Stage("score", f"{command} score {answers} --name own", lambda: scores.exists())
    report = scores.with_suffix(".report.json")
    yield Stage("report", f"{command} report {scores}", report.exists)


def settings(words: Sequence[str], typed: Sequence[str]) -> Script:
    """Return what a run script starts with these arguments. Raises InputError for one that does not train."""
    found = read_script(ROOT / words[0], [*words[1:], *typed])
    if found is None:
        raise InputError(f"{words[0]}: does not train")
    return found


def python() -> str:
    """Return this Python as one would type it."""
    local = Path(".venv/bin/python")
    return str(local) if local.exists() else shlex.quote(sys.executable)


def run_of(folder: Path) -> tuple[str, int] | None:
    """Return the run's id and how many processes worked on it, as its manifest has them."""
    path = folder / "manifest.json"
    if not path.exists():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return manifest["run_id"], len(manifest["sessions"])


def finished(folder: Path) -> bool:
    path = folder / "manifest.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished"


# --- the command ---


def work(rows: Sequence[Row], seeds: Sequence[int], typed: Sequence[str]) -> int:
    """Run what is not done, row by row; return the status of the first stage that fails, else 0."""
    for row in rows:
        for seed in seeds:
            print(f"\n{row.recipe}, {row.name}, seed {seed}; reported: {row.reported}", flush=True)
            for stage in stages(row, seed, typed):
                print(stage, flush=True)
                if is_dry_run() or stage.done():
                    continue
                status = subprocess.run(["bash", "-c", stage.command], check=False).returncode
                if status:
                    print(
                        f"{stage.name} ended with status {status}; the same command goes on from here", file=sys.stderr
                    )
                    return status
    return 0


def show_table(rows: Sequence[Row], seeds: Sequence[int]) -> int:
    """Write the tables of results/ again, and print what was measured beside what is reported."""
    from core.evaluation.summary import report

    tables.update(ROOT / "results")
    for row in rows:
        print(f"\n{row.recipe}, {row.name}; reported: {row.reported}; here:")
        folders = [f"released-{row.name}"] if row.released else [f"{row.name}-seed{seed}" for seed in seeds]
        scores = [Path("outputs") / row.recipe / folder / SCORES for folder in folders]
        print(report([path for path in scores if path.exists()]))
    return 0


def overview(recipe: str) -> str:
    """Return the tables of a recipe, a line each, with their rows."""
    found = read_tables(recipe)
    lines = [f"bash recipes/{recipe}/reproduce.sh TABLE [ROW ...]        DRY_RUN=1 prints the stages and their cost"]
    for name, table in found["tables"].items():
        rows = [one if isinstance(one, str) else one["id"] for one in table["rows"]]
        lines += [f"{name}: {table['title']}", *(f"  {row}" for row in rows)]
    if "released" in found:
        lines += ["released: evaluates what the authors released", *(f"  {row}" for row in found["released"])]
    return "\n".join([*lines, f"lab: the recipe on a laptop, {found['lab']['takes']}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line names and return the exit status: 2 for bad input, a failed stage's own status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    typed = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(prog="python -m results.reproduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help="The recipe whose table is repeated: ppo, grpo, dapo or search_r1.")
    parser.add_argument("table", nargs="?", help="The table, released or lab. Without one the tables are listed.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="Rows of the table (default: all that can be repeated).")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="The seeds, a run each (default: 1).")
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    try:
        if args.table is None:
            print(overview(args.recipe))
            return 0
        rows = rows_of(args.recipe, args.table, args.rows)
        return work(rows, args.seeds, typed) or (0 if is_dry_run() else show_table(rows, args.seeds))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
