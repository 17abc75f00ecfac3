"""Which run a checkpoint belongs to, and how a run that resumes differs from the one that wrote it.

The role of a key's field decides what a change means. This module imports neither torch nor
transformers.
"""

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
# Files of weights, in the order in which transformers looks for them
FORMATS = ("model*.safetensors", "pytorch_model*.bin")
MODELS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


def base_of(path: str) -> str:
    """Return the SHA-256 of a model's weights, in a folder or on this machine by a hub id or URL.

    Of safetensors every tensor counts by name, type, shape and bytes, so a copy that is cut into
    other files is the same base. Of other formats the files count. Raises FileNotFoundError.
    """
    folder = Path(local_path(path, "model")).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=list(FORMATS), local_files_only=True))
    files: list[Path] = []
    for pattern in FORMATS:
        files = files or sorted(folder.glob(pattern))
    if not files:
        raise FileNotFoundError(f"{path}: no weights ({', '.join(FORMATS)}) there")
    lines: list[str] = []
    for file in files:
        state = file.stat()
        lines += _tensors(file, state.st_size, state.st_mtime_ns)
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def bases(config: Any) -> dict[str, list[str]]:
    """Return key -> SHA-256 of weights, of the models that train and are on this machine."""
    hashes = {}
    for name, key in MODELS.items():
        if name == "actor" or config.has_critic:
            try:
                hashes[key] = [base_of(convert.get(config, key))]
            except (OSError, ValueError) as error:
                log.info("the weights that the %s starts from are not recorded: %s", name, error)
    return hashes


@functools.cache
def _tensors(file: Path, size: int, changed: int) -> list[str]:
    """Return a line for each tensor of a safetensors file, or one line for another file.

    ``size`` and ``changed`` are keys of the cache.
    """
    if file.suffix != ".safetensors":
        return [f"{file.name} {file_sha256(file)}"]
    lines = []
    with open(file, "rb") as stream:
        # Eight bytes of length, a header in JSON, the tensors
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            stream.seek(8 + header_bytes + begin)
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
    contents: Mapping[str, list[str]] = field(default_factory=dict)  # key -> SHA-256 of its files
    versions: Mapping[str, str] = field(default_factory=package_versions)


@dataclass(frozen=True)
class Change:
    """A key (or ranks, threads, a package) with the value of the checkpoint and that of the run."""

    key: str
    there: Any
    here: Any
    refused: bool = False  # without trainer.resume_with_changes: other objective, data or weights

    def __str__(self) -> str:
        there, here = (brief(show(value, self.key)) for value in (self.there, self.here))
        return f"{self.key} was {there}, is {here}"


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
        rule = "the manifest does not say which run it is of, so it cannot be resumed"
        raise InputError(f"{folder}: {rule}")
    if saved.seed != run.seed:
        rule = f"{folder} has seed {saved.seed}, which decides the order of the data"
        raise InputError(f"trainer.seed={run.seed}: {rule}; set it to {saved.seed}, {fix}")
    changes = sorted(_changes(saved, run), key=lambda change: not change.refused)
    refused = [str(change) for change in changes if change.refused]
    if refused and not allow:
        rule = (
            f"{folder} is of a run with these other settings, and a resumed run must keep its "
            "base, its data, what it trains and how it is measured. Take the changes back, "
            f"{fix}; trainer.resume_with_changes=True goes on with them and records them"
        )
        raise InputError([*refused, rule])
    return changes


def _changes(saved: Provenance, run: Provenance) -> Iterator[Change]:
    """Yield every key whose other value counts, then other ranks, threads and packages.

    Of files their contents count: a file may have moved.
    """
    schemas = recorded.schemas()
    keys = run.config.keys()
    schema = next((each for each in schemas if keys <= convert.all_keys(each).keys()), schemas[0])
    there, here = (recorded.completed(each.config, schema) for each in (saved, run))
    for key in sorted({*there, *here, *saved.contents, *run.contents} - {"trainer.seed"}):
        role = recorded.role_of(key)
        # The critic's keys follow the policy's where nothing reads them
        unread = key.startswith("critic.") and not here.get("critic.enable")
        if unread or role == BOOKKEEPING:
            continue
        before = there.get(key)
        after = here.get(key)
        same = before == after
        if key in saved.contents and key in run.contents:
            equal = saved.contents[key] == run.contents[key]
            same = equal and (same or role == FILES)
            before = _with_hashes(before, saved.contents[key])
            after = _with_hashes(after, run.contents[key])
        if not same:
            yield Change(key, before, after, refused=role in (IDENTITY, FILES))
    before, after = (
        {"ranks": each.ranks, "threads": each.threads, **dict(sorted(each.versions.items()))}
        for each in (saved, run)
    )
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name))


def _with_hashes(value: Any, hashes: Iterable[str]) -> str:
    return f"{brief(show(value))} (SHA-256 {', '.join(digest[:12] for digest in hashes)})"
