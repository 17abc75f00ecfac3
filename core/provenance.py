"""Which run a checkpoint or a result belongs to: model, seed, ranks, threads, configuration, package versions.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "transformers", "numpy", "vllm", "ray")


@dataclass(frozen=True)
class ModelFingerprint:
    """What two models must have in common for the weights of one to fit the other."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, module: Any) -> ModelFingerprint:
        """Of a torch module: the class name and the (global) shape of every parameter. Works on the meta device."""
        return cls(type(module).__name__, {name: tuple(value.shape) for name, value in module.named_parameters()})

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


def package_versions() -> dict[str, str]:
    """The installed versions of the packages that decide the numbers."""
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


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
        models = {
            name: ModelFingerprint(model["architecture"], {key: tuple(shape) for key, shape in model["shapes"].items()})
            for name, model in value["models"].items()
        }
        return cls(**{**value, "models": models})
