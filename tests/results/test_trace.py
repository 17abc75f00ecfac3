"""The token microscope without a browser: what is read, what is found, and what the page holds."""

from __future__ import annotations

import base64
import json
import re
import zipfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.errors import InputError
from core.trace import FORMAT
from results import report, trace
from results.reporting.run_reader import load_run
from results.reporting.trace_page import Shown, in_script, payload, trace_links, write_trace
from results.reporting.trace_reader import chosen_steps, read_step, trace_files
from tests.results.traced_run import EOS, made_groups, record, traced_config, traced_run

TOOL = " <tool_response>error: no such tool</tool_response> "


def page_data(run, steps=None):
    """The data of the page of a run."""
    found, notes = chosen_steps(run, steps, 200)
    loaded = load_run(run)
    return payload([Shown(loaded.name, found, loaded.config)], notes)


def written_data(path):
    """The data as a written page holds it."""
    text = path.read_text(encoding="utf-8")
    return re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]


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


# --- planted bugs ---


def later(value):
    """A token late."""
    return torch.cat([torch.zeros_like(value[:1]), value[:-1]])


def old_policy(groups):
    change = {"policy_version": -3}
    return [replace(g, trajectories=tuple(replace(t, **change) for t in g.trajectories)) for g in groups]


def masked_scores(groups):
    return [replace(g, scores=(replace(g.scores[0], masked=True), *g.scores[1:])) for g in groups]


def masked(mask):
    return lambda b: b.adding(response_mask=mask(b), loss_mask=mask(b))


def advantages(change):
    return lambda b: b.adding(advantages=change(b.advantages, b))


def engine_late(b):
    return b.adding(rollout_log_probs=later(b.rollout_log_probs))


BUGS = {  # bug -> the stage that has it, what it does there, the check that finds it
    "the mask is late": ("batch", masked(lambda b: later(b.response_mask)), "mask"),
    "tokens of a tool are trained on": ("batch", masked(lambda b: b.rollout_log_probs <= 0), "mask"),
    "the end is not trained on": ("batch", masked(lambda b: b.response_mask & (b.input_ids != EOS)), "mask"),
    "the engine's log-probs are late": ("batch", engine_late, "log-probs"),
    "the learner's log-probs are late": ("old", later, "log-probs"),
    "the learner has another temperature": ("old", lambda value: 1.7 * value, "log-probs"),
    "the engine has stale weights": ("old", lambda value: value - 0.5 * (value != 0), "log-probs"),
    "the ratio is to the wrong log-probs": ("loss", lambda kept: {**kept, "old": kept["old"] + 0.3}, "ratio"),
    "the clip does nothing": ("loss", lambda kept: {**kept, "clip": torch.zeros_like(kept["clip"])}, "ratio"),
    "the tool's tokens": ("advantages", advantages(lambda a, b: a + 0.5 * (~b.response_mask)), "advantages"),
    "the sign is lost": ("advantages", advantages(lambda a, _: -a), "advantages"),
    "an advantage is no number": ("advantages", advantages(lambda a, _: a / 0), "advantages"),
    "tokens weigh nothing": ("weights", lambda b: b.adding(loss_weight=0 * b.loss_weight), "loss weights"),
    "samples are older than allowed": ("groups", old_policy, "age"),
}


def test_planted_bugs_are_seen_where_a_reader_looks(tmp_path):
    """The finding is on the answer, and its tokens carry the mark."""
    stages = {bug: ({stage: change}, check) for bug, (stage, change, check) in BUGS.items()}
    both = {"groups": masked_scores, "batch": lambda b: b.adding(loss_mask=b.response_mask)}
    stages["an answer whose score is masked carries loss"] = both, "mask"
    for number, (bug, (changes, check)) in enumerate(stages.items()):
        data = page_data(traced_run(tmp_path / "grpo" / f"run{number}", (1,), changes, tool=TOOL))
        found = {one["check"] for row in rows(data) for one in row["findings"]}
        assert check in found, bug
        assert (columns_of(data["steps"][0])["flags"] & 32).any() or found == {"age"}, bug


def test_nothing_is_found_where_no_bug_is(tmp_path):
    for single in (False, True):
        folder = traced_run(tmp_path / "grpo" / f"run{single}", (), tool=TOOL)
        record(traced_config(folder), 1, made_groups(1, 0, tool=TOOL), single=single)
        data = page_data(folder)
        assert len(rows(data)) >= 12 and not any(row["findings"] for row in rows(data))


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
    first = texts[: step.groups[0].trajectories[0].length]
    joined = "".join(t if isinstance(t, str) else bytes.fromhex(t["bytes"]).decode("latin-1") for t in first)
    assert "how much is" in joined and "<b>7</b>" in joined and {"bytes": "c3"} in texts and {"bytes": "a9"} in texts
    row = rows(data)[0]
    assert [turn["role"] for turn in row["stretches"]] == ["prompt", "policy", "tool", "policy"]
    assert row["error"] and row["stop"] == "eos" and row["turns"] == 2
    assert row["parts"] == {"acc": row["score"], "format": 0.5}


def test_html_in_an_answer_cannot_end_the_script_that_holds_it(tmp_path):
    run = traced_run(tmp_path / "a" / "b", (1,), text="</script><script>alert(1)</script><!--")
    path, _ = write_trace([run])
    holder = written_data(path)
    assert json.loads(holder)["steps"] and path.read_text("utf-8").count("</script>") == 2 and "<" not in holder
    assert json.loads(str(in_script({"x": "</script>\u2028&"}))) == {"x": "</script>\u2028&"}
    assert in_script("\ud800")  # half a surrogate is no reason to fail


# --- what cannot be read ---


def rewritten(path, change):
    """Write a record again with its files changed."""
    with zipfile.ZipFile(path) as old:
        content = {name: old.read(name) for name in old.namelist()}
    change(content)
    with zipfile.ZipFile(path, "w") as new:
        for name, value in content.items():
            new.writestr(name, value)


def test_what_a_kill_or_another_version_left_is_named_and_the_rest_is_shown(tmp_path, capsys):
    assert trace.main([str(traced_run(tmp_path / "grpo" / "none", ()))]) == 2
    assert "record some with trainer.trace.freq=20" in capsys.readouterr().err
    run = traced_run(tmp_path / "grpo" / "run", (1, 2, 3, 4))
    first, second, third, last = trace_files(run)
    first.rename(first.with_name(first.name + ".partial"))
    second.write_bytes(second.read_bytes()[:-100])
    newer = {"format": FORMAT + 1}
    rewritten(third, lambda c: c.update({"meta.json": json.dumps({**json.loads(c["meta.json"]), **newer}).encode()}))
    assert trace.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "trajectories of 1 steps" in out and "step 1 of run was being written when the run was killed" in out
    assert f"{second}: damaged" in out and f"{third}: format {FORMAT + 1}, and this version reads {FORMAT}" in out
    assert "was being written when the run was killed" in (run / "trace.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="choose of 2, 3"):
        chosen_steps(run, [7], 200)
    rewritten(last, lambda content: content.pop("ids.npy"))
    with pytest.raises(InputError, match="damaged .*other lengths"):
        read_step(last)
    last.unlink()
    assert trace.main([str(run)]) == 2 and "no record can be read" in capsys.readouterr().err


# --- reports lead to it ---


def test_every_report_of_a_run_with_traces_links_its_page(tmp_path):
    runs = [traced_run(tmp_path / "grpo" / name, (1,), seed=seed) for seed, name in enumerate("abc")]
    assert report.main([str(runs[0])]) == 0 and (runs[0] / "trace.html").exists()
    assert '<a href="trace.html">Tokens of recorded steps: a</a>' in (runs[0] / "report.html").read_text()
    links = trace_links([load_run(run) for run in runs], tmp_path / "three")
    assert [one.file for one in links] == ["trace_a.html", "trace_b.html", "trace_c.html"]
    assert all((tmp_path / "three" / one.file).exists() for one in links)
