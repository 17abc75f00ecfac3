"""Which run a checkpoint or a result belongs to.

That is its model (and the base of adapters), seed, ranks, threads, configuration and package versions. Comparing two
of them is done in ``core/checkpoint/manifest.py``. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "numpy", "vllm", "ray")
FORMATS = ("model*.safetensors", "pytorch_model*.bin")  # of weights, in the order in which transformers looks for them
BLOCK = 1 << 24  # bytes


@dataclass(frozen=True)
class Base:
    """The frozen weights under adapters, which a checkpoint does not hold: where they were, and their SHA-256."""

    path: str
    sha256: str


@dataclass(frozen=True)
class ModelFingerprint:
    """What two models must have in common for the weights of one to fit the other."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    base: Base | None = None  # of a model with adapters

    @classmethod
    def of(cls, module: Any, base: Base | None = None) -> ModelFingerprint:
        """Return the class name of a torch module and the (global) shape of every parameter, on the meta device too."""
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        return cls(type(module).__name__, shapes, base)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFingerprint:
        base = value.get("base")  # checkpoints of before have none
        shapes = {key: tuple(shape) for key, shape in value["shapes"].items()}
        return cls(value["architecture"], shapes, Base(**base) if base else None)

    def differences(self, other: ModelFingerprint) -> list[str]:
        """Return what this (saved) model has otherwise than ``other`` (of this run), one phrase each."""
        found = []
        if self.architecture != other.architecture:
            found.append(f"architecture {self.architecture} there, {other.architecture} here")
        for name in sorted(self.shapes.keys() | other.shapes.keys()):
            there, here = (list(one.shapes[name]) if name in one.shapes else "absent" for one in (self, other))
            if there != here:
                found.append(f"{name} is {there} there, {here} here")
        return found


def base_of(path: str) -> Base:
    """Return the SHA-256 of the weights in a Hugging Face folder (or of a hub id's, as this machine holds them).

    Of safetensors every tensor counts by name, type, shape and bytes, so a copy that is cut into other files is the
    same base; of other formats the files do. Reads all of them, once a process. Raises FileNotFoundError.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=list(FORMATS), local_files_only=True))
    files = next((found for pattern in FORMATS if (found := sorted(folder.glob(pattern)))), None)
    if files is None:
        raise FileNotFoundError(f"{path}: no weights ({', '.join(FORMATS)}) there")
    entries = [entry for file in files for entry in _entries(file, file.stat().st_size, file.stat().st_mtime_ns)]
    return Base(path, hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest())


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
        found = []
        for name, one in header.items():
            digest, (begin, end) = hashlib.sha256(), one["data_offsets"]
            stream.seek(start + begin)
            while begin < end:
                block = stream.read(min(end - begin, BLOCK))
                if not block:
                    raise FileNotFoundError(f"{file} is cut short: fetch the model again")
                digest.update(block)
                begin += len(block)
            found.append(f"{name} {one['dtype']} {one['shape']} {digest.hexdigest()}")
        return tuple(found)


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
    versions: Mapping[str, str] = field(default_factory=package_versions)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        models = {name: ModelFingerprint.from_json(model) for name, model in value["models"].items()}
        return cls(**{**value, "models": models})
