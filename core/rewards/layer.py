"""From a finished trajectory to its :class:`Score`: who scores it, what the scorer sees, and what a
failure becomes.

The scorers are :mod:`reward_scores`' or the user's function; they run in this process or in graders
that can be killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from core.data.parquet import Example
from core.errors import InputError
from core.rewards.batch_calls import BatchCalls
from core.rewards.graders import GraderPool, InProcess
from core.rewards.grading import (
    Answer,
    CustomFunction,
    Failure,
    Job,
    RewardModelCall,
    Scorers,
)
from core.rewards.scorer_check import MODEL_STYLE, check_scorers, written
from core.types import Prompt, ScoredGroup, Trajectory
from reward_scores import SCORERS
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import Config, RewardModelConfig

log = logging.getLogger(__name__)

# Of reward_model.timeout_s: a slow program is a wrong answer, not a failing scorer
TESTS_SHARE = 0.8
# For which a Sandbox Fusion server that is away is tried again: Server's default
FUSION_GIVE_UP_S = 120.0


class RewardError(InputError):
    """Answers could not be scored, and the run cannot go on: by ``reward_model.on_error``, or as
    none could."""


class RewardLayer:
    """Scores trajectories as the sections ``reward_model`` and ``custom_reward_function`` of the
    configuration say.

    Raises InputError, with all problems, for a configuration that cannot work.
    """

    def __init__(self, config: Config):
        reward, custom = config.reward_model, config.custom_reward_function
        self.config: RewardModelConfig = reward
        known = sorted({scorer.name for scorer in SCORERS.values()})
        fix = (
            f"must map a scorer's name to its options, as in {{gsm8k: {{method: flexible}}}}; "
            f"names: {', '.join(known)}"
        )
        problems = [
            f"reward_model.reward_kwargs.{name}={options!r}: {fix}"
            for name, options in (reward.reward_kwargs or {}).items()
            if name not in known or not isinstance(options or {}, Mapping)
        ]  # wrong options fail on the scorer's own examples
        function = None
        if custom.path:
            try:
                lists = reward.reward_manager == "batch"
                function = CustomFunction(custom.path, custom.name, custom.reward_kwargs, lists)
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        self.scorers = Scorers(scorer_options(reward), function)
        # A server that restarts must not cost an answer: its time is not the scorer's
        seconds = reward.timeout_s + (FUSION_GIVE_UP_S if reward.sandbox_fusion.url else 0.0)
        self.pool = GraderPool(self.scorers, grader_count(reward), seconds, reward.memory_limit_mb)
        self.manager = (
            InProcess(self.scorers, self.pool) if reward.reward_manager == "naive" else self.pool
        )
        self.judge: Any = None
        if reward.judged:
            from core.rewards.judge import Judge

            self.judge = Judge(reward.judge)
        self._reward_model: BatchCalls | None = None
        self.failures = Failures()
        # Data source -> an answer that was graded at start
        self.known: Mapping[str, tuple[str, Score]] = {}

    def attach(self, reward_model: RewardModelCall) -> None:
        """Use this reward model: the workers load it after the layer is made."""
        self._reward_model = BatchCalls(reward_model)

    def check(self, rows: Iterable[Prompt | Example], tokenizer: Any = None) -> None:
        """Check every row of the data, and grade known answers where the answers will be graded;
        ask for the judge.

        Raises InputError with all problems.
        """
        self.known = check_scorers(self, rows, tokenizer)
        if self.judge is not None:
            self.judge.check()

    @property
    def in_process(self) -> bool:
        """Whether answers are graded in this process, while nothing else in it goes on. Known after
        :meth:`check`."""
        return (
            self.manager is not self.pool
            and not self.pool.settings["preload"]
            and self.judge is None
        )

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score an answer.

        For an example of style ``model`` the reward model scores; for another one the scorer, to
        whose value ``reward_model.weight`` times the model's number is added. An episode that
        failed (``Trajectory.failure``) has no score, as if its scorer had failed, which raises
        RewardError only with ``on_error=raise``.
        """
        job = self.job(prompt, trajectory)
        if trajectory.failure:
            result = Failure(ScoreStatus.CRASH, f"{trajectory.failure}\n")
        elif self.config.enable and prompt.style == MODEL_STYLE:
            result = await self._ask_model(prompt, trajectory)
        elif self.config.enable and self.config.weight:
            result, model = await asyncio.gather(
                self.manager.run(job), self._ask_model(prompt, trajectory)
            )
            if isinstance(model, Failure):
                result = result if isinstance(result, Failure) else model
            elif not isinstance(result, Failure):
                value, parts = (
                    result.value + self.config.weight * model.value,
                    {**model.parts, **result.parts},
                )
                result = dataclasses.replace(result, value=value, parts=parts)
        else:
            result = await self.manager.run(job)
        if not isinstance(result, Failure):
            self.failures.count("")
            return result
        report = (
            f"scoring failed ({result.status.value}) on uid={prompt.uid!r}, "
            f"data_source={job.data_source!r}, "
            f"ground_truth={job.ground_truth!r:.300}, response (its "
            f"end)={job.response[-1000:]!r}\n{result.detail}"
            f"(reward_model.on_error={self.config.on_error}) "
        )
        if self.config.on_error == "raise":
            raise RewardError(f"{report}ends the run: correct what failed, or set mask")
        self.failures.count(report)
        return Score(0.0, {"acc": 0.0}, result.status, masked=self.config.on_error == "mask")

    def job(self, prompt: Prompt | Example, trajectory: Trajectory) -> Job:
        """Return what a scorer gets: what the policy wrote, and how it came about."""
        opened = prompt.opened_tag if isinstance(prompt, Prompt) else None
        extra_info = {**prompt.extra_info, **facts(trajectory, opened)}
        return Job(prompt.data_source, trajectory.response_text, prompt.ground_truth, extra_info)

    def grade_text(
        self, row: Prompt | Example, response: str, ground_truth: Any
    ) -> Score | Failure:
        """Grade an answer that is known before the run. A user's function has the row's
        ``extra_info`` beside it."""
        job = dataclasses.replace(self.job(row, written(response)), ground_truth=ground_truth)
        if self.scorers.custom is None:  # a built-in scorer's examples are to no row
            job = dataclasses.replace(job, extra_info={})
        return asyncio.run(self.manager.run(job))

    async def _ask_model(self, prompt: Prompt, trajectory: Trajectory) -> Score | Failure:
        """Return the number of the judge or the reward model."""
        ids = (*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist())
        answer = Answer(prompt.messages, trajectory.response_text, ids, prompt.ground_truth)
        if self.judge is not None:
            return await self.judge.run(answer)
        return await self._reward_model.submit(answer)

    def usage(self, prefix: str) -> dict[str, float]:
        """Return what a judge cost since the last call, under names with this prefix; nothing
        without a judge."""
        return {} if self.judge is None else self.judge.usage(prefix)

    def close(self) -> None:
        """End the graders and the judge's connections. A second call does nothing."""
        self.manager.close()
        if self.judge is not None:
            self.judge.close()


class Failures:
    """Counts answers and those without a score; warns of the first of these."""

    def __init__(self) -> None:
        self.answers = self.failed = 0  # since the last rate
        self.first = self.latest = ""  # reports of failures

    def count(self, report: str) -> None:
        """Count an answer. ``report`` tells why it has no score, and is empty for one that has."""
        self.answers, self.failed = self.answers + 1, self.failed + bool(report)
        if report and not self.first:
            self.first = report
            log.warning("%sShown once; reward/failed_rate has the share of each step", report)
        self.latest = report or self.latest

    def rate(self, name: str) -> dict[str, float]:
        """Return the share of failures since the last call, dropped groups included; nothing
        without answers."""
        share = {name: self.failed / self.answers} if self.answers else {}
        self.answers = self.failed = 0
        return share

    def stop_if_all(self, least: int) -> None:
        """Raise RewardError where ``least`` answers were scored since the last rate and every one
        failed."""
        if self.failed == self.answers >= least:
            self._stop(self.answers)

    def stop_if_none_is_graded(self, groups: Iterable[ScoredGroup]) -> None:
        """Raise RewardError where the scorer failed on every answer of a step or a validation."""
        scores = [score for group in groups for score in group.scores]
        if scores and all(score.ungraded for score in scores):
            self._stop(len(scores))

    def _stop(self, answers: int) -> NoReturn:
        rule = f"the scorer failed on each of {answers} answers, of which nothing can be learnt"
        fix = "correct the scorer, or what it needs, and repeat the command"
        raise RewardError(f"{rule}; {fix}. The latest one:\n{self.latest}")


def facts(trajectory: Trajectory, opened_tag: str | None = None) -> dict[str, Any]:
    """Return what a scorer learns of how the response came about: verl's names, and more under
    ``rollout``.

    verl's ``num_turns`` counts the prompt and tools too. ``opened_tag`` is a tag that the prompt's
    end opened, such as ``<think>``. ``segments`` is the role-tagged text: a scorer's ``response``
    is the policy's part of it only.
    """
    by_policy = [segment.role == "policy" for segment in trajectory.segments]
    answers = sum(
        not own and before for before, own in zip([True, *by_policy], by_policy, strict=False)
    )
    users = list(trajectory.user_scores)
    return {
        "num_turns": 1 + trajectory.turns + answers,
        "num_tool_calls": trajectory.tool_calls,
        "turn_scores": users,
        "tool_rewards": list(trajectory.tool_rewards),
        "rollout_reward_scores": {"user_turn_rewards": users} if users else {},
        "rollout": {
            "num_turns": trajectory.turns,
            "num_tool_calls": trajectory.tool_calls,
            "opened_tag": opened_tag,
            "user_scores": users,
            "response_length": len(trajectory.response_ids),
            "truncated": trajectory.truncated,
            "segments": [
                {"role": segment.role, "text": segment.text} for segment in trajectory.segments
            ],
        },
    }


def grader_count(reward: RewardModelConfig) -> int:
    """Return the number of graders: one a core, at most 4, and as many as a Sandbox Fusion server
    may be asked by."""
    count = reward.num_workers or min(4, os.cpu_count() or 1)
    return min(count, reward.sandbox_fusion.max_concurrent) if reward.sandbox_fusion.url else count


def scorer_options(reward: RewardModelConfig) -> dict[str, dict[str, Any]]:
    """Return ``reward_model.reward_kwargs``, with where and within which limits the scorers run
    programs."""
    options = {name: dict(one or {}) for name, one in (reward.reward_kwargs or {}).items()}
    sandbox, fusion = reward.sandbox.model_dump(), reward.sandbox_fusion.model_dump()
    if reward.reward_manager != "naive":  # naive has no deadline for an answer
        sandbox["total_timeout_s"] = fusion["total_timeout_s"] = TESTS_SHARE * reward.timeout_s
        # Each has its share
        fusion["max_concurrent"] //= grader_count(reward) if reward.sandbox_fusion.url else 1
    options["prime_code"] = {"sandbox": sandbox, **options.get("prime_code", {})}
    if reward.sandbox_fusion.url:
        options["prime_code"] = {"sandbox_fusion": fusion, **options["prime_code"]}
    return options
