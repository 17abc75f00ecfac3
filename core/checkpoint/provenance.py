"""Which run a checkpoint or a result belongs to: model (and the base of adapters), seed, ranks, threads, configuration,
package versions.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        """Of a torch module: the class name and the (global) shape of every parameter. Works on the meta device."""
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        return cls(type(module).__name__, shapes, base)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFingerprint:
        base = value.get("base")  # checkpoints of before have none
        shapes = {key: tuple(shape) for key, shape in value["shapes"].items()}
        return cls(value["architecture"], shapes, Base(**base) if base else None)

    def differences(self, other: ModelFingerprint) -> list[str]:
        """What this (saved) model has otherwise than ``other`` (of this run), one phrase each."""
        found = []
        if self.architecture != other.architecture:
            found.append(f"architecture {self.architecture} there, {other.architecture} here")
        for name in sorted(self.shapes.keys() | other.shapes.keys()):
            there, here = self.shapes.get(name), other.shapes.get(name)
            if there != here:
                found.append(f"{name} is {_shape(there)} there, {_shape(here)} here")
        return found


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def base_of(path: str) -> Base:
    """The SHA-256 of the weights in a Hugging Face folder (or of a hub id's, as this machine holds them).

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
    return Base(path, _sha256([(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]))


def _sha256(files: Sequence[tuple[Path, int, int]]) -> str:
    entries = sorted(entry for file in files for entry in _entries(*file))
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()


@functools.cache
def _entries(file: Path, size: int, changed: int) -> tuple[str, ...]:
    """A line a tensor of a safetensors file (eight bytes of length, a header in JSON, the tensors), else one in all."""
    with open(file, "rb") as stream:
        if file.suffix != ".safetensors":
            return (f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}",)
        start = 8 + int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(start - 8))
        header.pop("__metadata__", None)
        found = []
        for name, one in header.items():
            digest = hashlib.sha256()
            for block in _blocks(stream, *(start + offset for offset in one["data_offsets"])):
                digest.update(block)
            found.append(f"{name} {one['dtype']} {one['shape']} {digest.hexdigest()}")
        return tuple(found)


def _blocks(stream: Any, start: int, end: int) -> Iterator[bytes]:
    stream.seek(start)
    while start < end:
        block = stream.read(min(end - start, BLOCK))
        if not block:
            raise FileNotFoundError(f"{stream.name} is cut short: fetch the model again")
        start += len(block)
        yield block


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The installed versions, by default of the packages that decide the numbers."""
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
