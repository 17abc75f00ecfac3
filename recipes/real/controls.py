"""Controls: training files whose reward says nothing about the task. The held-out file stays as it
is.

* ``random``: a fair coin (``reward_scores/random_reward.py``). It teaches nothing of the
  task, and its noise may lead away from the start.
* ``shuffled``: ground truths are permuted between prompts. What the policy gains from it is what
  can be had without reading the prompt: short answers, say, or a constraint that many prompts have.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CONTROLS = {
    "random": "a control: in training its reward is a fair coin and does not depend on the task",
    "shuffled": "a control: in training its ground truths are those of other prompts",
}
RANDOM_SOURCE = "control/random_reward"


def random_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows with a coin in place of their scorer, and another seed for each."""
    for at, line in enumerate(rows):
        facts = {**line["extra_info"], "control": "random", "seed": f"random reward {at}"}
        yield {**line, "data_source": RANDOM_SOURCE, "extra_info": facts}


def derange(keys: Sequence[str], rng: random.Random) -> list[int]:
    """Return a permutation that gives no position a key equal to its own.

    Raises ValueError where more than half of the keys are equal: there is none then.
    """
    if 2 * max(keys.count(key) for key in set(keys)) > len(keys):
        raise ValueError(
            "more than half of the ground truths are equal, so that no permutation "
            "changes all of them"
        )
    order = rng.sample(range(len(keys)), len(keys))
    for at in range(len(keys)):
        while keys[order[at]] == keys[at]:
            other = rng.randrange(len(keys))
            if keys[order[other]] != keys[at] and keys[order[at]] != keys[other]:
                order[at], order[other] = order[other], order[at]
    return order


def shuffled_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows with the ground truths of others; none keeps an equal one."""
    truths = [line["reward_model"]["ground_truth"] for line in rows]
    order = derange(
        [json.dumps(truth, sort_keys=True) for truth in truths], random.Random("shuffled gold")
    )
    for line, other in zip(rows, order, strict=True):
        reward_model = {**line["reward_model"], "ground_truth": truths[other]}
        yield {
            **line,
            "reward_model": reward_model,
            "extra_info": {**line["extra_info"], "control": "shuffled"},
        }


def control_files(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of ``train_random`` and ``train_shuffled``."""
    return {"train_random": list(random_rows(rows)), "train_shuffled": list(shuffled_rows(rows))}


def control_of(train_files: Sequence[str]) -> str | None:
    """Return what a run is that trained on these files, where it is a control; else None."""
    names = {Path(path).stem for path in train_files}
    return next((text for name, text in CONTROLS.items() if f"train_{name}" in names), None)
