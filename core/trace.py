"""Dumps the tokens of chosen steps (``trainer.trace``) for the page of ``python -m results.trace``.

A dump is ``<run>/trace/step_<n>.json.gz``: a few groups of the step and, for each of their tokens,
what the batch held when it trained. Texts of tokens are part of it, so that a reader needs no
tokenizer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.files import replacing
from core.tracking.tracker import attempt
from core.types import ScoredGroup, TrainBatch, Trajectory
from reward_scores.score import Score

if TYPE_CHECKING:
    from torch import Tensor

    from core.config.schema import TraceConfig

FOLDER = "trace"
MASKS = ("response_mask", "loss_mask")
NUMBERS = (
    "advantages",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "returns",
    "rollout_is_weights",
)


def is_due(options: TraceConfig, step: int, last_step: int) -> bool:
    """Return whether the step is to be dumped."""
    if step in (options.steps or ()):
        return True
    return options.freq > 0 and (step % options.freq == 0 or step in (1, last_step))


def chosen_groups(groups: Sequence[ScoredGroup], count: int) -> list[int]:
    """Return the indices of the groups to dump: that of the lowest mean score, and ``count``
    others.

    The others are chosen by a hash of the question, so that steps and runs show the same ones where
    they can.
    """
    indices = range(len(groups))
    worst = min(indices, key=lambda i: sum(s.value for s in groups[i].scores) / len(groups[i]))
    by_hash = sorted(indices, key=lambda i: hashlib.sha256(groups[i].prompt.uid.encode()).digest())
    return [worst, *(index for index in by_hash if index != worst)][: count + 1]


def dump(
    run_dir: Path,
    step: int,
    groups: Sequence[ScoredGroup],
    batch: TrainBatch,
    tokenizer: Any,
    count: int,
) -> None:
    """Write the dump of a step. A disk that takes nothing costs a warning, never the run."""
    columns = batch.only(("input_ids", *MASKS, *NUMBERS)).stored
    path = run_dir / FOLDER / f"step_{step:06d}.json.gz"
    content = {"step": step, "groups": []}
    for index in chosen_groups(groups, count):
        group = groups[index]
        (sequences,) = (batch.group == index).nonzero(as_tuple=True)
        trajectories = [
            {
                **_described(trajectory, score),
                **_tokens(columns, span, len(trajectory.prompt_ids), tokenizer),
            }
            for trajectory, score, span in zip(
                group.trajectories, group.scores, batch.spans(sequences), strict=True
            )
        ]
        prompt = group.prompt
        question = prompt.messages[-1].get("content", "") if prompt.messages else ""
        about = {
            "uid": prompt.uid,
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
        }
        content["groups"].append({**about, "question": question, "trajectories": trajectories})

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, ensure_ascii=False, default=str)
        with replacing(path) as partial:
            partial.write_bytes(gzip.compress(text.encode(errors="replace"), mtime=0))

    attempt(path, write)


def _described(trajectory: Trajectory, score: Score) -> dict[str, Any]:
    """Return what is said of a trajectory as a whole."""
    about = {"score": score.value, "parts": dict(score.parts), "status": score.status.value}
    return {**about, "stop": trajectory.stop.value, "turns": trajectory.turns}


def _tokens(
    columns: Mapping[str, Tensor], span: slice, prompt_length: int, tokenizer: Any
) -> dict[str, Any]:
    """Return the texts of a response's tokens and what the batch holds of each."""
    response = slice(span.start + prompt_length, span.stop)
    ids = columns["input_ids"][response].tolist()
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    masks = {name: columns[name][response].int().tolist() for name in MASKS}
    kept = [name for name in NUMBERS if name in columns]
    numbers = {name: [round(x, 5) for x in columns[name][response].tolist()] for name in kept}
    return {"tokens": texts, **masks, "numbers": numbers}
