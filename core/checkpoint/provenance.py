"""Which run a checkpoint belongs to, and what a run that resumes has otherwise than the run that
wrote it.

What a change of a key means is said by its field's role. This module imports neither torch nor
transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from core.config import convert, recorded
from core.config.section import BOOKKEEPING, FILES, IDENTITY, brief, show
from core.errors import InputError
from core.files import file_sha256, local_path

log = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "numpy", "vllm", "ray")
# Of weights, in the order in which transformers looks for them
FORMATS = ("model*.safetensors", "pytorch_model*.bin")
MODELS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


def base_of(path: str) -> str:
    """Return the SHA-256 of the weights in a Hugging Face folder (or of a hub id's or URL's, as
    this machine has them).

    Of safetensors every tensor counts by name, type, shape and bytes, so a copy that is cut into
    other files is the same base; of other formats the files do. Raises FileNotFoundError.
    """
    folder = Path(local_path(path, "model")).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=list(FORMATS), local_files_only=True))
    files = next((files for pattern in FORMATS if (files := sorted(folder.glob(pattern)))), None)
    if files is None:
        raise FileNotFoundError(f"{path}: no weights ({', '.join(FORMATS)}) there")
    lines = [
        line
        for file in files
        for line in _tensors(file, file.stat().st_size, file.stat().st_mtime_ns)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def bases(config: Any) -> dict[str, list[str]]:
    """Return key -> SHA-256 of the weights that it names, of the models that train and are on this
    machine."""
    found = {}
    for name, key in MODELS.items():
        if name == "actor" or config.has_critic:
            try:
                found[key] = [base_of(convert.get(config, key))]
            except (OSError, ValueError) as error:
                log.info("the weights that the %s starts from are not recorded: %s", name, error)
    return found


@functools.cache
def _tensors(file: Path, size: int, changed: int) -> list[str]:
    """Return a line a tensor of a safetensors file, else one in all; ``size`` and ``changed`` are
    keys of the cache."""
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

    seed: int
    ranks: int
    threads: int
    config: Mapping[str, Any]  # flat key -> value, as JSON has it
    # Key -> SHA-256 of the files that it names
    contents: Mapping[str, list[str]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=package_versions)


@dataclass(frozen=True)
class Change:
    """A key (or ranks, threads, a package) with the value of the checkpoint and that of the run."""

    key: str
    there: Any
    here: Any
    # Another objective, other data or weights: not without trainer.resume_with_changes
    refused: bool = False

    def __str__(self) -> str:
        return (
            f"{self.key} was {brief(show(self.there, self.key))}, is "
            f"{brief(show(self.here, self.key))}"
        )


def check_resume(
    folder: Path, saved: Provenance | None, run: Provenance, *, allow: bool = False
) -> list[Change]:
    """Check whether ``run`` may go on from the checkpoint in ``folder``, which ``saved`` wrote.

    Returns what differs and is allowed to (with ``allow`` all): the resumed run is then not
    bit-identical to an uninterrupted one. Raises InputError for another seed and, without
    ``allow``, for other weights, data or objective.
    """
    fix = "or choose another trainer.experiment_name"
    if saved is None:
        raise InputError(
            f"{folder}: the manifest does not say which run it is of, so it cannot be resumed"
        )
    if saved.seed != run.seed:
        rule = f"{folder} has seed {saved.seed}, which decides the order of the data"
        raise InputError(f"trainer.seed={run.seed}: {rule}; set it to {saved.seed}, {fix}")
    changed = sorted(_changes(saved, run), key=lambda change: not change.refused)
    if (refused := [change for change in changed if change.refused]) and not allow:
        rule = (
            f"{folder} is of a run with these other settings, and a resumed run must keep its "
            f"base, its data, what it "
            f"trains and how it is measured. Take the changes back, {fix}; "
            f"trainer.resume_with_changes=True goes on "
            "with them and records them"
        )
        raise InputError([*map(str, refused), rule])
    return changed


def _changes(saved: Provenance, run: Provenance) -> Iterator[Change]:
    """Yield every key whose other value counts, by its role (of a file its content), ranks, threads
    and packages."""
    schemas = recorded.schemas()
    schema = next(
        (one for one in schemas if run.config.keys() <= convert.all_keys(one).keys()), schemas[0]
    )
    there, here = (recorded.completed(each.config, schema) for each in (saved, run))
    for key in sorted({*there, *here, *saved.contents, *run.contents} - {"trainer.seed"}):
        role, pair = recorded.role_of(key), [there.get(key), here.get(key)]
        sums = [saved.contents.get(key), run.contents.get(key)]
        # Those keys follow the policy's
        unread = key.startswith("critic.") and not here.get("critic.enable")
        same = pair[0] == pair[1]
        if None not in sums:  # a file may have moved
            same = sums[0] == sums[1] and (same or role == FILES)
            named = (", ".join(one[:12] for one in of_key) for of_key in sums)
            pair = [
                f"{brief(show(value))} (SHA-256 {text})"
                for value, text in zip(pair, named, strict=True)
            ]
        if not (same or unread or role == BOOKKEEPING):
            yield Change(key, *pair, refused=role in (IDENTITY, FILES))
    around = [
        {"ranks": one.ranks, "threads": one.threads, **dict(sorted(one.versions.items()))}
        for one in (saved, run)
    ]
    for name in dict.fromkeys([*around[0], *around[1]]):
        if around[0].get(name) != around[1].get(name):
            yield Change(name, around[0].get(name), around[1].get(name))
