"""Which run a checkpoint or a result belongs to, and what a run that resumes has otherwise than the run that wrote it.

What a change of a key means is said by its field's role. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from core.config import convert, recorded
from core.config.section import BOOKKEEPING, FILES, IDENTITY, brief, show
from core.errors import InputError
from core.files import file_sha256, local_path

PACKAGES = ("torch", "transformers", "numpy", "vllm", "ray")
FORMATS = ("model*.safetensors", "pytorch_model*.bin")  # of weights, in the order in which transformers looks for them
MODELS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


@dataclass(frozen=True)
class Base:
    """The weights that a model started from: where they were, and their SHA-256."""

    path: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} (SHA-256 {self.sha256[:12]})"


def base_of(path: str) -> Base:
    """Return the SHA-256 of the weights in a Hugging Face folder (or of a hub id's or URL's, as this machine has them).

    Of safetensors every tensor counts by name, type, shape and bytes, so a copy that is cut into other files is the
    same base; of other formats the files do. Raises FileNotFoundError.
    """
    folder = Path(local_path(path, "model"))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=list(FORMATS), local_files_only=True))
    files = next((files for pattern in FORMATS if (files := sorted(folder.glob(pattern)))), None)
    if files is None:
        raise FileNotFoundError(f"{path}: no weights ({', '.join(FORMATS)}) there")
    lines = [line for file in files for line in _tensors(file, file.stat().st_size, file.stat().st_mtime_ns)]
    return Base(path, hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest())


@functools.cache
def _tensors(file: Path, size: int, changed: int) -> list[str]:
    """Return a line a tensor of a safetensors file, else one in all; ``size`` and ``changed`` are keys of the cache."""
    if file.suffix != ".safetensors":
        return [f"{file.name} {file_sha256(file)}"]
    with open(file, "rb") as stream:  # eight bytes of length, a header in JSON, the tensors
        start, lines = 8 + int.from_bytes(stream.read(8), "little"), []
        for name, tensor in json.loads(stream.read(start - 8)).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                stream.seek(start + begin)
                digest = hashlib.sha256(stream.read(end - begin)).hexdigest()
                lines.append(f"{name} {tensor['dtype']} {tensor['shape']} {digest}")
    return lines


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

    @property
    def has_adapters(self) -> bool:
        return any(".lora_" in name for name in self.shapes)


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

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        models = {}
        for name, model in value["models"].items():
            shapes = {key: tuple(shape) for key, shape in model["shapes"].items()}
            base = Base(**model["base"]) if model["base"] else None
            models[name] = ModelFingerprint(model["architecture"], shapes, base)
        return cls(**{**value, "models": models})

    def hashes(self) -> dict[str, list[str]]:
        """Return key -> SHA-256 of the files that it names, models included, as far as they are known."""
        bases = {MODELS[name]: [model.base.sha256] for name, model in self.models.items() if model.base is not None}
        return {**self.contents, **bases}


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

    Returns what differs and is allowed to (ranks, threads, package versions, keys that change no objective; with
    ``allow`` all): the resumed run is then not bit-identical to an uninterrupted one. Raises InputError for another
    model or seed (which decides the prompts) and, without ``allow``, for another base, other data or objective.
    """
    fix = "or choose another trainer.experiment_name"
    if saved is None:
        raise InputError(f"{folder}: the manifest does not say which run it is of, so it cannot be resumed")
    if saved.models.keys() != run.models.keys():
        there, here = (", ".join(sorted(one.models)) for one in (saved, run))
        rule = f"algorithm.adv_estimator decides whether a run has a critic: this one has {here}"
        raise InputError(f"{folder} holds {there}; {rule}. Resume with the configuration of the run, {fix}")
    for name, there in saved.models.items():
        key, here = MODELS[name], run.models[name]
        odd = [
            part for part in sorted({*there.shapes, *here.shapes}) if there.shapes.get(part) != here.shapes.get(part)
        ]
        if odd or there.architecture != here.architecture:
            shapes = (f"{one.architecture} {[one.shapes.get(part) for part in odd[:3]]}" for one in (there, here))
            kinds = " there, ".join(shapes)
            raise InputError(
                f"{folder} is a checkpoint of another model ({name}: {', '.join(odd[:3])} of {kinds} here); a resumed "
                f"run must keep its model: set {key} to the one the run started from, {fix}"
            )
        if here.has_adapters and there.base and here.base and there.base.sha256 != here.base.sha256:
            raise InputError(
                f"{key}={here.base}: {folder} holds adapters of another base, {there.base}, which alone they "
                f"fit. Give the run that base, wherever it is now, {fix}"
            )
    if saved.seed != run.seed:
        rule = f"{folder} has seed {saved.seed}, which decides the order of the data"
        raise InputError(f"trainer.seed={run.seed}: {rule}; set it to {saved.seed}, {fix}")
    changed = sorted(_changes(saved, run), key=lambda change: not change.refused)
    if (refused := [change for change in changed if change.refused]) and not allow:
        rule = (
            f"{folder} is of a run with these other settings, and a resumed run must keep its base, its data, what it "
            f"trains and how it is measured. Take the changes back, {fix}; trainer.resume_with_changes=True goes on "
            "with them and records them"
        )
        raise InputError([*map(str, refused), rule])
    return changed


def _changes(saved: Provenance, run: Provenance) -> Iterator[Change]:
    """Yield every key whose other value counts, by its role (of a file its content), ranks, threads and packages."""
    schemas = recorded.schemas()
    schema = next((one for one in schemas if run.config.keys() <= convert.all_keys(one).keys()), schemas[0])
    there, here = (recorded.completed(each.config, schema) for each in (saved, run))
    sums_there, sums_here = saved.hashes(), run.hashes()
    for key in sorted({*there, *here, *sums_there, *sums_here} - {"trainer.seed"}):
        role, pair = recorded.role_of(key), [there.get(key), here.get(key)]
        sums = [sums_there.get(key), sums_here.get(key)]
        unread = key.startswith("critic.") and "critic" not in run.models  # those keys follow the policy's
        same = pair[0] == pair[1]
        if None not in sums:  # a file may have moved
            same = sums[0] == sums[1] and (same or role == FILES)
            named = (", ".join(one[:12] for one in of_key) for of_key in sums)
            pair = [f"{brief(show(value))} (SHA-256 {text})" for value, text in zip(pair, named, strict=True)]
        if not (same or unread or role == BOOKKEEPING):
            yield Change(key, *pair, refused=role in (IDENTITY, FILES))
    around = [
        {"ranks": one.ranks, "threads": one.threads, **dict(sorted(one.versions.items()))} for one in (saved, run)
    ]
    for name in dict.fromkeys([*around[0], *around[1]]):
        if around[0].get(name) != around[1].get(name):
            yield Change(name, around[0].get(name), around[1].get(name))
