"""Outside agents: an OpenAI endpoint whose tokens are the policy's, whatever the agent does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import textwrap
import time

import httpx
import openai
import pytest

from core.config import compose
from core.engines.engine import SamplingParams
from core.errors import InputError
from core.rollout.agent_loop import EpisodeLimits, TrajectorySampler, make_agent_loop
from core.types import Prompt, Stop
from recipes.lab.tools import Calculator
from tests.core.data.templates import pair_tokenizer_of
from tests.core.rollout.test_tool_agent import CALCULATOR, call, loop_of, play, tokenizer
from tests.scripted_engine import ScriptedEngine

AGENT = "actor_rollout_ref.rollout.agent"
TOOL = dict(Calculator.tool_schema)
CHAT = ({"role": "user", "content": "how much?"},)
running: dict[str, object] = {}  # the agent of the test


async def run(prompt, client):
    return await running["agent"](prompt, client)


def run_plain(prompt, client):
    return running["agent"](prompt, client)


class Playing:
    """Episodes of an agent with a scripted policy; ``turns`` are its texts, or made by request."""

    def __init__(
        self,
        agent,
        turns,
        *options,
        entry="run",
        chat=CHAT,
        hold=False,
        ground_truth="4",
        words=None,
    ):
        running["agent"] = agent
        chosen = [f"{AGENT}.path={__name__}:{entry}"] if agent else []
        lengths = ["data.max_prompt_length=1000", "data.max_response_length=2000"]
        self.words = words or tokenizer()
        self.loop = make_agent_loop(compose("grpo", [*chosen, *lengths, *options]), self.words)
        left = list(turns) if not callable(turns) else None
        respond = turns if left is None else lambda _: left.pop(0)
        self.engine = ScriptedEngine(self.words, respond)
        self.sampler = TrajectorySampler(self.engine, self.words, 1, self.loop)
        if hold:
            self.sampler.barrier.holds = frozenset(["tools"])
        ids = tuple(self.words.encode(chat[-1]["content"], add_special_tokens=False))
        self.prompt = Prompt(0, "q", ids, chat, ground_truth, "test", {"level": 2})

    def trajectories(self, count=1):
        limits = EpisodeLimits(2000, 2000)

        async def play_all():
            sampling = SamplingParams(max_tokens=2000)
            samples = (self.sampler.sample(self.prompt, i, sampling, limits) for i in range(count))
            return await asyncio.gather(*samples)

        try:
            return asyncio.run(play_all())
        finally:
            self.metrics = self.loop.metrics()
            self.loop.close()


def text_of(playing, ids) -> str:
    return playing.words.decode(ids)


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


def test_a_plain_function_gets_a_plain_client_and_no_reward_leaves_the_score_to_the_scorer():
    def agent(prompt, client):
        assert prompt.extra_info == {"level": 2}
        answer = client.chat.completions.create(model="p", messages=list(prompt.messages))
        assert answer.choices[0].message.content == "4"

    playing = Playing(agent, ["4"], entry="run_plain")
    (trajectory,) = playing.trajectories()
    assert trajectory.reward is None and trajectory.response_text == "4"
    assert trajectory.prompt_ids.tolist() == list(playing.prompt.token_ids)


async def ask(client, messages, **fields):
    answer = await client.chat.completions.create(model="p", messages=messages, **fields)
    return [choice.message for choice in answer.choices]


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

    playing = Playing(agent, lambda request: sampled, words=words)
    (trajectory,) = playing.trajectories()
    assert (trajectory.failure, trajectory.branches) == ("", ())
    assert trajectory.response_ids[trajectory.response_mask].tolist() == sampled * 3
    for before, after in itertools.pairwise(playing.engine.requests):
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


def test_log_probs_and_a_stream_of_one_chunk():
    async def agent(prompt, client):
        answer = await client.chat.completions.create(
            model="p", messages=list(prompt.messages), logprobs=True
        )
        (choice,) = answer.choices
        assert [token.token for token in choice.logprobs.content] == ["4", "2", "<eos>"]
        assert {token.logprob for token in choice.logprobs.content} == {-1.0}
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 3)
        stream = await client.chat.completions.create(
            model="p",
            messages=list(prompt.messages),
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        delta = chunks[0].choices[0].delta
        assert delta.tool_calls[0].function.name == "calculator"
        assert chunks[0].choices[0].finish_reason == "tool_calls" and chunks[1].usage
        return 1.0

    (trajectory,) = Playing(agent, ["42", TURNS[0]]).trajectories()
    assert trajectory.failure == ""


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


# --- faults ---


async def raises(prompt, client):
    await ask(client, list(prompt.messages))
    raise KeyError("lost")


async def exits(prompt, client):
    await ask(client, list(prompt.messages))
    sys.exit(3)


async def hangs(prompt, client):
    await ask(client, list(prompt.messages))
    await asyncio.Event().wait()


async def blocks(prompt, client):
    await ask(client, list(prompt.messages))
    time.sleep(20)


async def never_asks(prompt, client):
    return 1.0


async def asks_for_ever(prompt, client):
    while True:
        await ask(client, list(prompt.messages), seed=1)  # refused


async def never_gives_up(prompt, client):
    await ask(client, list(prompt.messages))
    while True:
        with contextlib.suppress(openai.BadRequestError):
            await ask(client, [])


async def rewards_nan(prompt, client):
    await ask(client, list(prompt.messages))
    return float("nan")


FAULTS = [raises, exits, hangs, blocks, never_asks, asks_for_ever, never_gives_up, rewards_nan]


@pytest.mark.parametrize("agent", FAULTS)
def test_what_an_agent_does_wrong_costs_its_own_score(agent):
    deadline = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=3"
    playing = Playing(agent, lambda request: "4", deadline)
    (trajectory,) = playing.trajectories()
    assert trajectory.failure and trajectory.turns == 1
    assert trajectory.response_mask.any() == (agent not in (never_asks, asks_for_ever))
    assert playing.metrics["agent/failed_rate"] == 1
    assert playing.metrics["agent/timeout_rate"] == (agent in (hangs, blocks, never_gives_up))


def test_an_engine_that_fails_ends_the_run_and_is_no_fault_of_the_agent():
    def respond(request):
        raise FloatingPointError("weights hold NaN")

    with pytest.raises(FloatingPointError):
        Playing(raises, respond).trajectories()


def test_a_full_context_is_the_policy_s_fault():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        while True:
            (message,) = await ask(client, messages)
            messages += [message, {"role": "user", "content": "more"}]

    playing = Playing(agent, lambda request: "x" * 1400)
    (trajectory,) = playing.trajectories()
    assert trajectory.truncated and trajectory.failure == "" and trajectory.reward is None
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= 3000


def test_the_completions_of_an_episode_are_bounded():
    async def agent(prompt, client):
        while True:
            await ask(client, list(prompt.messages))

    bound = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3"
    (trajectory,) = Playing(agent, lambda request: "4", bound).trajectories()
    assert "max_assistant_turns=3" in trajectory.failure and len(trajectory.branches) == 2


def test_64_episodes_at_once_each_with_requests_at_once():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        several = await asyncio.gather(*(ask(client, messages) for _ in range(3)))
        (message,) = several[0]
        await ask(client, [*messages, message, {"role": "user", "content": "?"}])
        return 1.0

    playing = Playing(agent, lambda request: "4")
    trajectories = playing.trajectories(64)
    assert [t.failure for t in trajectories] == [""] * 64
    assert {len(t.branches) for t in trajectories} == {2}
    assert len({request.seed for request in playing.engine.requests}) == 64 * 4


# --- requests ---


REFUSED = {
    "seed": {"seed": 3},
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required"},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4},
    "n": {"n": 0},
    "messages": {"messages": []},
    "messages.content": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "messages.tool_calls": {
        "messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]
    },
    "messages.audio": {"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]},
}


def test_a_field_that_is_not_supported_is_named():
    async def agent(prompt, client):
        for field, fields in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, **{"messages": list(prompt.messages), **fields})
            assert refused.value.param == field
        last = [*prompt.messages, {"role": "assistant", "content": "I"}]
        await ask(client, last)  # the policy goes on with it
        return 1

    playing = Playing(agent, ["4"])
    (trajectory,) = playing.trajectories()
    assert trajectory.failure == ""
    assert text_of(playing, trajectory.prompt_ids).endswith("<bos>assistant\nI")


def test_a_request_without_the_episode_s_token_is_refused_and_only_the_loopback_listens():
    urls = []

    async def agent(prompt, client):
        url = f"{client.base_url}chat/completions"
        urls.append(url)
        body = {"messages": list(prompt.messages)}
        async with httpx.AsyncClient() as plain:
            for token in ("", "Bearer x", "Bearer"):
                headers = {"Authorization": token} if token else {}
                answer = await plain.post(url, json=body, headers=headers)
                assert answer.status_code == 401
        await ask(client, list(prompt.messages))
        return 1.0

    (trajectory,) = Playing(agent, ["4"]).trajectories()
    assert trajectory.failure == "" and urls[0].startswith("http://127.0.0.1:")
    with pytest.raises(httpx.TransportError):  # it is closed with the run
        httpx.post(urls[0], json={})
    with pytest.raises(InputError, match="agent.host=192.0.2.99"):
        Playing(agent, [], f"{AGENT}.host=192.0.2.99")


def test_the_token_of_an_episode_that_has_ended_is_refused():
    keys = []

    async def status_of(client, key):
        async with httpx.AsyncClient() as plain:
            url = f"{client.base_url}chat/completions"
            headers = {"Authorization": f"Bearer {key}"}
            return (await plain.post(url, json={"messages": []}, headers=headers)).status_code

    async def agent(prompt, client):
        keys.append(client.api_key)
        number = len(keys)
        await ask(client, list(prompt.messages))
        if number == 1:
            return 1.0
        assert await status_of(client, client.api_key) == 400
        for _ in range(100):
            if await status_of(client, keys[0]) == 401:
                return 1.0
            await asyncio.sleep(0.1)
        raise AssertionError("its token is accepted after its end")

    trajectories = Playing(agent, lambda request: "4").trajectories(2)
    assert [each.failure for each in trajectories] == ["", ""]


# --- programs ---

PROGRAM = """
import json, os, sys, urllib.request
example = json.load(sys.stdin)
assert example["extra_info"] == {"level": 2}, example
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": example["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("noise" * 100_000)
"""


@pytest.mark.parametrize(
    ("end", "reward", "failure"),
    [
        ("print(float(answer == example['ground_truth']))", 1.0, ""),
        ("print('null')", None, ""),
        ("sys.exit('out of ideas')", None, "out of ideas"),
        ("pass", None, "JSON"),
        ("import time; time.sleep(60)", None, "neither asked nor ended in 8 s"),
    ],
)
def test_a_program_plays_with_the_last_line_as_its_reward(tmp_path, end, reward, failure):
    (tmp_path / "agent.py").write_text(textwrap.dedent(PROGRAM) + end)
    command = f"{AGENT}.command={sys.executable} {tmp_path}/agent.py"
    deadline = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=8"
    (trajectory,) = Playing(
        None, ["4"], command, *([deadline] if "sleep" in end else [])
    ).trajectories()
    assert failure in trajectory.failure and bool(trajectory.failure) == bool(failure)
    assert trajectory.reward == reward and trajectory.response_text == "4"


def test_an_agent_that_is_not_there_is_refused_at_the_start():
    for option in (f"{AGENT}.command=no-such-program x", f"{AGENT}.path=no/file.py:run"):
        with pytest.raises(InputError, match=f"{AGENT}\\."):
            make_agent_loop(compose("grpo", [option]), tokenizer())
    with pytest.raises(InputError, match="agent.command"):
        compose("grpo", [f"{AGENT}.path=a:b", f"{AGENT}.command=true"])
