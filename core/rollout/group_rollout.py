"""Answers and scores prompts: the groups of a step, one at a time, and those of a validation.

A trainer's hooks are passed in: ``generate`` answers a prompt once, ``shape_reward`` makes a score the one that trains.
Which groups a step begins and keeps is :mod:`core.rollout.collect`'s choice.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from core.config.schema import Config
from core.data.draw_order import sampling_seed
from core.engines import RolloutEngine, SampleRequest, SamplingParams
from core.engines.in_process_engine import InProcessEngine
from core.rewards.layer import RewardLayer
from core.rollout.agent_loop import AgentLoop, Barrier, Episode, Limits
from core.tracking.metrics import BusyClock
from core.types import Prompt, ScoredGroup, Trajectory
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
    tool_calls: Barrier

    async def sample(self, prompt: Prompt, sample_index: int, sampling: SamplingParams, limits: Limits) -> Trajectory:
        """Return an episode of the agent loop, played to its end, or without a loop one turn of the engine."""
        if self.agent_loop is None:
            seed = sampling_seed(self.run_seed, prompt.ordinal, sample_index)
            return await self.engine.sample(SampleRequest(prompt.token_ids, sampling, seed, media=prompt.media))
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
    scoring: Barrier = field(default_factory=Barrier)

    async def roll_group(self, prompt: Prompt) -> ScoredGroup:
        """Answer a prompt, score the answers and shape their scores."""
        rolls = [self.answers(prompt, range(self.n), self.sampling)]
        if self.greedy:
            rolls.append(self.answers(prompt, [GREEDY], dataclasses.replace(self.sampling, temperature=0.0)))
        rolled = await asyncio.gather(*rolls)
        scores, *baseline = [tuple(map(self.shape_reward, one.scores, one.trajectories)) for one in rolled]
        return dataclasses.replace(rolled[0], scores=scores, baseline=baseline[0][0] if baseline else None)

    async def answers(self, prompt: Prompt, indices: Iterable[int], sampling: SamplingParams) -> ScoredGroup:
        """Return an answer for each sample index, each scored while others still decode; nothing shapes the scores."""

        async def answer(index: int) -> tuple[Trajectory, Score]:
            with self.clock.busy("decode"):
                trajectory = await self.generate(prompt, index, sampling)
            with self.clock.busy("reward"):
                score = await self.scoring.run(lambda: self.reward.score(prompt, trajectory))
            return trajectory, score.keeping_raw()

        return ScoredGroup(prompt, *zip(*await asyncio.gather(*map(answer, indices)), strict=True))


def make_deterministic(config: Config, engine: RolloutEngine, scoring: Barrier, tool_calls: Barrier) -> None:
    """Have an engine in this process await what decides which samples decode together: a run then repeats to the bit.

    Scores are awaited where they decide what is begun next, tools with ``multi_turn.deterministic_tools``. Other
    engines are left alone.
    """
    if not isinstance(engine, InProcessEngine):
        return
    data = config.data
    scoring.holds = config.drops_groups or (data.gen_batch_size or data.train_batch_size) < data.train_batch_size
    tool_calls.holds = config.actor_rollout_ref.rollout.multi_turn.deterministic_tools
    barriers = [barrier for barrier in (scoring, tool_calls) if barrier.holds]

    async def settled() -> bool:
        """Await all of them; return whether any had news."""
        return any([await barrier.settled() for barrier in barriers])

    engine.before_step = settled if barriers else None
