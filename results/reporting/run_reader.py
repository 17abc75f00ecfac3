"""Recorded runs: a run folder, or its published copy, as one object.

What is said about runs (before and after, which of them are one experiment) is in
:mod:`results.reporting.summaries`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from core.config import convert, recipes, recorded
from core.config.section import BOOKKEEPING
from core.errors import InputError
from core.files import local_path
from core.secret_keys import hidden
from core.tracking.json_lines import intact_rows, read_jsonl
from core.tracking.run_manifest import DATA, ROOT
from core.tracking.validation import Estimate, ValRecord
from results.reporting.comparison import accuracy_by_question

Item = TypeVar("Item")
# Variable -> names of its metrics: accuracies, and what the scorer gives where that is more
VALIDATED = {
    "acc": re.compile(r"val-core/(?P<source>.+)/acc/(?P<name>(mean|pass|maj)@\d+)"),
    "reward": re.compile(r"val-aux/(?P<source>.+)/reward/(?P<name>mean@\d+)"),
}
STEP = r"/[^\s'\"=,:;\[\](){}<>/]+"  # a folder or a file of a path
# Of one step only a whole text, what stands behind "=", or ~/step: "</think>", "[/INST]" and
# "/no_think" are no paths
ONE_STEP = rf"~{STEP}|(?:^|(?<==)){STEP}(?=$|[\s'\",])"
BEFORE_PATH = r"(?:(?<![\w/.])|(?<=file://))(?<!<path>)"
ANY_PATH = re.compile(rf"{BEFORE_PATH}(?:~?(?:{STEP}){{2,}}|{ONE_STEP})/?")
NOT_RECORDED = "not recorded"


class NotARun(InputError):
    """A folder is not a run folder, or a file in it is damaged."""


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds. Raises ValueError where it is no YAML."""
    try:
        return yaml.load(text, convert.LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no YAML ({' '.join(str(error).split())})") from error


@dataclass(frozen=True)
class Point:
    """An accuracy at a validation: ``name`` is ``mean@k``, ``pass@k`` or ``maj@k``, ``estimate.n``
    counts questions."""

    step: int
    name: str
    estimate: Estimate


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run. ``config`` is flat; ``validation`` holds the records of the steps that were
    kept."""

    folder: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    validation: Mapping[int, Sequence[ValRecord]]
    samples: Sequence[Mapping[str, Any]]
    alias: str = ""  # its name beside another run of the same name

    @property
    def name(self) -> str:
        return self.alias or f"{self.manifest['recipe']}/{self.manifest['run']}"

    @property
    def seed(self) -> Any:
        return self.config.get("trainer.seed")

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        """The time in steps. A published copy has recorded it: it lacks the rows of some steps."""
        recorded_seconds = self.manifest.get("seconds_in_steps")
        if recorded_seconds is not None:
            return recorded_seconds
        return sum(row.get("timing_s/step", 0.0) for row in self.metrics)

    @property
    def session(self) -> Mapping[str, Any]:
        """The last process that worked on the run."""
        return self.manifest["sessions"][-1]

    @property
    def status(self) -> str:
        """The status, and how far the run came where that is not to its end."""
        total, status = self.manifest.get("total_steps"), self.manifest["status"]
        short = total is not None and self.last_step < total
        return f"{status} at step {self.last_step} of {total}" if short else status

    @cached_property
    def decisive(self) -> dict[str, Any]:
        """The values of the keys that make the experiment, which are all but the seeds.

        Keys that another version lacks count as their defaults, and keys that this version lacks as
        nothing, so that seeds of several versions are one experiment. Keys of a critic or a
        reference policy that the run does not have count as nothing: their defaults changed. Files
        count by their content: a published copy has lost the folders of those outside the clone.
        """
        schema = recipes.schema_of(self.manifest["recipe"])
        values, defaults = (
            recorded.completed(self.config, schema, self.manifest["recipe"]),
            convert.as_json(schema()),
        )
        # Data that is drawn from the seed is another file in each run, and counts by its name
        drawn = re.compile(rf"\bseed-{re.escape(str(self.seed))}\b")
        for key, default in defaults.items():
            value = values[key]
            paths = value if isinstance(value, list) else [value]
            if (
                key.startswith(DATA)
                and not drawn.search(str(value))
                and any(map(self.hashes_of, paths))
            ):
                values[key] = [self.hashes_of(path) or path for path in paths]
            elif value == scrub(default):  # a published copy has lost the folder of a default path
                values[key] = default
        absent = () if values.get("critic.enable") else ("critic.",)
        kl = ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss")
        if not any(values.get(key) for key in kl):
            absent += ("actor_rollout_ref.ref.",)
        decisive = {
            k: v for k, v in values.items() if not k.startswith(absent) and convert.known(k, schema)
        }
        kept = {k: v for k, v in decisive.items() if recorded.role_of(k) != BOOKKEEPING}
        shared = {
            k: v
            for k, v in kept.items()
            if k != "trainer.cpu_threads" and k.split(".")[-1] != "seed"
        }
        return json.loads(drawn.sub("seed-*", json.dumps(shared, default=str)))

    @cached_property
    def experiment(self) -> str:
        """A hash of what makes the experiment: runs that share it differ in their seeds only."""
        text = json.dumps([self.manifest["recipe"], self.decisive], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def hashes_of(self, path: Any) -> list[str]:
        """Return the SHA-256 of a file of data or a reward function, by its configured path.

        They are several where a published copy has lost the folders that told files of one name
        apart.
        """
        name = str(Path(str(path)).expanduser())
        recorded_files = self.manifest.get("data", ())
        return [entry["sha256"] for entry in recorded_files if str(Path(entry["path"])) == name]

    @property
    def base(self) -> str | None:
        """The SHA-256 of the weights that the policy started from; None where it is not
        recorded."""
        return ((self.manifest.get("models") or {}).get("actor") or {}).get("sha256")

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return steps and values of a metric, where it was logged."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    def points(self, variable: str = "acc") -> dict[str, list[Point]]:
        """Return ``data_source -> accuracies`` (or rewards) in the order of steps."""
        found: dict[str, list[Point]] = {}
        for row in self.metrics:
            for key in row:
                if match := VALIDATED[variable].fullmatch(key):
                    source, name = match["source"], match["name"]
                    aux = f"val-aux/{source}"
                    low, high = (
                        row.get(f"{aux}/{variable}/{name}/{side}") for side in ("ci_low", "ci_high")
                    )
                    estimate = Estimate(
                        row[key], low, high, int(row.get(f"{aux}/num_questions", 0))
                    )
                    found.setdefault(source, []).append(Point(int(row["step"]), name, estimate))
        return found

    @cached_property
    def scored(self) -> frozenset[str]:
        """The data sources whose ``acc`` is a score and no accuracy: it is neither 0 nor 1 in some
        answer."""
        keys = {
            key
            for row in self.metrics
            for key in row
            if key.startswith("val-aux/") and key.endswith("/acc/min")
        }
        found = {key.removeprefix("val-aux/").removesuffix("/acc/min") for key in keys}
        records = (record for of_step in self.validation.values() for record in of_step)
        found |= {
            record.data_source for record in records if not set(record.values["acc"]) <= {0.0, 1.0}
        }
        return frozenset(found)

    @cached_property
    def dense(self) -> frozenset[str]:
        """The data sources whose validation has rewards that are not the accuracies."""

        def values(variable: str, source: str) -> list[float]:
            points = self.points(variable).get(source, [])
            return [point.estimate.value for point in points if point.name.startswith("mean@")]

        rewarded = self.points("reward")
        return frozenset(
            source for source in rewarded if values("reward", source) != values("acc", source)
        )

    def accuracy_at(self, step: int, variable: str = "acc") -> dict[str, dict[str, float]]:
        """Return ``data_source -> uid -> accuracy`` at a validated step; {} where the records were
        not kept."""
        return accuracy_by_question(self.validation.get(step, ()), variable)


# --- reading ---


def run_copy(path: str) -> Path:
    """Return a run folder as it is, and for a URL its copy here, without checkpoints. Raises
    InputError."""
    return Path(local_path(path, "RUN", without=("global_step_*",)))


def load_run(folder: str | Path) -> RecordedRun:
    """Read a run folder or its published copy.

    Raises:
        NotARun: a file is missing or damaged; it is named.
    """
    folder = Path(folder)
    published = (folder / "metrics.csv").exists()
    needed = ["config.yaml", "manifest.json", "metrics.csv" if published else "metrics.jsonl"]
    if missing := [name for name in needed if not (folder / name).exists()]:
        raise NotARun(f"{folder} is not a run folder: it has no {', '.join(missing)}")
    return RecordedRun(
        folder,
        config=hidden(_part(folder / "config.yaml", _read_config)),  # earlier runs recorded secrets
        manifest=hidden(_part(folder / "manifest.json", _read_manifest)),
        metrics=_part(folder / needed[2], _read_csv if published else _read_metrics),
        validation=_part(folder / "validation", lambda path: _read_validation(path.parent)),
        samples=_part(folder / "samples.jsonl", _read_samples),
    )


def told_apart(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs, those of one name with the shortest ends of their folders that differ."""
    found = []
    for run in runs:
        same = [Path(other.folder).resolve().parts for other in runs if other.name == run.name]
        mine, length = Path(run.folder).resolve().parts, 1
        while length < len(mine) and sum(parts[-length:] == mine[-length:] for parts in same) > 1:
            length += 1
        found.append(run if len(same) == 1 else replace(run, alias="/".join(mine[-length:])))
    return found


def _part(path: Path, read: Callable[[Path], Item]) -> Item:
    """Return what ``read`` makes of a file. Raises NotARun, which names it, where the file is not
    what it should be."""
    try:
        return read(path)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        csv.Error,
    ) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise NotARun(f"{path}: damaged, so that the run cannot be shown ({why})") from error


def _read_config(path: Path) -> dict[str, Any]:
    return dict(convert.leaves(read_yaml(path.read_text(encoding="utf-8"))))


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = json.loads(path.read_bytes())
    if not all(isinstance(manifest[name], str) for name in ("run", "recipe", "run_id", "status")):
        raise ValueError("a name or the status is no text")
    if not manifest["sessions"] or not isinstance(manifest.get("total_steps"), int | None):
        raise ValueError("it has no session, or total_steps is no number")
    for session in manifest["sessions"]:
        known = {"gpus"} <= session["hardware"].keys() and {"commit", "dirty"} <= session[
            "git"
        ].keys()
        if not known or "command" not in session:
            raise ValueError(
                "a session has no command, no gpus under hardware, or no commit and dirty under git"
            )
    return manifest


def _read_metrics(path: Path) -> list[dict[str, float]]:
    rows, damaged = intact_rows(path)
    if damaged:
        raise ValueError(f"no row of metrics: {damaged[0]}")
    for row in rows:
        _check_numbers(row.items(), f"step {row['step']}")
    return rows


def _check_numbers(values: Iterable[tuple[str, Any]], where: str) -> None:
    for name, value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{where}, {name}: {value!r:.60} is no finite number")


def _read_samples(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path)
    for row in rows:
        _check_numbers([("step", row["step"]), ("score", row["score"])], "an answer")
        if not {"input", "output"} <= row.keys():
            raise ValueError(f"a row of step {row['step']} has no input or no output")
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file, or of its compressed copy ``<path>.gz``; none where
    there is neither.

    Raises:
        ValueError: a line is damaged, or the compressed copy is cut short.
    """
    packed = path.with_name(path.name + ".gz")
    if path.exists() or not packed.exists():
        return read_jsonl(path)
    try:
        return [
            json.loads(line) for line in gzip.decompress(packed.read_bytes()).decode().splitlines()
        ]
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{packed}: not a whole gzip file ({error})") from error


def settings_of(folder: Path) -> RecordedRun:
    """Return a published run's configuration and manifest, without what it measured."""
    config = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return RecordedRun(folder, dict(convert.leaves(config)), manifest, (), {}, ())


def _read_csv(path: Path) -> list[dict[str, float]]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    for number, row in enumerate(rows, 2):
        _check_numbers(row.items(), f"line {number}")
    return [{**row, "step": int(row["step"])} for row in rows]


def _read_validation(folder: Path) -> dict[int, list[ValRecord]]:
    rows = [(row["step"], row) for row in read_rows(folder / "validation.jsonl")]
    for path in sorted(
        one for one in (folder / "validation").glob("*.jsonl") if one.stem.isdecimal()
    ):
        rows += [(int(path.stem), row) for row in read_jsonl(path)]
    by_step: dict[int, list[ValRecord]] = {}
    for step, row in sorted(rows, key=lambda pair: pair[0]):
        record = ValRecord.from_json(row)
        if not isinstance(record.uid, str) or not isinstance(record.data_source, str):
            raise ValueError(f"step {step}: uid or data_source is no text")
        for name, values in record.values.items():
            _check_numbers(
                ((name, value) for value in values), f"step {step}, question {record.uid}"
            )
        by_step.setdefault(step, []).append(record)
    return by_step


# --- what of a machine is not published ---


def scrub(value: Any, paths: re.Pattern[str] = ANY_PATH) -> Any:
    """Return the data without secrets, host name and absolute paths.

    The repository's paths become relative, others keep their last name.
    """
    value = hidden(value)
    if isinstance(value, Mapping):
        return {key: scrub(item, paths) for key, item in value.items()}
    if isinstance(value, list):
        return [scrub(item, paths) for item in value]
    if not isinstance(value, str):
        return value
    text = value.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    text = paths.sub(lambda match: f"<path>/{Path(match[0]).name}", text)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "<host>", text) if len(host) > 3 else text
