"""The token microscope without a browser: what is read, what is found, and what the page holds."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zipfile
import zlib

import numpy as np
import pytest
import torch

from core.errors import InputError
from core.trace import FORMAT
from results import report, trace
from results.reporting.pages import Link
from results.reporting.run_reader import load_run
from results.reporting.trace_page import Shown, in_script, payload, trace_links, write_trace
from results.reporting.trace_reader import chosen_steps, read_step, trace_files
from tests.results.traced_run import EOS, made_groups, record, traced_config, traced_run

TOOL = " <tool_response>error: no such tool</tool_response> "


def shown(run, steps=None):
    found, notes = chosen_steps(run, steps, 200)
    loaded = load_run(run)
    return Shown(loaded.name, found, loaded.config), notes


def page_data(run, steps=None):
    one, notes = shown(run, steps)
    return payload([one], notes)


def columns_of(step):
    """The page's columns as its script reads them."""
    data, start, out = zlib.decompress(base64.b64decode(step["data"])), 0, {}
    for name, kind, scale, count in step["columns"]:
        dtype = np.dtype({"u8": "<u1", "u16": "<u2", "u32": "<u4", "f16": "<f2"}[kind])
        raw = np.frombuffer(data[start : start + dtype.itemsize * count], np.uint8).reshape(dtype.itemsize, count)
        out[name] = np.ascontiguousarray(raw.T).view(dtype)[:, 0] * (np.float64(scale) if kind == "f16" else 1)
        start += dtype.itemsize * count
    assert start == len(data)
    return out


def rows(data):
    return [one for step in data["steps"] for group in step["groups"] for one in group["trajectories"]]


# --- ten and more planted bugs ---


def flat(batch, name, value):
    return batch.adding(**{name: value})


def later(value):
    return torch.cat([torch.zeros_like(value[:1]), value[:-1]])


def every(**changes):
    def changed(groups):
        return [
            dataclasses.replace(g, trajectories=tuple(dataclasses.replace(t, **changes) for t in g.trajectories))
            for g in groups
        ]

    return changed


def masked_scores(groups):
    return [
        dataclasses.replace(g, scores=(dataclasses.replace(g.scores[0], masked=True), *g.scores[1:])) for g in groups
    ]


BUGS = {
    "the mask is one token late": ({"batch": lambda b: flat(b, "response_mask", later(b.response_mask))}, {"mask"}),
    "tokens of a tool are trained on": (
        {
            "batch": lambda b: flat(
                flat(b, "response_mask", b.rollout_log_probs <= 0), "loss_mask", b.rollout_log_probs <= 0
            )
        },
        {"mask"},
    ),
    "the end of the sequence is not trained on": (
        {"batch": lambda b: flat(b, "response_mask", b.response_mask & (b.input_ids != EOS))},
        {"mask"},
    ),
    "an answer whose score is masked carries loss": (
        {"groups": masked_scores, "batch": lambda b: flat(b, "loss_mask", b.response_mask)},
        {"mask"},
    ),
    "the engine's log-probs are one token late in the batch": (
        {"batch": lambda b: flat(b, "rollout_log_probs", later(b.rollout_log_probs))},
        {"log-probs"},
    ),
    "the learner's log-probs are one token late": ({"old": later}, {"log-probs"}),
    "the learner has another temperature": ({"old": lambda value: 1.7 * value}, {"log-probs"}),
    "the engine has stale weights": ({"old": lambda value: value - 0.5 * (value != 0)}, {"log-probs"}),
    "the ratio is to the wrong log-probs": ({"loss": lambda kept: {**kept, "old": kept["old"] + 0.3}}, {"ratio"}),
    "the clip does nothing": ({"loss": lambda kept: {**kept, "clip": torch.zeros_like(kept["clip"])}}, {"ratio"}),
    "advantages reach the tool's tokens": (
        {"advantages": lambda b: flat(b, "advantages", b.require("advantages") + 0.5 * (~b.response_mask))},
        {"advantages"},
    ),
    "the sign of the advantage is lost": (
        {"advantages": lambda b: flat(b, "advantages", -b.require("advantages"))},
        {"advantages"},
    ),
    "an advantage is no number": (
        {"advantages": lambda b: flat(b, "advantages", b.require("advantages") / 0)},
        {"advantages"},
    ),
    "tokens of an answer weigh nothing": (
        {"weights": lambda b: b.adding(loss_weight=0 * b.loss_weight)},
        {"loss weights"},
    ),
    "samples are older than allowed": ({"groups": every(policy_version=-3)}, {"age"}),
}


def test_planted_bugs_are_seen_where_a_reader_looks(tmp_path):
    """The finding is on the answer, and its tokens carry the mark."""
    for number, (bug, (stages, checks)) in enumerate(BUGS.items()):
        data = page_data(traced_run(tmp_path / "grpo" / f"run{number}", (1,), stages, tool=TOOL))
        found = {one["check"] for row in rows(data) for one in row["findings"]}
        assert checks <= found, bug
        marks = columns_of(data["steps"][0])["flags"] & 32
        assert marks.any() or found == {"age"}, bug


def test_nothing_is_found_where_no_bug_is(tmp_path):
    for single in (False, True):
        folder = traced_run(tmp_path / "grpo" / f"run{single}", (), tool=TOOL)
        record(traced_config(folder), 1, made_groups(1, 0, tool=TOOL), single=single)
        data = page_data(folder)
        assert len(rows(data)) >= 12 and not any(row["findings"] for row in rows(data))


def test_a_shift_is_named_and_the_columns_show_it(tmp_path):
    data = page_data(traced_run(tmp_path / "grpo" / "run", (1,), {"old": later}, length=60))
    texts = {one["text"] for row in rows(data) for one in row["findings"]}
    assert any("one token earlier: a shift by one" in text for text in texts)
    columns = columns_of(data["steps"][0])
    assert np.nanmax(np.abs(columns["gap"])) > 0.5


# --- what the page holds ---


def test_the_columns_are_what_was_recorded(tmp_path):
    run = traced_run(tmp_path / "grpo" / "run", (2,), tool=TOOL)
    data, step = page_data(run), read_step(trace_files(run)[0])
    columns = columns_of(data["steps"][0])

    def of_response(name):
        return np.concatenate([t.arrays[name][t.prompt :] for g in step.groups for t in g.trajectories])

    sampled = of_response("sampled")
    np.testing.assert_allclose(columns["engine"][sampled], of_response("engine")[sampled], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(columns["ratio"][sampled], of_response("ratio")[sampled] - 1, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(columns["advantage"], of_response("advantages"), rtol=1e-3)
    np.testing.assert_allclose(columns["weight"][sampled], of_response("loss_weight")[sampled], rtol=1e-3)
    texts = [data["tokens"][int(place)] for place in columns["token"]]
    first = step.groups[0].trajectories[0]
    joined = "".join(
        t if isinstance(t, str) else bytes.fromhex(t["bytes"]).decode("latin-1") for t in texts[: first.length]
    )
    assert "how much is" in joined and "<b>7</b>" in joined and {"bytes": "c3"} in texts and {"bytes": "a9"} in texts
    assert [turn["role"] for turn in rows(data)[0]["stretches"]] == ["prompt", "policy", "tool", "policy"]
    assert rows(data)[0]["error"] and rows(data)[0]["stop"] == "eos" and rows(data)[0]["turns"] == 2
    assert rows(data)[0]["parts"] == {"acc": rows(data)[0]["score"], "format": 0.5}


def test_queries_and_passages_are_told_apart_from_what_a_tool_said(tmp_path):
    said = "\n\n<information>Doc 1(Title: Jaws) A film.\nDoc 2(Title: Shark) A fish.</information>\n\n"
    data = page_data(traced_run(tmp_path / "a" / "b", (1,), text="<search> who? </search>", tool=said))
    tool = rows(data)[0]["stretches"][2]
    assert tool["role"] == "retrieved" and tool["query"] == "who?" and tool["passages"] == ["Jaws", "Shark"]
    assert not rows(data)[0]["error"]


def test_html_in_an_answer_cannot_end_the_script_that_holds_it(tmp_path):
    run = traced_run(tmp_path / "a" / "b", (1,), text="</script><script>alert(1)</script><!--")
    path, _ = write_trace([run])
    text = path.read_text(encoding="utf-8")
    holder = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(holder)["steps"] and text.count("</script>") == 2 and "<" not in holder
    assert json.loads(str(in_script({"x": "</script>\u2028&"}))) == {"x": "</script>\u2028&"}
    assert "\ud800".encode("utf-8", "replace") == b"?" and in_script("\ud800")  # half a surrogate is no reason to fail


# --- what cannot be read ---


def test_a_run_without_traces_says_how_to_record_some(tmp_path, capsys):
    run = traced_run(tmp_path / "grpo" / "run", ())
    assert trace.main([str(run)]) == 2
    assert "no step is recorded; record some with trainer.trace.freq=20" in capsys.readouterr().err
    assert trace.main([str(tmp_path)]) == 2 and "is not a run folder" in capsys.readouterr().err
    assert trace.main(["a", "b", "c"]) == 2 and "3 runs: name one" in capsys.readouterr().err


def test_what_a_kill_or_another_version_left_is_named_and_the_rest_is_shown(tmp_path, capsys):
    run = traced_run(tmp_path / "grpo" / "run", (1, 2, 3, 4))
    first, second, third, last = trace_files(run)
    first.rename(first.with_name(first.name + ".partial"))
    second.write_bytes(second.read_bytes()[:-100])
    with zipfile.ZipFile(third) as old:
        content = {name: old.read(name) for name in old.namelist()}
    content["meta.json"] = json.dumps({**json.loads(content["meta.json"]), "format": FORMAT + 1}).encode()
    with zipfile.ZipFile(third, "w") as new:
        for name, value in content.items():
            new.writestr(name, value)
    assert trace.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "16 trajectories of 1 steps" in out or "12 trajectories of 1 steps" in out
    assert "step 1 of run was being written when the run was killed, and is left out" in out
    assert f"{second}: damaged" in out and f"{third}: format {FORMAT + 1}, and this version reads {FORMAT}" in out
    page = (run / "trace.html").read_text(encoding="utf-8")
    assert "was being written when the run was killed" in page
    last.unlink()
    assert trace.main([str(run)]) == 2 and "no record can be read" in capsys.readouterr().err
    with pytest.raises(InputError, match="recorded other steps; choose of 2, 3"):
        chosen_steps(run, [7], 200)


def test_arrays_that_do_not_fit_are_damage(tmp_path):
    run = traced_run(tmp_path / "grpo" / "run", (1,))
    (path,) = trace_files(run)
    with zipfile.ZipFile(path) as old:
        content = {name: old.read(name) for name in old.namelist() if name != "ids.npy"}
    with zipfile.ZipFile(path, "w") as new:
        for name, value in content.items():
            new.writestr(name, value)
    with pytest.raises(InputError, match="damaged .*other lengths"):
        read_step(path)


def test_steps_are_spread_out_and_those_left_out_are_named(tmp_path):
    run = traced_run(tmp_path / "grpo" / "run", (1, 2, 3, 4))
    every = sum(read_step(path).count for path in trace_files(run))
    found, notes = chosen_steps(run, None, every - 1)
    assert [one.step for one in found] == [1, 2, 4] and "3 of 4 recorded steps are shown (1, 2, 4)" in notes[0]
    assert [one.step for one in chosen_steps(run, [3], 1)[0]] == [3]


def test_two_runs_on_the_same_questions_stand_on_one_page(tmp_path):
    runs = [traced_run(tmp_path / "grpo" / name, (1,), seed=seed) for seed, name in enumerate("ab")]
    path, _ = write_trace(runs, tmp_path / "both.html")
    data = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])
    assert data["runs"] == ["grpo/a", "grpo/b"] and [step["run"] for step in data["steps"]] == [0, 1]
    questions = [{group["uid"] for group in step["groups"]} for step in data["steps"]]
    assert len(questions[0] & questions[1]) >= 2  # the regular ones are the same


# --- reports lead to it ---


def test_every_report_of_a_run_with_traces_links_its_page(tmp_path, capsys):
    runs = [traced_run(tmp_path / "grpo" / name, (1,), seed=seed) for seed, name in enumerate("abc")]
    assert report.main([str(runs[0])]) == 0
    assert (runs[0] / "trace.html").exists()
    assert '<a href="trace.html">Tokens of recorded steps: a</a>' in (runs[0] / "report.html").read_text()
    assert "[Tokens of recorded steps: a](trace.html)" in (runs[0] / "report.md").read_text()
    loaded = [load_run(run) for run in runs]
    assert trace_links(loaded[:2], tmp_path / "two") == [Link("Tokens of recorded steps: a and b", "trace.html")]
    links = trace_links(loaded, tmp_path / "three")
    assert [one.file for one in links] == ["trace_a.html", "trace_b.html", "trace_c.html"]
    assert all((tmp_path / "three" / one.file).exists() for one in links)
    trace_files(runs[0])[0].write_bytes(b"half")
    assert "The recorded tokens cannot be shown" in trace_links(loaded[:1], tmp_path / "damaged")[0].text
    trace_files(runs[0])[0].unlink()
    assert trace_links(loaded[:1], tmp_path / "none") == []
