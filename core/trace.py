"""Dumps the tokens of chosen steps (``trainer.trace``) for the page of ``python -m results.trace``.

A dump is ``<run>/trace/step_<n>.json.gz``: a few groups of the step and, for each of their tokens,
what the batch held when it trained. It has the texts of tokens, so a reader needs no tokenizer.
"""

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from core.config.schema import TraceConfig
from core.files import replacing
from core.tracking.tracker import attempt
from core.types import ScoredGroup, TrainBatch

FOLDER = "trace"
MASKS = ("response_mask", "loss_mask")
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_prob")
NUMBERS = ("advantages", *LOG_PROBS, "values", "returns", "rollout_is_weights")


def is_due(options: TraceConfig, step: int, last_step: int) -> bool:
    """Return whether the step is to be dumped."""
    if step in (options.steps or ()):
        return True
    return options.freq > 0 and (step % options.freq == 0 or step in (1, last_step))


def chosen_groups(groups: Sequence[ScoredGroup], count: int) -> list[int]:
    """Return the groups to dump by index: that of the lowest mean score, and ``count`` others.

    A hash of the question chooses the others: steps and runs show the same ones if they can.
    """

    def mean_score(index: int) -> float:
        return sum(score.value for score in groups[index].scores) / len(groups[index])

    def question_hash(index: int) -> bytes:
        return hashlib.sha256(groups[index].prompt.uid.encode()).digest()

    indices = range(len(groups))
    worst = min(indices, key=mean_score)
    others = [index for index in sorted(indices, key=question_hash) if index != worst]
    return [worst, *others[:count]]


def dump(
    run_dir: Path,
    step: int,
    groups: Sequence[ScoredGroup],
    batch: TrainBatch,
    tokenizer: Any,
    count: int,
) -> None:
    """Write the dump of a step. A disk that refuses it costs a warning, not the run."""
    columns = batch.only(("input_ids", *MASKS, *NUMBERS)).stored
    content = {"step": step, "groups": []}
    for index in chosen_groups(groups, count):
        group = groups[index]
        spans = batch.spans((batch.group == index).nonzero()[:, 0])
        trajectories = []
        for (trajectory, score, _), span in zip(group.sequences, spans, strict=True):
            response = slice(span.start + len(trajectory.prompt_ids), span.stop)
            about = {"score": score.value, "parts": dict(score.parts), "status": score.status.value}
            about |= {"stop": trajectory.stop.value, "turns": trajectory.turns}
            trajectories.append({**about, **token_columns(columns, response, tokenizer)})
        prompt = group.prompt
        about = {name: getattr(prompt, name) for name in ("uid", "data_source", "ground_truth")}
        about["question"] = prompt.messages[-1].get("content", "") if prompt.messages else ""
        content["groups"].append({**about, "trajectories": trajectories})
    path = run_dir / FOLDER / f"step_{step:06d}.json.gz"

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, ensure_ascii=False, default=str)
        with replacing(path) as partial:
            partial.write_bytes(gzip.compress(text.encode(errors="replace"), mtime=0))

    attempt(path, write)


def token_columns(columns: Mapping[str, Tensor], response: slice, tokenizer: Any) -> dict[str, Any]:
    """Return the texts of a response's tokens and what the batch holds for each of them."""
    ids = columns["input_ids"][response].tolist()
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    masks = {name: columns[name][response].int().tolist() for name in MASKS}
    numbers = {
        name: [round(number, 5) for number in columns[name][response].tolist()]
        for name in NUMBERS
        if name in columns
    }
    return {"tokens": texts, **masks, "numbers": numbers}
