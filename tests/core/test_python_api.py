"""``core.train``: objects go in as they are, and the command line's checks hold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time

import pytest

from core import command_line, python_api, train
from core.errors import InputError
from tests.faults.tiny_run import prepare
from tests.row_files import plain_row


def test_a_cell_of_a_notebook_has_an_event_loop_and_trains_in_a_thread():
    """Also SystemExit comes out; an interrupt requests a stop, and the work ends by itself."""
    stopped = threading.Event()

    async def cell(work):
        return python_api._apart(work, stopped.set)

    async def value():
        return 4

    assert asyncio.run(cell(lambda: asyncio.run(value()))) == 4
    with pytest.raises(SystemExit, match="3"):
        asyncio.run(cell(lambda: sys.exit(3)))

    def interrupted():
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        return stopped.wait(20)

    loop = asyncio.new_event_loop()  # asyncio.run has a handler of its own
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert loop.run_until_complete(cell(interrupted)) is True
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()


KEYS = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 64,
    "data.max_response_length": 6,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "trainer.total_training_steps": 2,
    "trainer.val_before_train": True,
    "trainer.logger": ["console"],
    "trainer.cpu_threads": 1,
}


def parity(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 2


def scripted_parity(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 2


scripted_parity.__module__ = "__main__"


class InterruptingLogger:
    """Ctrl-C arrives after step 1."""

    def __init__(self, run):
        pass

    def log(self, step, values):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self, failed):
        pass


def examples(count):
    chats = [[{"role": "user", "content": "ab"[n % 2] * (n + 1)}] for n in range(count)]
    return [plain_row(n, "tests/letters", prompt=chat) for n, chat in enumerate(chats)]


@pytest.mark.parametrize("reward", [parity, scripted_parity])
def test_a_list_of_examples_and_a_function_train(tmp_path, monkeypatch, reward):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = train(
        "grpo", model="./model", data=examples(8), val_data=examples(3), reward=reward, keys=KEYS
    )
    assert run.folder.is_relative_to(tmp_path) and (run.folder / "global_step_2").is_dir()
    assert [row["step"] for row in run.metrics] == [0, 1, 2] and 0 < run.metrics[1][
        "critic/score/mean"
    ] < 1
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"


def test_an_interrupted_run_is_not_returned_as_done_and_the_same_call_continues(
    tmp_path, monkeypatch
):
    """A notebook's next cell reported the half of a run as if it were the whole."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    keys = {**KEYS, "trainer.logger": [f"{__name__}:InterruptingLogger"]}
    call = {"model": "./model", "data": examples(8), "reward": parity}
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 1 of 2.*same call continues"):
        train("grpo", **call, keys=keys)
    run = train("grpo", **call, keys=keys)
    assert [row["step"] for row in run.metrics] == [1, 2]


def test_ctrl_c_before_the_first_step_is_one_line(monkeypatch):
    """Its traceback was that of importing and loading: pages."""

    def interrupt(*_):
        raise KeyboardInterrupt

    for name, stand_in in {
        "all_problems": lambda *_: [],
        "load_trainer": lambda *_: None,
        "train": interrupt,
    }.items():
        monkeypatch.setattr(command_line, name, stand_in)
    with pytest.raises(KeyboardInterrupt, match="before the first step") as caught:
        train("grpo", model="m", data="d.jsonl", reward="r.py")
    assert caught.value.__suppress_context__


def test_what_the_command_line_refuses_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="data.train_batch_sise") as caught:
        train("grpo", model="./nothing", data="no.parquet", keys={"data.train_batch_sise": 4})
    assert "no.parquet" in str(caught.value) and not list(tmp_path.rglob("*.jsonl"))
