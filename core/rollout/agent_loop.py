"""Episodes of several turns: the policy writes, a tool answers, until there is an answer or no room
is left.

A loop is a class with ``async run(episode)``, which asks for turns and adds what its tools return,
in plain Python. An :class:`Episode` keeps one stream of token ids: what the policy sampled stays as
it was sampled, what is added is encoded once and lies outside ``response_mask`` with log-prob 0.
Nothing is decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from core.config import registry
from core.config.code_by_path import load_object
from core.data.draw_order import sampling_seed
from core.data.parquet import Example, Problems
from core.data.vocabulary import encode_literally, special_tokens, writable
from core.engines.engine import SampleRequest, SamplingParams
from core.errors import InputError
from core.types import Prompt, Segment, Stop, Trajectory

if TYPE_CHECKING:
    from core.config.schema import Config

KEY = "actor_rollout_ref.rollout.agent_loop"


class AgentLoop:
    """What ``actor_rollout_ref.rollout.agent_loop`` names. One object serves all episodes of a run,
    many at a time.

    ``recipes/search_r1/search_loop.py`` is one. ``tags`` are what it reads in the policy's text.
    What ``__init__`` raises ends the run before a model loads.
    """

    tags: Sequence[str] = ()

    def __init__(self, config: Config, tokenizer: Any):
        self.config = config
        self.tokenizer = tokenizer
        check_readable(tokenizer, self.tags)

    async def run(self, episode: Episode) -> None:
        """Play one episode: at least one turn. What it raises ends the run."""
        raise NotImplementedError

    def check(self, example: Example | Prompt) -> str | None:
        """Return what is wrong with an example of the data for this loop, or None. Every one passes
        before a start."""
        return None

    def tools_of(self, example: Example) -> Sequence[Any]:
        """Return the schemas of the tools of which the example's prompt tells the policy."""
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Return numbers of the episodes since the last call, under full names (``agent/...``), for
        the step's log."""
        return {}

    def close(self) -> None:
        """Let go of tools and connections. A second call does nothing."""


def make_agent_loop(config: Config, tokenizer: Any) -> AgentLoop | None:
    """Return the configured loop, None where each trajectory is one turn. Raises InputError for a
    path to no loop."""
    spec = config.actor_rollout_ref.rollout.agent_loop
    kind = spec and load_object(registry.AGENT_LOOPS.get(spec, spec), KEY)
    if spec and not (isinstance(kind, type) and issubclass(kind, AgentLoop)):
        raise InputError(
            f"{KEY}={spec}: is no agent loop; extend core.rollout.agent_loop.AgentLoop"
        )
    return kind(config, tokenizer) if spec else None


def check_readable(tokenizer: Any, tags: Sequence[str]) -> None:
    """Raise InputError for tags that are special tokens: an answer's text has none."""
    if hidden := [tag for tag in tags if tag in special_tokens(tokenizer)]:
        rule = "are special tokens, which the text of an answer lacks, and the loop reads them"
        fix = "set special to false for them in tokenizer.json and tokenizer_config.json"
        raise InputError(f"the tokenizer's {', '.join(hidden)}: {rule}; {fix}")


def check_examples(loop: AgentLoop | None, examples: Iterable[Example | Prompt]) -> None:
    """Check all examples that a run may draw. Raises InputError where the loop refuses any."""
    problems = Problems(shown=3)
    for example in examples if loop is not None else ():
        if trouble := loop.check(example):
            where = example.where if isinstance(example, Example) else f"uid {example.uid}"
            problems.add(
                KEY, "an example does not suit its loop", "correct the data", where, trouble
            )
    problems.raise_if_any()


class Barrier:
    """Runs tools and scorers. Results of a kind that it ``holds`` are handed out together, once no
    job is outstanding.

    Where results decide what is generated next (filtered groups, turns after a tool), an engine in
    this process awaits :meth:`settled` before each step: which samples decode together, and with it
    every last bit, is then no chance.
    """

    def __init__(self) -> None:
        self.holds: frozenset[str] = frozenset()  # of "tools" and "scores"
        self._round: list[asyncio.Task] = []
        self._end = asyncio.Event()  # of the round
        self._news = False  # results were handed out since the last call of settled

    async def run(self, kind: str, job: Callable[[], Awaitable[Any]]) -> Any:
        """Return what the job returns; ``kind`` is tools or scores."""
        if kind not in self.holds:
            return await job()
        task = asyncio.ensure_future(job())
        self._round.append(task)
        task.add_done_callback(self._hand_out)
        try:
            await self._end.wait()  # which wakes those that wait in their order
        except asyncio.CancelledError:
            task.cancel()
            raise
        return await task

    def _hand_out(self, _: asyncio.Task) -> None:
        if all(task.done() for task in self._round):
            self._end.set()
            self._round, self._end, self._news = [], asyncio.Event(), True

    async def settled(self) -> bool:
        """Wait until no result is outstanding. Return whether any was handed out since the last
        call."""
        while self._round:
            await asyncio.wait(self._round)
        news, self._news = self._news, False
        return news


@dataclass(frozen=True)
class Limits:
    """``response`` tokens of the whole episode after the prompt, tools' included; ``turn`` of one
    of its turns."""

    response: int
    turn: int


class Episode:
    """One sample of one prompt while it grows.

    ``turns`` counts the policy's turns, ``tool_calls`` the calls made through :meth:`call`.
    ``seed``, the first turn's, is one that no other sample of the run has.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        sampling: SamplingParams,
        limits: Limits,
        sampler: TrajectorySampler,
    ):
        self.prompt, self.sample_index, self.sampling, self.limits = (
            prompt,
            sample_index,
            sampling,
            limits,
        )
        self.sampler = sampler
        self.seed = sampling_seed(sampler.run_seed, prompt.ordinal, sample_index)
        self.turns = self.tool_calls = 0
        self.user_scores: list[float] = []  # what simulated users gave the policy's turns
        self.tool_rewards: list[float] = []  # what tools gave the policy's calls
        self.ids: list[int] = []  # of the response
        self.stop: Stop | None = None  # of the last turn; LENGTH once something did not fit
        self.failure = ""  # why it cannot be scored: what is around the policy failed
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._segments: list[Segment] = []
        self._versions: list[int] = []
        self._full = False

    @property
    def left(self) -> int:
        """Tokens that the response may still hold."""
        return self.limits.response - len(self.ids)

    @property
    def over(self) -> bool:
        """Whether no further turn has room."""
        return self._full or self.left < 1

    async def turn(self, *, stop: Sequence[str] = (), max_tokens: int | None = None) -> Segment:
        """Let the policy write until the end of the sequence, one of the ``stop`` strings, or a
        limit.

        The token that completes a stop string is kept, whatever follows the string in it. Each turn
        has its own seed.
        """
        room = min(self.left, self.limits.turn, max_tokens or self.left)
        if self.over:
            raise RuntimeError(
                f"no room for a turn: {len(self.ids)} of {self.limits.response} tokens are written"
            )
        check_readable(self.sampler.tokenizer, stop)
        sampling = dataclasses.replace(
            self.sampling, max_tokens=room, stop=(*self.sampling.stop, *stop)
        )
        seed = sampling_seed(
            self.sampler.run_seed, self.prompt.ordinal, self.sample_index, self.turns
        )
        ids = (*self.prompt.token_ids, *self.ids)
        request = SampleRequest(ids, sampling, seed, episode=self.seed, media=self.prompt.media)
        wrote = await self.sampler.engine.sample(request)
        self._append(
            wrote.response_ids.tolist(),
            True,
            wrote.logprobs.tolist(),
            Segment("policy", wrote.response_text),
        )
        self._versions.append(wrote.policy_version)
        self.turns += 1
        self.stop = wrote.stop
        return self._segments[-1]

    async def call(
        self,
        job: Callable[[], Awaitable[Any]],
        timeout_s: float | None = None,
        *,
        counted: bool = True,
    ) -> Any:
        """Await a tool, as a call if it is ``counted``. Raises TimeoutError after ``timeout_s``,
        and what it raises."""
        self.tool_calls += counted

        async def bounded() -> Any:
            async with asyncio.timeout(timeout_s):
                return await job()

        return await self.sampler.barrier.run("tools", bounded)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text that is not the policy's. What looks like a special token in it
        stays text."""
        return encode_literally(self.sampler.tokenizer, writable(text))

    def add(self, text: str, role: str = "tool", ids: Sequence[int] | None = None) -> bool:
        """Append text that the policy did not write: all of it or, where it would leave no token to
        the policy, none.

        ``ids`` are its own, if they are not :meth:`encode`'s. Returns whether the policy can go on.
        Where it cannot, the episode is over and counts as truncated.
        """
        if role == "policy":
            raise ValueError("role='policy' is kept for what the engine sampled")
        ids = self.encode(text) if ids is None else ids
        if len(ids) >= self.left:
            self.cut_short()
            return False
        self._append(list(ids), False, [0.0] * len(ids), Segment(role, writable(text)))
        return True

    def cut_short(self) -> None:
        """End the episode as truncated: something that has to follow has no room."""
        self._full, self.stop = True, Stop.LENGTH

    def _append(
        self, ids: list[int], by_policy: bool, logprobs: list[float], segment: Segment
    ) -> None:
        self.ids += ids
        self._mask += [by_policy] * len(ids)
        self._logprobs += logprobs
        self._segments.append(segment)

    def trajectory(self) -> Trajectory:
        """Return the episode as it stands. ``policy_version`` is the oldest of its turns."""
        if not self.turns:
            raise RuntimeError("the agent loop ended an episode in which the policy wrote nothing")
        return Trajectory(
            prompt_ids=np.array(self.prompt.token_ids),
            response_ids=np.array(self.ids),
            response_mask=np.array(self._mask),
            logprobs=np.array(self._logprobs),
            segments=tuple(self._segments),
            stop=self.stop,
            policy_version=min(self._versions),
            seed=self.seed,
            turns=self.turns,
            tool_calls=self.tool_calls,
            user_scores=tuple(self.user_scores),
            tool_rewards=tuple(self.tool_rewards),
            failure=self.failure,
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
        self, prompt: Prompt, sample_index: int, sampling: SamplingParams, limits: Limits
    ) -> Trajectory:
        """Return an episode of the agent loop, played to its end, or without a loop one turn of the
        engine."""
        if self.agent_loop is None:
            seed = sampling_seed(self.run_seed, prompt.ordinal, sample_index)
            return await self.engine.sample(
                SampleRequest(prompt.token_ids, sampling, seed, media=prompt.media)
            )
        episode = Episode(prompt, sample_index, sampling, limits, self)
        await self.agent_loop.run(episode)
        return episode.trajectory()
