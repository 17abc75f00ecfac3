"""A judge that is vLLM's own HTTP server (its CPU build): a judged run, its replay without a server, kill and resume.

The judge is a tiny random model which a JSON schema forces to reply with a number. Its grades mean nothing; what counts
is that they are the server's, and stay the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make setup says why", allow_module_level=True)

import pyarrow as pa
import pyarrow.parquet as pq

from core.answer_cache import AnswerCache
from core.engines import vllm
from tests.core.rewards.test_judge import NOBODY
from tests.faults.kill_and_resume import AtPoint, AtRandom, compare_runs, run_uninterrupted, run_with_kills
from tests.faults.tiny_run import command, prepare
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(vllm.DEVICE != "cpu", reason="this vLLM is not the CPU build"),
]
SCHEMA = {
    "type": "object",
    "properties": {"score": {"enum": [0, 1]}},
    "required": ["score"],
    "additionalProperties": False,
}
START_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    prepare(folder)
    for name in ("train", "test"):
        rows = pq.read_table(folder / f"{name}.parquet").to_pylist()
        for row in rows:
            row["reward_model"]["style"] = "model"
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "template.txt").write_text("Question: {question}\nAnswer: {response}\nGrade it 0 or 1.")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    canaries = [{"question": "q", "response": text, "right": text == "a"} for text in ("a", "b")]
    (folder / "canaries.jsonl").write_text("\n".join(map(json.dumps, canaries)))
    sizes = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024)
    tiny_model("qwen2", seed=5, **sizes).save_pretrained(folder / "judge")
    tiny_tokenizer().save_pretrained(folder / "judge")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """Yields the address of vLLM's server, and ends it, also before the module's last test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        **{"model": folder / "judge", "served-model-name": "judge", "host": "127.0.0.1", "port": port},
        **{"dtype": "float32", "max-model-len": 1024, "max-num-seqs": 16},
    }
    line = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *line, "--enforce-eager"],
            stdout=log,
            stderr=log,
            env=env,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "server.log")
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        end(process)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def keys(folder):
    cache = AnswerCache(Path(folder) / "replies", "cache_dir")
    found = set(cache._cache)
    cache.close()
    return found


def judged(folder, url, cache, *overrides):
    keys = {
        "reward_model.enable": True,
        "reward_model.on_error": "raise",
        "reward_model.judge.url": url,
        "reward_model.judge.model": "judge",
        "reward_model.judge.template": folder / "template.txt",
        "reward_model.judge.json_schema": folder / "schema.json",
        "reward_model.judge.canaries": folder / "canaries.jsonl",
        "reward_model.judge.canary_every": 2,
        "reward_model.judge.max_tokens": 300,
        "reward_model.judge.cache_dir": cache,
        "reward_model.judge.give_up_s": 5,
        "trainer.health.judge_agreement.bound": 0,
        "custom_reward_function.path": "null",
        "trainer.logger": "[jsonl]",
    }
    return command(folder, "grpo", 6, *(f"{key}={value}" for key, value in keys.items()), *overrides)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_judged_run_its_kills_and_its_replay_without_the_server(folder, server):
    url, process = server
    whole = run_uninterrupted(judged(folder, url, folder / "kept"), folder / "whole")
    found = [line for line in lines(whole.folder) if "critic/score/mean" in line]
    assert len(found) == 6 and sum(line["perf/judge_requests"] for line in found) > 30
    assert all(line["reward/crash_rate"] == line["reward/timeout_rate"] == 0 for line in found)
    assert 0 < sum(line["critic/score/mean"] for line in found) < 6, "the judge tells answers apart"
    assert any("reward/judge_canary/mean" in line for line in found)

    # killed twice, with replies of its own: the same weights, metrics and number of kept replies
    kills = [AtPoint("update", 3), AtRandom()]
    killed = run_with_kills(judged(folder, url, folder / "kept-too"), folder / "killed", kills, random.Random(0))
    assert killed.landed and compare_runs(whole.folder, killed.folder) == []
    one, other = (keys(folder / name) for name in ("kept", "kept-too"))
    assert len(one) > 30 and one == other

    end(process)
    replay = run_uninterrupted(judged(folder, NOBODY, folder / "kept"), folder / "replay")
    assert compare_runs(whole.folder, replay.folder) == []
    assert sum(line.get("perf/judge_requests", 0) for line in lines(replay.folder)) == 0
