"""How far work is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import io
import time

import pytest

from core.tracking import progress as progress_module
from core.tracking.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_terminal_shows_a_bar_of_work_that_is_not_short(monkeypatch, pause):
    monkeypatch.setattr(progress_module, "DELAY_S", 0.05)
    monkeypatch.setattr("sys.stderr", out := Terminal())
    with progress("validation", 2, "prompt") as count:
        time.sleep(pause)
        count()
        time.sleep(0.15 if pause else 0)
        count()
        count()  # one more than was expected is no error
    count()  # nor is one that comes late
    assert ("validation" in out.getvalue()) == (pause > 0)


def test_a_log_gets_a_line_a_tenth_and_none_in_between(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", out := io.StringIO())
    with progress("validation", 40, "prompt") as count:
        for _ in range(41):
            now[0] += 20.0  # a tenth takes 80 s
            count()
        assert out.getvalue().splitlines() == [f"validation: {done} of 40 prompts" for done in range(4, 44, 4)]
    with progress("validation", 40, "prompt") as count:
        for _ in range(40):
            now[0] += 1.0  # several tenths pass in half a minute
            count()
    assert out.getvalue().splitlines()[10:] == ["validation: 30 of 40 prompts"]
