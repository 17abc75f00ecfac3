"""Files of answers: a JSON line an answer, and beside it a manifest of what they are answers to and whose.

``core.evaluate`` writes them; what scores, keeps or reports answers reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import InputError
from core.files import write_atomic
from core.tracking.tracker import intact_rows
from core.types import Prompt, Segment, Stop, Trajectory

if TYPE_CHECKING:
    from core.tracking.validation import ValRecord

FORMAT = 1
OF_PROMPT = ("uid", "ordinal", "data_source", "ground_truth", "extra_info", "style", "opened_tag")
OF_EPISODE = ("turns", "tool_calls", "user_scores", "tool_rewards")
Key = tuple[int, int]  # ordinal of the question, number of the sample


def answer_line(prompt: Prompt, sample: int, trajectory: Trajectory, prompt_text: str) -> dict[str, Any]:
    """Return what a line holds. ``mask_runs`` are lengths of stretches of ids: the policy's, not its, its, ..."""
    runs = [(wrote, len(list(same))) for wrote, same in groupby(trajectory.response_mask.tolist())]
    return {
        **{name: getattr(prompt, name) for name in OF_PROMPT},
        "sample": sample,
        "prompt": prompt_text,
        "response": trajectory.response_text,
        "stop": trajectory.stop.value,
        "response_ids": trajectory.response_ids.tolist(),
        "mask_runs": [*([0] if runs and not runs[0][0] else []), *(length for _, length in runs)],
        "segments": [{"role": one.role, "text": one.text} for one in trajectory.segments],
        **{name: getattr(trajectory, name) for name in OF_EPISODE},
    }


def prompt_of(answer: Mapping[str, Any]) -> Prompt:
    """Return the question of a line: what a scorer reads of it, without its ids."""
    return Prompt(token_ids=(), messages=(), **{name: answer.get(name) for name in OF_PROMPT})


def trajectory_of(answer: Mapping[str, Any]) -> Trajectory:
    """Return the answer of a line: all but its log-probs and the ids of its prompt."""
    wrote = np.arange(len(answer["mask_runs"])) % 2 == 0
    return Trajectory(
        prompt_ids=np.zeros(0),
        response_ids=np.array(answer["response_ids"], np.int32),
        response_mask=np.repeat(wrote, answer["mask_runs"]),
        logprobs=np.zeros(len(answer["response_ids"])),
        segments=tuple(Segment(one["role"], one["text"]) for one in answer["segments"]),
        stop=Stop(answer["stop"]),
        policy_version=0,
        seed=0,
        **{name: answer[name] for name in OF_EPISODE if name in answer},
    )


def read_lines(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the answers of a file, without lines that are damaged: of a process that was killed in writing, say."""
    return {(row["ordinal"], row["sample"]): row for row in intact_rows(path)[0]}


def manifest_path(path: Path) -> Path:
    """Return the file that tells what a file of answers, scores or demonstrations holds."""
    return path.with_suffix(".manifest.json")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Return the manifest beside a file. Raises InputError where there is none, or it is of another kind of file."""
    beside = manifest_path(path)
    if not path.is_file():
        raise InputError(f"{path}: does not exist; python -m core.evaluate makes one")
    try:
        manifest = json.loads(beside.read_text(encoding="utf-8"))
        if (manifest["kind"], manifest["format"]) == (kind, FORMAT):
            return manifest
        raise ValueError(f"it is of a file of {manifest['kind']}, format {manifest['format']}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        rule = f"no {beside.name} beside it that tells of {kind} in format {FORMAT} ({error})"
        raise InputError(f"{path}: {rule}; restore it from a copy") from error


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest beside a file."""
    write_atomic(manifest_path(path), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def complete_answers(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the manifest and the answers of a file that lacks none.

    Raises InputError: an incomplete file has more of the short answers, which end first.
    """
    manifest = read_manifest(path, "answers")
    lines, expected = read_lines(path), manifest["questions"] * manifest["samples"]
    if len(lines) != expected:
        raise InputError(f"{path}: holds {len(lines)} of {expected} answers; repeat its generate command")
    return manifest, list(lines.values())


def refuse_unscored(path: Path, records: Sequence[ValRecord], first: str = "") -> None:
    """Raise InputError for a data source on whose answers the scorer always failed; ``first`` is a failure's report."""
    from core.tracking.validation import failed_share

    for source in dict.fromkeys(record.data_source for record in records):
        if failed_share(one for one in records if one.data_source == source) == 1:
            rule = f"the scorer failed on every answer of data_source={source!r}, so that there is no accuracy"
            raise InputError(f"{path}: {rule}; correct it and score the answers again. {first}")
