"""Outside agents: an OpenAI endpoint whose tokens are the policy's, whatever the agent does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import resource
import sys
import textwrap
import time
from pathlib import Path

import httpx
import openai
import pytest

from core.config.composition import compose
from core.engines.engine import SamplingParams
from core.errors import InputError
from core.rollout import outside_agent, untrusted
from core.rollout.agent_loop import EpisodeLimits, TrajectorySampler, make_agent_loop
from core.types import Prompt
from recipes.lab.tools import Calculator
from tests.core.rollout.test_tool_agent import tokenizer
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


async def ask(client, messages, **fields):
    answer = await client.chat.completions.create(model="p", messages=messages, **fields)
    return [choice.message for choice in answer.choices]


def test_a_plain_function_gets_a_plain_client_and_no_reward_leaves_the_score_to_the_scorer():
    def agent(prompt, client):
        assert prompt.extra_info == {"level": 2}
        answer = client.chat.completions.create(model="p", messages=list(prompt.messages))
        assert answer.choices[0].message.content == "4"

    playing = Playing(agent, ["4"], entry="run_plain")
    (trajectory,) = playing.trajectories()
    assert trajectory.reward is None and trajectory.response_text == "4"
    assert trajectory.prompt_ids.tolist() == list(playing.prompt.token_ids)


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


def test_the_time_in_which_the_policy_writes_is_not_the_agent_s():
    def respond(request):
        time.sleep(4)
        return "4"

    async def agent(prompt, client):
        await ask(client, list(prompt.messages))
        return 1.0

    deadline = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=3"
    (trajectory,) = Playing(agent, respond, deadline).trajectories()
    assert (trajectory.failure, trajectory.reward) == ("", 1.0)


async def hides_errors(prompt, client):
    with contextlib.suppress(openai.APIError):
        await ask(client, list(prompt.messages))
    return 1.0


@pytest.mark.parametrize("agent", [raises, hides_errors])
def test_an_engine_that_fails_ends_the_run_and_is_no_fault_of_the_agent(agent):
    def respond(request):
        raise FloatingPointError("weights hold NaN")

    with pytest.raises(FloatingPointError):
        Playing(agent, respond).trajectories()


def test_a_request_in_flight_ends_with_its_episode():
    held = []

    async def agent(prompt, client):
        await ask(client, list(prompt.messages))
        orphan = asyncio.create_task(ask(client, list(prompt.messages)))
        while not held:
            await asyncio.sleep(0.05)
        orphan.cancel()
        return 1.0

    playing = Playing(agent, ["4"])
    sample = playing.engine.sample

    async def hold_second(request):
        if playing.engine.requests:
            held.append(request)
            await asyncio.Event().wait()
        return await sample(request)

    playing.engine.sample = hold_second
    (trajectory,) = playing.trajectories()
    assert (trajectory.failure, trajectory.reward) == ("", 1.0)
    assert (trajectory.turns, trajectory.branches) == (1, ())


def test_a_full_context_is_the_policy_s_fault():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        while True:
            (message,) = await ask(client, messages)
            messages += [message, {"role": "user", "content": "more"}]

    # A scorer reads what the policy wrote; where the agent alone scores, that is 0
    for source, reward in ("openai/gsm8k", None), ("my_env", 0.0):
        playing = Playing(agent, lambda request: "x" * 1400)
        playing.prompt = dataclasses.replace(playing.prompt, data_source=source)
        (trajectory,) = playing.trajectories()
        assert trajectory.truncated and trajectory.failure == "" and trajectory.reward == reward
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= 3000


def test_an_agent_that_goes_on_after_a_full_context_answers_for_its_own_faults():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        try:
            while True:
                (message,) = await ask(client, messages)
                messages += [message, {"role": "user", "content": "more"}]
        except openai.BadRequestError:
            await ask(client, list(prompt.messages))
        if fault:
            raise KeyError("lost")
        return 1.0

    for fault in (True, False):
        (trajectory,) = Playing(agent, lambda request: "x" * 1400).trajectories()
        assert ("KeyError: 'lost'" in trajectory.failure) == fault
        assert trajectory.truncated  # the episode counts as cut short (recipes/agents)


def test_messages_that_cannot_be_written_cost_a_request_and_no_run():
    bad = [
        *({"role": "tool", "content": content} for content in (42, 0, 0.0, True, "\ud83d")),
        {"role": "assistant", "content": "x", "tool_calls": 3},
    ]

    async def agent(prompt, client):
        (message,) = await ask(client, list(prompt.messages))
        for each in bad:
            async with httpx.AsyncClient(trust_env=False) as http:
                body = json.dumps(
                    {
                        "messages": [
                            *prompt.messages,
                            {"role": "assistant", "content": message.content},
                            each,
                        ]
                    }
                )
                answer = await http.post(
                    f"{client.base_url}chat/completions",
                    content=body,
                    headers={"authorization": f"Bearer {client.api_key}"},
                )
            assert answer.status_code == 400, (each, answer.text)
        return 1.0

    playing = Playing(agent, lambda request: "4")
    (trajectory,) = playing.trajectories()
    assert (trajectory.failure, trajectory.reward, trajectory.branches) == ("", 1.0, ())
    assert playing.metrics["agent/refused_requests"] == len(bad)


def test_an_empty_stop_string_stops_nothing():
    async def agent(prompt, client):
        (message,) = await ask(client, list(prompt.messages), stop="")
        return float(message.content == "hello world")

    (trajectory,) = Playing(agent, ["hello world"]).trajectories()
    assert (trajectory.failure, trajectory.reward) == ("", 1.0)


class AsyncObject:
    async def __call__(self, prompt, client):
        (message,) = await ask(client, list(prompt.messages))
        return float(message.content)


async_object = AsyncObject()


def lost_coroutine(prompt, client):
    return async_object(prompt, client)


def test_an_object_may_be_the_agent_and_a_coroutine_that_nobody_expects_is_named():
    (trajectory,) = Playing(run, ["4"], entry="async_object").trajectories()
    assert (trajectory.failure, trajectory.reward) == ("", 4.0)
    (trajectory,) = Playing(run, ["4"], entry="lost_coroutine").trajectories()
    assert "returns a coroutine: write it as async def" in trajectory.failure


def test_no_more_episodes_play_at_once_than_files_may_be_open(monkeypatch):
    at_once = []

    async def agent(prompt, client):
        at_once.append(1)
        most.append(len(at_once))
        await ask(client, list(prompt.messages))
        at_once.pop()
        return 1.0

    most = []
    playing = Playing(agent, lambda request: "4")
    playing.loop.room = asyncio.Semaphore(2)
    assert all(each.reward == 1.0 for each in playing.trajectories(6)) and max(most) <= 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert outside_agent.most_episodes() >= min(64, hard // 16)

    def full():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(untrusted, "_new_loop", full)
    (trajectory,) = Playing(agent, lambda request: "4").trajectories()
    assert "Too many open files" in trajectory.failure


def test_the_completions_of_an_episode_are_bounded():
    async def agent(prompt, client):
        while True:
            await ask(client, list(prompt.messages))

    bound = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3"
    (trajectory,) = Playing(agent, lambda request: "4", bound).trajectories()
    assert "max_assistant_turns=3" in trajectory.failure and len(trajectory.branches) == 2


def test_completions_that_are_requested_at_once_are_bounded_too():
    async def agent(prompt, client):
        messages = list(prompt.messages)
        several = (ask(client, messages) for _ in range(5))
        answers = await asyncio.gather(*several, return_exceptions=True)
        assert sum(isinstance(answer, openai.BadRequestError) for answer in answers) == 2
        return 1.0

    bound = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3"
    playing = Playing(agent, lambda request: "4", bound)
    (trajectory,) = playing.trajectories()
    assert (trajectory.failure, trajectory.reward) == ("", 1.0)
    assert len(playing.engine.requests) == 3 and len(trajectory.branches) == 2


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


def test_a_program_is_killed_with_what_it_started(tmp_path):
    helper = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
open("%s", "w").write(str(child.pid))
print(1.0)
sys.stdout.flush()
os._exit(0)
"""
    (tmp_path / "agent.py").write_text(PROGRAM + helper % (tmp_path / "child"))
    command = f"{AGENT}.command={sys.executable} {tmp_path}/agent.py"
    deadline = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=8"
    (trajectory,) = Playing(None, ["4"], command, deadline).trajectories()
    assert (trajectory.turns, trajectory.reward, trajectory.failure) == (1, 1.0, "")
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the program's child runs on")


def test_no_proxy_stands_between_an_agent_and_the_policy(tmp_path, monkeypatch):
    """Environment variables name one that does not answer: on many clusters they name a real one."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def agent(prompt, client):
        await ask(client, list(prompt.messages))
        return 1.0

    (tmp_path / "agent.py").write_text(PROGRAM + "print(1.0)")
    program = f"{AGENT}.command={sys.executable} {tmp_path}/agent.py"
    for player, options in ((agent, ()), (None, (program,))):
        (trajectory,) = Playing(player, ["4"], *options).trajectories()
        assert (trajectory.failure, trajectory.reward) == ("", 1.0)


def test_an_agent_that_is_not_there_is_refused_at_the_start():
    for option in (f"{AGENT}.command=no-such-program x", f"{AGENT}.path=no/file.py:run"):
        with pytest.raises(InputError, match=f"{AGENT}\\."):
            make_agent_loop(compose("grpo", [option]), tokenizer())
    with pytest.raises(InputError, match="agent.command"):
        compose("grpo", [f"{AGENT}.path=a:b", f"{AGENT}.command=true"])
