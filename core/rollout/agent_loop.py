"""Episodes of several turns: the policy writes and a tool answers, until an answer or the limit.

An agent loop is a class with ``async run(episode)``: plain Python that asks for turns and adds what
its tools return. An :class:`Episode` records one stream of token ids. What the policy sampled stays
as it was sampled. What a tool adds is encoded once, and has no loss and log-prob 0. Nothing is
decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from core.config import registry
from core.config.code_by_path import load_object
from core.config.schema import Config
from core.data.draw_order import sampling_seed
from core.data.parquet import Example
from core.data.vocabulary import encode_literally, special_tokens, writable
from core.engines.engine import SampleRequest, SamplingParams
from core.errors import InputError, Problems
from core.rollout.barrier import Barrier
from core.types import KeptSets, Prompt, Segment, Stop, Trajectory

KEY = "actor_rollout_ref.rollout.agent_loop"


class AgentLoop:
    """Base of what ``actor_rollout_ref.rollout.agent_loop`` names.

    One object serves all episodes of a run, many at a time. ``recipes/search_r1/search_loop.py`` is
    an example. ``tags`` are what it looks for in the policy's text. What ``__init__`` raises ends
    the run before a model loads.
    """

    tags: Sequence[str] = ()
    # Whether it makes prompts of its own, of up to data.max_prompt_length tokens
    makes_prompts = False

    def __init__(self, config: Config, tokenizer: Any):
        self.config = config
        self.tokenizer = tokenizer
        check_readable(tokenizer, self.tags)

    async def run(self, episode: Episode) -> Trajectory | None:
        """Play one episode: at least one turn. What it raises ends the run.

        Return its trajectory if that is another than ``episode`` has recorded.
        """
        raise NotImplementedError

    def check(self, example: Example) -> str | None:
        """Return what is wrong with an example for this loop, or None. All are checked at start."""
        return None

    def tools_of(self, example: Example) -> Sequence[Any]:
        """Return the schemas of the tools that the example's prompt describes to the policy."""
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Return numbers of the episodes since the last call, under full names (``agent/...``)."""
        return {}

    def close(self) -> None:
        """Close tools and connections. A second call does nothing."""


def make_agent_loop(config: Config, tokenizer: Any) -> AgentLoop | None:
    """Return the configured loop, or None if each trajectory is one turn. Raises InputError."""
    name = config.actor_rollout_ref.rollout.agent_loop
    if not name:
        return None
    kind = load_object(registry.AGENT_LOOPS.get(name, name), KEY)
    if not (isinstance(kind, type) and issubclass(kind, AgentLoop)):
        fix = "extend core.rollout.agent_loop.AgentLoop"
        raise InputError(f"{KEY}={name}: is no agent loop; {fix}")
    return kind(config, tokenizer)


def check_readable(tokenizer: Any, tags: Sequence[str]) -> None:
    """Raise InputError for tags that are special tokens: the text of an answer has none."""
    special = special_tokens(tokenizer)
    hidden = [tag for tag in tags if tag in special]
    if hidden:
        raise InputError(
            f"the tokenizer's {', '.join(hidden)}: are special tokens, which the text of an answer "
            "lacks, and the loop reads them; set special to false for them in tokenizer.json and "
            "tokenizer_config.json"
        )


def check_example(loop: AgentLoop | None, example: Example, problems: Problems) -> None:
    """Add a problem if the loop refuses an example of the data."""
    refusal = loop and loop.check(example)
    if refusal:
        rule = "an example does not suit its loop"
        problems.add(KEY, rule, "correct the data", example.where, refusal)


@dataclass(frozen=True)
class EpisodeLimits:
    """The most tokens of an episode."""

    response: int  # everything after the prompt, tool output included
    turn: int  # one turn of the policy


@dataclass(frozen=True)
class Stretch:
    """A part of the response that the policy or somebody else wrote, as it was recorded."""

    segment: Segment
    ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32: the engine's; 0 if the policy did not write the stretch
    by_policy: bool  # a sample of the policy, as it trains
    kept: KeptSets | None = None  # the ids that truncation kept, if they are replayed


@dataclass(eq=False, repr=False)
class Episode:
    """One sample of one prompt while it grows."""

    prompt: Prompt
    sample_index: int
    sampling: SamplingParams
    limits: EpisodeLimits
    sampler: TrajectorySampler
    first_turn: int = 0  # sets the seeds apart from those of other trajectories
    turns: int = 0  # of the policy
    tool_calls: int = 0  # made through call()
    user_scores: list[float] = field(default_factory=list)  # of the policy's turns
    tool_rewards: list[float] = field(default_factory=list)  # of the policy's calls
    # Why the last turn ended; LENGTH once something did not fit
    stop: Stop | None = None
    # Why the episode cannot be scored: something around the policy failed
    failure: str = ""
    _stretches: list[Stretch] = field(default_factory=list)
    _oldest_version: int | None = None
    _is_full: bool = False

    @property
    def seed(self) -> int:
        """The first turn's seed, which no other sample of the run has."""
        return self._seed_of_turn(0)

    def _seed_of_turn(self, turn: int) -> int:
        run_seed = self.sampler.run_seed
        number = self.first_turn + turn
        return sampling_seed(run_seed, self.prompt.ordinal, self.sample_index, number)

    @property
    def written(self) -> int:
        """Tokens of the response so far."""
        return sum(len(stretch.ids) for stretch in self._stretches)

    @property
    def left(self) -> int:
        """Tokens that the response may still hold."""
        return self.limits.response - self.written

    @property
    def over(self) -> bool:
        """Whether there is no room for another turn."""
        return self._is_full or self.left < 1

    @property
    def last_stretch(self) -> Stretch:
        return self._stretches[-1]

    @property
    def last_id(self) -> int:
        """The last token of the response."""
        return int(self.last_stretch.ids[-1])

    @property
    def context(self) -> list[int]:
        """The prompt's tokens, and those of the response so far."""
        context = list(self.prompt.token_ids)
        for stretch in self._stretches:
            context += stretch.ids.tolist()
        return context

    async def turn(
        self,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        sampled_by: Mapping[str, float] = MappingProxyType({}),
    ) -> Segment:
        """Let the policy write until its end of sequence, one of the ``stop`` strings, or a limit.

        The token that completes a stop string is kept whole. Each turn has its own seed. A turn
        ``sampled_by`` another temperature or top_p than the run's has no loss, since its tokens are
        no samples of the policy.
        """
        if self.over:
            limit = self.limits.response
            raise RuntimeError(f"no room for a turn: {self.written} of {limit} tokens are written")
        check_readable(self.sampler.tokenizer, stop)
        distribution = dataclasses.replace(self.sampling, **sampled_by)
        sampling = dataclasses.replace(
            distribution,
            max_tokens=min(self.left, self.limits.turn, max_tokens or self.left),
            stop=(*self.sampling.stop, *stop),
        )
        request = SampleRequest(
            prompt_ids=tuple(self.context),
            sampling=sampling,
            seed=self._seed_of_turn(self.turns),
            episode=self.seed,
            media=self.prompt.media,
        )
        turn = await self.sampler.engine.sample(request)
        segment = Segment("policy", turn.response_text)
        trains = distribution == self.sampling
        kept = turn.kept if trains else None
        stretch = Stretch(segment, turn.response_ids, turn.logprobs, by_policy=trains, kept=kept)
        self._stretches.append(stretch)
        if self._oldest_version is None or turn.policy_version < self._oldest_version:
            self._oldest_version = turn.policy_version
        self.turns += 1
        self.stop = turn.stop
        return segment

    async def call(
        self,
        job: Callable[[], Awaitable[Any]],
        timeout_s: float | None = None,
        *,
        counted: bool = True,
    ) -> Any:
        """Await a tool. ``counted``: it is a call that the policy made.

        Raises TimeoutError after ``timeout_s``, and what the tool raises.
        """
        self.tool_calls += counted

        async def bounded_job() -> Any:
            async with asyncio.timeout(timeout_s):
                return await job()

        return await self.sampler.barrier.run("tools", bounded_job)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text that is not the policy's; special tokens in it stay text."""
        return encode_literally(self.sampler.tokenizer, writable(text))

    def add(self, text: str, role: str = "tool", ids: Sequence[int] | None = None) -> bool:
        """Append text that the policy did not write: all of it, or nothing if it does not fit.

        It fits if it leaves at least one token to the policy. ``ids`` are used in place of
        :meth:`encode`'s. Return whether the policy can go on; if not, the episode is over and
        counts as truncated.
        """
        if role == "policy":
            raise ValueError("role='policy' is kept for what the engine sampled")
        if ids is None:
            ids = self.encode(text)
        if len(ids) >= self.left:
            self.cut_short()
            return False
        token_ids = np.array(ids, np.int32)
        no_logprobs = np.zeros(len(token_ids), np.float32)
        segment = Segment(role, writable(text))
        self._stretches.append(Stretch(segment, token_ids, no_logprobs, by_policy=False))
        return True

    def cut_short(self) -> None:
        """End the episode as truncated: something that has to follow does not fit."""
        self._is_full = True
        self.stop = Stop.LENGTH

    def trajectory(self) -> Trajectory:
        """Return the episode so far. ``policy_version`` is the oldest of its turns."""
        if not self.turns:
            raise RuntimeError("the agent loop ended an episode in which the policy wrote nothing")
        stretches = self._stretches
        masks = [np.full(len(stretch.ids), stretch.by_policy) for stretch in stretches]
        mask = np.concatenate(masks)
        return Trajectory(
            prompt_ids=np.array(self.prompt.token_ids),
            response_ids=np.concatenate([stretch.ids for stretch in stretches]),
            response_mask=mask,
            logprobs=np.concatenate([stretch.logprobs for stretch in stretches]) * mask,
            segments=tuple(stretch.segment for stretch in stretches),
            stop=self.stop,
            policy_version=self._oldest_version,
            seed=self.seed,
            turns=self.turns,
            tool_calls=self.tool_calls,
            user_scores=tuple(self.user_scores),
            tool_rewards=tuple(self.tool_rewards),
            failure=self.failure,
            kept=KeptSets.joined([(stretch.kept, len(stretch.ids)) for stretch in stretches]),
        )


@dataclass(frozen=True)
class TrajectorySampler:
    """Samples trajectories from an engine: single turns, or episodes of an agent loop."""

    engine: Any  # has ``async sample(request)``
    tokenizer: Any
    run_seed: int
    agent_loop: AgentLoop | None = None
    barrier: Barrier = field(default_factory=Barrier)

    async def sample(
        self, prompt: Prompt, sample_index: int, sampling: SamplingParams, limits: EpisodeLimits
    ) -> Trajectory:
        """Return a whole episode of the agent loop, or without a loop one turn of the engine."""
        if self.agent_loop is None:
            seed = sampling_seed(self.run_seed, prompt.ordinal, sample_index)
            request = SampleRequest(prompt.token_ids, sampling, seed, media=prompt.media)
            return await self.engine.sample(request)
        episode = Episode(prompt, sample_index, sampling, limits, self)
        trajectory = await self.agent_loop.run(episode)
        return episode.trajectory() if trajectory is None else trajectory
