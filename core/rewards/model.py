"""Model rewards: what the reward model is shown of an answer, and how its numbers become scores.

The model itself is :mod:`core.rewards.reward_model`; where it runs is the business of
:attr:`core.cluster.workers.Workers.judge`.
Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.rewards.batch_calls import Together
from core.rewards.grading import Failure
from core.types import Prompt, Trajectory
from reward_scores.score import Score, ScoreStatus

PART = "model"  # the part of a score that keeps the model's number
CUT = "model_cut"  # the part that says that the model did not see the end of the answer


@dataclass(frozen=True)
class Answer:
    """An answer as a reward model may read it: a chat and a text, or the policy's own token ids."""

    messages: tuple[Mapping[str, Any], ...]
    response: str  # what the policy wrote, and nothing else
    token_ids: tuple[int, ...]  # prompt and response

    @classmethod
    def of(cls, prompt: Prompt, trajectory: Trajectory) -> Answer:
        ids = (*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist())
        return cls(prompt.messages, trajectory.response_text, ids)


@dataclass(frozen=True)
class Judgement:
    """The model's number, or why there is none."""

    value: float = math.nan
    cut: bool = False  # the answer was longer than reward_model.max_length
    error: str = ""


Judge = Callable[[Sequence[Answer]], Sequence[Judgement] | Awaitable[Sequence[Judgement]]]


class ModelRewards:
    """Shows the model all the answers that wait at once."""

    def __init__(self, judge: Judge):
        self._judge = judge
        self._together = Together(self._call)

    async def run(self, answer: Answer) -> Judgement | Failure:
        """A finite judgement; a Failure where the model could not be shown the answer, or gave no number."""
        found: Judgement = await self._together(answer)
        if found.error or not math.isfinite(found.value):
            detail = found.error or f"it gave {found.value}"
            return Failure(ScoreStatus.CRASH, f"the reward model has no score for the answer: {detail}\n")
        return found

    async def _call(self, answers: list[Answer]) -> Sequence[Judgement]:
        result = self._judge(answers)
        return await result if inspect.isawaitable(result) else result


def alone(judgement: Judgement) -> Score:
    """The score of a row of style ``model``: the number is its value, and, for want of a verdict, its ``acc``."""
    return Score(judgement.value, {PART: judgement.value, CUT: float(judgement.cut)})


def beside(score: Score, judgement: Judgement, weight: float) -> Score:
    """A rule's score with the model's number added by weight; ``acc`` stays the rule's."""
    parts = {**score.parts, PART: judgement.value, CUT: float(judgement.cut)}
    return replace(score, value=score.value + weight * judgement.value, parts=parts)
