"""The run manifest, ``manifest.json`` of a run folder: where its numbers come from.

It is not the checkpoint manifest, which lists the files of one checkpoint.
"""

import functools
import hashlib
import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.checkpoint.provenance import package_versions
from core.config import convert, paths
from core.config.defaults import resolve
from core.config.schema import Config
from core.errors import InputError
from core.files import file_sha256, is_url, local_path
from core.secret_keys import command_line

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "ray",
    "vllm",
    "flash-attn",
    "sympy",
    "math-verify",
)
DATA = ("data.", "custom_reward_function.")  # keys whose files a manifest lists
# Arguments of git that select the files that a run computes with
CODE = ("--", ".", ":(exclude)results/*/*")
Changes = Mapping[str, list[Any]]  # key -> [before, now]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def begun(
    path: Path,
    config: Config,
    recipe: str,
    resume: int | None,
    models: Mapping[str, Any],
    changes: Changes,
) -> dict[str, Any]:
    """Return the manifest of a run that starts, or resumes after step ``resume``.

    It has an entry for this process. ``models`` are the places of the weights that the run starts
    with, and their SHA-256. Raises InputError for a manifest that is damaged.
    """
    manifest = {
        "run": path.parent.resolve().name,
        "recipe": recipe,
        "run_id": secrets.token_hex(4),
        "sessions": [],
    }
    if path.exists():
        try:
            manifest = {**manifest, **json.loads(path.read_bytes())}
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{path}: is no manifest ({error}); restore it from a copy, or remove it"
            ) from error
    manifest.pop("stopped_because", None)
    defaults = convert.as_json(resolve(type(config)(), recipe))
    changed = {
        key: [defaults[key], value]
        for key, value in convert.as_json(config).items()
        if value != defaults[key]
    }
    data_files = [path for key, path in paths.named(config) if key.startswith(DATA)]
    manifest |= {
        "status": "running",
        "seeds": {"trainer.seed": config.trainer.seed, "data.seed": config.data.seed},
        "changed_from_defaults": changed,
        "data": data_hashes(dict.fromkeys(data_files)),
        "models": dict(models),
    }
    manifest["sessions"].append(session(resume, changes))
    return manifest


def session(resumed_from: int | None = None, changes: Changes | None = None) -> dict[str, Any]:
    """Return the manifest's entry for this process; a resumed run has several."""
    import torch

    variables = {
        name: os.environ[name]
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if name in os.environ
    }
    return {
        "started": now(),
        "ended": None,
        "resumed_from_step": resumed_from,
        **({"changes": dict(changes)} if changes else {}),
        "command": command_line(sys.orig_argv),
        "git": git_state(),
        "packages": {"python": platform.python_version(), **package_versions(PACKAGES)},
        "hardware": hardware(),
        "threads": {"torch": torch.get_num_threads(), **variables},
    }


def _output(*command: str) -> bytes:
    """Return what a command prints; nothing if it is not installed, fails or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Return the checkout's commit, whether it is dirty, and a hash of its difference from HEAD.

    All three are None outside git. Files that git does not know count by their names; files that
    runs have left in ``results`` do not count.
    """
    git = ("git", "-C", str(root))
    top = _output(*git, "rev-parse", "--show-toplevel").decode().strip()
    commit = _output(*git, "rev-parse", "HEAD").decode().strip()
    if not commit or Path(top).resolve() != root.resolve():
        return {"commit": None, "dirty": None, "diff_sha256": None}
    changed = _output(*git, "diff", "HEAD", "--binary", *CODE)
    unknown = _output(*git, "ls-files", "-o", "--exclude-standard", *CODE)
    difference = changed + unknown
    digest = hashlib.sha256(difference).hexdigest() if difference else None
    return {"commit": commit, "dirty": bool(difference), "diff_sha256": digest}


def hardware() -> dict[str, Any]:
    """Return the CPU, its vector instructions, usable cores, memory and GPUs; no host's name."""
    import torch

    cpu = platform.processor()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        cores = len(os.sched_getaffinity(0))
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").decode()
    return {
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus.splitlines(),
        "system": f"{platform.system()} {platform.machine()}",
    }


# -- files -----------------------------------------------------------------------------------------


def data_hashes(files: Iterable[str]) -> list[dict[str, Any]]:
    """Return path or URL, size and sha256 of each file that is on this machine.

    A file at a URL is, if it was copied to it.
    """
    entries = []
    for name in files:
        path = Path(local_path(name, "data")).expanduser()
        if not path.is_file():
            continue
        stat = path.stat()
        entries.append(
            {
                "path": name if is_url(name) else str(path),
                "bytes": stat.st_size,
                "sha256": _sha256(path.resolve(), stat.st_size, stat.st_mtime_ns),
            }
        )
    return entries


@functools.cache
def _sha256(path: Path, size: int, changed: int) -> str:
    """Return a file's hash. Another size or time of change is another entry of the cache."""
    return file_sha256(path)


def contents(config: Config) -> dict[str, list[str]]:
    """Return key -> SHA-256 of the files that it names, if all of them are on this machine."""
    files: dict[str, list[str]] = {}
    for key, path in paths.named(config):
        # Other URLs are models, which have hashes of their own
        if not is_url(path) or key.startswith("data."):
            files.setdefault(key, []).append(path)
    hashes = {}
    for key, names in files.items():
        entries = data_hashes(names)
        if len(entries) == len(names):
            hashes[key] = [entry["sha256"] for entry in entries]
    return hashes
