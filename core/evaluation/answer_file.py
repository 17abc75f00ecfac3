"""Saved answers: a JSONL file with a line an answer, and beside it a manifest of what they are answers to and whose.

Lines are appended as answers end; the complete file is in the order of the questions, whatever the timing was. Nothing
here generates or scores.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InputError
from core.files.durable_files import fsync, write_atomic
from core.tracking import run_manifest
from core.tracking.records import json_line
from core.types import Prompt, Segment, Stop, Trajectory

FORMAT = 1
FIELDS = (
    *("uid", "ordinal", "sample", "data_source", "prompt", "response", "stop", "response_ids", "mask_runs"),
    *("segments", "turns", "tool_calls", "ground_truth", "extra_info", "style"),
)
GIVEN = ("user_scores", "tool_rewards")  # numbers that only some episodes have
Key = tuple[int, int]  # ordinal of the question, number of the sample


# --- a line ---


def answer_line(prompt: Prompt, sample: int, trajectory: Trajectory, prompt_text: str) -> str:
    """Return the line of one answer. ``mask_runs`` are lengths of stretches of ids: the policy's, not its, its, ..."""
    runs = [(wrote, len(list(same))) for wrote, same in groupby(trajectory.response_mask.tolist())]
    values = (
        *(prompt.uid, prompt.ordinal, sample, prompt.data_source, prompt_text, trajectory.response_text),
        *(trajectory.stop.value, trajectory.response_ids.tolist()),
        [*([0] if runs and not runs[0][0] else []), *(length for _, length in runs)],
        [{"role": one.role, "text": one.text} for one in trajectory.segments],
        *(trajectory.turns, trajectory.tool_calls, prompt.ground_truth, prompt.extra_info, prompt.style),
    )
    numbers = {name: list(getattr(trajectory, name)) for name in GIVEN if getattr(trajectory, name)}
    if trajectory.tool_scores:
        numbers["tool_scores"] = dict(trajectory.tool_scores)
    if prompt.opened_tag:
        numbers["opened_tag"] = prompt.opened_tag
    return json_line({**dict(zip(FIELDS, values, strict=True)), **numbers})


def prompt_of(answer: Mapping[str, Any]) -> Prompt:
    """Return the question of a line: what a scorer reads of it, without its ids."""
    names = ("uid", "ground_truth", "data_source", "extra_info", "style")
    fields = {name: answer[name] for name in names}
    return Prompt(answer["ordinal"], token_ids=(), messages=(), **fields, opened_tag=answer.get("opened_tag"))


def trajectory_of(answer: Mapping[str, Any]) -> Trajectory:
    """Return the answer of a line: all but its log-probs and the ids of its prompt."""
    wrote = np.arange(len(answer["mask_runs"])) % 2 == 0
    ids = np.array(answer["response_ids"], np.int32)
    return Trajectory(
        prompt_ids=np.zeros(0),
        response_ids=ids,
        response_mask=np.repeat(wrote, answer["mask_runs"]),
        logprobs=np.zeros(len(ids)),
        segments=tuple(Segment(one["role"], one["text"]) for one in answer["segments"]),
        stop=Stop(answer["stop"]),
        policy_version=0,
        seed=0,
        turns=answer["turns"],
        tool_calls=answer["tool_calls"],
        tool_scores=answer.get("tool_scores", {}),
        **{name: tuple(answer.get(name, ())) for name in GIVEN},
    )


# --- reading ---


@dataclass(frozen=True)
class Lines:
    """The whole lines of a file by their keys, as they stand there, and their bytes in all."""

    by_key: Mapping[Key, str]
    size: int

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.by_key.values()]


def read_lines(path: Path) -> Lines:
    """Read the file. A half-written last line, of a process that was killed in writing it, is left out.

    Raises InputError for damage before that, and for an answer that is there twice.
    """
    raw = path.read_bytes().split(b"\n")
    lines: dict[Key, str] = {}
    size = 0
    for number, line in enumerate(raw[:-1], 1):  # what follows the last newline is empty, or half a line
        try:
            answer = json.loads(line)
            key = (int(answer["ordinal"]), int(answer["sample"]))
            if lacking := [name for name in FIELDS if name not in answer]:
                raise ValueError(f"no {', '.join(lacking)}")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(raw) - 1 and not raw[-1]:
                break
            rule = f"is damaged ({type(error).__name__}: {error})"
            raise InputError(
                f"{path}: line {number} of {len(raw) - 1} {rule}; only the last line may be incomplete. Restore the "
                "file from a copy, or delete that line and repeat the generate command"
            ) from error
        if key in lines:
            raise InputError(
                f"{path}: line {number} repeats the answer of question {key[0]}, sample {key[1]}; delete one of the two"
            )
        lines[key] = line.decode() + "\n"
        size += len(line) + 1
    return Lines(lines, size)


def manifest_path(path: Path) -> Path:
    return path.with_suffix(".manifest.json")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Return the manifest beside a file. Raises InputError where there is none, or it is of another kind of file."""
    beside = manifest_path(path)
    if not path.is_file():
        raise InputError(f"{path}: does not exist; python -m core.evaluate makes one")
    try:
        manifest = json.loads(beside.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: no {beside.name} beside it, so nothing tells what it holds; restore it") from error
    except ValueError as error:
        raise InputError(f"{beside}: is damaged ({error}); restore it from a copy") from error
    if not isinstance(manifest, dict) or (manifest.get("kind"), manifest.get("format")) != (kind, FORMAT):
        raise InputError(f"{path}: is not a file of {kind} (format {FORMAT}) of python -m core.evaluate")
    return manifest


def complete_answers(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the manifest and the answers of a file that lacks none.

    Raises InputError: an incomplete file has more of the short answers, which end first.
    """
    manifest = read_manifest(path, "answers")
    lines, expected = read_lines(path), manifest["questions"] * manifest["samples"]
    if len(lines.by_key) != expected:
        raise InputError(f"{path}: holds {len(lines.by_key)} of {expected} answers; repeat its generate command")
    return manifest, lines.answers()


# --- writing ---


class AnswerFile:
    """A file that answers are added to, by one process at a time.

    Opening it begins a file, or goes on with one of the same settings: a half-written last line is cut off.
    Raises InputError for other settings, a damaged file, and one that another process writes.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], keys: Sequence[Key]):
        self.path, self.order = path, {key: number for number, key in enumerate(keys)}
        self.manifest = self._begun(dict(manifest)) if manifest_path(path).exists() else dict(manifest)
        if path.exists() and not manifest_path(path).exists():
            raise InputError(
                f"{path}: exists and is not a file of answers (no {manifest_path(path).name}); give another"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115  (open, and locked, as long as this object is)
        try:
            self._lock()
            lines = read_lines(path)
            if strange := [key for key in lines.by_key if key not in self.order]:
                raise InputError(
                    f"{path}: holds an answer to question {strange[0][0]}, sample {strange[0][1]}, unknown here"
                )
            self._file.truncate(lines.size)
            self.lines = dict(lines.by_key)
            self.manifest["sessions"] = [*self.manifest.get("sessions", []), run_manifest.session(None, {})]
            self._write_manifest()
        except BaseException:
            self._file.close()
            raise

    def _begun(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest of the file that is there, whose settings must be this call's."""
        if not self.path.exists():
            return manifest
        there = read_manifest(self.path, "answers")
        if changed := differences(there["settings"], manifest["settings"]):
            raise InputError(
                f"{self.path}: was begun with other settings: {'; '.join(changed)}. Answers of two settings do not go "
                "into one file: give another --out, or the settings of before"
            )
        return {**manifest, "sessions": there["sessions"]}

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"{self.path}: another process is writing it; wait for it, or give another --out"
            ) from error

    def __contains__(self, key: Key) -> bool:
        return key in self.lines

    @property
    def complete(self) -> bool:
        return len(self.lines) == len(self.order)

    def append(self, key: Key, line: str) -> None:
        self._file.write(line.encode())
        self._file.flush()
        self.lines[key] = line

    def forget(self, keys: Collection[Key]) -> None:
        """Take answers back that are to be given again beside others of their batch."""
        if any(key in self.lines for key in keys):
            self.lines = {key: line for key, line in self.lines.items() if key not in keys}
            self._rewrite(self.lines)

    def _rewrite(self, keys: Iterable[Key]) -> None:
        self._file.close()
        write_atomic(self.path, "".join(self.lines[key] for key in keys))
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._lock()

    def close(self) -> None:
        """Put what there is on disk; a complete file in the order of the questions."""
        if self._file.closed:
            return
        if self.complete and list(self.lines) != list(self.order):
            self._rewrite(self.order)
        os.fsync(self._file.fileno())
        self._file.close()
        fsync(self.path.parent)
        self.manifest["sessions"][-1]["ended"] = run_manifest.now()
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_atomic(manifest_path(self.path), json.dumps(self.manifest, indent=1, ensure_ascii=False) + "\n")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return which settings differ, one phrase each."""
    keys = [*there, *(key for key in here if key not in there)]
    return [f"{key} was {there.get(key)}, is {here.get(key)}" for key in keys if there.get(key) != here.get(key)]
