"""One checkpoint folder: the manifest that seals it, its verification, and whether a run may go on from it.

Which folder is written or taken is decided in ``core/checkpoint/store.py``. The manifest of a run folder is another
file, see ``core/tracking/run_manifest.py``. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.checkpoint.changes import Change, changes
from core.checkpoint.provenance import ModelFingerprint, Provenance
from core.config.section import FrozenDict
from core.errors import InputError
from core.files.durable_files import file_sha256, fsync, write_durably
from core.files.file_names import inside, plain_name

FORMAT = 2
MANIFEST = "manifest.json"
NAME = re.compile(r"global_step_(0|[1-9]\d*)")


class DamagedCheckpoint(InputError):
    """A folder is not the complete checkpoint that was once written there."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete folder whose hashes were verified when this object was made."""

    folder: Path
    step: int
    files: Mapping[str, Mapping[str, Any]]  # name in the folder -> {"bytes", "sha256"}
    provenance: Provenance | None = None

    def path(self, name: str) -> Path:
        """Return the file or subfolder ``name`` of the checkpoint.

        Raises:
            InputError: the manifest lists no such file, so nothing vouches for it.
        """
        if not any(file == name or file.startswith(f"{name}/") for file in self.files):
            raise InputError(f"{self.folder} holds no {name}; it holds {', '.join(sorted(self.files)) or 'nothing'}")
        return self.folder / name

    def check_compatible(self, run: Provenance, *, allow: bool = False) -> list[Change]:
        """Check whether a run may go on from here.

        Returns:
            What differs from the run that wrote it and is allowed to (ranks, threads, package versions, keys that
            change no objective; with ``allow`` all). Where this is not empty, the resumed run is not promised to be
            bit-identical to an uninterrupted one.

        Raises:
            InputError: the weights are of another model, or the seed is another one (examples and
                sampling seeds are functions of it: prompts would be trained twice, others never), or, without
                ``allow``, base, data or objective are other ones.
        """
        self.check_models(run.models)
        saved = self.provenance
        if saved.seed != run.seed:
            raise InputError(
                f"trainer.seed={run.seed}, but {self.folder} was written with seed {saved.seed}: a resumed run must "
                f"keep its seed, which decides the order of the data. Set trainer.seed={saved.seed}, or choose another "
                "trainer.experiment_name"
            )
        changed = changes(saved, run)
        if refused := [change for change in changed if change.refused and not allow]:
            rule = (
                f"{self.folder} is of a run with these other settings, and a resumed run must keep its base, its data, "
                "what it trains and how it is measured. Take the changes back, or choose another "
                "trainer.experiment_name; trainer.resume_with_changes=True goes on with them and records them"
            )
            raise InputError([*map(str, refused), rule])
        return changed

    def check_models(self, models: Mapping[str, ModelFingerprint]) -> None:
        """Check the part of :meth:`check_compatible` that can be known before a weight is read.

        ``models`` are those of :func:`core.learner.saving.planned_fingerprints`. Raises InputError for other ones.
        """
        if self.provenance is None:
            raise InputError(f"{self.folder}: the manifest does not say which run it is of, so it cannot be resumed")
        saved = self.provenance.models
        for name in sorted(saved.keys() | models.keys()):
            if name in saved and name in models:
                self._check_model(name, saved[name], models[name])
                continue
            holds, needs = ("holds a", "has none") if name in saved else ("holds no", "has one")
            raise InputError(
                f"{self.folder} {holds} {name}, but this run {needs} (algorithm.adv_estimator decides whether there "
                "is a critic). Resume with the configuration of the run, or choose another trainer.experiment_name"
            )

    def _check_model(self, name: str, there: ModelFingerprint, here: ModelFingerprint) -> None:
        differences = there.differences(here)
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise InputError(
                f"{self.folder} is a checkpoint of another model ({name}): {'; '.join(differences[:3])}{more}. A "
                "resumed run must keep its model: set actor_rollout_ref.model.path (critic.model.path) to the one the "
                "run started from, or choose another trainer.experiment_name"
            )
        if here.has_adapters and there.base and here.base and there.base.sha256 != here.base.sha256:
            key = "actor_rollout_ref.model.path" if name == "actor" else f"{name}.model.path"
            raise InputError(
                f"{key}={here.base.path} (weights of SHA-256 {here.base.sha256[:12]}): {self.folder} holds adapters "
                f"of another base, {there.base.path} as it was then (SHA-256 {there.base.sha256[:12]}); adapters fit "
                "the weights that they were trained on alone. Give the run that base, wherever it is now, or choose "
                "another trainer.experiment_name"
            )


def verify(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """Check every file that the manifest of ``folder`` lists, and return the checkpoint.

    Args:
        hashes: also read every file and compare its SHA-256; False compares presence and size only.

    Raises:
        DamagedCheckpoint: names the file and what is wrong with it.
        InputError: written by a later version of this code.
    """
    body = _read_manifest(folder)
    for name, recorded in body["files"].items():
        try:
            size = inside(folder, name, folder / MANIFEST).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{folder}: {name} is missing ({error.strerror})") from error
        except InputError as error:
            raise DamagedCheckpoint(str(error)) from error
        if size != recorded["bytes"]:
            raise DamagedCheckpoint(f"{folder}: {name} has {size} bytes, the manifest says {recorded['bytes']}")
    if hashes:
        for name, digest in _hash_all(folder, body["files"]).items():
            if digest != body["files"][name]["sha256"]:
                raise DamagedCheckpoint(f"{folder}: {name} was altered: its SHA-256 is not the one in the manifest")
        for name in body["files"]:
            check_index(folder / name)
    saved = body["provenance"]
    try:
        return Checkpoint(folder, body["step"], body["files"], Provenance.from_json(saved) if saved else None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is not a manifest ({type(error).__name__}: {error})") from error


def check_index(path: Path) -> None:
    """Check the names of files in an index of weights (``*.index.json``); any other file is none.

    Raises DamagedCheckpoint: transformers would read, and an export copy, what they lead to.
    """
    if not path.name.endswith(".index.json"):
        return
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        for name in names:
            plain_name(name, path)
    except InputError as error:
        raise DamagedCheckpoint(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: is no index of weights ({type(error).__name__}: {error})") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body, digest = manifest["body"], manifest["sha256"]
        shapes = [(int(entry["bytes"]), str(entry["sha256"])) for entry in body["files"].values()]
        if not isinstance(body["step"], int) or any(size < 0 for size, _ in shapes):
            raise ValueError("step or sizes are no numbers")
    except OSError as error:
        raise DamagedCheckpoint(f"{folder}: no readable {MANIFEST} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is not a manifest ({type(error).__name__}: {error})") from error
    if digest != _digest(body):
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} was altered: its own SHA-256 does not match")
    if body.get("format") != FORMAT:
        raise InputError(
            f"{folder} has format {body.get('format')}, this code reads {FORMAT}: resume with the code that wrote it"
        )
    named = NAME.fullmatch(folder.name)
    if named and int(named[1]) != body["step"]:
        raise DamagedCheckpoint(f"{folder}: the manifest is of step {body['step']}: the folder was renamed")
    return body


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash_all(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of each file; hashing releases the interpreter lock, so threads help with large ones."""

    def sha256(name: str) -> str:
        try:
            return file_sha256(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder}: {name} cannot be read ({error.strerror})") from error

    with ThreadPoolExecutor(max_workers=min(8, max(1, len(names)))) as pool:
        return dict(zip(names, pool.map(sha256, names), strict=True))


def seal(folder: Path, step: int, provenance: Provenance | None, hashes: Mapping[str, str] = FrozenDict()) -> None:
    """Put everything in ``folder`` on disk, then a manifest that lists and hashes it, on disk too.

    ``hashes`` are the SHA-256 of files whose writers computed them; those are not read again.
    """
    paths = sorted(folder.rglob("*"))
    names = [str(path.relative_to(folder)) for path in paths if path.is_file()]
    for path in paths:
        fsync(path)
    sums = {**_hash_all(folder, [name for name in names if name not in hashes]), **hashes}
    body = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": sums[name]} for name in names},
        "provenance": None if provenance is None else dataclasses.asdict(provenance),
    }
    body = json.loads(json.dumps(body))  # as a reader will see it, so that the digest is of the same thing
    write_durably(folder / MANIFEST, json.dumps({"sha256": _digest(body), "body": body}, indent=1))
    fsync(folder)
