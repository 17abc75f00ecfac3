"""Which engine gets a request: the samples of a prompt together, the turns of an episode where
their prefix is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from core.cluster.ray_engine import RayEngine
from core.engines.engine import SampleRequest, SamplingParams


class Actor:
    """An engine's actor that answers each request at once."""

    def __init__(self) -> None:
        self.seen: list[SampleRequest] = []
        self.sample = self
        self.abort = SimpleNamespace(remote=lambda *_: None)

    def options(self, **_: object) -> Actor:
        return self

    async def remote(self, requests):
        self.seen += [request for _, request in requests]
        for key, request in requests:
            future = asyncio.get_running_loop().create_future()
            future.set_result([(key, f"answer to {request.prompt_ids}")])
            yield future


@pytest.fixture
def engine():
    actors = {f"engine {i}": Actor() for i in range(3)}
    calls = {"lost": lambda _: None, "call": lambda *_: [[], [], []]}
    watch = SimpleNamespace(actors=actors, limit=lambda _: 60.0, took=lambda *_: None, **calls)
    return RayEngine(watch, list(actors))


def turn(episode: int | None, *ids: int) -> SampleRequest:
    return SampleRequest(ids, SamplingParams(8), seed=sum(ids), episode=episode)


async def play(engine: RayEngine, episode: int, turns: int) -> None:
    for length in range(1, turns + 1):
        await engine.sample(turn(episode, *[episode] * length))
        await asyncio.sleep(0.001 * (episode % 3))  # others overtake


def test_every_turn_of_an_episode_goes_to_the_engine_that_holds_its_prefix(engine):
    async def all_of_them():
        await asyncio.gather(*(play(engine, episode, 5) for episode in range(1, 31)))

    asyncio.run(all_of_them())
    homes = {}
    for name, actor in engine.watch.actors.items():
        for one in actor.seen:
            homes.setdefault(one.episode, set()).add(name)
    assert len(homes) == 30 and all(len(names) == 1 for names in homes.values())
    assert sorted(len(actor.seen) for actor in engine.watch.actors.values()) == [50, 50, 50]


def test_the_samples_of_a_prompt_begin_together(engine):
    async def group():
        await asyncio.gather(*(engine.sample(turn(number, 7, 8)) for number in range(6)))

    asyncio.run(group())
    assert sorted(len(actor.seen) for actor in engine.watch.actors.values()) == [0, 0, 6]


def test_requests_without_an_episode_go_where_least_is_in_flight(engine):
    async def singles():
        await asyncio.gather(*(engine.sample(turn(None, number)) for number in range(9)))

    asyncio.run(singles())
    assert [len(actor.seen) for actor in engine.watch.actors.values()] == [3, 3, 3]


def test_a_fault_on_the_way_reaches_whoever_awaits_the_sample(engine):
    def fail(**_):
        raise KeyError("planted")

    for actor in engine.watch.actors.values():
        actor.options = fail

    async def one():
        await asyncio.wait_for(engine.sample(turn(None, 1)), 20)

    with pytest.raises(KeyError, match="planted"):
        asyncio.run(one())
