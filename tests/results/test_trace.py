"""The page of recorded tokens without a browser: what it holds, and what cannot be read."""

from __future__ import annotations

import re

import pytest

from core.errors import InputError
from core.learner.batching import make_batch
from core.trace import dump
from results import report, trace
from results.reporting.run_reader import load_run
from results.reporting.trace_page import (
    MOST_TOKENS,
    chosen_dumps,
    trace_files,
    trace_links,
    write_trace,
)
from tests.core.synthetic import configured, make_run
from tests.core.test_trace import LetterTokenizer, group


def traced_run(folder, steps, text="ab<i>c"):
    """Write a run folder with dumps of these steps, and return it."""
    config = configured(
        {"trainer.default_local_dir": str(folder), "actor_rollout_ref.rollout.n": 2}
    )
    make_run(folder, config, steps=4, questions=8)
    for step in steps:
        groups = [group(0, text=text), group(1, text=text)]
        batch = make_batch(groups, 0)
        batch = batch.adding(advantages=batch.response_mask * 0.5)
        dump(folder, step, groups, batch, LetterTokenizer(), 1)
    return folder


def test_every_token_is_on_the_page_with_its_numbers(tmp_path):
    path, shown = write_trace([traced_run(tmp_path / "grpo" / "run", (1, 2))])
    page = path.read_text(encoding="utf-8")
    tokens = re.findall(r'<i v="([^"]*)" class="([^"]*)">([^<]*)</i>', page)
    assert len(tokens) == 2 * 2 * 2 * 6 and shown.startswith("8 trajectories of 2 steps")
    assert {token for _, _, token in tokens} == {"a", "b", "c", "&lt;", "i", "&gt;"}
    fields = re.findall(r"<option>(\w+)</option>", page)
    numbers = dict(zip(fields, tokens[0][0].split(","), strict=True))
    assert float(numbers["advantages"]) == 0.5 and float(numbers["rollout_log_probs"]) == -0.25
    assert [kind.split() for _, kind, _ in tokens[6:12]] == [
        [],
        ["other", "idle"],
        ["other", "idle"],
        [],
        [],
        [],
    ]


def test_html_in_an_answer_stays_text(tmp_path):
    run = traced_run(tmp_path / "a" / "b", (1,), text="</script><script>alert(1)</script>")
    page = write_trace([run])[0].read_text("utf-8")
    assert page.count("<script>") == page.count("</script>") == 1


def test_what_a_kill_left_is_named_and_the_rest_is_shown(tmp_path, capsys):
    assert trace.main([str(traced_run(tmp_path / "grpo" / "none", ()))]) == 2
    assert "record some with trainer.trace.freq=20" in capsys.readouterr().err
    run = traced_run(tmp_path / "grpo" / "run", (1, 2, 3))
    _, second, _ = trace_files(run)
    second.write_bytes(second.read_bytes()[:-20])
    assert trace.main([str(run)]) == 0
    assert f"{second}: damaged" in capsys.readouterr().out
    with pytest.raises(InputError, match="choose of 1, 2, 3"):
        chosen_dumps(run, [7])
    for path in trace_files(run):
        path.write_bytes(b"")
    assert trace.main([str(run)]) == 2 and "no record can be read" in capsys.readouterr().err


def test_a_page_of_long_answers_has_the_first_and_the_last_step_and_says_what_it_leaves_out(
    tmp_path,
):
    run = traced_run(tmp_path / "grpo" / "run", range(1, 6), text="a" * (MOST_TOKENS // 10))
    dumps, notes = chosen_dumps(run, None)
    assert [one["step"] for one in dumps] == [1, 5] and "name them with --steps" in notes[0]
    assert [one["step"] for one in chosen_dumps(run, [2, 3])[0]] == [2, 3]


def test_every_report_of_a_run_with_dumps_links_its_page(tmp_path):
    runs = [traced_run(tmp_path / "grpo" / name, (1,)) for name in "abc"]
    assert report.main([str(runs[0])]) == 0 and (runs[0] / "trace.html").exists()
    assert (
        '<a href="trace.html">Tokens of recorded steps: a</a>'
        in (runs[0] / "report.html").read_text()
    )
    (link,) = trace_links([load_run(run) for run in runs], tmp_path / "three")
    assert link.text.endswith("a and b and c") and (tmp_path / "three" / link.file).exists()
