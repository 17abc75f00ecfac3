"""Capsules as they lie in a run folder: which steps were kept, and what one of them holds.

A :class:`StoredStep` is a capsule that was found, checked and read; ``capsule_recorder`` wrote it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from core.checkpoint.run_state import decode
from core.config import Config, roles
from core.config.unknown_keys import validated
from core.errors import InputError
from core.extensions.capsules.capsule_recorder import FACTS, FOLDER, FORMAT, TENSORS
from core.files.durable_files import PARTIAL, file_sha256
from core.files.file_names import FIX, inside
from core.safe_text.redaction import without_hidden
from core.tracking.records import step_of
from core.types import ScoredGroup, TrainBatch

MODELS = ("actor", "critic", "ref")


@dataclass(frozen=True)
class StoredStep:
    """A capsule. ``facts`` is its description, ``tensors`` what its phases made: phase/name -> tensor."""

    folder: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        return self.facts["step"]

    @functools.cached_property
    def config(self) -> Config:
        """Return the configuration of the step. Raises InputError for keys that this version of the code lacks."""
        tree, problems = without_hidden(self.facts["config"]), []
        config = validated(roles.schema_for(tree), tree, problems)
        if problems:
            named = ", ".join(problem.key for problem in problems[:3])
            rule = f"it is of another version of this code, which has other keys ({named})"
            raise InputError(f"{self.folder}: {rule}; replay it with commit {self.facts['code']['commit']}")
        return config

    @functools.cached_property
    def groups(self) -> tuple[ScoredGroup, ...]:
        buffers = {name: value.numpy() for name, value in self.of("groups").items()}
        return tuple(decode(group, buffers) for group in self.facts["groups"])

    def of(self, phase: str) -> dict[str, Tensor]:
        """Return name -> tensor, of what one phase made."""
        return {
            name.partition("/")[2]: value for name, value in self.tensors.items() if name.partition("/")[0] == phase
        }

    def batch(self, *phases: str) -> TrainBatch:
        """Return the batch as it was after these phases."""
        batch = TrainBatch(self.tensors["lengths"], {}, self.facts["batch"]["pad_id"])
        for phase in ("batch", *phases):
            batch = batch.adding(**self.of(phase))
        return batch


def find(run: Path, step: int | None) -> Path:
    """Return the folder of the step's capsule; ``run`` is a run folder, a folder of capsules or one capsule.

    Raises InputError where there is none, naming the steps that were kept; without ``step`` there must be one.
    """
    if not run.is_dir():
        raise InputError(f"RUN={run}: no such folder; name a run folder, such as outputs/grpo/lab-seed1")
    if (run / FACTS).exists():
        folders = {step_of(run): run}
    else:
        place = run / FOLDER if (run / FOLDER).is_dir() else run
        folders = {step_of(path): path for path in sorted(place.glob("step_*")) if path.suffix == "" and path.is_dir()}
        unfinished = {step_of(path) for path in place.glob(f"step_*{PARTIAL}")}
        if step in unfinished - folders.keys():
            raise InputError(
                f"--step={step}: its capsule is half written, as the run ended meanwhile; repeat the command of the "
                f"run, which writes it anew. {_has(folders)}"
            )
    if not folders:
        raise InputError(
            f"RUN={run}: holds no capsules; keep steps with trainer.capsule_steps=[N], which a resumed run may begin "
            "to do"
        )
    if step is None and len(folders) > 1:
        raise InputError(f"--step: name one. {_has(folders)}")
    chosen = next(iter(folders)) if step is None else step
    if chosen not in folders:
        raise InputError(f"--step={step}: {run} has no capsule of that step. {_has(folders)}")
    return folders[chosen]


def _has(folders: Mapping[int, Path]) -> str:
    return f"Kept: {', '.join(map(str, folders))}" if folders else "No other step is kept"


def read(folder: Path) -> StoredStep:
    """Read a capsule and check every file of it. Raises InputError for a damaged one, or one of another version."""
    from safetensors.torch import load_file

    path = folder / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version, hashes = facts["format"], dict(facts["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"cannot be read as a capsule ({type(error).__name__}: {error})"
        raise InputError(f"{path}: {rule}; copy it anew, or let the run keep the step again") from error
    if version != FORMAT:
        raise InputError(
            f"{path}: has format {version}, and this code reads {FORMAT}; replay it with the code that wrote it, "
            f"commit {facts.get('code', {}).get('commit')}"
        )
    for name, recorded in hashes.items():
        file = inside(folder, name, path)
        if not file.is_file():
            raise InputError(f"{file}: is missing; copy the capsule anew, or let the run keep the step again")
        if file_sha256(file) != recorded:
            raise InputError(f"{file}: was altered or cut short; copy the capsule anew, or keep the step again")
    _check_weights(facts, path)
    tensors = {name: value.clone() for name, value in load_file(folder / TENSORS).items()}  # aligned as torch does
    return StoredStep(folder, facts, tensors)


def _check_weights(facts: Mapping[str, Any], path: Path) -> None:
    """Check the names of the folders in which a capsule has its weights."""
    if "actor" not in (kept := facts["weights"]["kept"]):
        raise InputError(f"{path}: weights.kept={kept}: lacks the policy's weights (actor); let the run keep it again")
    for name in kept:
        if name not in MODELS:
            raise InputError(f"{path}: weights.kept={ascii(name)[:200]}: must be one of {', '.join(MODELS)}; {FIX}")
        inside(path.parent, name, path)
