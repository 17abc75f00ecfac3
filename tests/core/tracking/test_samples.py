"""Answers that are printed in full: the first of each source, and none acts on the terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.tracking.loggers import ConsoleLogger
from core.tracking.samples import print_examples


def test_printed_answers_are_the_first_of_each_source(capsys):
    rows = [
        {"data_source": source, "input": f"q{i}", "output": "o", "gts": "g", "score": 0.5}
        for i, source in enumerate("aabb")
    ]
    print_examples(rows, 1)
    text = capsys.readouterr().out
    assert text.splitlines()[:4] == ["[prompt] q0", "[response] o", "[ground_truth] g", "[score] 0.5"]
    assert text.count("[prompt]") == 2 and "[prompt] q2" in text
    print_examples(rows, 0)
    print_examples([], 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("field", ["input", "output", "gts"])
def test_no_answer_acts_on_the_terminal(field, capsys):
    """Write to the clipboard, clear the screen, turn the text round, overwrite the line, ring, half a character."""
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\u202egnp\u2066\rover\x08\x9b2J\ud800"
    row = {"data_source": "a", "input": "q", "output": "o", "gts": "g", "score": 0.5, field: f"two\nlines\t{evil}é中"}
    print_examples([row], 1)
    text = capsys.readouterr().out
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert "two\nlines\t\\x1b]52;c;aGk=\\x07\\x1b[2J\\u202egnp\\u2066\\rover" in text and "\\ud800é中" in text
    console = ConsoleLogger(SimpleNamespace(total=None))
    console.samples(1, [row])
    console.log(1, {f"val-core/{evil}/acc/mean@1": 1.0})
    assert all(c.isprintable() or c in "\n\t" for c in capsys.readouterr().out)
