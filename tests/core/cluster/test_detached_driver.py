"""The loop in a process of its own: what the shell sees of it, and what it does when the process dies."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from core import launch
from core.cluster.detached_driver import DriverProcess, News, oversee
from core.config import compose, convert
from core.errors import WorkersLost


class Loop:
    """A driver by script: News, or an exception to raise."""

    def __init__(self, *script, settings=None):
        self.script, self.interrupts, self.killed, self.there = list(script), 0, False, settings

    def settings(self):
        return self.there

    def read(self, seen):
        step = self.script.pop(0)
        if callable(step):
            step = step()
        if isinstance(step, Exception):
            raise step
        return step

    def interrupt(self):
        self.interrupts += 1

    def kill(self):
        self.killed = True


def news(text="", status=None, restarts=0, saved=False):
    return News(((1, text),), 1, restarts, saved, status)


def config(**overrides):
    return compose("grpo", [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()])


def test_output_and_status_reach_the_shell(capsys):
    loop = Loop(news("one\n"), News(((2, "oh\n"), (1, "two\n")), 3, 0, False, None), news("", status=7))
    assert oversee(lambda *_: (loop, False), config()) == 7
    assert capsys.readouterr() == ("one\ntwo\n", "oh\n")


def test_a_dead_loop_is_started_again_from_its_checkpoint_as_often_as_allowed(capsys):
    """Its own restarts count too. Before a checkpoint is there it starts as the first time."""
    loops = [
        Loop(news("a"), WorkersLost("the first died")),
        Loop(news("b", restarts=2, saved=True), WorkersLost("the second died")),
        Loop(WorkersLost("the third died")),
    ]
    placed = []

    def place(config, restarts):
        placed.append((restarts, config.trainer.resume_mode))
        return loops[len(placed) - 1], False

    assert oversee(place, config(trainer__max_restarts=3, trainer__resume_mode="disable")) == 1
    assert placed == [(0, "disable"), (1, "disable"), (3, "auto")]
    out, err = capsys.readouterr()
    assert out == "ab" and "restart 1 of 3" in err and "the third died\n(trainer.max_restarts=3: not started" in err


def test_ctrl_c_is_handed_on_once_and_the_second_one_kills():
    def press():
        os.kill(os.getpid(), signal.SIGINT)
        return news()

    before = signal.getsignal(signal.SIGINT)
    patient = Loop(news(), press, news(), news(status=0))
    assert oversee(lambda *_: (patient, False), config()) == 0
    assert patient.interrupts >= 1 and not patient.killed
    hasty = Loop(press, press, news(status=0))
    assert oversee(lambda *_: (hasty, False), config()) == 128 + signal.SIGINT and hasty.killed
    doomed = Loop(press, WorkersLost("gone"))
    assert oversee(lambda *_: (doomed, False), config(trainer__max_restarts=5)) == 1
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_twice_ends_the_wait_for_a_place():
    """A cluster may be full for minutes; one Ctrl-C waits for the place, because the run is stopped there."""

    def full(config, restarts):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the wait went on")

    def found(config, restarts):
        os.kill(os.getpid(), signal.SIGINT)
        return patient, False

    assert oversee(full, config()) == 128 + signal.SIGINT
    patient = Loop(news(), news(status=0))
    assert oversee(found, config()) == 0 and patient.interrupts >= 1
    places = iter([lambda: (Loop(WorkersLost("gone")), False), lambda: full(None, 0)])
    assert oversee(lambda *_: next(places)(), config(trainer__max_restarts=1)) == 128 + signal.SIGINT


def test_a_run_that_goes_on_is_joined_but_not_with_other_settings(capsys):
    ours = config()
    assert oversee(lambda *_: (Loop(news(status=0), settings=convert.as_json(ours)), True), ours) == 0
    other = Loop(settings=convert.as_json(config(trainer__total_epochs=3)))
    assert oversee(lambda *_: (other, True), ours) == 2
    assert "trainer.total_epochs is 3 there, 30 here" in capsys.readouterr().err


class Trainer:
    """Prints, waits for a Ctrl-C, ends."""

    def __init__(self, config):
        self.config, self.saved_step, self.run_dir = config, 4, "somewhere"
        self.session = self
        self.asked = threading.Event()
        self.stop = self
        self.requested = False

    def request(self):
        self.asked.set()

    def init_workers(self): ...

    def fit(self):
        print("fitting")
        print("hm", file=sys.stderr)
        if self.config.trainer.total_epochs == 3:
            raise ValueError("three")
        assert self.asked.wait(20)

    def outcome(self):
        return "stopped"


@pytest.fixture
def process(monkeypatch, tmp_path):
    """A loop's process, but in this one; its exit is an event."""
    gone = threading.Event()
    monkeypatch.setattr("core.cluster.detached_driver.os._exit", lambda _: gone.set())
    monkeypatch.setattr("core.cluster.detached_driver.WAIT_S", 0.01)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    made = DriverProcess()
    made.tmp = tmp_path
    yield made
    assert gone.wait(10)


def read_all(process, until):
    seen, text = 0, {1: "", 2: ""}
    while True:
        found = process.read(seen, 5.0)
        seen = found.seen
        for number, piece in found.pieces:
            text[number] += piece
        if until(text, found):
            return text, found


def test_the_process_tells_what_the_loop_prints_and_how_it_ends(process):
    process.start(f"{__name__}:Trainer", config(trainer__default_local_dir=process.tmp / "run"), 1)
    read_all(process, lambda text, _: "hm" in text[2])
    process.interrupt()
    text, last = read_all(process, lambda _, found: found.status is not None)
    assert text == {1: "fitting\nstopped; run folder somewhere\n", 2: "hm\n"}
    assert (last.status, last.restarts, last.saved) == (0, 1, True)
    assert (process.tmp / "run" / "driver.log").read_text() == "fitting\nhm\nstopped; run folder somewhere\n"


def test_an_interrupt_before_the_loop_is_there_reaches_it(process):
    process.interrupt()
    process.start(f"{__name__}:Trainer", config(trainer__default_local_dir=process.tmp / "run"), 0)
    assert read_all(process, lambda _, found: found.status is not None)[1].status == 0


def test_an_error_of_the_loop_is_shown_whole(process):
    process.start(f"{__name__}:Trainer", config(trainer__default_local_dir=process.tmp, trainer__total_epochs=3), 0)
    text, last = read_all(process, lambda _, found: found.status is not None)
    assert last.status == 1 and "ValueError: three" in text[2] and "in fit" in text[2]


def test_which_runs_have_a_loop_apart(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = {"trainer__backend": "ray"}
    assert not launch.apart(config(**ray))
    assert launch.apart(config(**ray, ray_kwargs__driver_actor=True))
    assert not launch.apart(config(ray_kwargs__driver_actor=True))
    there = compose("grpo", ["trainer.backend=ray", "+ray_kwargs.ray_init.address=10.0.0.1:6379"])
    assert launch.apart(there) and not launch.apart(convert.replaced(there, {"ray_kwargs.driver_actor": False}))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert launch.apart(config(**ray))
    assert not launch.apart(compose("grpo", ["trainer.backend=ray", "+ray_kwargs.ray_init.address=local"]))
