"""Golden vectors in other shapes than the committed ones: what public code also writes is read, and still compared."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest

from tests import golden_io
from tests.conformance import ADAPTERS
from tests.golden_io import Case, check, load

GROUPED = ("adv_grpo", "adv_rloo", "adv_opo", "adv_gpg", "adv_reinforce_plus_plus_baseline")


def changed(case: Case, **parts) -> Case:
    return dataclasses.replace(copy.deepcopy(case), **parts)


def agrees(case: Case, precision: str = "f64") -> bool:
    try:
        check(ADAPTERS[case.file](case, precision), case.want(precision))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", GROUPED)
def test_group_ids_may_be_texts(name):
    for case in load(name)[:8]:
        texts = [f"uid-{each}" for each in case.inputs["index"]]
        assert agrees(changed(case, inputs={**case.inputs, "index": texts}))
    one = next(case for case in load("adv_grpo") if len(set(case.inputs["index"])) > 1)
    assert not agrees(changed(one, inputs={**one.inputs, "index": ["same"] * len(one.inputs["index"])}))


def value_loss(mode: str, where: str, **counts) -> Case:
    """A part of two sequences of a step, with the loss worked out by the published formula in plain Python."""
    vpreds, returns, values = [[0.5, 1.0, 9.0], [2.0, -1.0, 0.25]], [[1.0, 0.0, 9.0], [0.5, 0.5, 0.5]], [[0.0] * 3] * 2
    mask, clip = [[1, 1, 0], [1, 1, 1]], 100.0  # nothing is clipped
    columns = zip(vpreds, returns, mask, strict=True)
    rows = [[(v - r) ** 2 / 2 for v, r, m in zip(*row, strict=True) if m] for row in columns]
    if mode == "token-mean":
        loss = sum(map(sum, rows)) / counts["batch_num_tokens"]
    elif mode == "seq-mean-token-sum":
        loss = sum(map(sum, rows)) / counts["global_batch_size"]
    else:
        loss = sum(sum(row) / len(row) for row in rows) / counts["global_batch_size"]
    scale = counts.get("dp_size", 1)
    weight = {
        "token-mean": lambda row: 1 / counts["batch_num_tokens"],
        "seq-mean-token-sum": lambda row: 1 / counts["global_batch_size"],
        "seq-mean-token-mean": lambda row: 1 / counts["global_batch_size"] / sum(row),
    }[mode]
    grad = [
        [scale * m * (v - r) * weight(row) for v, r, m in zip(*three, row, strict=True)]
        for three, row in zip(zip(vpreds, returns, strict=True), mask, strict=True)
    ]
    inputs = {"vpreds": vpreds, "returns": returns, "values": values, "response_mask": mask}
    params = {"cliprange_value": clip, "loss_agg_mode": mode}
    if where == "nested":
        params["global_batch_info"] = counts
    else:
        {"params": params, "inputs": inputs}[where].update(counts)
    want = {"vf_loss": scale * loss, "grad_vpreds": grad, "vf_clipfrac": 0.0}
    return Case("value_loss", "a part of a step", inputs, params, {"f64": want})


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("where", ["params", "inputs", "nested"])
def test_a_value_loss_may_be_of_a_part_of_the_step(mode, where):
    case = value_loss(mode, where, batch_num_tokens=12, global_batch_size=7, dp_size=2)
    assert agrees(case)
    want = case.want("f64")
    assert not agrees(changed(case, expected={"f64": {**want, "vf_loss": 1.01 * want["vf_loss"]}}))


@pytest.mark.parametrize("bound", [0, None, "absent"])
def test_accumulation_may_have_no_bound(bound):
    params = {"train_batch_size": 4, **({} if bound == "absent" else {"max_num_gen_batches": bound})}
    events = [
        {"event": "continue"},
        {"event": "continue"},
        {"event": "train", "used_prompts": 4, "num_gen_batches": 3, "discarded_surplus_prompts": 1},
    ]
    case = Case("dapo_accumulation", "unbounded", {"kept_prompts_per_gen_batch": [1, 1, 3]}, params, {"": events})
    assert agrees(case)
    events[-1]["num_gen_batches"] = 2
    assert not agrees(case)


def importance(threshold, level: str, weights, masks=((1, 1), (1, 1)), metrics=None) -> Case:
    old = [[0.0, math.log(3.0)], [math.log(0.25), math.log(1.5)]]  # learner less engine: ratios 1, 3 and 1/4, 3/2
    inputs = {"old_log_prob": old, "rollout_log_prob": [[0.0] * 2] * 2, "response_mask": [list(row) for row in masks]}
    params = {"rollout_is": level, "rollout_is_threshold": threshold}
    return Case("rollout_corr_is", "two-sided", inputs, params, {"f64": {"weights": weights, "metrics": metrics or {}}})


@pytest.mark.parametrize("threshold", ["0.5_2.0", "0.5_2", " 0.5_2.0 "])
def test_a_threshold_of_two_bounds_may_be_a_text(threshold):
    assert agrees(importance(threshold, "token", [[1.0, 0.0], [0.0, 1.5]]))
    assert not agrees(importance(threshold, "token", [[1.0, 2.0], [0.25, 1.5]]))
    assert agrees(importance(threshold, "sequence", [[0.0, 0.0], [0.0, 0.0]]))  # ratios 3 and 3/8
    assert agrees(importance("2.0", "token", [[1.0, 2.0], [0.25, 1.5]]))  # one bound as text truncates


def test_rows_without_a_token_are_left_out_of_two_sided_means_too():
    metrics = {"rollout_is_seq_mean": 0.123, "rollout_is_seq_fraction_high": 0.123}  # published: with the empty row
    case = importance("0.5_2.0", "token", [[1.0, 0.0], [0.0, 0.0]], masks=((1, 1), (0, 0)), metrics=metrics)
    outcome = check(ADAPTERS[case.file](case, "f64"), case.want("f64"))
    assert set(outcome.departures) == set(metrics)


def test_a_folder_of_other_vectors_is_read(tmp_path, monkeypatch):
    case = {
        "name": "texts",
        "inputs": {
            "token_level_rewards": [[0.0, 1.0], [0.0, 3.0]],
            "response_mask": [[1, 1], [1, 1]],
            "index": ["a", "a"],
        },
        "params": {},
        "expected_f64": {"advantages": [[-2.0, -2.0], [2.0, 2.0]], "returns": [[-2.0, -2.0], [2.0, 2.0]]},
    }
    (tmp_path / "adv_rloo.json").write_text(json.dumps({"cases": [case]}))
    monkeypatch.setenv("GOLDEN_DIR", str(tmp_path))
    assert golden_io.golden_files() == ["adv_rloo"]
    (read,) = load("adv_rloo")
    assert agrees(read) and agrees(read, "f32")
