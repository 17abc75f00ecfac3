"""What samples an answer: its seed is of its ordinal, its number and its turn."""

from __future__ import annotations

import asyncio

from core.rollout.agent_loop import ToolCalls
from core.rollout.group_rollout import TrajectorySampler
from core.types import Prompt


def test_a_question_that_is_drawn_again_samples_other_answers():
    requests = []

    class Engine:
        async def sample(self, request):
            requests.append(request)

    sampler = TrajectorySampler(Engine(), None, 1, None, ToolCalls())
    for ordinal in (0, 1, 7):
        for index in (0, 1):
            asyncio.run(sampler.sample_turn(Prompt(ordinal, "same", (1, 2), (), "a", "test"), index, None))
    assert len({request.seed for request in requests}) == 6
