"""What a reward model is called with, and what it gives.

The model itself is :mod:`core.rewards.judge.reward_model`; where it runs is decided by
:attr:`core.cluster.workers.Workers.reward_model`. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """An answer as a reward model may read it: a chat and a text, or the policy's own token ids."""

    messages: tuple[Mapping[str, Any], ...]
    response: str  # what the policy wrote, and nothing else
    token_ids: tuple[int, ...]  # prompt and response
    ground_truth: Any = None  # for a judge that compares with it


@dataclass(frozen=True)
class ModelScore:
    """The model's number, or why there is none."""

    value: float = math.nan
    cut: bool = False  # the answer was longer than reward_model.max_length
    error: str = ""
    timed_out: bool = False  # the error is that there was no reply in time
    notes: Mapping[str, float] = field(default_factory=dict)  # of a judge: further parts of the score

    @property
    def parts(self) -> dict[str, float]:
        """The parts of a score that keep the number, and whether the model did not see the end of the answer."""
        return {"model": self.value, "model_cut": float(self.cut), **self.notes}


# The reward model as the reward layer calls it: with all the answers that wait at once
RewardModelCall = Callable[[Sequence[Answer]], Sequence[ModelScore] | Awaitable[Sequence[ModelScore]]]
