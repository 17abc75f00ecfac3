"""Reading what ``trainer.trace`` recorded: steps, groups and trajectories with their tokens. Imports no torch.

A step that cannot be read is left out and named in a note; nothing is guessed. The recorder, and the format, are in
:mod:`core.trace`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InputError
from core.files import PARTIAL
from core.trace import FOLDER, FORMAT
from core.tracking.tracker import step_of

HOW = "record some with trainer.trace.freq=20 (every 20 steps, the first and the last), or trainer.trace.steps=[1,2]"
DAMAGED = (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile)
OF_RESPONSE = ("ids", "sampled", "engine")  # every record has these arrays


@dataclass(frozen=True)
class TokenTexts:
    """What the ids of a record look like: a text, or bytes that are no text alone."""

    known: Mapping[str, Any]

    def raw(self, token: int) -> bytes:
        one = self.known[str(token)]
        return one.encode() if isinstance(one, str) else bytes.fromhex(one["bytes"])

    def join(self, ids: Sequence[int]) -> str:
        """Return the text of several tokens; bytes that are no text together either become U+FFFD."""
        return b"".join(self.raw(int(one)) for one in ids).decode("utf-8", "replace")


@dataclass(frozen=True, eq=False)
class TracedTrajectory:
    """One trajectory: ``about`` has its score and how it ended, ``arrays`` a value for each of its tokens.

    Shapes (L tokens, the first ``prompt`` of them the prompt's):
        arrays  [L], each field that the record has; NaN where a phase computed nothing
    """

    about: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    prompt: int
    texts: TokenTexts

    @property
    def length(self) -> int:
        return len(self.arrays["ids"])

    def field(self, name: str) -> np.ndarray | None:
        """Return a field, or None where the record has none or has it nowhere in this trajectory."""
        value = self.arrays.get(name)
        return None if value is None or (value.dtype.kind == "f" and np.isnan(value).all()) else value

    def learner(self) -> np.ndarray | None:
        """Return the learner's log-probs before the update, or those of the update's own pass."""
        old = self.field("old_log_probs")
        return self.field("log_prob") if old is None else np.where(self.arrays["response_mask"], old, np.nan)

    def turns(self) -> Iterator[tuple[str, int, int]]:
        """Yield who wrote each stretch, and its first and following token: the prompt, then turn by turn.

        Neighbouring stretches that the policy did not write are one: the tokens do not tell where one ends.
        """
        yield "prompt", 0, self.prompt
        roles = [role for role, count in self.about["roles"] if count]
        written = [next(same) for policy, same in groupby(roles, lambda role: role == "policy") if not policy]
        start, others = self.prompt, iter(written)
        for policy, same in groupby(self.arrays["sampled"][self.prompt :].tolist()):
            end = start + len(list(same))
            yield "policy" if policy else next(others, "tool"), start, end
            start = end


@dataclass(frozen=True)
class TracedGroup:
    about: Mapping[str, Any]
    trajectories: Sequence[TracedTrajectory]


@dataclass(frozen=True)
class TracedStep:
    meta: Mapping[str, Any]
    groups: Sequence[TracedGroup]

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def count(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)


def has_traces(run: Path) -> bool:
    """Return whether a run recorded tokens, or began to."""
    return any((run / FOLDER).glob("step_*.npz*"))


def trace_files(run: Path) -> list[Path]:
    """Return the complete records of a run, in the order of steps."""
    return sorted(path for path in (run / FOLDER).glob("step_*.npz") if step_of(path) >= 0)


def read_step(path: Path) -> TracedStep:
    """Read one record.

    Raises:
        InputError: it is damaged, or of another version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            meta = json.loads(archive.read("meta.json"))
            if meta["format"] != FORMAT:
                raise InputError(
                    f"{path}: format {meta['format']}, and this version reads {FORMAT}; show it with the version that "
                    "recorded it"
                )
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            arrays = {}
            for name in names:
                with archive.open(name) as part:
                    arrays[name.removesuffix(".npy")] = np.lib.format.read_array(part, allow_pickle=False)
        return TracedStep(meta, list(_groups(meta, arrays)))
    except DAMAGED as error:
        raise InputError(f"{path}: damaged ({error!r}); remove it, the other steps can be shown") from error


def _groups(meta: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Iterator[TracedGroup]:
    lengths, prompts = arrays.pop("lengths").tolist(), arrays.pop("prompts").tolist()
    if any(len(value) != sum(lengths) for value in arrays.values()) or not set(OF_RESPONSE) <= set(arrays):
        raise ValueError("arrays of other lengths than the trajectories have")
    texts, row, end = TokenTexts(meta["tokens"]), 0, 0
    for about in meta["groups"]:
        found = []
        for one in about["trajectories"]:
            start, end = end, end + lengths[row]
            own = {name: value[start:end] for name, value in arrays.items()}
            found.append(TracedTrajectory(one, own, prompts[row], texts))
            row += 1
        yield TracedGroup(about, found)


def chosen_steps(run: Path, steps: Sequence[int] | None, most: int) -> tuple[list[TracedStep], list[str]]:
    """Return records to show and notes on what is not: the steps asked for, or some at even distances.

    ``most`` bounds the trajectories where no steps are named; the first and the last step come first.

    Raises:
        InputError: the run has no record that can be read, or not the steps that were asked for.
    """
    paths = {step_of(path): path for path in trace_files(run)}
    notes = [
        f"step {step_of(path)} of {run.name} was being written when the run was killed, and is left out"
        for path in sorted((run / FOLDER).glob(f"step_*{PARTIAL}"))
    ]
    if not paths:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise InputError(f"{run}: no step is recorded{why}; {HOW}")
    if steps and (missing := [step for step in steps if step not in paths]):
        there = ", ".join(map(str, paths))
        raise InputError(f"--steps={missing[0]}: {run} recorded other steps; choose of {there}")
    found: dict[int, TracedStep] = {}
    for step in steps or _spread(sorted(paths)):
        try:
            read = read_step(paths[step])
        except InputError as error:
            notes.append(str(error))
            continue
        if steps or not found or sum(one.count for one in found.values()) + read.count <= most:
            found[step] = read
    if not found:
        raise InputError(f"{run}: no record can be read: {'; '.join(notes)}")
    if len(found) < len(paths) and not steps:
        shown = ", ".join(map(str, sorted(found)))
        notes.append(
            f"{run.name}: {len(found)} of {len(paths)} recorded steps are shown ({shown}); name others: --steps"
        )
    return [found[step] for step in sorted(found)], notes


def _spread(steps: Sequence[int]) -> list[int]:
    """Return the last step, the first, and then those that halve the widest gap: any beginning is spread out."""
    order = [steps[-1], steps[0]] if len(steps) > 1 else list(steps)
    while len(order) < len(steps):
        shown = sorted(steps.index(step) for step in order)
        left, right = max(zip(shown, shown[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        order.append(steps[(left + right) // 2])
    return order
