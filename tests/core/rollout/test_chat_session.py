"""The tokens of an episode are those that the policy sampled, whatever an agent does with messages."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from core.engines.engine import SamplingParams
from core.rollout.agent_loop import Episode, EpisodeLimits
from core.rollout.chat_session import ChatRequest, ChatSession, Refused
from core.types import Stop
from recipes.lab.tools import Calculator
from tests.core.data.templates import pair_tokenizer_of
from tests.core.rollout.test_outside_agent import AGENT, TOOL, Playing, ask, text_of
from tests.core.rollout.test_tool_agent import CALCULATOR, call, loop_of, play

LIMITS, SAMPLING = EpisodeLimits(2000, 2000), SamplingParams(max_tokens=2000)


async def react(prompt, client):
    """Plays what the tool agent plays, with the plain client."""
    messages = list(prompt.messages)
    calculator = Calculator({})
    for _ in range(4):
        answer = await client.chat.completions.create(model="p", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return 1.0 if message.content == "#### 84" else 0.0
        for each in message.tool_calls:
            result = await calculator.execute("", json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


TURNS = ["so " + call("calculator", expression="(3 + 4) * 12"), "#### 84"]


@pytest.mark.parametrize("hold", [False, True])
def test_the_tokens_are_the_tool_agent_s(tmp_path, hold):
    playing = Playing(react, TURNS, hold=hold)
    (trajectory,) = playing.trajectories()
    inside = play(loop_of(tmp_path, tools=CALCULATOR), list(TURNS))
    assert trajectory.response_ids.tolist() == inside.response_ids.tolist()
    assert trajectory.response_mask.tolist() == inside.response_mask.tolist()
    assert trajectory.seed == inside.seed and trajectory.logprobs.sum() == inside.logprobs.sum()
    assert text_of(playing, trajectory.prompt_ids).startswith("<tool calculator>")
    assert (trajectory.reward, trajectory.branches, trajectory.failure) == (1.0, (), "")
    assert (trajectory.turns, trajectory.tool_calls, trajectory.stop) == (2, 1, Stop.EOS)
    metrics = playing.metrics
    assert metrics["agent/extended_share"] == metrics["agent/trajectories"] == 1
    assert metrics["agent/tokens_rendered_again"] == 0 and metrics["agent/requests"] == 2
    first, second = (request.prompt_ids for request in playing.engine.requests)
    assert second[: len(first)] == first


@pytest.mark.parametrize("n", [1, 2])
def test_an_agent_that_ends_with_a_request_in_flight_leaves_no_engine_waiting(n):
    async def impatient(prompt, client):
        messages = list(prompt.messages)
        await ask(client, messages)
        in_flight.append(asyncio.ensure_future(ask(client, messages, n=n)))
        while len(playing.engine.requests) < 1 + n:
            await asyncio.sleep(0.01)
        return 1.0

    async def never(request):
        playing.engine.requests.append(request)
        await asyncio.Event().wait()

    async def play_and_settle():
        trajectory = await playing.sampler.sample(playing.prompt, 0, SAMPLING, LIMITS)
        await asyncio.wait_for(playing.sampler.barrier.settled(), 5)
        return trajectory

    in_flight = []
    playing = Playing(impatient, lambda _: "4", hold=True)
    sample = playing.engine.sample
    playing.engine.sample = lambda asked: (never if playing.engine.requests else sample)(asked)
    try:
        trajectory = asyncio.run(play_and_settle())
    finally:
        playing.loop.close()
    assert (trajectory.reward, trajectory.failure) == (1.0, "")


def test_a_request_after_the_end_of_its_episode_is_refused():
    playing = Playing(None, lambda _: "4", f"{AGENT}.path={__name__}:react", hold=True)

    async def ask_late():
        episode = Episode(playing.prompt, 0, SAMPLING, LIMITS, playing.sampler)
        session = ChatSession(episode, playing.loop.frames, playing.loop.encoder, 3000, None)
        await session.close()
        messages = [dict(message) for message in playing.prompt.messages]
        with pytest.raises(Refused, match="the episode of this token has ended"):
            await session.complete(ChatRequest(messages=messages))
        await asyncio.wait_for(playing.sampler.barrier.settled(), 5)

    try:
        asyncio.run(ask_late())
    finally:
        playing.loop.close()


def test_an_edited_history_is_a_trajectory_of_its_own_and_each_sampled_token_trains_once():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        (first,) = await ask(client, messages)
        more = {"role": "user", "content": "more"}
        (second,) = await ask(client, [*messages, first, more])
        assert second.content == "two"
        # The same continuation again shares the prompt, and two choices share theirs
        await ask(client, [*messages, first, more], n=2)
        # An edited answer extends nothing
        await ask(client, [*messages, {"role": "assistant", "content": "One!"}, more])
        return 1

    playing = Playing(agent, ["one", "two", "three", "four", "five"])
    (last,) = playing.trajectories()
    trajectories = {text_of(playing, t.response_ids): t for t in (last, *last.branches)}
    prompts = {text: text_of(playing, t.prompt_ids) for text, t in trajectories.items()}
    frame = "\n<bos>user\nmore<eos>\n<bos>assistant\n"
    assert prompts == {
        f"one<eos>{frame}two<eos>": "how much?",
        "three<eos>": f"how much?one<eos>{frame}",
        "four<eos>": f"how much?one<eos>{frame}",
        "five<eos>": "<bos>user\nhow much?<eos>\n<bos>assistant\nOne!<eos>" + frame,
    }
    assert text_of(playing, last.response_ids) == "five<eos>"
    sampled = [t.response_ids[t.response_mask] for t in trajectories.values()]
    written = "".join(sorted(text_of(playing, ids) for ids in sampled))
    assert written == "five<eos>four<eos>one<eos>two<eos>three<eos>"
    seeds = [request.seed for request in playing.engine.requests]
    assert len(set(seeds)) == 5 and all(t.reward is None for t in last.branches)
    assert playing.metrics["agent/trajectories"] == 4
    assert playing.metrics["agent/extended_share"] == pytest.approx(2 / 3)
    again = len(trajectories["five<eos>"].prompt_ids)
    assert playing.metrics["agent/tokens_rendered_again"] == again


def test_an_agent_continues_the_policy_s_message_and_a_stop_string_stays_with_its_tokens():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        (first,) = await ask(client, messages, stop=["</s>"])
        assert first.content == "find <s>x"
        begun = {"role": "assistant", "content": first.content + "</s> [found] "}
        (second,) = await ask(client, [*messages, begun], stop="</s>")
        assert second.content == "so"
        whole = {"role": "assistant", "content": begun["content"] + second.content}
        await ask(client, [*messages, whole, {"role": "user", "content": "?"}])

    playing = Playing(agent, ["find <s>x</s> and on", "so", "end"])
    (trajectory,) = playing.trajectories()
    assert trajectory.failure == "" and trajectory.branches == ()
    assert text_of(playing, trajectory.response_ids) == (
        "find <s>x</s> [found] so<eos>\n<bos>user\n?<eos>\n<bos>assistant\nend<eos>"
    )
    others = text_of(playing, trajectory.response_ids[~trajectory.response_mask])
    assert others == " [found] \n<bos>user\n?<eos>\n<bos>assistant\n"


def test_what_the_policy_sampled_is_never_encoded_again():
    """The ids stay where the tokenizer writes the same text with fewer: log-probs are of these."""
    words = pair_tokenizer_of("chatml")
    sampled = [*words.convert_tokens_to_ids([".", "Ċ", ".", "Ċ"]), words.eos_token_id]
    assert len(words.encode(".\n.\n", add_special_tokens=False)) < len(sampled) - 1

    async def agent(prompt, client):
        messages = list(prompt.messages)
        (first,) = await ask(client, messages)
        messages += [first, {"role": "user", "content": "more.\n"}]
        (second,) = await ask(client, messages)
        assert first.content == second.content == ".\n.\n"
        # The policy goes on with its message, behind what the agent adds to it
        await ask(client, [*messages, {"role": "assistant", "content": ".\n.\n.\n"}])
        # A second continuation begins with the same ids
        await ask(client, [*messages[:-1], {"role": "user", "content": "other.\n"}])

    playing = Playing(agent, lambda request: sampled, words=words)
    (last,) = playing.trajectories()
    (trajectory,) = last.branches
    assert last.failure == ""
    assert trajectory.response_ids[trajectory.response_mask].tolist() == sampled * 3
    requests = playing.engine.requests
    for before, after in (*itertools.pairwise(requests[:3]), (requests[0], requests[3])):
        answered = [*before.prompt_ids, *sampled]
        assert list(after.prompt_ids[: len(answered)]) == answered


def test_tokens_of_another_distribution_carry_no_loss():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        (first,) = await ask(client, messages, temperature=0.2, max_tokens=3)
        await ask(client, [*messages, first, {"role": "user", "content": "?"}], temperature=1.0)

    playing = Playing(agent, ["12345", "7"])
    (trajectory,) = playing.trajectories()
    assert text_of(playing, trajectory.response_ids[trajectory.response_mask]) == "7<eos>"
    assert trajectory.logprobs[:3].tolist() == [0, 0, 0] and trajectory.response_text == "1237"
    assert [request.sampling.temperature for request in playing.engine.requests] == [0.2, 1.0]


def test_other_tools_make_another_prompt():
    """A last request without tools extends nothing: its policy would still read of them."""

    async def agent(prompt, client):
        messages = list(prompt.messages)
        (first,) = await ask(client, messages, tools=[TOOL])
        messages += [
            first,
            {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "8"},
        ]
        await ask(client, messages, tools=[TOOL], tool_choice="none")

    playing = Playing(agent, TURNS)
    (trajectory,) = playing.trajectories()
    (branch,) = trajectory.branches
    assert text_of(playing, branch.prompt_ids).startswith("<tool calculator>")
    assert text_of(playing, trajectory.prompt_ids).startswith("<bos>user")
    assert playing.metrics["agent/extended_share"] == 0


def test_a_turn_with_a_broken_call_is_text():
    broken = TURNS[0] + "<tool_call>{</tool_call>"

    async def agent(prompt, client):
        (message,) = await ask(client, list(prompt.messages), tools=[TOOL])
        assert message.tool_calls is None and message.content == broken

    (trajectory,) = Playing(agent, [broken]).trajectories()
    assert trajectory.failure == "" and trajectory.tool_calls == 0


def written_anew(message):
    """Return a message as a client writes it that reads the arguments of calls, without spaces."""
    echo = message.model_dump(exclude_none=True)
    for each in echo["tool_calls"]:
        arguments = json.loads(each["function"]["arguments"])
        each["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    return echo


@pytest.mark.parametrize("echo_of", [lambda message: message, written_anew])
def test_a_streamed_call_is_extended_however_the_client_sends_it_back(echo_of):
    """A client that read a stream adds an index to each call: the call was encoded again."""

    async def agent(prompt, client):
        messages = list(prompt.messages)
        fields = {"model": "p", "messages": messages, "tools": [TOOL]}
        async with client.chat.completions.stream(**fields) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        assert message.tool_calls[0].index == 0
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "84"}
        await ask(client, [*messages, echo_of(message), answer], tools=[TOOL])
        return 1.0

    playing = Playing(agent, TURNS)
    (trajectory,) = playing.trajectories()
    assert trajectory.failure == "" and trajectory.branches == ()
    assert playing.metrics["agent/extended_share"] == 1
    assert TURNS[0] in text_of(playing, trajectory.response_ids)
