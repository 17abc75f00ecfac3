"""Which run a checkpoint or a result belongs to, and what a run that resumes has otherwise than the run that wrote it.

That is its models (and the weights that they started from), seed, ranks, threads, configuration, the contents of the
files that it names, and package versions. What a change of a key means is said by its field (its role).
This module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from core.config import recorded_settings
from core.config.checked import schema_for
from core.config.problem import brief, show
from core.config.section import BOOKKEEPING, FILES, IDENTITY
from core.errors import InputError
from core.files import local_path

PACKAGES = ("torch", "transformers", "numpy", "vllm", "ray")
FORMATS = ("model*.safetensors", "pytorch_model*.bin")  # of weights, in the order in which transformers looks for them
BLOCK = 1 << 24  # bytes
THREADS = 8  # that hash; each has a block in memory
SEED = "trainer.seed"  # has a refusal of its own, which no flag lifts
MODELS = {"actor_rollout_ref.model.path": "actor", "critic.model.path": "critic"}

# ---------------------------------------------------------------- models and the weights that they started from


@dataclass(frozen=True)
class Base:
    """The weights that a model started from: where they were, their SHA-256, and how to know them unread.

    ``stamp`` is a hash of the files' names, sizes and times of change (of a hub's, of the commit): as long as path and
    stamp match, no file is read.
    """

    path: str
    sha256: str
    stamp: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.path} (SHA-256 {self.sha256[:12]})"


@dataclass(frozen=True)
class ModelFingerprint:
    """What two models must have in common for the weights of one to fit the other."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    base: Base | None = None  # None where it is not known: of weights out of reach

    @classmethod
    def of(cls, module: Any, base: Base | None = None) -> ModelFingerprint:
        """Return the class name of a torch module and the (global) shape of every parameter, on the meta device too."""
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        return cls(type(module).__name__, shapes, base)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFingerprint:
        base = value.get("base")
        shapes = {key: tuple(shape) for key, shape in value["shapes"].items()}
        return cls(value["architecture"], shapes, Base(**base) if base else None)

    @property
    def has_adapters(self) -> bool:
        return any(".lora_" in name for name in self.shapes)

    def differences(self, other: ModelFingerprint) -> list[str]:
        """Return what this (saved) model has otherwise than ``other`` (of this run), one phrase each."""
        differences = []
        if self.architecture != other.architecture:
            differences.append(f"architecture {self.architecture} there, {other.architecture} here")
        for name in sorted(self.shapes.keys() | other.shapes.keys()):
            there, here = (list(model.shapes[name]) if name in model.shapes else "absent" for model in (self, other))
            if there != here:
                differences.append(f"{name} is {there} there, {here} here")
        return differences


def base_of(path: str, known: Base | None = None) -> Base:
    """Return the SHA-256 of the weights in a Hugging Face folder (or of a hub id's or URL's, as this machine has them).

    Of safetensors every tensor counts by name, type, shape and bytes, so a copy that is cut into other files is the
    same base; of other formats the files do. Several threads read the files, once a process, and nothing is read where
    ``known`` has the same path and stamp. Raises FileNotFoundError.
    """
    folder, commit = Path(local_path(path, "model")), None
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=list(FORMATS), local_files_only=True))
        commit = folder.name
    files = next((files for pattern in FORMATS if (files := sorted(folder.glob(pattern)))), None)
    if files is None:
        raise FileNotFoundError(f"{path}: no weights ({', '.join(FORMATS)}) there")
    stats = [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    named = [(file.name, size, commit or changed) for file, size, changed in stats]
    stamp = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
    if known is not None and (known.path, known.stamp) == (path, stamp):
        return known
    entries = [entry for stat in stats for entry in _entries(*stat)]
    return Base(path, hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest(), stamp)


@functools.cache
def _entries(file: Path, size: int, changed: int) -> tuple[str, ...]:
    """Return a line a tensor of a safetensors file, else one in all; ``size`` and ``changed`` are keys of the cache.

    A safetensors file holds eight bytes of length, a header in JSON, and the tensors.
    """
    with open(file, "rb") as stream:
        if file.suffix != ".safetensors":
            return (f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}",)
        start = 8 + int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(start - 8))
        header.pop("__metadata__", None)

        def line(name: str) -> str:
            tensor = header[name]
            begin, end = (start + offset for offset in tensor["data_offsets"])
            return f"{name} {tensor['dtype']} {tensor['shape']} {_digest(stream.fileno(), begin, end, file)}"

        with ThreadPoolExecutor(THREADS) as pool:
            return tuple(pool.map(line, header))


def _digest(number: int, begin: int, end: int, file: Path) -> str:
    """Return the SHA-256 of a range of an open file."""
    digest = hashlib.sha256()
    while begin < end:
        block = os.pread(number, min(end - begin, BLOCK), begin)
        if not block:
            raise FileNotFoundError(f"{file} is cut short: fetch the model again")
        digest.update(block)
        begin += len(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- a run, and another that goes on from it


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the installed versions, by default of the packages that decide the numbers."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@dataclass(frozen=True)
class Provenance:
    """Which run a checkpoint belongs to: written into its manifest, compared at a resume."""

    models: Mapping[str, ModelFingerprint]  # "actor", and "critic" where there is one
    seed: int
    ranks: int
    threads: int
    config: Mapping[str, Any]  # flat key -> value, as JSON has it
    contents: Mapping[str, list[str]] = field(default_factory=dict)  # key -> SHA-256 of the files that it names
    versions: Mapping[str, str] = field(default_factory=package_versions)

    @property
    def bases(self) -> dict[str, Base]:
        """The base of each model, where it is known."""
        return {name: model.base for name, model in self.models.items() if model.base is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        models = {name: ModelFingerprint.from_json(model) for name, model in value["models"].items()}
        return cls(**{**value, "models": models})


@dataclass(frozen=True)
class Change:
    """A key (or ranks, threads, a package) with the value of the checkpoint and that of the run."""

    key: str
    there: Any
    here: Any
    refused: bool = False  # another objective, other data or another base: not without trainer.resume_with_changes

    def __str__(self) -> str:
        return f"{self.key} was {brief(show(self.there, self.key))}, is {brief(show(self.here, self.key))}"


def check_resume(folder: Path, saved: Provenance | None, run: Provenance, *, allow: bool = False) -> list[Change]:
    """Check whether ``run`` may go on from the checkpoint in ``folder``, which ``saved`` wrote.

    Returns:
        What differs and is allowed to (ranks, threads, package versions, keys that change no objective; with ``allow``
        all). Where this is not empty, the resumed run is not promised to be bit-identical to an uninterrupted one.

    Raises:
        InputError: the weights are of another model, or the seed is another one (examples and sampling seeds are
            functions of it: prompts would be trained twice, others never), or, without ``allow``, base, data or
            objective are other ones.
    """
    if saved is None:
        raise InputError(f"{folder}: the manifest does not say which run it is of, so it cannot be resumed")
    for name in sorted(saved.models.keys() | run.models.keys()):
        if name in saved.models and name in run.models:
            _check_model(folder, name, saved.models[name], run.models[name])
            continue
        holds, needs = ("holds a", "has none") if name in saved.models else ("holds no", "has one")
        raise InputError(
            f"{folder} {holds} {name}, but this run {needs} (algorithm.adv_estimator decides whether there is a "
            "critic). Resume with the configuration of the run, or choose another trainer.experiment_name"
        )
    if saved.seed != run.seed:
        raise InputError(
            f"{SEED}={run.seed}, but {folder} was written with seed {saved.seed}: a resumed run must keep its seed, "
            f"which decides the order of the data. Set {SEED}={saved.seed}, or choose another trainer.experiment_name"
        )
    changed = sorted([*_settings(saved, run), *_surroundings(saved, run)], key=lambda change: not change.refused)
    if refused := [change for change in changed if change.refused and not allow]:
        rule = (
            f"{folder} is of a run with these other settings, and a resumed run must keep its base, its data, what it "
            "trains and how it is measured. Take the changes back, or choose another trainer.experiment_name; "
            "trainer.resume_with_changes=True goes on with them and records them"
        )
        raise InputError([*map(str, refused), rule])
    return changed


def _check_model(folder: Path, name: str, there: ModelFingerprint, here: ModelFingerprint) -> None:
    if differences := there.differences(here):
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise InputError(
            f"{folder} is a checkpoint of another model ({name}): {'; '.join(differences[:3])}{more}. A resumed run "
            "must keep its model: set actor_rollout_ref.model.path (critic.model.path) to the one the run started "
            "from, or choose another trainer.experiment_name"
        )
    if here.has_adapters and there.base and here.base and there.base.sha256 != here.base.sha256:
        key = next(key for key, model in MODELS.items() if model == name)
        raise InputError(
            f"{key}={here.base}: {folder} holds adapters of another base, {there.base} as it was then; adapters fit "
            "the weights that they were trained on alone. Give the run that base, wherever it is now, or choose "
            "another trainer.experiment_name"
        )


def _settings(saved: Provenance, run: Provenance) -> Iterator[Change]:
    """Yield every key whose other value counts, by its role; of a file the content counts where its hash is known."""
    schema = schema_for(run.config)
    there, here = (recorded_settings.completed(each.config, schema) for each in (saved, run))
    keys = there.keys() | here.keys() | saved.contents.keys() | run.contents.keys()
    if "critic" not in {*saved.models, *run.models}:  # its keys follow the policy's, and nothing reads them
        keys = {key for key in keys if not key.startswith("critic.")}
    for key in sorted({*keys} - {SEED}):
        role, pair = recorded_settings.role_of(key), [there.get(key), here.get(key)]
        hashes = [_hashes(key, saved), _hashes(key, run)]
        known = None not in hashes  # where one is not recorded the names have to do
        if known and (hashes[0] != hashes[1] or role == FILES):  # a file may have moved
            same = hashes[0] == hashes[1]
        else:
            same = pair[0] == pair[1]
        if not same and role != BOOKKEEPING:
            shown = [_named(*one) for one in zip(pair, hashes, strict=True)] if known else pair
            yield Change(key, *shown, refused=role in (IDENTITY, FILES))


def _hashes(key: str, of: Provenance) -> list[str] | None:
    """Return the hashes of what a key names, or None where they are not recorded."""
    if key not in MODELS:
        return of.contents.get(key)
    base = of.bases.get(MODELS[key])
    return [base.sha256] if base is not None else None


def _named(value: Any, hashes: list[str]) -> str:
    return f"{brief(show(value))} (SHA-256 {', '.join(one[:12] for one in hashes)})"


def _surroundings(saved: Provenance, run: Provenance) -> Iterator[Change]:
    pairs = [(name, getattr(saved, name), getattr(run, name)) for name in ("ranks", "threads")]
    names = sorted(saved.versions.keys() | run.versions.keys())
    pairs += [(name, saved.versions.get(name), run.versions.get(name)) for name in names]
    yield from (Change(*pair) for pair in pairs if pair[1] != pair[2])
