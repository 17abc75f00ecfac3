"""A real run whose tools hang: a step costs the deadline, a scheduler's signal saves at once."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from core.checkpoint.store import CheckpointStore
from tests.core.rollout.test_tool_agent import TEMPLATE
from tests.core.rollout.test_tool_agent import call as written_call
from tests.faults.kill_and_resume import launched, read_lines, run_uninterrupted
from tests.faults.tiny_run import command, prepare
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

STEPS = 3
CALLS = 64  # at once: 8 prompts, 8 answers each
DEADLINE_S = 1.0
NAMES = ("plain", "coroutine")
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"

# Every second call of each tool hangs, for as long as the process lives
TOOLS = """
import asyncio
import itertools
import pathlib
import time

from core.rollout.tools import BaseTool


def number_of_call(numbers):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write("call\\n")
    return next(numbers)


class Plain(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "plain"}}
    numbers = itertools.count()

    def execute(self, instance_id, parameters, **kwargs):
        if number_of_call(self.numbers) % 2:
            time.sleep(10_000)
        return "7"


class Blocking(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "coroutine"}}
    numbers = itertools.count()

    async def execute(self, instance_id, parameters, **kwargs):
        number = number_of_call(self.numbers)
        if number % 4 == 1:
            time.sleep(10_000)
        while number % 4 == 3:
            try:
                await asyncio.sleep(10_000)
            except BaseException:  # its cancellation too
                continue
        return "7"
"""


def write_calling_policy(folder: Path) -> None:
    """Write a model that calls either tool in each turn, and then ends the turn.

    A call is one token, of two equally likely ones. Its layers add nothing to the embeddings, so
    that the next token depends on the last one alone: a call behind text, the end behind a call.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens([written_call(name) for name in NAMES])
    calls = slice(VOCAB_SIZE, VOCAB_SIZE + len(NAMES))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": calls.stop}
    model = tiny_model("llama", **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.get_input_embeddings().weight.zero_()
        embeddings[:, 0] = 1.0
        embeddings[calls] = embeddings[calls].roll(1, dims=1)
        head = model.get_output_embeddings().weight.zero_()
        head[calls, 0] = 5.0
        head[tokenizer.eos_token_id, 1] = 5.0
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@pytest.fixture
def factory(tmp_path):
    prepare(tmp_path)
    write_calling_policy(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    classes = [f"  - class_name: {tmp_path}/tools.py:{name}\n" for name in ("Plain", "Blocking")]
    (tmp_path / "tools.yaml").write_text("tools:\n" + "".join(classes))
    return command(
        tmp_path,
        "grpo",
        STEPS,
        f"{MULTI_TURN}.enable=True",
        f"{MULTI_TURN}.tool_config_path={tmp_path}/tools.yaml",
        f"{MULTI_TURN}.tool_timeout_s={DEADLINE_S}",
        f"{MULTI_TURN}.max_assistant_turns=2",
        f"{MULTI_TURN}.max_tool_response_length=20",
        "data.train_batch_size=8",
        "data.max_prompt_length=128",
        "data.max_response_length=100",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "trainer.save_freq=100",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
    )


def steps_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in read_lines(run / "metrics.jsonl")]


def wait_until(condition, process, log: Path) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


@pytest.mark.processes
def test_of_64_calls_half_hang_a_step_costs_the_deadline_and_a_signal_saves(factory, tmp_path):
    run, log, calls = tmp_path / "run", tmp_path / "run.log", tmp_path / "calls"
    with launched(factory(run), run) as process:
        wait_until(lambda: len(steps_of(run)) == 2, process, log)
        made_before = len(read_lines(calls))
        wait_until(lambda: len(read_lines(calls)) > made_before + 8, process, log)
        process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        assert process.wait(60) == 0, log.read_text()
        assert time.monotonic() - signalled < 20
    assert "stopped after step 2" in log.read_text()
    assert CheckpointStore(run).latest().step == 2
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"

    run_uninterrupted(factory, run)
    lines = steps_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["agent/calls"] == CALLS
        assert 0.4 < line["agent/failed_calls"] < 0.6
        assert line["timing_s/gen"] >= DEADLINE_S
        assert line["timing_s/step"] < 20
        assert line["actor/grad_norm"] > 0
