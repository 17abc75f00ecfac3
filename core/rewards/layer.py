"""From a finished trajectory to its :class:`Score`: who scores it, what the scorer sees, and what a failure becomes.

The scorers are :mod:`reward_scores`' or the user's; where they run is a reward manager's choice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from core.config import registry
from core.data.parquet import Example
from core.errors import InputError
from core.rewards.custom_reward import CustomFunction
from core.rewards.graders import make_manager
from core.rewards.grading import (
    Answer,
    Failure,
    Grade,
    InProcess,
    Job,
    ModelScore,
    RewardManager,
    RewardModelCall,
    Scorers,
)
from core.rewards.request_batcher import RequestBatcher
from core.rewards.scorer_check import (
    MODEL_STYLE,
    check_examples,
    check_rows,
    fails_on_all,
    option_problems,
    trial_answers,
)
from core.types import Prompt, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus
from reward_scores.unit_tests import SandboxOptions

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.sections.reward import RewardModelConfig

log = logging.getLogger(__name__)

COUNTS = {"zero": "it counts 0", "mask": "it carries no loss"}  # by reward_model.on_error
RUN_PROGRAMS = ("prime_code", "unit_tests")  # scorers that do
TESTS_SHARE = 0.8  # of reward_model.timeout_s: a slow program is a wrong answer, not a failing scorer


class RewardError(RuntimeError):
    """Answers could not be scored, and the run cannot go on: by ``reward_model.on_error``, or since none ever could."""


class Failures:
    """Counts answers and those without a score; warns of the first of these and of the first part that is no number."""

    def __init__(self, on_error: str):
        self.on_error = on_error
        self.answers = self.failed = 0  # since the last rate
        self.all_answers = self.all_failed = 0
        self.first = ""  # the report of the first failure
        self._noted = False

    def count(self, result: Score | Failure, job: Job, uid: str) -> None:
        self.answers += 1
        self.all_answers += 1
        if isinstance(result, Failure):
            self.failed += 1
            self.all_failed += 1
            if not self.first:
                self.first = f"{described(result, job, uid)}\n{result.detail}"
                if self.on_error in COUNTS and not result.fatal:  # otherwise the run ends with it
                    log.warning(
                        "%s(reward_model.on_error=%s: %s. Shown once; reward/failed_rate has the share of each step)",
                        self.first,
                        self.on_error,
                        COUNTS[self.on_error],
                    )
        elif result.notes and not self._noted:
            self._noted = True
            log.warning(
                "the scorer of data_source=%r returns parts that are no finite numbers (%s): they are kept as texts "
                "beside the answers and have no metric. Shown once",
                job.data_source,
                ", ".join(f"{name}={text!r:.60}" for name, text in result.notes.items()),
            )

    def rate(self, name: str) -> dict[str, float]:
        """Return the share of failures since the last call, dropped groups included; nothing without answers."""
        share = {name: self.failed / self.answers} if self.answers else {}
        self.answers = self.failed = 0
        return share

    def stop_if_all(self, least: int = 1) -> None:
        """Raise RewardError where at least ``least`` answers were scored so far and every one failed."""
        if self.all_failed == self.all_answers >= least:
            raise RewardError(
                f"the scorer failed on each of the {self.all_answers} answers so far, so that nothing can be learnt or "
                f"measured; the first one:\n{self.first}"
            )


def described(result: Failure, job: Job, uid: str) -> str:
    """Return which answer failed, in one line."""
    return (
        f"scoring failed ({result.status.value}) on uid={uid!r}, data_source={job.data_source!r}, "
        f"ground_truth={job.ground_truth!r:.300}, response (its end)={job.response[-1000:]!r}"
    )


class RewardLayer:
    """Scores trajectories as the sections ``reward_model`` and ``custom_reward_function`` of the configuration say.

    ``reward_model.reward_kwargs`` maps a scorer's name to its options: ``{"gsm8k": {"method": "flexible"}}``.
    Raises InputError, with all problems, for a configuration that cannot work.
    """

    def __init__(self, config: Config):
        reward, custom = config.reward_model, config.custom_reward_function
        own = registry.own_manager(reward.reward_manager, reward.source)
        problems = option_problems(reward.reward_kwargs or {}, others=own)
        function = None
        if custom.path:
            batched = registry.reward_manager(reward.reward_manager, reward.source).batched
            try:
                function = CustomFunction(custom.path, custom.name or "compute_score", custom.reward_kwargs, batched)
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        self.config: RewardModelConfig = reward
        self.uses_model, self.model_weight = reward.uses_model, reward.model_weight
        self._agreement = config.trainer.health.judge_agreement.bound if reward.judged else None
        self._reward_model: RequestBatcher | None = None
        self.scorers = Scorers(scorer_options(reward), function)
        self.manager: RewardManager = make_manager(reward, self.scorers)
        self.judge: Any = None
        if reward.judged:
            from core.rewards.judge import Judge

            self.judge = Judge(reward.judge)
        self.grade: Grade = self.manager.run
        self.ask_judge: Any = None if self.judge is None else self.judge.run
        self.custom = function is not None or own
        # It takes the answers of a group in one call
        self.batched = function is not None and function.batched
        self.failures = Failures(reward.on_error)
        self._known: dict[str, tuple[str, Score]] = {}  # data source -> an answer that was graded at start

    def attach(self, reward_model: RewardModelCall) -> None:
        """Use this reward model: the workers load it after the layer is made."""
        self._reward_model = RequestBatcher(lambda answers, _: reward_model(answers))

    async def _call_reward_model(self, answer: Answer) -> ModelScore:
        return (await self._reward_model.submit([answer]))[0]

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score an answer. A failing scorer raises RewardError only with ``on_error=raise``.

        For an example of style ``model`` the reward model scores; for another one the scorer, to whose value
        ``reward_model.weight`` times the model's number is added where that is not 0.
        """
        return await self._score(prompt, trajectory, self.job(prompt, trajectory), self.grade)

    async def score_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score answers to a prompt as :meth:`score` does; a function of lists gets them in one call, in this order."""
        jobs, grade = [self.job(prompt, trajectory) for trajectory in trajectories], self.grade
        if self.batched and not self._by_model(prompt):
            results = dict(zip(map(id, jobs), await self.manager.run_together(jobs), strict=True))

            async def grade(job: Job) -> Score | Failure:
                return results[id(job)]

        found = (self._score(prompt, one, job, grade) for one, job in zip(trajectories, jobs, strict=True))
        return list(await asyncio.gather(*found))

    def job(self, prompt: Prompt | Example, trajectory: Trajectory) -> Job:
        """Return what a scorer gets: what the policy wrote, or the whole response for a function that asks for it."""
        whole = self.config.solution_str == "response" and self.custom
        text = "".join(one.text for one in trajectory.segments) if whole else trajectory.response_text
        opened = prompt.opened_tag if isinstance(prompt, Prompt) else None
        extra_info = {**prompt.extra_info, **verl_facts(trajectory), "rollout": rollout_facts(trajectory, opened)}
        return Job(prompt.data_source, text, prompt.ground_truth, extra_info)

    def _by_model(self, prompt: Prompt) -> bool:
        return self.uses_model and prompt.style == MODEL_STYLE

    async def _score(self, prompt: Prompt, trajectory: Trajectory, job: Job, grade: Grade) -> Score:
        if self.uses_model and (prompt.style == MODEL_STYLE or self.model_weight):
            result = await self._with_model(prompt, trajectory, job, grade)
        else:
            result = await grade(job)
        self.failures.count(result, job, prompt.uid)
        if not isinstance(result, Failure):
            return result
        if result.fatal or self.config.on_error == "raise":
            way_out = "" if result.fatal else "reward_model.on_error=zero or =mask goes on without it"
            raise RewardError(f"{described(result, job, prompt.uid)}\n{result.detail}{way_out}")
        return Score(0.0, {"acc": 0.0}, result.status, masked=self.config.on_error == "mask")

    async def _with_model(self, prompt: Prompt, trajectory: Trajectory, job: Job, grade: Grade) -> Score | Failure:
        if self.ask_judge is None and self._reward_model is None:
            raise RuntimeError("reward_model.enable: the workers have not attached the model yet")
        call = self.ask_judge or self._call_reward_model
        ids = (*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist())
        answer = Answer(prompt.messages, trajectory.response_text, ids, prompt.ground_truth)
        if prompt.style == MODEL_STYLE:
            rule, model = None, await call(answer)
        else:
            rule, model = await asyncio.gather(grade(job), call(answer))
        if isinstance(rule, Failure):
            return rule
        if model.error or not math.isfinite(model.value):
            status = ScoreStatus.TIMEOUT if model.timed_out else ScoreStatus.CRASH
            reason = model.error or f"it gave {model.value}"
            return Failure(status, f"the reward model has no score for the answer: {reason}\n")
        if rule is None:
            return Score(model.value, model.parts)
        value, parts = rule.value + self.model_weight * model.value, {**rule.parts, **model.parts}
        return dataclasses.replace(rule, value=value, parts=parts)

    def check(self, rows: Iterable[Prompt | Example]) -> None:
        """Check every row of the data, and grade the scorers' own examples where the answers will be graded.

        A judge then grades its canaries. Raises InputError with all problems.
        """
        compares = self.judge is not None and self.judge.template.reads_reference
        problems, first = check_rows(self.config, self.scorers, self.manager, rows, model_compares=compares)
        by_scorer: dict[str, Prompt | Example] = {}
        for data_source, row in first.items():
            by_scorer.setdefault(self.scorers.scorer(data_source).name, row)
        for row in by_scorer.values():
            check_examples(problems, self.scorers.scorer(row.data_source), partial(self.grade_example, row))
        problems.raise_if_any()
        if failing := [problem for row in first.values() if self.custom and (problem := self._try(row))]:
            raise InputError(failing)
        self._say_isolation({self.scorers.scorer(data_source).name for data_source in first})
        if self.judge is not None:
            self.judge.check(self._agreement)

    def _say_isolation(self, scorers: Collection[str]) -> None:
        """Print what holds the programs of answers on this machine, where there are any."""
        options = [self.scorers.reward_kwargs[name] for name in RUN_PROGRAMS if name in scorers]
        local = [option["sandbox"] for option in options if not option.get("sandbox_fusion", {}).get("url")]
        if local and not self.scorers.custom:
            print(SandboxOptions(**local[0]).isolation().line, flush=True)

    def _try(self, row: Prompt | Example) -> str | None:
        """Have a user's code grade answers to a row until one has a score; return the problem where none has."""
        failed: list[Failure] = []
        answers = trial_answers(self.scorers.scorer(row.data_source), row.ground_truth)
        # A function of lists may compare answers: all of them in one call, and where that fails each of them twice
        for together in [answers, *((one, one) for one in answers)] if self.batched else [(one,) for one in answers]:
            for answer, result in zip(together, self._grade(row, together, row.ground_truth), strict=True):
                if not isinstance(result, Failure):
                    self._known[row.data_source] = (answer, result)
                    return None
                failed.append(result)
        custom = self.scorers.custom
        key = f"custom_reward_function.path={custom.name}" if custom else "reward_model.reward_manager"
        return fails_on_all(key, row, self.job(row, written("")), failed[0])

    def known_answer(self, row: Prompt | Example) -> tuple[str, Score]:
        """Return an answer and its score, to try hooks with: graded at the row's data source, or a scorer's example."""
        if row.data_source not in self._known:
            answer, ground_truth, _ = self.scorers.scorer(row.data_source).examples[0]
            self._known[row.data_source] = (answer, self.grade_example(row, answer, ground_truth))
        return self._known[row.data_source]

    def grade_example(self, row: Prompt | Example, response: str, ground_truth: Any) -> Score | Failure:
        """Grade an answer that is known before the run."""
        return self._grade(row, [response], ground_truth)[0]

    def _grade(self, row: Prompt | Example, responses: Sequence[str], ground_truth: Any) -> list[Score | Failure]:
        """Grade texts, in one call of a function of lists. A user's function has the row's ``extra_info`` beside it."""
        jobs = [dataclasses.replace(self.job(row, written(one)), ground_truth=ground_truth) for one in responses]
        if not self.custom:  # a built-in scorer's examples are to no row
            jobs = [dataclasses.replace(job, extra_info={}) for job in jobs]
        if self.batched:
            return asyncio.run(self.manager.run_together(jobs))
        return [asyncio.run(self.manager.run(job)) for job in jobs]

    @property
    def in_process(self) -> bool:
        """Whether answers are graded in this process, while nothing else in it goes on. Known after :meth:`check`."""
        return isinstance(self.manager, InProcess) and not self.manager.pool.preloaded and self.judge is None

    def usage(self, prefix: str) -> dict[str, float]:
        """Return what a judge cost since the last call, under names with this prefix; nothing without a judge."""
        return {} if self.judge is None else self.judge.usage(prefix)

    def close(self) -> None:
        """End the manager's processes and the judge's connections. A second call does nothing."""
        self.manager.close()
        if self.judge is not None:
            self.judge.close()


def rollout_facts(trajectory: Trajectory, opened_tag: str | None = None) -> dict[str, Any]:
    """Return ``extra_info["rollout"]``: how the response came about.

    ``opened_tag`` is the tag that the prompt's end opened, such as ``<think>``: the response begins inside it.
    ``user_scores`` are what a simulated user gave the policy's turns. ``segments`` is the role-tagged text: a scorer's
    ``response`` is the policy's part of it only.
    """
    return {
        "num_turns": trajectory.turns,
        "num_tool_calls": trajectory.tool_calls,
        "opened_tag": opened_tag,
        "user_scores": list(trajectory.user_scores),
        "response_length": len(trajectory.response_ids),
        "truncated": trajectory.truncated,
        "segments": [{"role": segment.role, "text": segment.text} for segment in trajectory.segments],
    }


def verl_facts(trajectory: Trajectory) -> dict[str, Any]:
    """Return what verl puts into ``extra_info`` itself, for reward functions that were written for it.

    Its ``num_turns`` counts the prompt, the policy's turns and those in which a tool answered, so that one answer
    has 2; ``extra_info["rollout"]["num_turns"]`` counts the policy's alone. ``turn_scores`` are a simulated user's,
    ``tool_rewards`` what tools gave single calls, ``rollout_reward_scores`` the former and what each tool gave the
    whole episode, under its name; all are empty where nothing gives any.
    """
    written = [segment.role == "policy" for segment in trajectory.segments]
    answers = sum(not own and before for before, own in zip([True, *written], written, strict=False))
    users = list(trajectory.user_scores)
    return {
        "num_turns": 1 + trajectory.turns + answers,
        "num_tool_calls": trajectory.tool_calls,
        "turn_scores": users,
        "tool_rewards": list(trajectory.tool_rewards),
        "rollout_reward_scores": {**trajectory.tool_scores, **({"user_turn_rewards": users} if users else {})},
    }


def written(text: str) -> Trajectory:
    """Return a trajectory of one turn that holds a text and stands for an answer at start."""
    return Trajectory([0], [0], [True], [0.0], (Segment("policy", text),), Stop.EOS, 0, 0)


def scorer_options(reward: RewardModelConfig) -> dict[str, dict[str, Any]]:
    """Return ``reward_model.reward_kwargs``, with where and within which limits the scorers run programs."""
    kwargs = reward.reward_kwargs or {}
    options = {name: dict(one or {}) for name, one in kwargs.items() if isinstance(one, Mapping | None)}
    sandbox, fusion = reward.sandbox.model_dump(), reward.sandbox_fusion.model_dump()
    if reward.source != "register" or reward.reward_manager != "naive":  # naive has no deadline for an answer
        sandbox["total_timeout_s"] = fusion["total_timeout_s"] = TESTS_SHARE * reward.timeout_s
    for name in RUN_PROGRAMS:
        options[name] = {"sandbox": sandbox, **options.get(name, {})}
    if reward.sandbox_fusion.url:
        options["prime_code"] = {"sandbox_fusion": fusion, **options["prime_code"]}
    return options
