"""What waits for scores: the barrier that makes a run repeat to the bit."""

from __future__ import annotations

import asyncio
import random

from core.engines.engine import SampleRequest, SamplingParams
from core.engines.hf import HFEngine
from core.rollout.barrier import Barrier
from core.rollout.collect import CollectLimits, CollectState, collect_groups
from core.types import Prompt, ScoredGroup
from reward_scores.score import Score
from tests.tiny import tiny_model, tiny_tokenizer


class Slow:
    """Scores that take a random number of the event loop's turns: some of them several steps of the
    engine."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    async def score(self, value):
        for _ in range(self.random.choice((1, 2, 4, 8))):
            await asyncio.sleep(0)
        if value is None:
            raise KeyError("inner")
        return Score(float(value))


def held():
    barrier = Barrier()
    barrier.holds = frozenset({"scores"})
    return barrier


def test_results_are_handed_out_together_and_in_order():
    barrier, slow = held(), Slow(0)

    async def watch():
        order = []

        async def one(number):
            result = await barrier.run(
                "scores", lambda: slow.score(number if number != 7 else None)
            )
            assert not barrier._round  # the last one's score is there
            order.append((number, result.value))

        tasks = [asyncio.ensure_future(one(number)) for number in range(20)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        assert await barrier.settled()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[7], KeyError)  # an error passes through
        assert not await barrier.settled()
        return order

    assert asyncio.run(watch()) == [
        (number, float(number)) for number in range(20) if number not in (3, 7)
    ]


def decoded_together(seed: int) -> list[tuple[int, ...]]:
    """Which samples (by seed) each step of the engine decoded, under scores that take their
    time."""
    engine = HFEngine(tiny_model("llama", hidden_size=16, intermediate_size=16), tiny_tokenizer())
    barrier, slow, steps, step = held(), Slow(seed), [], engine._advance
    engine.before_step = barrier.settled

    def watched():
        steps.append(tuple(row.request.seed for row in engine.rows))
        return step()

    engine._advance = watched

    async def roll(ordinal):
        prompt = Prompt(ordinal, f"q{ordinal}", (1, 2, 3 + ordinal % 50), (), None, "x")

        async def one(sample):
            sampling = SamplingParams(
                max_tokens=2 + (ordinal * 7 + sample * 3) % 31, ignore_eos=True
            )
            trajectory = await engine.sample(
                SampleRequest(prompt.token_ids, sampling, 10 * ordinal + sample)
            )
            return trajectory, await barrier.run(
                "scores", lambda: slow.score(int(trajectory.response_ids[-1]) % 2)
            )

        trajectories, scores = zip(*await asyncio.gather(*map(one, range(2))), strict=True)
        return ScoredGroup(prompt, trajectories, scores)

    def mixed(group):
        return len({score.value for score in group.scores}) > 1

    asyncio.run(
        collect_groups(roll, mixed, CollectState(keep_rate=0.5), CollectLimits(6, 8, 1000, True))
    )
    return steps


def test_filtered_collecting_decodes_the_same_samples_together_however_long_scores_take():
    first, *others = (decoded_together(seed) for seed in range(3))
    assert len(first) > 20 and all(first == other for other in others)
