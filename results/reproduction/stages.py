"""The stages of a row: data, training or not, answers, scores, a report, and its copy in
``results/``.

A stage is a shell command with the question whether what it makes is there. Nothing is run here.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import compose, convert, recipes
from core.config.paths import run_folder
from core.config.section import typed
from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting.run_scripts import Script, read_script
from results.reproduction.rows import LAB, Row, read_tables

SCORES = "evaluation/answers.scores-own.jsonl"  # in a run's folder, what core.evaluate score writes
# What decides answers and scores, or where they are made; other keys of a script are the
# training's.
EVALUATING = (
    *(
        "actor_rollout_ref.model.",
        "actor_rollout_ref.rollout.",
        "reward_model.",
        "custom_reward_function.",
        "data.",
    ),
    *("trainer.backend", "trainer.n_gpus_per_node", "trainer.device"),
)
TRAINING = (
    *("actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n", "reward_model.max_length"),
    *("data.train_files", "data.train_batch_size", "data.gen_batch_size"),
)


@dataclass(frozen=True)
class Stage:
    """A shell command, whether what it makes is there, and whether the service must answer."""

    name: str
    command: str
    done: Callable[[], bool]
    needs_service: bool = False

    def __str__(self) -> str:
        return f"  {self.name}: {'done' if self.done() else 'to do'}\n    {self.command}"


def stages(row: Row, seed: int, typed: Sequence[str], serving: bool = False) -> Iterator[Stage]:
    """Yield what is done for a row with one seed, in order.

    ``typed`` is added to what trains the row, or to what evaluates it where nothing is trained.
    Stages that need the recipe's service are marked, where it is used (``serving``).
    """
    serving = serving and row.needs_service
    words = shlex.split(row.command)
    at = words.index("bash") + 1
    if Path(words[at]).name == "eval.sh":  # nothing is trained
        yield from untrained(row, typed, serving)
        return
    own = [f"trainer.experiment_name={row.name}-seed{seed}", f"trainer.seed={seed}"]
    own += [f"trainer.reference={row.name}"] if row.named else []
    script = settings(words[at:], [*own, *typed])
    yield from data_of(row, script)
    if row.released:
        folder = Path("outputs") / row.recipe / f"released-{row.name}"
        # A typed preset is in the script's values already, and would here lie below them.
        more = [word for word in typed if not word.startswith("preset=")]
        source = [
            "--model",
            row.released,
            *evaluation_keys(script),
            f"trainer.reference={row.name}",
            *more,
        ]
        yield from evaluation(row.recipe, folder, source, serving)
        return
    folder = run_folder(script.config)
    keys = {word.partition("=")[0] for word in own}
    words = [word for word in words if word.partition("=")[0] not in keys]
    yield Stage("train", shlex.join([*words, *own, *typed]), lambda: finished(folder), serving)
    lab = read_tables(row.recipe)["lab"].get("evaluation", ()) if row.name == LAB else ()
    yield from evaluation(row.recipe, folder, ["--run", str(folder), *lab], serving)
    target = ROOT / "results" / row.recipe / folder.name
    publish = f"{python()} -m results.publish {folder} --as {row.recipe}/{folder.name}"
    yield Stage(
        "publish", publish, lambda: run_of(folder) is not None and run_of(folder) == run_of(target)
    )


# --- data ---


def data_of(row: Row, script: Script) -> Iterator[Stage]:
    """Yield the commands that make files of the row's configuration; none for files of one's
    own."""
    data = script.config.data
    used = {
        Path(name).expanduser()
        for name in (*data.val_files, *(() if row.released else data.train_files))
    }
    for entry in read_tables(row.recipe)["data"]:
        made = paths(entry["makes"])
        if used & set(made):
            yield making("data", entry["command"], made)


def untrained_data(row: Row) -> Iterator[Stage]:
    """Yield the commands that make the data of a row without a training configuration: those that
    name it."""
    for entry in read_tables(row.recipe)["data"]:
        if row.name in entry.get("rows", ()):
            yield making("data", entry["command"], paths(entry["makes"]))


def making(name: str, command: str, made: Sequence[Path]) -> Stage:
    command = re.sub("^python ", f"{python()} ", command)
    return Stage(name, command, lambda: all(path.exists() for path in made))


def paths(words: str) -> list[Path]:
    """Return the paths that these shell words name: with variables and braces, without
    wildcards."""
    shown = subprocess.run(
        ["bash", "-c", f"IFS=; set -f; printf '%s\\0' {words}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(path) for path in shown.stdout.split("\0")[:-1]]


# --- answers ---


def evaluation(recipe: str, folder: Path, source: Sequence[str], serving: bool) -> Iterator[Stage]:
    """Yield generating, scoring and reporting; ``source`` is the model or the run, with its
    settings."""
    answers, scores = folder / "evaluation/answers.jsonl", folder / SCORES
    command = f"{python()} -m core.evaluate"
    generate = shlex.join(["generate", recipe, "--out", str(answers), *source])
    yield Stage(
        "generate", f"{command} {generate}", lambda: scores.exists() or answered(answers), serving
    )
    yield Stage("score", f"{command} score {answers} --name own", scores.exists)
    report = scores.with_suffix(".report.json")
    yield Stage("report", f"{python()} -m results.reporting.accuracies {scores}", report.exists)


def untrained(row: Row, typed: Sequence[str], serving: bool) -> Iterator[Stage]:
    """Yield the stages of a row whose model nobody trains: ``eval.sh`` answers and scores, greedily
    and sampled."""
    yield from untrained_data(row)
    folder = Path("outputs") / row.recipe / f"eval-{row.name}"
    reports = [folder / f"{how}.scores-exact_match.report.json" for how in ("greedy", "sampled")]
    command = " ".join([row.command, shlex.join(typed)]).strip()
    yield Stage("evaluate", command, lambda: all(path.exists() for path in reports), serving)


def evaluation_keys(script: Script) -> list[str]:
    """Return ``key=value`` of what a script sets and an evaluation reads: of the resolved values,
    presets included."""
    recipe_default = convert.flat(compose(script.recipe, ()))
    own = convert.all_keys(recipes.schema_of(script.recipe)).keys() - convert.all_keys().keys()
    return [
        f"{key}={typed(value)}"
        for key, value in convert.flat(script.config).items()
        if value != recipe_default[key]
        and (key.startswith(EVALUATING) or key in own)
        and key not in TRAINING
    ]


def settings(words: Sequence[str], typed: Sequence[str]) -> Script:
    """Return what a run script starts with these arguments. Raises InputError for one that does not
    train."""
    found = read_script(ROOT / words[0], [*words[1:], *typed])
    if found is None:
        raise InputError(f"{words[0]}: does not train")
    return found


def python() -> str:
    """Return this Python as one would type it."""
    local = Path(".venv/bin/python")
    return str(local) if local.exists() else shlex.quote(sys.executable)


# --- what is there ---


def run_of(folder: Path) -> tuple[str, int] | None:
    """Return the run's id and how many processes worked on it, as its manifest has them."""
    manifest = _manifest(folder / "manifest.json")
    return None if manifest is None else (manifest["run_id"], len(manifest["sessions"]))


def finished(folder: Path) -> bool:
    manifest = _manifest(folder / "manifest.json")
    return manifest is not None and manifest["status"] == "finished"


def answered(answers: Path) -> bool:
    """Return whether the file holds all answers, by the number of its lines."""
    manifest = _manifest(answers.with_suffix(".manifest.json"))
    if manifest is None or not answers.exists():
        return False
    with open(answers, "rb") as file:
        return sum(1 for _ in file) == manifest["questions"] * manifest["samples"]


def _manifest(path: Path) -> Mapping[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
