"""Episodes: one stream of ids with a mask, seeds a turn, budgets, tools that hold nobody up, exact replays."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import compose
from core.data.draw_order import sampling_seed
from core.engines import SamplingParams
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode, Limits, TrajectorySampler, make_agent_loop
from core.types import Prompt, Stop
from tests.faults.kill_and_resume import AtPoint, compare_runs, run_uninterrupted, run_with_kills
from tests.faults.tiny_run import command, prepare
from tests.scripted_engine import LOGPROB, ScriptedEngine
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ASK = ("</ask>",)
ROLLOUT = "actor_rollout_ref.rollout"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def prompt(text: str = "Q: ", ordinal: int = 3) -> Prompt:
    return Prompt(ordinal, f"q{ordinal}", tuple(ids(text)), ({"role": "user", "content": text},), "a", "test")


def episode(engine, response: int = 100, turn: int = 100, index: int = 0, ordinal: int = 3) -> Episode:
    sampler, sampling = TrajectorySampler(engine, TOKENIZER, run_seed=1), SamplingParams(max_tokens=999)
    return Episode(prompt(ordinal=ordinal), index, sampling, Limits(response, turn), sampler)


def scripted(*turns: str) -> ScriptedEngine:
    """Answers the n-th request with the n-th text."""
    left = list(turns)
    return ScriptedEngine(TOKENIZER, lambda request: left.pop(0))


async def said(text: str) -> str:
    return text


# --- the stream ---


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
    added = [one for (one,) in map(ids, "[<eos> it is 4]")]  # what looks like a special token stays text
    assert t.response_ids.tolist() == first + added + second
    assert t.response_mask.tolist() == [True] * len(first) + [False] * len(added) + [True] * 2
    assert t.logprobs.tolist() == [LOGPROB] * len(first) + [0.0] * len(added) + [LOGPROB] * 2
    texts = [("policy", "so <ask>x</ask>"), ("tool", "[<eos> it is 4]"), ("policy", "4")]
    assert [(s.role, s.text) for s in t.segments] == texts and t.response_text == "so <ask>x</ask>4"
    assert (t.turns, t.tool_calls, t.stop, t.truncated) == (2, 1, Stop.EOS, False)
    requests = [r.request for r in engine.records]
    assert [r.prompt_ids for r in requests] == [tuple(ids("Q: ")), (*ids("Q: "), *first, *added)]
    # each turn has its own seed, the first one is that of a single turn
    assert [r.seed for r in requests] == [sampling_seed(1, 3, 5, 0), sampling_seed(1, 3, 5, 1)]
    assert t.seed == sampling_seed(1, 3, 5)
    assert t.policy_version == 0, "the oldest of the turns"


# --- limits ---


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


class Recorded:
    """An engine that keeps what it gave."""

    def __init__(self, engine):
        self.engine, self.gave = engine, []

    async def sample(self, request):
        self.gave.append(await self.engine.sample(request))
        return self.gave[-1]


class Chatter(AgentLoop):
    """Writes and is answered until nothing has room or no answer is left."""

    def __init__(self, answers):
        self.answers = list(answers)

    async def run(self, e: Episode) -> None:
        while not e.over:
            await e.turn()
            if not self.answers or not e.add(self.answers.pop(0)):
                return


@settings(max_examples=60, deadline=None)
@given(
    response=st.integers(1, 40),
    turn=st.integers(1, 12),
    turns=st.lists(st.text("abc", min_size=1, max_size=9), min_size=45, max_size=45),
    answers=st.lists(st.text("xyz", min_size=1, max_size=9), max_size=12),
)
def test_no_limit_is_ever_passed_and_every_id_is_where_it_was_sampled(response, turn, turns, answers):
    engine = Recorded(scripted(*turns))
    e = episode(engine, response, turn)
    asyncio.run(Chatter(answers).run(e))
    t = e.trajectory()
    assert 1 <= len(t.response_ids) <= response
    assert all(len(gave.response_ids) <= turn for gave in engine.gave)
    sampled = np.concatenate([gave.response_ids for gave in engine.gave])
    assert t.response_ids[t.response_mask].tolist() == sampled.tolist()
    added = "".join(segment.text for segment in t.segments if segment.role == "tool")
    assert TOKENIZER.decode(t.response_ids[~t.response_mask]) == added


# --- tools ---


def test_an_episode_that_waits_for_a_tool_holds_no_other():
    """The first one's tool answers only once all the others are done."""
    engine = ScriptedEngine(TOKENIZER, lambda request: "<ask>x</ask>" if request.prompt_ids[-1] == ids(" ")[0] else "4")
    others_done = asyncio.Event()

    async def play(e: Episode, slow: bool) -> None:
        await e.turn(stop=ASK)
        await e.call(others_done.wait if slow else lambda: said("y"))
        e.add("y")
        await e.turn()

    async def main() -> None:
        episodes = [episode(engine, ordinal=n) for n in range(8)]
        slow = asyncio.ensure_future(play(episodes[0], True))
        await asyncio.wait_for(asyncio.gather(*(play(e, False) for e in episodes[1:])), 30)
        assert not slow.done()
        others_done.set()
        await asyncio.wait_for(slow, 30)

    asyncio.run(main())


# --- the loop as it is configured ---


LOOP = """
import asyncio

from core.rollout.agent_loop import AgentLoop


class Parrot(AgentLoop):
    \"\"\"Three turns of two tokens; the tool repeats each in capitals, after a pause.\"\"\"

    async def run(self, episode):
        for _ in range(3):
            turn = await episode.turn(max_tokens=2)

            async def job():
                await asyncio.sleep(PAUSE())
                return turn.text.upper()

            if not episode.add(f"[{await episode.call(job)}]"):
                return
        await episode.turn()

    def metrics(self):
        return {"agent/parrots": 1.0}
"""


def parrot(folder: Path, pause: str = "lambda: 0", name: str = "parrot.py") -> str:
    path = folder / name
    path.write_text(f"import random\n\nPAUSE = {pause}\n{LOOP}")
    return f"{ROLLOUT}.agent_loop={path}:Parrot"


def test_a_loop_of_ones_own_is_a_class_by_its_path(tmp_path):
    assert make_agent_loop(compose("grpo", []), TOKENIZER) is None
    assert type(make_agent_loop(compose("grpo", [parrot(tmp_path)]), TOKENIZER)).__name__ == "Parrot"
    with pytest.raises(InputError, match="is no agent loop"):
        make_agent_loop(compose("grpo", [f"{ROLLOUT}.agent_loop=core.types:Segment"]), TOKENIZER)


# --- with a model ---


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parrot")
    prepare(folder)
    return folder


@pytest.mark.slow  # four runs; kills in the default tests are those of tests/faults
def test_a_run_with_tools_is_resumed_and_repeats_to_the_bit(files, tmp_path):
    """Killed in the middle and resumed: weights and metrics of the uninterrupted run, tool calls among them."""
    length = "data.max_response_length=24"
    make = command(files, "grpo", 4, length, parrot(files))
    whole = run_uninterrupted(make, tmp_path / "whole")
    killed = run_with_kills(make, tmp_path / "killed", [AtPoint("update", 3)], random.Random(0))
    assert len(killed.landed) == 1
    assert compare_runs(whole.folder, killed.folder) == []
    last = json.loads((whole.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["num_turns/max"] == 4 and last["tool_call_counts/mean"] > 2 and last["agent/parrots"] == 1
    assert last["rollout_corr/logp_diff_max"] < 1e-4  # the learner reads the very tokens that were sampled
    slow = parrot(files, "lambda: random.SystemRandom().random() / 100", "slow.py")
    repeats = (f"{ROLLOUT}.multi_turn.deterministic_tools=True", "trainer.test_freq=-1")
    for name in ("one", "two"):
        run_uninterrupted(command(files, "grpo", 4, length, slow, *repeats), tmp_path / name)
    assert compare_runs(tmp_path / "one", tmp_path / "two") == []
