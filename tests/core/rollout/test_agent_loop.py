"""Episodes: one stream of ids with a mask, seeds a turn, budgets, tools that hold nobody up, exact
replays."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config.composition import compose
from core.data.draw_order import sampling_seed
from core.engines.engine import SamplingParams
from core.errors import InputError
from core.rollout.agent_loop import (
    AgentLoop,
    Episode,
    EpisodeLimits,
    TrajectorySampler,
    make_agent_loop,
)
from core.types import Prompt, Stop
from tests.scripted_engine import LOGPROB, ScriptedEngine
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ASK = ("</ask>",)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def prompt(text: str = "Q: ", ordinal: int = 3) -> Prompt:
    return Prompt(
        ordinal, f"q{ordinal}", tuple(ids(text)), ({"role": "user", "content": text},), "a", "test"
    )


def episode(
    engine, response: int = 100, turn: int = 100, index: int = 0, ordinal: int = 3
) -> Episode:
    sampler, sampling = (
        TrajectorySampler(engine, TOKENIZER, run_seed=1),
        SamplingParams(max_tokens=999),
    )
    return Episode(prompt(ordinal=ordinal), index, sampling, EpisodeLimits(response, turn), sampler)


def scripted(*turns: str) -> ScriptedEngine:
    """Answers the n-th request with the n-th text."""
    left = list(turns)
    return ScriptedEngine(TOKENIZER, lambda request: left.pop(0))


async def said(text: str) -> str:
    return text


async def two_turns(e: Episode) -> None:
    turn = await e.turn(stop=ASK)
    assert turn.text == "so <ask>x</ask>" and e.stop is Stop.STOP_STRING
    answer = await e.call(lambda: said("<eos> it is 4"))
    assert e.add(f"[{answer}]")
    e.sampler.engine.update_weights((), 7)
    await e.turn(stop=ASK)
    assert e.stop is Stop.EOS


def test_an_episode_is_one_stream_of_what_was_sampled_and_what_was_added():
    engine = scripted("so <ask>x</ask> and more", "4")
    e = episode(engine, index=5)
    asyncio.run(two_turns(e))
    t = e.trajectory()
    first, second = ids("so <ask>x</ask>"), [*ids("4"), 1]
    # What looks like a special token stays text
    added = [one for (one,) in map(ids, "[<eos> it is 4]")]
    assert t.response_ids.tolist() == first + added + second
    assert t.response_mask.tolist() == [True] * len(first) + [False] * len(added) + [True] * 2
    assert t.logprobs.tolist() == [LOGPROB] * len(first) + [0.0] * len(added) + [LOGPROB] * 2
    texts = [("policy", "so <ask>x</ask>"), ("tool", "[<eos> it is 4]"), ("policy", "4")]
    assert [(s.role, s.text) for s in t.segments] == texts and t.response_text == "so <ask>x</ask>4"
    assert (t.turns, t.tool_calls, t.stop, t.truncated) == (2, 1, Stop.EOS, False)
    requests = engine.requests
    assert [r.prompt_ids for r in requests] == [tuple(ids("Q: ")), (*ids("Q: "), *first, *added)]
    # each turn has its own seed, the first one is that of a single turn
    assert [r.seed for r in requests] == [sampling_seed(1, 3, 5, 0), sampling_seed(1, 3, 5, 1)]
    assert t.seed == sampling_seed(1, 3, 5)
    assert t.policy_version == 0, "the oldest of the turns"


def test_an_episode_has_the_kept_ids_of_its_turns_and_none_of_what_was_added():
    e = episode(scripted("so <ask>x</ask>", "4"))
    e.sampling = dataclasses.replace(e.sampling, top_k=2, kept_sets=True)
    asyncio.run(two_turns(e))
    t = e.trajectory()
    assert t.kept.counts.tolist() == t.response_mask.tolist()
    assert t.kept.ids.tolist() == t.response_ids[t.response_mask].tolist()


def test_what_does_not_fit_is_not_added_at_all_and_ends_the_episode_as_truncated():
    e = episode(scripted("abc"), response=10)
    with pytest.raises(RuntimeError, match="wrote nothing"):
        e.trajectory()

    async def play() -> None:
        await e.turn()
        assert e.left == 6
        assert not e.add("123456")  # it would leave the policy no token
        assert e.over
        with pytest.raises(RuntimeError, match="no room"):
            await e.turn()

    asyncio.run(play())
    t = e.trajectory()
    assert t.truncated and t.response_ids.tolist() == [*ids("abc"), 1]


@settings(max_examples=60, deadline=None)
@given(
    response=st.integers(1, 40),
    turn=st.integers(1, 12),
    turns=st.lists(st.text("abc", min_size=1, max_size=9), min_size=45, max_size=45),
    answers=st.lists(st.text("xyz", min_size=1, max_size=9), max_size=12),
)
def test_no_limit_is_ever_passed_and_every_id_is_where_it_was_sampled(
    response, turn, turns, answers
):
    engine, gave, left = scripted(*turns), [], list(answers)
    sample = engine.sample

    async def recorded(request):
        gave.append(await sample(request))
        return gave[-1]

    async def play():
        while not e.over:
            await e.turn()
            if not left or not e.add(left.pop(0)):
                return

    engine.sample = recorded
    e = episode(engine, response, turn)
    asyncio.run(play())
    t = e.trajectory()
    assert 1 <= len(t.response_ids) <= response
    assert all(len(one.response_ids) <= turn for one in gave)
    sampled = np.concatenate([one.response_ids for one in gave])
    assert t.response_ids[t.response_mask].tolist() == sampled.tolist()
    added = "".join(segment.text for segment in t.segments if segment.role == "tool")
    assert TOKENIZER.decode(t.response_ids[~t.response_mask]) == added


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_an_answer_s_text_lacks_are_refused(special):
    class Loop(AgentLoop):
        tags = ("<ask>", "</ask>")

    words = tiny_tokenizer()
    words.add_tokens(["<ask>", "</ask>"], special_tokens=special)
    sampler = TrajectorySampler(scripted("<ask>x</ask>"), words, run_seed=1)
    playing = Episode(prompt(), 0, SamplingParams(max_tokens=99), EpisodeLimits(99, 99), sampler)
    if not special:
        assert Loop(None, words).tags == Loop.tags
        assert asyncio.run(playing.turn(stop=ASK)).text == "<ask>x</ask>"
        return
    with pytest.raises(InputError, match="<ask>, </ask>: are special tokens"):
        Loop(None, words)
    with pytest.raises(InputError, match="</ask>: are special tokens"):
        asyncio.run(playing.turn(stop=ASK))


def test_a_loop_of_ones_own_is_a_class_by_its_path(tmp_path):
    key = "actor_rollout_ref.rollout.agent_loop"
    path = tmp_path / "parrot.py"
    path.write_text(
        "from core.rollout.agent_loop import AgentLoop\n\nclass Parrot(AgentLoop):\n    pass\n"
    )
    assert make_agent_loop(compose("grpo", []), TOKENIZER) is None
    assert (
        type(make_agent_loop(compose("grpo", [f"{key}={path}:Parrot"]), TOKENIZER)).__name__
        == "Parrot"
    )
    with pytest.raises(InputError, match="is no agent loop"):
        make_agent_loop(compose("grpo", [f"{key}=core.types:Segment"]), TOKENIZER)
