"""Files of answers: a JSON line an answer, and beside it a manifest of whose answers they are.

``core/evaluate.py`` writes them, and files of scores in the same form. This module loads no model.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InputError
from core.files import write_atomic
from core.tracking.json_lines import intact_rows
from core.tracking.validation import ValRecord, failed_share
from core.types import Prompt, Segment, Stop, Trajectory

FORMAT = 1
PROMPT_FIELDS = (
    "uid",
    "ordinal",
    "data_source",
    "ground_truth",
    "extra_info",
    "style",
    "opened_tag",
)
EPISODE_FIELDS = ("turns", "tool_calls", "user_scores", "tool_rewards", "failure", "reward")
Key = tuple[int, int]  # ordinal of the question, number of the sample


# -- lines -----------------------------------------------------------------------------------------


def answer_line(
    prompt: Prompt, sample: int, trajectory: Trajectory, prompt_text: str
) -> dict[str, Any]:
    """Return what a line holds.

    ``mask_runs`` are lengths of stretches of ids, alternately of the policy and of others. The
    first is the policy's, and may be 0.
    """
    mask = trajectory.response_mask.tolist()
    mask_runs = [len(list(stretch)) for _, stretch in groupby(mask)]
    if mask and not mask[0]:
        mask_runs.insert(0, 0)
    return {
        **{name: to_json(getattr(prompt, name)) for name in PROMPT_FIELDS},
        "sample": sample,
        "prompt": prompt_text,
        "response": trajectory.response_text,
        "stop": trajectory.stop.value,
        "response_ids": trajectory.response_ids.tolist(),
        "mask_runs": mask_runs,
        "segments": [{"role": part.role, "text": part.text} for part in trajectory.segments],
        **{name: getattr(trajectory, name) for name in EPISODE_FIELDS},
    }


def prompt_of(answer: Mapping[str, Any]) -> Prompt:
    """Return the question of a line, as far as a scorer reads it: without its ids."""
    fields = {name: from_json(answer.get(name)) for name in PROMPT_FIELDS}
    return Prompt(token_ids=(), messages=(), **fields)


def trajectory_of(answer: Mapping[str, Any]) -> Trajectory:
    """Return the answer of a line, without its log-probs and the ids of its prompt."""
    by_policy = np.arange(len(answer["mask_runs"])) % 2 == 0
    return Trajectory(
        prompt_ids=np.zeros(0),
        response_ids=np.array(answer["response_ids"], np.int32),
        response_mask=np.repeat(by_policy, answer["mask_runs"]),
        logprobs=np.zeros(len(answer["response_ids"])),
        segments=tuple(Segment(part["role"], part["text"]) for part in answer["segments"]),
        stop=Stop(answer["stop"]),
        policy_version=0,
        seed=0,
        **{name: answer[name] for name in EPISODE_FIELDS if name in answer},
    )


# -- values ----------------------------------------------------------------------------------------
#
# Bytes, dates and decimals, which parquet holds and JSON lacks, in a form that JSON can hold: what
# scores recorded answers has to get the ground truth that training gives. Text that only looks like
# a date stays text. Names of code are not restored, only the values that are listed here.

# Keys of the object that stands for such a value
KIND = "value of kind"
TEXT = "as"


def to_json(value: Any) -> Any:
    """Return a value with an object of KIND and TEXT for each part that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [to_json(part) for part in value]
    kind = type(value).__name__
    if isinstance(value, tuple):  # an entry of parquet's map
        return {KIND: kind, TEXT: [to_json(part) for part in value]}
    if isinstance(value, bytes):
        return {KIND: kind, TEXT: base64.b64encode(value).decode()}
    if isinstance(value, date | time):
        return {KIND: kind, TEXT: value.isoformat()}
    if isinstance(value, timedelta):
        nanoseconds = getattr(value, "nanoseconds", 0)  # of pandas
        return {KIND: kind, TEXT: [value.days, value.seconds, value.microseconds, nanoseconds]}
    if isinstance(value, Decimal):
        return {KIND: kind, TEXT: str(value)}
    return value


def from_json(value: Any) -> Any:
    """Return the value of which :func:`to_json` made this one."""
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {KIND, TEXT} and value[KIND] in RESTORED:
        return RESTORED[value[KIND]](value[TEXT])
    return {name: from_json(part) for name, part in value.items()}


def _timestamp(text: str) -> Any:
    import pandas  # which pyarrow takes for times in nanoseconds

    return pandas.Timestamp(text)


def _pandas_timedelta(parts: list[int]) -> Any:
    import pandas

    names = ("days", "seconds", "microseconds", "nanoseconds")
    return pandas.Timedelta(**dict(zip(names, parts, strict=True)))


# By the name of the type
RESTORED: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda parts: tuple(from_json(parts)),
    "bytes": base64.b64decode,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts[:3]),
    "Timestamp": _timestamp,
    "Timedelta": _pandas_timedelta,
    "Decimal": Decimal,
}


# -- files -----------------------------------------------------------------------------------------


def read_answers(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the intact answers of a file; a process that was killed leaves a damaged line."""
    rows, _ = intact_rows(path)
    return {(row["ordinal"], row["sample"]): row for row in rows}


def manifest_path(path: Path) -> Path:
    """Return the path of the manifest beside a file of answers, scores or demonstrations."""
    return path.with_suffix(".manifest.json")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Return the manifest beside a file.

    Raises InputError if there is none, or if it is that of another kind of file.
    """
    beside = manifest_path(path)
    if not path.is_file():
        raise InputError(f"{path}: does not exist; python -m core.evaluate makes one")
    try:
        manifest = json.loads(beside.read_text(encoding="utf-8"))
        if (manifest["kind"], manifest["format"]) != (kind, FORMAT):
            raise ValueError(f"it is of a file of {manifest['kind']}, format {manifest['format']}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: no {beside.name} beside it that tells of {kind} in format {FORMAT} "
            f"({error}); restore it from a copy, or make scores of answers by "
            "python -m core.evaluate score"
        ) from error
    return manifest


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest beside a file."""
    write_atomic(manifest_path(path), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def complete_answers(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the manifest and the answers of a complete file.

    Raises InputError: an incomplete file has more of the short answers, which end first.
    """
    manifest = read_manifest(path, "answers")
    answers = read_answers(path)
    expected = manifest["questions"] * manifest["samples"]
    if len(answers) != expected:
        raise InputError(
            f"{path}: holds {len(answers)} of {expected} answers; repeat its generate command"
        )
    # A process that was killed behind its last answer has left them in the order of their ends
    order = sorted(answers, key=lambda key: (abs(key[0]), key[1]))
    return manifest, [answers[key] for key in order]


def questions_hash(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the questions as the model reads them.

    Their ids depend on the tokenizer, the template and the cutting.
    """
    read = [(prompt.ordinal, prompt.uid, prompt.token_ids) for prompt in prompts]
    digest = hashlib.sha256(json.dumps(read).encode())
    for prompt in prompts:
        for picture in prompt.media.pictures if prompt.media else ():
            digest.update(picture.data)
    return digest.hexdigest()


def refuse_unscored(path: Path, records: Sequence[ValRecord], first_failure: str = "") -> None:
    """Raise InputError for a data source on whose answers the scorer always failed."""
    for source in dict.fromkeys(record.data_source for record in records):
        of_source = [record for record in records if record.data_source == source]
        if failed_share(of_source) == 1:
            raise InputError(
                f"{path}: the scorer failed on every answer of data_source={source!r}, so that "
                f"there is no accuracy; correct it and score the answers again. {first_failure}"
            )
