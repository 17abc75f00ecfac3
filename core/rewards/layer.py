"""From a finished trajectory to its :class:`Score`: who scores it, what the scorer sees, and what a failure becomes.

The scorers are :mod:`reward_scores`' or the user's; where they run is a reward manager's choice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from core.config import registry
from core.data.parquet import Example
from core.errors import InputError
from core.rewards.batch_calls import Answer, BatchCalls, RewardModelCall
from core.rewards.check import MODEL_STYLE, check_examples, check_rows, option_problems
from core.rewards.custom import CustomFunction
from core.rewards.grading import Failure, InProcess, Job, RewardManager, Scorers, as_score
from core.rewards.judge import Judge
from core.rewards.managers import make_manager
from core.types import Prompt, Trajectory
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import Config, RewardModelConfig

RUN_PROGRAMS = ("prime_code", "unit_tests")  # scorers that do
TESTS_SHARE = 0.8  # of reward_model.timeout_s: a slow program is a wrong answer, not a failing scorer


class RewardError(RuntimeError):
    """A reward function failed on an answer and ``reward_model.on_error=raise``."""


class RewardLayer:
    """Scores trajectories as the sections ``reward_model`` and ``custom_reward_function`` of the configuration say.

    ``reward_model.reward_kwargs`` maps a scorer's name to its options: ``{"gsm8k": {"method": "flexible"}}``.
    Raises InputError, with all problems, for a configuration that cannot work.
    """

    def __init__(self, config: Config):
        reward, custom = config.reward_model, config.custom_reward_function
        problems = option_problems(reward.reward_kwargs or {})
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
        self._agreement = config.trainer.health.judge_agreement.bound if reward.judged else None
        self._call_model: BatchCalls | None = None
        self.scorers = Scorers(scorer_options(reward), function)
        self.manager: RewardManager = make_manager(reward, self.scorers)
        self.judge: Judge | None = Judge(reward.judge) if reward.judged else None
        self.judging: Any = self.judge  # the judge, or a barrier before it
        self._examples: dict[tuple[str, str, str], Score | Failure] = {}

    def attach(self, reward_model: RewardModelCall) -> None:
        """Use this reward model: the workers load it after the layer is made."""
        self._call_model = BatchCalls(reward_model)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score what the policy wrote. A failing scorer raises RewardError only with ``on_error=raise``.

        For an example of style ``model`` the reward model scores; for another one the scorer, to whose value
        ``reward_model.weight`` times the model's number is added where that is not 0.
        """
        extra_info = {**prompt.extra_info, **verl_facts(trajectory), "rollout": rollout_facts(trajectory)}
        job = Job(prompt.data_source, trajectory.response_text, prompt.ground_truth, extra_info)
        if self.config.enable and (prompt.style == MODEL_STYLE or self.config.weight):
            result = await self._with_model(prompt, trajectory, job)
        else:
            result = await self.manager.run(job)
        if not isinstance(result, Failure):
            return result
        if self.config.on_error == "raise":
            raise RewardError(
                f"scoring failed ({result.status.value}) on uid={prompt.uid!r}, data_source={job.data_source!r}, "
                f"ground_truth={job.ground_truth!r:.300}, response (its end)={job.response[-1000:]!r}\n{result.detail}"
                "reward_model.on_error=zero or =mask goes on without it"
            )
        return Score(0.0, {"acc": 0.0}, result.status, masked=self.config.on_error == "mask")

    def grade_again(self, prompt: Prompt, trajectory: Trajectory, response: str) -> float | None:
        """Return what the scorer gives a response, past the manager and all that keeps scores.

        None where that is not the whole score (a reward model), would run a user's function or a program a second time,
        or may not end.
        """
        scorers, source = self.scorers, prompt.data_source
        if self.config.enable or scorers.custom or prompt.style == MODEL_STYLE or scorers.libraries(source):
            return None
        scorer = scorers.scorer(source)
        if scorer.name in RUN_PROGRAMS:
            return None
        facts = {**prompt.extra_info, **verl_facts(trajectory), "rollout": rollout_facts(trajectory)}
        return as_score(scorer(response, prompt.ground_truth, facts, **scorers.options(scorer))).value

    async def _with_model(self, prompt: Prompt, trajectory: Trajectory, job: Job) -> Score | Failure:
        call = self._call_model if self.judging is None else self.judging.run
        if call is None:
            raise RuntimeError("reward_model.enable: the workers have not attached the model yet")
        ids = (*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist())
        answer = Answer(prompt.messages, trajectory.response_text, ids, prompt.ground_truth)
        if prompt.style == MODEL_STYLE:
            rule, found = None, await call(answer)
        else:
            rule, found = await asyncio.gather(self.manager.run(job), call(answer))
        if isinstance(rule, Failure):
            return rule
        if found.error or not math.isfinite(found.value):
            status = ScoreStatus.TIMEOUT if found.timed_out else ScoreStatus.CRASH
            reason = found.error or f"it gave {found.value}"
            return Failure(status, f"the reward model has no score for the answer: {reason}\n")
        if rule is None:
            return Score(found.value, found.parts)
        value, parts = rule.value + self.config.weight * found.value, {**rule.parts, **found.parts}
        return dataclasses.replace(rule, value=value, parts=parts)

    def check(self, rows: Iterable[Prompt | Example]) -> None:
        """Check every row of the data, and grade the scorers' own examples where the answers will be graded.

        A judge then grades its canaries. Raises InputError with all problems.
        """
        compares = self.judge is not None and self.judge.template.reads_reference
        problems, used = check_rows(self.config, self.scorers, self.manager, rows, model_compares=compares)
        for data_source in used:
            check_examples(problems, self.scorers.scorer(data_source), partial(self.grade_example, data_source))
        problems.raise_if_any()
        if self.judge is not None:
            self.judge.check(self._agreement)

    def grade_example(
        self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> Score | Failure:
        """Grade an answer that is known before the run; each is graded once, however many checks use its score."""
        # A user's function may treat data sources differently; a built-in scorer does not know them
        scored_by = data_source if self.scorers.custom else self.scorers.scorer(data_source).name
        key = (scored_by, response, repr(ground_truth))
        if key not in self._examples:
            job = Job(data_source, response, ground_truth, extra_info or {})
            self._examples[key] = asyncio.run(self.manager.run(job))
        return self._examples[key]

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


def rollout_facts(trajectory: Trajectory) -> dict[str, Any]:
    """Return ``extra_info["rollout"]``: how the response came about.

    ``user_scores`` are what a simulated user gave the policy's turns. ``segments`` is the role-tagged text: a scorer's
    ``response`` is the policy's part of it only.
    """
    return {
        "num_turns": trajectory.turns,
        "num_tool_calls": trajectory.tool_calls,
        "user_scores": list(trajectory.user_scores),
        "response_length": len(trajectory.response_ids),
        "truncated": trajectory.truncated,
        "segments": [{"role": segment.role, "text": segment.text} for segment in trajectory.segments],
    }


def verl_facts(trajectory: Trajectory) -> dict[str, int]:
    """Return what verl puts into ``extra_info`` itself, for reward functions that were written for it.

    Its ``num_turns`` counts the prompt, the policy's turns and those in which a tool answered, so that one answer
    has 2; ``extra_info["rollout"]["num_turns"]`` counts the policy's alone.
    """
    written = [segment.role == "policy" for segment in trajectory.segments]
    answers = sum(not own and before for before, own in zip([True, *written], written, strict=False))
    return {"num_turns": 1 + trajectory.turns + answers, "num_tool_calls": trajectory.tool_calls}


def scorer_options(reward: RewardModelConfig) -> dict[str, dict[str, Any]]:
    """Return ``reward_model.reward_kwargs``, with where and within which limits the scorers run programs."""
    options = {name: dict(given or {}) for name, given in (reward.reward_kwargs or {}).items()}
    sandbox = dataclasses.asdict(reward.sandbox)
    if reward.source != "register" or reward.reward_manager != "naive":  # naive has no deadline for an answer
        sandbox["total_timeout_s"] = TESTS_SHARE * reward.timeout_s
    for name in RUN_PROGRAMS:
        options[name] = {"sandbox": sandbox, **options.get(name, {})}
    if reward.sandbox_fusion.url:
        fusion = dataclasses.asdict(reward.sandbox_fusion)
        options["prime_code"] = {"sandbox_fusion": fusion, **options["prime_code"]}
    return options
