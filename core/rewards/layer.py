"""From a finished trajectory to its :class:`Score`: which scorer, what it sees, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from core.config import tables
from core.errors import InputError
from core.rewards.check import MODEL_STYLE, find_problems, option_problems
from core.rewards.custom import CustomFunction
from core.rewards.grading import Executor, Failure, Grader, Job
from core.rewards.managers import InWaves, Naive, make_manager
from core.rewards.model import Answer, Judge, ModelRewards, alone, beside
from core.rewards.programs import scorer_options
from core.types import Prompt, Trajectory
from reward_scores.score import Score


class RewardError(RuntimeError):
    """A reward function failed on a sample and ``reward_model.on_error=raise``."""


class RewardLayer:
    """Scores trajectories as ``reward_model`` and ``custom_reward_function`` say.

    ``reward_model.reward_kwargs`` maps a scorer's name to its options: ``{"gsm8k": {"method": "flexible"}}``.
    Raises InputError, with all problems, for a configuration that cannot work.
    """

    def __init__(self, config: Any, tokenizer: Any = None):
        reward, custom = config.reward_model, config.custom_reward_function
        problems = option_problems(reward.reward_kwargs or {})
        function = None
        if custom.path:
            try:
                function = CustomFunction(
                    custom.path,
                    custom.name or "compute_score",
                    custom.reward_kwargs,
                    batched=tables.reward_manager(reward).batched,
                )
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        self.on_error = reward.on_error
        self.has_model, self.weight = reward.enable, reward.weight
        self.model: ModelRewards | None = None
        self.grader = Grader(scorer_options(reward), function)
        self.executor: Executor = make_manager(reward, self.grader)

    def attach(self, judge: Judge) -> None:
        """The reward model, once the workers have loaded it."""
        self.model = ModelRewards(judge)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """The verdict on what the policy wrote. A failing scorer raises only with ``on_error=raise``.

        In a row of style ``model`` it is the reward model's; in another one the scorer's, to which
        ``reward_model.weight`` times the model's number is added where that is not 0.
        """
        extra_info = {**prompt.extra_info, "rollout": rollout_facts(trajectory)}
        job = Job(prompt.data_source, trajectory.response_text, prompt.ground_truth, extra_info)
        if self.has_model and (prompt.style == MODEL_STYLE or self.weight):
            result = await self._with_model(prompt, trajectory, job)
        else:
            result = await self.executor.run(job)
        return self._after(result, job, prompt.uid) if isinstance(result, Failure) else result

    async def _with_model(self, prompt: Prompt, trajectory: Trajectory, job: Job) -> Score | Failure:
        if self.model is None:
            raise RuntimeError("reward_model.enable: the workers have not attached the model yet")
        answer = Answer.of(prompt, trajectory)
        if prompt.style == MODEL_STYLE:
            found = await self.model.run(answer)
            return found if isinstance(found, Failure) else alone(found)
        ruled, found = await asyncio.gather(self.executor.run(job), self.model.run(answer))
        failed = next((one for one in (ruled, found) if isinstance(one, Failure)), None)
        return failed or beside(ruled, found, self.weight)

    def _after(self, failure: Failure, job: Job, uid: str) -> Score:
        if self.on_error == "raise":
            raise RewardError(
                f"scoring failed ({failure.status.value}) on uid={uid!r}, data_source={job.data_source!r}, "
                f"ground_truth={job.ground_truth!r:.300}, response (its end)={job.response[-1000:]!r}\n{failure.detail}"
                "reward_model.on_error=zero or =mask goes on without it"
            )
        return Score(0.0, {"acc": 0.0}, failure.status, masked=self.on_error == "mask")

    def check(self, rows: Iterable[Prompt | Mapping[str, Any]]) -> None:
        """Looks at every row and grades the examples of the scorers in use, where the answers will be graded.

        ``rows`` are prompts or rows of the data schema. Raises InputError with all problems.
        """
        problems = find_problems(self.grader, self.executor, rows, model=self.has_model, weight=self.weight)
        if problems:
            raise InputError(problems)

    def in_waves(self) -> Callable[[], Awaitable[bool]] | None:
        """Makes the order of the verdicts independent of time; None where it is anyway.

        Returns what an engine that decodes in this process has to await before each of its steps: see
        :class:`core.rewards.managers.InWaves`. To be called after :meth:`check`, which learns whether workers grade.
        """
        if self.in_process:
            return None
        self.executor = waves = InWaves(self.executor)
        return waves.settled

    @property
    def in_process(self) -> bool:
        """Whether answers are graded in this process, while nothing else in it goes on."""
        return isinstance(self.executor, Naive) and self.executor.at_once

    def close(self) -> None:
        """Ends the manager's processes. A second call does nothing."""
        self.executor.close()


def rollout_facts(trajectory: Trajectory) -> dict[str, Any]:
    """What ``extra_info["rollout"]`` tells a scorer about how the response came about.

    ``segments`` is the role-tagged text: a scorer's ``response`` is the policy's part of it only.
    """
    return {
        "num_turns": trajectory.turns,
        "num_tool_calls": trajectory.tool_calls,
        "response_length": len(trajectory.response_ids),
        "truncated": trajectory.truncated,
        "segments": [{"role": segment.role, "text": segment.text} for segment in trajectory.segments],
    }
