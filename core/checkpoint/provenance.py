"""Which run a checkpoint or a result belongs to.

That is its models (and the weights that they started from), seed, ranks, threads, configuration, the contents of the
files that it names, and package versions. Two of them are compared in ``core/checkpoint/changes.py``. This module
imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from core.config.locations import local_path

PACKAGES = ("torch", "transformers", "numpy", "vllm", "ray")
FORMATS = ("model*.safetensors", "pytorch_model*.bin")  # of weights, in the order in which transformers looks for them
BLOCK = 1 << 24  # bytes
THREADS = 8  # that hash; each has a block in memory


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
