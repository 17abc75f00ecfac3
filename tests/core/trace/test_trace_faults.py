"""A trace that cannot be written."""

from __future__ import annotations

import json

from tests.core.test_session import start


def test_a_full_trace_folder_ends_no_training(tmp_path, caplog):
    """The folder is a file: nothing can be written in it."""
    run = start(tmp_path, "trainer.total_training_steps=2", "trainer.trace.freq=1")
    run.trace.folder = tmp_path / "model" / "config.json"
    run.fit()
    assert run.run.step == 2 and caplog.text.count("trace could not be written") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["perf/trace_dropped"] for line in lines] == [1, 1]
