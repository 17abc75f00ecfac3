"""Kills a training command again and again, lets it resume, and compares the result with an
undisturbed run.

whole = run_uninterrupted(command, tmp / "whole")
killed = run_with_kills(command, tmp / "killed", [AtPoint("update", 3), AtRandom()],
random.Random(0)) assert compare_runs(whole.folder, killed.folder) == []
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from core.checkpoint.run_state import load_tensors
from core.checkpoint.store import CheckpointStore
from tests.faults.killing import VARIABLE, killed

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.001
TIMES = ("timing_s/", "perf/")  # metrics that no two runs share

CmdFactory = Callable[[Path], list[str]]


@dataclass(frozen=True)
class AtPoint:
    """At the named moment of ``tests.faults.killing``, once."""

    phase: str
    step: int


@dataclass(frozen=True)
class AtRandom:
    """At a random later step, and at a random moment within ``step_seconds`` after that step's
    metrics appeared."""

    step_seconds: float = 0.5


Kill = AtPoint | AtRandom


@dataclass(frozen=True)
class Outcome:
    """What became of a run. ``landed`` are the kills that hit a living process, in order."""

    folder: Path
    landed: tuple[Kill, ...]


class RunFailed(AssertionError):
    """The command ended otherwise than by success or by the kill that was meant for it."""


def run_uninterrupted(
    cmd_factory: CmdFactory,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Outcome:
    """Run the command to its end."""
    with launched(cmd_factory(folder), folder, dict(env or {})) as process:
        _check(_wait(process, timeout), folder, expected=0)
    return Outcome(folder, ())


def run_with_kills(
    cmd_factory: CmdFactory,
    folder: Path,
    kills: Sequence[Kill],
    rng: random.Random,
    *,
    finish: bool = True,
) -> Outcome:
    """Start the command once for every kill, in order, and then (``finish``) let it run to its end.

    A kill that does not land (the run ended before it) is left out of ``Outcome.landed``.

    Raises:
        RunFailed: a launch failed by itself, or took longer than ten minutes.
    """
    landed = []
    for kill in kills:
        command, extra = cmd_factory(folder), {}
        if isinstance(kill, AtPoint):
            command, extra = killed(command, kill.phase, kill.step)
        with launched(command, folder, extra) as process:
            if isinstance(kill, AtRandom):
                _wait_for_step(process, folder / "metrics.jsonl", rng)
                _wait_until(process, time.monotonic() + rng.uniform(0, kill.step_seconds))
                process.kill()
            status = _wait(process, 600)
        if status != 0:
            _check(status, folder, expected=-signal.SIGKILL)
            landed.append(kill)
    if finish:
        run_uninterrupted(cmd_factory, folder)
    return Outcome(folder, tuple(landed))


class launched:
    """The command as a process group of its own, its output in ``<folder>.log``; nothing of it
    outlives the block."""

    def __init__(self, command: list[str], folder: Path, env: Mapping[str, str] | None = None):
        self.command, self.folder = command, folder
        self.env = {
            **{k: v for k, v in os.environ.items() if k != VARIABLE},
            "PYTHONPATH": str(ROOT),
            **(env or {}),
        }

    def __enter__(self) -> subprocess.Popen:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(_log(self.folder), "a") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        return self.process

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # the usual case: nothing is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _wait(process: subprocess.Popen, timeout: float) -> int:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{process.args} still runs after {timeout} s") from error


def _check(status: int, folder: Path, *, expected: int) -> None:
    if status != expected:
        tail = "\n".join(_log(folder).read_text(errors="replace").splitlines()[-30:])
        raise RunFailed(
            f"exit status {status}, expected {expected}. The end of {_log(folder)}:\n{tail}"
        )


def _wait_until(
    process: subprocess.Popen, end: float, done: Callable[[], bool] = lambda: False
) -> None:
    while process.poll() is None and time.monotonic() < end and not done():
        time.sleep(POLL_S)


def _wait_for_step(process: subprocess.Popen, metrics: Path, rng: random.Random) -> None:
    """Wait until this process has written metrics and the file has as many lines as before, or up
    to three more."""
    before = read_lines(metrics)
    target = max(1, len(before) + rng.randrange(4) - 1)

    def written() -> bool:
        # A resumed run cuts the file back to its checkpoint first: only a new last line is news.
        lines = read_lines(metrics)
        return bool(lines) and lines[-1:] != before[-1:] and len(lines) >= target

    _wait_until(process, time.monotonic() + 600, written)


def read_lines(path: Path) -> list[str]:
    """Read the finished lines: the last may be half written while its run goes on."""
    if not path.exists():
        return []
    finished, _, _ = path.read_text().rpartition("\n")
    return finished.splitlines()


# ---------------------------------------------------------------- comparing


def compare_runs(a: Path, b: Path) -> list[str]:
    """Return what differs between two finished runs: their last checkpoints to the bit, and metrics
    without times.

    Empty where nothing does. Every file of the checkpoint counts: weights, optimizer, RNG and
    driver state.
    """
    return [*compare_checkpoints(a, b), *_compare_metrics(a / "metrics.jsonl", b / "metrics.jsonl")]


def compare_checkpoints(a: Path, b: Path) -> Iterator[str]:
    left, right = CheckpointStore(a).latest(), CheckpointStore(b).latest()
    if left is None or right is None or left.step != right.step:
        yield f"the last checkpoints are {left and left.folder} and {right and right.folder}"
        return
    for name in sorted(left.files.keys() | right.files.keys()):
        if name not in left.files or name not in right.files:
            yield f"{name} is only in the checkpoint of {a if name in left.files else b}"
        elif left.files[name]["sha256"] != right.files[name]["sha256"]:
            yield from _compare_files(name, left.folder / name, right.folder / name)


def _compare_files(name: str, a: Path, b: Path) -> Iterator[str]:
    """The hashes differ: which values do? (A zip may differ where its content does not.)"""
    if a.suffix == ".pt":
        left, right = dict(_leaves(load_tensors(a))), dict(_leaves(load_tensors(b)))
    elif a.suffix == ".safetensors":
        left, right = dict(_leaves(load_file(a))), dict(_leaves(load_file(b)))
    else:
        yield f"{name} differs"
        return
    different = [
        key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)
    ]
    if different:
        yield (
            f"{name}: {len(different)} of {len(left)} values differ, such as "
            f"{', '.join(different[:3])}"
        )


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{where}/{key}")
    elif isinstance(value, torch.Tensor):
        yield (
            where,
            (
                str(value.dtype),
                tuple(value.shape),
                value.reshape(-1).view(torch.uint8).numpy().tobytes(),
            ),
        )
    else:
        yield where, repr(value)


def _compare_metrics(a: Path, b: Path) -> Iterator[str]:
    left, right = read_lines(a), read_lines(b)
    if len(left) != len(right):
        yield f"{len(left)} lines of metrics in {a}, {len(right)} in {b}"
    for number, (one, other) in enumerate(zip(left, right, strict=False), start=1):
        there, here = json.loads(one), json.loads(other)
        for key in sorted(there.keys() | here.keys()):
            if not key.startswith(TIMES) and json.dumps(there.get(key)) != json.dumps(
                here.get(key)
            ):
                yield f"metrics line {number}, {key}: {there.get(key)} there, {here.get(key)} here"
