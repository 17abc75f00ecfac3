"""The endpoint speaks OpenAI's protocol, names what it does not support, and knows its episodes."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from core.errors import InputError
from tests.core.rollout.test_chat_session import TURNS
from tests.core.rollout.test_outside_agent import AGENT, TOOL, Playing, ask, text_of


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


def test_limits_of_a_request_reach_the_engine():
    async def agent(prompt, client):
        for name in ("max_tokens", "max_completion_tokens"):
            answer = await client.chat.completions.create(
                model="p", messages=list(prompt.messages), top_p=0.5, **{name: 2}
            )
            (choice,) = answer.choices
            assert (choice.message.content, choice.finish_reason) == ("12", "length")

    playing = Playing(agent, ["1234", "1234"])
    (trajectory,) = playing.trajectories()
    assert trajectory.failure == "" and not trajectory.response_mask.any()
    sampled = [request.sampling for request in playing.engine.requests]
    assert [(each.max_tokens, each.top_p) for each in sampled] == [(2, 0.5)] * 2


REFUSED = {
    "temperature": {"temperature": 2.5},  # vLLM takes at most 2
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
