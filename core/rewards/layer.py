"""Scoring of finished trajectories: by scorers, a reward model or a judge, and without a score.

The scorers are those of :mod:`reward_scores` or the user's function. They run in this process or in
graders that can be killed.
"""

import asyncio
import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NoReturn

from core.config.schema import Config, RewardModelConfig
from core.data.parquet import Example
from core.errors import InputError
from core.rewards.batch_calls import BatchCalls
from core.rewards.graders import GraderPool, InProcess
from core.rewards.grading import (
    BY_NAME,
    MODEL_STYLE,
    Answer,
    CustomFunction,
    Failure,
    Job,
    RewardModelCall,
    Scorers,
    as_score,
)
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus

log = logging.getLogger(__name__)

# Share of reward_model.timeout_s for a program's tests: a slow program is a wrong answer, and no
# failing scorer
TESTS_SHARE = 0.8
# Seconds for which a Sandbox Fusion server that is away is tried again: Server's default
FUSION_GIVE_UP_S = 120.0


class RewardError(InputError):
    """Answers could not be scored, and ``reward_model.on_error`` ends the run, or none could."""


class RewardLayer:
    """Scores trajectories by the sections ``reward_model`` and ``custom_reward_function``.

    Raises InputError, with all problems, for a configuration that cannot work.
    """

    def __init__(self, config: Config):
        reward = config.reward_model
        custom = config.custom_reward_function
        self.config: RewardModelConfig = reward
        scorer_names = sorted(BY_NAME)
        # Wrong options of a scorer fail on its own examples
        problems = [
            f"reward_model.reward_kwargs.{name}={options!r}: must map a scorer's name to its "
            f"options, as in {{gsm8k: {{method: flexible}}}}; names: {', '.join(scorer_names)}"
            for name, options in (reward.reward_kwargs or {}).items()
            if name not in scorer_names or not isinstance(options or {}, Mapping)
        ]
        problems += [
            f"reward_model.scorers.{source}={name}: is no scorer; names: {', '.join(scorer_names)}"
            for source, name in reward.scorers.items()
            if name not in BY_NAME
        ]
        function = None
        if custom.path:
            try:
                lists = reward.reward_manager == "batch"
                kwargs = deepcopy(custom.reward_kwargs)
                function = CustomFunction(custom.path, custom.name, kwargs, lists)
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        self.scorers = Scorers(scorer_options(reward), function, reward.scorers)
        timeout_s = reward.timeout_s
        if reward.sandbox_fusion.url:
            # The time of a server that restarts is not the scorer's, and must not cost an answer
            timeout_s += FUSION_GIVE_UP_S
        self.pool = GraderPool(
            self.scorers, grader_count(reward), timeout_s, reward.memory_limit_mb
        )
        self.manager: GraderPool | InProcess = self.pool
        if reward.reward_manager == "naive":
            self.manager = InProcess(self.scorers, self.pool)
        self.judge: Any = None
        if reward.judged:
            from core.rewards.judge import Judge

            self.judge = Judge(reward.judge)
        self._reward_model: BatchCalls | None = None
        self.failures = Failures()

    def attach(self, reward_model: RewardModelCall) -> None:
        """Use this reward model: the workers load it after the layer is made."""
        self._reward_model = BatchCalls(reward_model)

    @property
    def in_process(self) -> bool:
        """Return whether grading holds up this process. Known once the scorers are checked."""
        return (
            self.manager is not self.pool
            and not self.pool.settings["preload"]
            and self.judge is None
        )

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score an answer.

        The reward model scores an example of style ``model``. The scorer scores any other example,
        and ``reward_model.weight`` times the model's number is added. An episode that failed
        (``Trajectory.failure``) has no score, as if its scorer had failed. Raises RewardError only
        with ``on_error=raise``.
        """
        job = self.job(prompt, trajectory)
        result = await self._result(job, prompt, trajectory)
        if not isinstance(result, Failure):
            self.failures.count("")
            return result
        report = (
            f"scoring failed ({result.status.value}) on uid={prompt.uid!r}, "
            f"data_source={job.data_source!r}, ground_truth={job.ground_truth!r:.300}, "
            f"response (its end)={job.response[-1000:]!r}\n{result.detail}"
            f"(reward_model.on_error={self.config.on_error}) "
        )
        if self.config.on_error == "raise":
            raise RewardError(f"{report}ends the run: correct what failed, or set mask")
        self.failures.count(report)
        return Score(0.0, {"acc": 0.0}, result.status, masked=self.config.on_error == "mask")

    async def _result(self, job: Job, prompt: Prompt, trajectory: Trajectory) -> Score | Failure:
        """Return the score by scorer, reward model or both, or why there is none."""
        if trajectory.failure:
            return Failure(ScoreStatus.CRASH, f"{trajectory.failure}\n")
        if trajectory.reward is not None:
            return as_score(trajectory.reward)
        if not self.config.enable:
            return await self.manager.run(job)
        if prompt.style == MODEL_STYLE:
            return await self._score_by_model(prompt, trajectory)
        if not self.config.weight:
            return await self.manager.run(job)
        by_scorer, by_model = await asyncio.gather(
            self.manager.run(job), self._score_by_model(prompt, trajectory)
        )
        for score in (by_scorer, by_model):
            if isinstance(score, Failure):
                return score
        return dataclasses.replace(
            by_scorer,
            value=by_scorer.value + self.config.weight * by_model.value,
            parts={**by_model.parts, **by_scorer.parts},
        )

    def job(self, prompt: Prompt | Example, trajectory: Trajectory) -> Job:
        """Return the job of a scorer: the policy's text, and facts about the trajectory."""
        opened_tag = prompt.opened_tag if isinstance(prompt, Prompt) else None
        extra_info = {**prompt.extra_info, **facts(trajectory, opened_tag)}
        return Job(prompt.data_source, trajectory.response_text, prompt.ground_truth, extra_info)

    def grade_text(
        self, row: Prompt | Example, response: str, ground_truth: Any
    ) -> Score | Failure:
        """Grade an answer that is known before the run.

        A user's function also gets the row's ``extra_info``.
        """
        job = self.job(row, trajectory_of_text(response))
        job = dataclasses.replace(job, ground_truth=ground_truth)
        if self.scorers.custom is None:  # the examples of a built-in scorer belong to no row
            job = dataclasses.replace(job, extra_info={})
        return asyncio.run(self.manager.run(job))

    async def _score_by_model(self, prompt: Prompt, trajectory: Trajectory) -> Score | Failure:
        """Return the score of the judge or the reward model."""
        ids = (*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist())
        answer = Answer(prompt.messages, trajectory.response_text, ids, prompt.ground_truth)
        if self.judge is not None:
            return await self.judge.run(answer)
        return await self._reward_model.submit(answer)

    def usage(self, prefix: str) -> dict[str, float]:
        """Return the judge's counts since the last call, if there is a judge, by prefixed names."""
        return {} if self.judge is None else self.judge.usage(prefix)

    def close(self) -> None:
        """End the graders and the judge's connections. A second call does nothing."""
        self.manager.close()
        if self.judge is not None:
            self.judge.close()


@dataclass
class Failures:
    """Counts answers, and those without a score; warns of the first failure."""

    # Since the last rate
    answers: int = 0
    failed: int = 0
    # Reports of failures
    first: str = ""
    latest: str = ""

    def count(self, report: str) -> None:
        """Count an answer. ``report`` is the reason why it has no score, empty if it has one."""
        self.answers += 1
        if not report:
            return
        self.failed += 1
        self.latest = report
        if not self.first:
            self.first = report
            log.warning("%sShown once; reward/failed_rate has the share of each step", report)

    def rate(self, name: str) -> dict[str, float]:
        """Return the share of failures since the last call, if there were answers.

        Answers of dropped groups count.
        """
        share = {name: self.failed / self.answers} if self.answers else {}
        self.answers = 0
        self.failed = 0
        return share

    def stop_if_every_answer_failed(self, least: int) -> None:
        """Raise RewardError if ``least`` answers came since the last rate and every one failed."""
        if self.failed == self.answers >= least:
            self._stop(self.answers)

    def stop_if_no_answer_is_graded(self, groups: Iterable[ScoredGroup]) -> None:
        """Raise RewardError if the scorer failed on every answer of a step or a validation."""
        scores = [score for group in groups for score in group.scores]
        if scores and all(score.ungraded for score in scores):
            self._stop(len(scores))

    def _stop(self, answers: int) -> NoReturn:
        raise RewardError(
            f"the scorer failed on each of {answers} answers, of which nothing can be learnt; "
            "correct the scorer, or what it needs, and repeat the command. The latest one:\n"
            f"{self.latest}"
        )


def trajectory_of_text(text: str) -> Trajectory:
    """Return a trajectory of one turn that holds a text: an answer that is known at start."""
    return Trajectory([0], [0], [True], [0.0], (Segment("policy", text),), Stop.EOS, 0, 0)


def facts(trajectory: Trajectory, opened_tag: str | None = None) -> dict[str, Any]:
    """Return facts about a trajectory for its scorer: verl's names, and more under ``rollout``.

    verl's ``num_turns`` counts the prompt and tools too. ``opened_tag`` is a tag that the prompt's
    end opened, such as ``<think>``. ``segments`` is the role-tagged text: a scorer's ``response``
    is the policy's part of it only.
    """
    # Stretches of text that tools or simulated users wrote
    by_others = [segment.role != "policy" for segment in trajectory.segments]
    stretches = sum(1 for other, _ in itertools.groupby(by_others) if other)
    user_scores = list(trajectory.user_scores)
    return {
        "num_turns": 1 + trajectory.turns + stretches,
        "num_tool_calls": trajectory.tool_calls,
        "turn_scores": user_scores,
        "tool_rewards": list(trajectory.tool_rewards),
        "rollout_reward_scores": {"user_turn_rewards": user_scores} if user_scores else {},
        "rollout": {
            "num_turns": trajectory.turns,
            "num_tool_calls": trajectory.tool_calls,
            "opened_tag": opened_tag,
            "user_scores": user_scores,
            "response_length": len(trajectory.response_ids),
            "truncated": trajectory.truncated,
            "segments": [
                {"role": segment.role, "text": segment.text} for segment in trajectory.segments
            ],
        },
    }


def grader_count(reward: RewardModelConfig) -> int:
    """Return the number of graders: one per core, and at most 4 if num_workers is not set.

    A Sandbox Fusion server allows at most ``max_concurrent``.
    """
    count = reward.num_workers or min(4, os.cpu_count() or 1)
    if reward.sandbox_fusion.url:
        count = min(count, reward.sandbox_fusion.max_concurrent)
    return count


def scorer_options(reward: RewardModelConfig) -> dict[str, dict[str, Any]]:
    """Return ``reward_model.reward_kwargs``, with the place and the limits of programs."""
    options = {name: chosen or {} for name, chosen in reward.reward_kwargs.items()}
    has_deadline = reward.reward_manager != "naive"
    tests_s = TESTS_SHARE * reward.timeout_s
    sandbox = reward.sandbox.model_dump()
    if has_deadline:
        sandbox["total_timeout_s"] = tests_s
    of_programs = {"sandbox": sandbox}
    if reward.sandbox_fusion.url:
        fusion = reward.sandbox_fusion.model_dump()
        if has_deadline:
            fusion["total_timeout_s"] = tests_s
            fusion["max_concurrent"] //= grader_count(reward)  # the share of each grader
        of_programs["sandbox_fusion"] = fusion
    options["prime_code"] = {**of_programs, **options.get("prime_code", {})}
    return options
