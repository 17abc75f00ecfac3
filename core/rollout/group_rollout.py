"""Answers and scores prompts: the groups of a step, one at a time, and those of a validation.

A trainer's hooks are passed in: ``generate`` answers a prompt once, ``shape_reward`` makes a score the one that trains.
Which groups a step begins and keeps is :mod:`core.rollout.collect`'s choice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.config.schema import Config
from core.data.draw_order import sampling_seed
from core.engines import RolloutEngine, SampleRequest, SamplingParams
from core.engines.in_process_engine import InProcessEngine
from core.rewards.layer import RewardLayer
from core.rollout.agent_loop import AgentLoop, Episode, Limits, ToolCalls
from core.rollout.collect import ScoreGroups
from core.tracking.step_time import BusyClock
from core.types import AnsweredGroup, Prompt, ScoredGroup, Trajectory
from reward_scores.score import Score

GREEDY = -1  # the sample index of a greedy baseline answer

Generate = Callable[[Prompt, int, SamplingParams], Awaitable[Trajectory]]
ShapeReward = Callable[[Score, Trajectory], Score]


@dataclass(frozen=True)
class TrajectorySampler:
    """Samples trajectories from an engine: single turns, or episodes of an agent loop."""

    engine: Any  # has ``async sample(request)``
    tokenizer: Any
    run_seed: int
    agent_loop: AgentLoop | None
    tool_calls: ToolCalls

    async def sample_turn(self, prompt: Prompt, sample_index: int, sampling: SamplingParams) -> Trajectory:
        """Return one turn of the engine."""
        seed = sampling_seed(self.run_seed, prompt.ordinal, sample_index)
        return await self.engine.sample(SampleRequest(prompt.token_ids, sampling, seed, media=prompt.media))

    async def play(self, prompt: Prompt, sample_index: int, sampling: SamplingParams, limits: Limits) -> Trajectory:
        """Play an episode of the agent loop to its end."""
        parts = {"engine": self.engine, "tokenizer": self.tokenizer, "calls": self.tool_calls}
        episode = Episode(prompt, sample_index, sampling, limits, run_seed=self.run_seed, **parts)
        await self.agent_loop.run(episode)
        return episode.trajectory()


@dataclass(frozen=True)
class GroupRollout:
    """Answers a prompt ``n`` times with the hook ``generate``, scores the answers and shapes their scores.

    With ``greedy`` each group has a greedy answer as well, whose score is its baseline. ``clock`` counts the seconds in
    which anything decodes or is scored.
    """

    generate: Generate
    shape_reward: ShapeReward
    reward: RewardLayer
    clock: BusyClock
    n: int
    sampling: SamplingParams
    greedy: bool = False

    @property
    def score_later(self) -> ScoreGroups | None:
        """Return what scores whole groups after they are answered: for a reward function of lists, otherwise None."""
        return self.score_groups if self.reward.batched else None

    async def roll_group(self, prompt: Prompt) -> ScoredGroup | AnsweredGroup:
        """Answer a prompt and score each answer while others still decode, unless :attr:`score_later` is to do so."""
        requests = [(index, self.sampling) for index in range(self.n)]
        if self.greedy:
            requests.append((GREEDY, dataclasses.replace(self.sampling, temperature=0.0)))
        if self.reward.batched:
            answers = await asyncio.gather(*(self.answer(prompt, *request) for request in requests))
            return AnsweredGroup(prompt, tuple(answers[: self.n]), *answers[self.n :])
        rolls = await asyncio.gather(*(self.answer_and_score(prompt, *request) for request in requests))
        trajectories, scores = zip(*rolls[: self.n], strict=True)
        return self.shaped(ScoredGroup(prompt, trajectories, scores), *rolls[self.n :])

    async def score_groups(self, groups: Sequence[AnsweredGroup]) -> list[ScoredGroup]:
        """Score whole groups in one call and shape them. Greedy answers have a call of their own, as in verl."""
        scored = await self.score_together(groups)
        if not self.greedy:
            return list(map(self.shaped, scored))
        greedy = await self.score_together([AnsweredGroup(group.prompt, (group.greedy,)) for group in groups])
        return [
            self.shaped(group, (one.trajectories[0], one.scores[0])) for group, one in zip(scored, greedy, strict=True)
        ]

    def shaped(self, group: ScoredGroup, greedy: tuple[Trajectory, Score] | None = None) -> ScoredGroup:
        """Return the group with the scores that train, and the shaped score of its greedy answer as its baseline."""
        scores = tuple(map(self.shape_reward, group.scores, group.trajectories))
        baseline = None if greedy is None else self.shape_reward(greedy[1], greedy[0])
        return dataclasses.replace(group, scores=scores, baseline=baseline)

    async def validation_groups(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, answered: Callable[[], Any]
    ) -> Sequence[ScoredGroup]:
        """Answer each prompt ``n`` times and score the answers; nothing shapes them. ``answered`` counts prompts."""

        async def roll(prompt: Prompt) -> ScoredGroup | AnsweredGroup:
            if self.reward.batched:
                answers = await asyncio.gather(*(self.answer(prompt, index, sampling) for index in range(n)))
                group = AnsweredGroup(prompt, tuple(answers))
            else:
                rolls = await asyncio.gather(*(self.answer_and_score(prompt, index, sampling) for index in range(n)))
                group = ScoredGroup(prompt, *zip(*rolls, strict=True))
            answered()
            return group

        groups = await asyncio.gather(*map(roll, prompts))
        return await self.score_together(groups) if self.reward.batched else groups

    async def answer(self, prompt: Prompt, index: int, sampling: SamplingParams) -> Trajectory:
        """Return one trajectory."""
        with self.clock.busy("decode"):
            return await self.generate(prompt, index, sampling)

    async def answer_and_score(self, prompt: Prompt, index: int, sampling: SamplingParams) -> tuple[Trajectory, Score]:
        """Return one trajectory and the scorer's score of it."""
        trajectory = await self.answer(prompt, index, sampling)
        with self.clock.busy("reward"):
            score = await self.reward.score(prompt, trajectory)
        return trajectory, score.keeping_raw()

    async def score_together(self, groups: Sequence[AnsweredGroup]) -> list[ScoredGroup]:
        """Return the groups with what the scorer gave; a reward function of lists gets all of them in one call."""
        answers = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        with self.clock.busy("reward"):
            scores = map(Score.keeping_raw, await self.reward.score_all(answers))
        return [
            ScoredGroup(group.prompt, group.trajectories, tuple(itertools.islice(scores, len(group.trajectories))))
            for group in groups
        ]


def make_deterministic(
    config: Config, engine: RolloutEngine, reward: RewardLayer, tool_calls: ToolCalls, *, episodes: bool
) -> None:
    """Have an engine in this process await what decides which samples decode together: a run then repeats to the bit.

    Scores are awaited where they decide what is begun next, tools with ``multi_turn.deterministic_tools``. Other
    engines are left alone.
    """
    if not isinstance(engine, InProcessEngine):
        return
    data, barriers = config.data, []
    in_flight = data.gen_batch_size or data.train_batch_size
    if config.drops_groups or in_flight < data.train_batch_size:
        barriers += reward.add_barriers()
    if episodes and config.actor_rollout_ref.rollout.multi_turn.deterministic_tools:
        barriers.append(tool_calls.add_barrier())

    async def settled() -> bool:
        """Await all of them; return whether any had news."""
        return any([await barrier() for barrier in barriers])

    engine.before_step = settled if barriers else None
