"""The loop of engines in this process: every request is settled, and by the first fault."""

from __future__ import annotations

import asyncio

import pytest

from core.engines.hf import HFEngine
from tests.core.engine_contract import ask, ids, run, sample_all
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def engine():
    made = HFEngine(tiny_model(), tiny_tokenizer(), max_batch_rows=3)
    yield made
    made.close()


def outcomes(engine, *requests):
    async def gather():
        waiting = [asyncio.ensure_future(engine.sample(request)) for request in requests]
        done, pending = await asyncio.wait(waiting, timeout=20)
        return [None if task in pending else task.exception() for task in waiting]

    return run(gather())


def requests():
    """Return five requests, of which two wait for room; the first ones end together."""
    return [ask(seed=seed, max_tokens=4, ignore_eos=True) for seed in range(5)]


def refuse(engine, fault):
    """Have the engine queue a request as vLLM does, which may refuse it then."""

    def admit():
        engine.rows += engine._waiting[:1]
        raise fault

    return admit


def test_every_consumer_learns_of_a_finished_row_that_cannot_be_read(engine, monkeypatch):
    good = sample_all(engine, requests())
    fault = OverflowError("out of range integral type conversion attempted")

    def decode(*args, **kwargs):
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "decode", decode)
        assert outcomes(engine, *requests()) == [fault] * 5
    assert [ids(t) for t in sample_all(engine, requests())] == [ids(t) for t in good]


def test_every_consumer_learns_why_a_request_was_refused_late(engine, monkeypatch):
    fault = ValueError("temperature must be in [0, 2], got 2.5.")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_admit", refuse(engine, fault))
        assert outcomes(engine, *requests()) == [fault] * 5
    assert len(sample_all(engine, requests())) == 5


def test_the_first_fault_is_told_where_aborting_fails_too(engine, monkeypatch, caplog):
    fault = RuntimeError("a process of the engine died")

    def abort(rows):
        raise RuntimeError("the engine is dead")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_advance", lambda: (_ for _ in ()).throw(fault))
        patch.setattr(engine, "_drop", abort)
        assert outcomes(engine, *requests()) == [fault] * 5
        engine.close()
    assert "the engine is dead" in caplog.text
