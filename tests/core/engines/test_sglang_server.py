"""What SGLang's engine makes of a server that refuses, lies or dies; the real one is tested beside it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from core.config import compose
from core.engines import make_engine, sglang_server
from core.engines.sglang import SGLangEngine, server_arguments
from core.engines.sglang_server import SGLangServer, flags, launch, problems
from core.errors import InputError, WorkersLost
from core.types import Stop
from tests.core.engine_contract import HELLO, ask, ids, run, sample_all
from tests.core.ray_cluster import write_model
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

ROLLOUT, CPU = "actor_rollout_ref.rollout", torch.device("cpu")


@contextmanager
def scripted(generate):
    """Yield the address of a server and the requests that it received; ``generate(body)`` is its reply: a dict, a
    status, or a list of what a stream brings."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply({})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            self.reply(generate(body) if self.path == "/generate" else {"success": True})

        def reply(self, made):
            if made is None:  # it dies
                self.close_connection = True
                return
            status, kind = (made if isinstance(made, int) else 200), "application/json"
            if isinstance(made, list):
                kind = "text/event-stream"
                data = "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in made).encode()
            else:
                data = json.dumps({"error": {"message": "scripted"}} if isinstance(made, int) else made).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # aborted
                self.wfile.write(data)

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def written(tokens, why="length", total=None, **meta):
    pairs = [[-0.5 - token / 100, token, None] for token in tokens]
    meta = {"output_token_logprobs": pairs, "completion_tokens": total or len(tokens), **meta}
    return {"output_ids": list(tokens), "meta_info": {"finish_reason": why and {"type": why}, **meta}}


@contextmanager
def engine_on(generate, **options):
    with scripted(generate) as (url, seen), torch.device("meta"):
        skeleton = tiny_model(**options)
        server = SGLangServer(url, 5.0)
        engine = SGLangEngine(tiny_tokenizer(), skeleton, server, device=CPU, max_length=256, max_rows=4)
        try:
            yield engine, seen
        finally:
            engine.close()


def body_of(**settings):
    with engine_on(lambda body: written([5] * body["sampling_params"]["max_new_tokens"])) as (engine, seen):
        sample_all(engine, [ask(**settings)])
    return next(body for path, body in seen if path == "/generate")


def test_a_request_says_all_that_a_server_could_add():
    body = body_of(max_tokens=3, temperature=0.7)
    assert body["input_ids"] == list(HELLO) and body["return_logprob"] and not body["stream"]
    assert body["sampling_params"] == {
        **{"temperature": 0.7, "max_new_tokens": 3, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": False, "stop_token_ids": [1]},
    }
    assert "return_sampling_mask" not in body_of(temperature=0, top_k=5, top_p=0.5)
    cut = body_of(top_p=0.5)
    assert cut["return_sampling_mask"] and cut["sampling_logprobs_mode"] == "selected"
    assert (cut["sampling_params"]["top_k"], cut["sampling_params"]["top_p"]) == (VOCAB_SIZE, 0.5)
    assert "top_k" not in body_of(top_k=5000)["sampling_params"]


def test_ids_that_the_tokenizer_does_not_know_are_ruled_out():
    with engine_on(lambda _: written([5]), vocab_size=VOCAB_SIZE + 2) as (engine, seen):
        sample_all(engine, [ask(max_tokens=1)])
    body = next(body for path, body in seen if path == "/generate")
    assert body["sampling_params"]["logit_bias"] == {str(VOCAB_SIZE): -1e9, str(VOCAB_SIZE + 1): -1e9}


def test_log_probs_are_those_of_the_truncated_distribution():
    with engine_on(lambda _: written([7, 9], output_token_sampling_logprobs=[-0.1, -0.2])) as (engine, _):
        (found,) = sample_all(engine, [ask(max_tokens=2, top_k=3)])
    assert (ids(found), found.logprobs.tolist()) == ([7, 9], pytest.approx([-0.1, -0.2]))


def test_a_stream_is_examined_token_by_token():
    """The model's own end does not end a request that ignores it; a stop id does, in the middle of what has come."""
    whole, steps = [5, 1, 6, 7, 8], (1, 2, 5)
    parts = [
        written(whole[known:end], "length" if end == 5 else None, total=end)
        for known, end in zip((0, *steps), steps, strict=False)
    ]
    with engine_on(lambda _: [*parts, "[DONE]"]) as (engine, seen):
        (found,) = sample_all(engine, [ask(max_tokens=5, ignore_eos=True, stop_token_ids=(6,))])
    assert (ids(found), found.stop) == ([5, 1, 6], Stop.STOP_TOKEN)
    assert found.logprobs.tolist() == pytest.approx([-0.5 - token / 100 for token in (5, 1, 6)])
    body = next(body for path, body in seen if path == "/generate")
    assert body["stream"] and body["sampling_params"]["ignore_eos"]


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (written([5, 6], "abort"), None, ""),  # it is whole all the same
        (written([5], "abort"), RuntimeError, "ended a response with abort, 0 tokens after 1"),
        (written([5, 6, 7]), RuntimeError, "ended a response with length, 1 tokens after 2"),
        (400, RuntimeError, "refused /generate: .*scripted"),
        (404, RuntimeError, "older than SGLang 0.5.23"),
        (None, WorkersLost, "server at .* is lost"),
        ([written([5], None), {"error": {"message": "no room"}}], RuntimeError, "refused /generate: .*no room"),
        (written([5, 6], output_token_logprobs=[[None, 5, None]] * 2), FloatingPointError, "not finite"),
    ],
)
def test_a_reply_that_cannot_stand(reply, error, words):
    stops = ("never!",) if isinstance(reply, list) else ()
    with engine_on(lambda _: reply) as (engine, _):
        if error is None:
            assert sample_all(engine, [ask(max_tokens=2)])
            return
        with pytest.raises(error, match=words):
            sample_all(engine, [ask(max_tokens=2, stop=stops)])


def test_an_aborted_request_is_aborted_on_the_server():
    begun, held = threading.Event(), threading.Event()

    def reply(body):
        if body["sampling_params"]["max_new_tokens"] == 50:
            begun.set()
            held.wait(60)
        return written([5] * body["sampling_params"]["max_new_tokens"])

    async def abort(engine):
        doomed = asyncio.ensure_future(engine.sample(ask(max_tokens=50)))
        await engine.sample(ask(max_tokens=2))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        doomed.cancel()
        return await engine.sample(ask(max_tokens=3))

    with engine_on(reply) as (engine, seen):
        assert len(ids(run(abort(engine)))) == 3
        sent = {body["rid"]: body["sampling_params"] for path, body in seen if path == "/generate"}
        deadline = time.monotonic() + 30
        while not (gone := [body["rid"] for path, body in seen if path == "/abort_request"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held.set()
    assert [sent[name]["max_new_tokens"] for name in gone] == [50]


# -- which server


def configured(model, *overrides):
    local = ("trainer.backend=local", "trainer.device=cpu", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.dtype=float32")
    lengths = ("data.max_prompt_length=16", "data.max_response_length=24", "trainer.phase_timeout_s=5")
    return compose("grpo", [*local, *lengths, f"actor_rollout_ref.model.path={model}", *overrides])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_configuration_reaches_the_server(model):
    given = ("page_size=16", "attention_backend=triton", "disable_radix_cache=null")
    config = configured(
        model, *(f"+{ROLLOUT}.engine_kwargs.sglang.{one}" for one in given), f"{ROLLOUT}.max_num_seqs=9"
    )
    with torch.device("meta"):
        found = server_arguments(config, tiny_model(), CPU, reads_weights=False)
    expected = {"model_path": str(model), "load_format": "dummy", "dtype": "float32", "context_length": 48}
    expected |= {"device": "cpu", "attention_backend": "triton", "page_size": 16, "max_total_tokens": 9 * 48}
    assert expected.items() <= found.items() and not found["enable_memory_saver"]
    with torch.device("meta"):
        on_gpu = server_arguments(config, tiny_model(), torch.device("cuda"), reads_weights=False)
    assert on_gpu["enable_memory_saver"] and on_gpu["mem_fraction_static"] == 0.5 and "device" not in on_gpu
    words = flags({"a_b": True, "c": False, "d": None, "e": [1, 2], "f": {"x": 1}, "g": 0})
    assert words == ["--a-b", "--e", "1", "2", "--f", '{"x": 1}', "--g", "0"]


def test_what_is_missing_is_said_before_a_start(model, monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_server, "ENVIRONMENT", tmp_path)
    (line,) = problems(configured(model))
    assert "SGLang is not installed; type bash environment/sglang.sh" in line
    with pytest.raises(InputError, match="rollout.name=sglang: SGLang is not installed"):
        make_engine(configured(model), None, tiny_tokenizer(), CPU)


def program(folder, text):
    path = folder / "python"
    path.write_text(textwrap.dedent(text))
    path.chmod(0o755)
    return str(path)


def test_a_server_that_does_not_start(tmp_path):
    ends = program(tmp_path, "#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(InputError, match=r"ended with status 3 as it started; its log ends:\s+no such model"):
        launch(ends, {}, 20.0, on_cpu=True)
    hangs = program(tmp_path, f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    with pytest.raises(InputError, match="not ready in trainer.phase_timeout_s=1 s"):
        launch(hangs, {}, 1.0, on_cpu=True)
    begun = time.monotonic()
    while not _ended(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < begun + 10
        time.sleep(0.01)


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    answers = program(
        tmp_path,
        f"""\
        #!{sys.executable}
        import os, subprocess, sys
        from http.server import BaseHTTPRequestHandler, HTTPServer
        class Healthy(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
        part = subprocess.Popen(["sleep", "60"])
        print(os.getpid(), part.pid, file=open("{tmp_path}/new", "w"), flush=True)
        os.rename("{tmp_path}/new", "{tmp_path}/pid")
        HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
        """,
    )
    code = "from core.engines.sglang_server import launch; "
    code += f"launch({answers!r}, {{}}, 20.0, on_cpu=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    processes = [int(word) for word in (tmp_path / "pid").read_text().split()]
    assert not any(map(_ended, processes))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while not all(map(_ended, processes)):
        assert time.monotonic() < deadline, "the server, or a process of its own, outlived its parent"
        time.sleep(0.05)


def _ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
