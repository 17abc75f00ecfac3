"""What SGLang's engine makes of a server that refuses, lies or dies; the real one is tested beside
it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.config.composition import compose
from core.engines import sglang
from core.engines.engine import make_engine
from core.engines.sglang import SGLangEngine, SGLangServer, problems
from core.errors import InputError, WorkersLost
from core.types import Stop
from tests.core.engine_contract import HELLO, ask, ids, run, sample_all
from tests.core.ray_cluster import write_model
from tests.search import reply, serving
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

ROLLOUT, CPU = "actor_rollout_ref.rollout", torch.device("cpu")
URL = f"{ROLLOUT}.engine_kwargs.sglang.url"


@contextmanager
def scripted(generate):
    """Yield the address of a server and the requests that it received; ``generate(body)`` is its
    reply: a dict, a status, or a list of what a stream brings."""
    seen = []

    def behave(handler, body):
        if "model_path" in body:
            body["weights"] = load_file(f"{body['model_path']}/model.safetensors")
        seen.append((handler.path, body))
        made = (
            generate(body)
            if handler.path == "/generate"
            else {"success": True, "ranks": [{"per_gpu_checksum": "1f"}]}
        )
        if made is None:  # it dies
            handler.close_connection = True
        elif isinstance(made, list):
            data = "".join(
                f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in made
            )
            reply(handler, 200, data.encode(), [("Content-Type", "text/event-stream")])
        elif isinstance(made, int):
            reply(handler, made, {"error": {"message": "scripted"}})
        else:
            reply(handler, 200, made)

    with serving(behave, "", listed=lambda handler, _: reply(handler, 200, {})) as url:
        yield url, seen


def written(tokens, why="length", total=None, **meta):
    pairs = [[-0.5 - token / 100, token, None] for token in tokens]
    meta = {"output_token_logprobs": pairs, "completion_tokens": total or len(tokens), **meta}
    return {
        "output_ids": list(tokens),
        "meta_info": {"finish_reason": why and {"type": why}, **meta},
    }


@contextmanager
def engine_on(generate, **options):
    with scripted(generate) as (url, seen), torch.device("meta"):
        skeleton = tiny_model(**options)
        server = SGLangServer(url, 5.0)
        engine = SGLangEngine(
            tiny_tokenizer(), skeleton, server, device=CPU, max_length=256, max_rows=4
        )
        try:
            yield engine, seen
        finally:
            engine.close()


def echo(body):
    return written([5] * body["sampling_params"]["max_new_tokens"])


def requested(seen, path="/generate"):
    return [body for each, body in seen if each == path]


def test_a_request_says_all_that_a_server_could_add():
    with engine_on(echo, vocab_size=VOCAB_SIZE + 2) as (engine, seen):
        for settings in (
            dict(max_tokens=3, temperature=0.7),
            dict(temperature=0, top_k=5, top_p=0.5),
            dict(top_p=0.5),
        ):
            sample_all(engine, [ask(**settings)])
    first, greedy, cut = requested(seen)
    assert first["input_ids"] == list(HELLO) and first["return_logprob"] and first["stream"]
    assert first["sampling_params"] == {
        **{"temperature": 0.7, "max_new_tokens": 3, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": True},
        # Ids that the tokenizer does not know
        "logit_bias": {str(VOCAB_SIZE): -1e9, str(VOCAB_SIZE + 1): -1e9},
    }
    assert "return_sampling_mask" not in greedy
    assert cut["return_sampling_mask"] and cut["sampling_logprobs_mode"] == "selected"
    assert (cut["sampling_params"]["top_k"], cut["sampling_params"]["top_p"]) == (
        VOCAB_SIZE + 2,
        0.5,
    )


def test_a_stream_is_examined_token_by_token():
    """The model's own end does not end a request that ignores it; a stop id does, in the middle of
    what has come."""
    whole, steps = [5, 1, 6, 7, 8], (1, 2, 5)
    parts = [
        written(whole[known:end], "length" if end == 5 else None, total=end)
        for known, end in zip((0, *steps), steps, strict=False)
    ]
    with engine_on(lambda _: [*parts, "[DONE]"]) as (engine, _):
        (found,) = sample_all(engine, [ask(max_tokens=5, ignore_eos=True, stop_token_ids=(6,))])
    assert (ids(found), found.stop) == ([5, 1, 6], Stop.STOP_TOKEN)
    assert found.logprobs.tolist() == pytest.approx([-0.5 - token / 100 for token in (5, 1, 6)])


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (written([5], "abort"), WorkersLost, "ended a response with abort after 1 tokens"),
        (400, RuntimeError, "refused /generate: .*scripted"),
        (None, WorkersLost, "server at .* is lost"),
        (
            [written([5], None), {"error": {"message": "no room"}}],
            RuntimeError,
            "refused /generate: .*no room",
        ),
        (
            written([5, 6], output_token_logprobs=[[None, 5, None], [None, 6, None]]),
            FloatingPointError,
            "not finite",
        ),
    ],
)
def test_a_reply_that_cannot_stand(reply, error, words):
    stops = ("never!",) if isinstance(reply, list) else ()
    with engine_on(lambda _: reply) as (engine, _), pytest.raises(error, match=words):
        sample_all(engine, [ask(max_tokens=2, stop=stops)])


def logprobs_of(*tokens):
    return [[-0.5, token, None] for token in tokens]


CUT = {
    "no event": [],
    "no reason": [written([5, 6], None)],
    "done": ["[DONE]"],
    "lost ids": [written([5], None), written([7, 8], None, total=4), written([9, 1], total=6)],
    "fewer than before": [written([5, 6], None), written([7], total=1)],
    "no log-probs": [
        {"output_ids": [5, 6], "meta_info": {"completion_tokens": 2, "finish_reason": None}}
    ],
    "fewer log-probs": [written([5, 6, 7], None, output_token_logprobs=logprobs_of(5, 6))],
    "log-probs of others": [written([5, 6, 7], None, output_token_logprobs=logprobs_of(7, 8, 9))],
    "floats": [written([5.0, 6.0, 7.0])],
    "no token of the model": [written([VOCAB_SIZE + 99] * 3)],
    "negative": [written([-1, -1, -1])],
    "no JSON": ['{"output_ids": [5'],
    "no fields": [{"text": "x"}],
    "no reason's form": [written([5], None, finish_reason="length")],
    "ended early": [written([5, 6], "stop")],
}


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(sglang, "PAUSE_S", 0.0)


@pytest.mark.parametrize("parts", CUT.values(), ids=CUT)
def test_a_stream_that_is_cut_is_requested_again_and_then_a_failure_with_its_rate(
    no_pause, parts, caplog
):
    replies = [parts, parts, echo]

    def generate(body):
        made = replies.pop(0) if replies else parts
        return made(body) if callable(made) else made

    with engine_on(generate) as (engine, seen):
        (found,) = sample_all(engine, [ask(max_tokens=6, ignore_eos=True)])
        assert (ids(found), found.stop) == (
            [5] * 6,
            Stop.LENGTH,
        ) and "2 of 2 streams were cut" in caplog.text
        names = [body["rid"] for body in requested(seen)]
        assert len({*names}) == 3
        with pytest.raises(WorkersLost, match="5 of 6 streams were cut"):
            sample_all(engine, [ask(max_tokens=6, ignore_eos=True)])


def test_a_server_that_is_busy_is_asked_until_it_answers(monkeypatch):
    statuses = [503, 429, 503]

    def generate(body):
        return statuses.pop(0) if statuses else echo(body)

    monkeypatch.setattr(sglang, "HttpOptions", functools.partial(sglang.HttpOptions, pause_s=0.01))
    with engine_on(generate) as (engine, _):
        (found,) = sample_all(engine, [ask(max_tokens=2)])
        assert ids(found) == [5, 5]
        statuses += [503] * 1000
        engine.server._http.options = dataclasses.replace(
            engine.server._http.options, give_up_s=0.2
        )
        with pytest.raises(RuntimeError, match="refused /generate: status 503"):
            sample_all(engine, [ask(max_tokens=2)])


def test_a_whole_reply_stands_with_the_log_probs_of_the_truncated_distribution():
    with engine_on(
        lambda _: written([7, 9], "abort", output_token_sampling_logprobs=[-0.1, -0.2])
    ) as (engine, _):
        (found,) = sample_all(engine, [ask(max_tokens=2, top_k=3)])
    assert (ids(found), found.logprobs.tolist()) == ([7, 9], pytest.approx([-0.1, -0.2]))


def test_an_update_hands_over_every_weight_once():
    weights = tiny_model(tie_word_embeddings=True).state_dict()
    with engine_on(None, tie_word_embeddings=True) as (engine, seen):
        (proof,) = engine.update_weights(weights.items(), 4)
        assert (engine.policy_version, proof.weights) == (4, {"all": (31,)})
    (body,) = requested(seen, "/update_weights_from_disk")
    assert (
        body["weights"].keys() == weights.keys() - {"lm_head.weight"}
        and body["load_format"] == "safetensors"
    )
    assert all(torch.equal(value, weights[name]) for name, value in body["weights"].items())
    assert [path for path, _ in seen][:2] == ["/update_weights_from_disk", "/flush_cache"]
    assert not Path(body["model_path"]).exists()


def test_an_aborted_request_is_aborted_on_the_server():
    begun, held = threading.Event(), threading.Event()

    def reply(body):
        if body["sampling_params"]["max_new_tokens"] == 50:
            begun.set()
            held.wait(60)
        return echo(body)

    async def abort(engine):
        doomed = asyncio.ensure_future(engine.sample(ask(max_tokens=50)))
        await engine.sample(ask(max_tokens=2))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        doomed.cancel()
        return await engine.sample(ask(max_tokens=3))

    with engine_on(reply) as (engine, seen):
        assert len(ids(run(abort(engine)))) == 3
        sent = {body["rid"]: body["sampling_params"] for body in requested(seen)}
        deadline = time.monotonic() + 30
        while not (gone := [body["rid"] for body in requested(seen, "/abort_request")]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held.set()
    assert [sent[name]["max_new_tokens"] for name in gone] == [50]


def test_an_engine_is_made_on_the_server_of_the_url(tmp_path):
    local = (
        "trainer.backend=local",
        "trainer.device=cpu",
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.dtype=float32",
    )
    lengths = (
        "data.max_prompt_length=16",
        "data.max_response_length=24",
        "trainer.phase_timeout_s=5",
    )
    keys = [*local, *lengths, f"actor_rollout_ref.model.path={write_model(tmp_path)}"]
    with scripted(echo) as (url, _):
        config = compose("grpo", [*keys, f"+{URL}={url}/"])
        engine = make_engine(config, None, tiny_tokenizer(), CPU)
        assert len(ids(run(engine.sample(ask(max_tokens=3))))) == 3 and engine.max_length == 40
        engine.close()
    with pytest.raises(InputError, match=re.escape(f"{URL}={url}: ")):
        make_engine(config, None, tiny_tokenizer(), CPU)
    assert [line.partition(":")[0] for line in problems(compose("grpo", keys))] == [URL]
    more = compose("grpo", [*keys, f"+{URL}=x", f"+{ROLLOUT}.engine_kwargs.sglang.page_size=16"])
    assert [line.partition(":")[0] for line in problems(more)] == [
        f"{ROLLOUT}.engine_kwargs.sglang.page_size"
    ]
