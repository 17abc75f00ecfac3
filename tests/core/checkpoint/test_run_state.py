"""What a checkpoint holds besides weights comes back equal to the bit, of the same types, without pickle."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import math
import random
import subprocess
import sys
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.checkpoint.run_state import DriverState, load_tensors, rng_state, save_tensors, seed_generators, set_rng_state
from core.errors import InputError
from core.types import Dropped, Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus
from tests.checkpoints import ROOT


def same(a, b) -> bool:
    """Equal in type and to the bit, all the way down; a read-only mapping may come back as a dict."""
    if isinstance(a, MappingProxyType):
        a = dict(a)
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, item.name), getattr(b, item.name)) for item in dataclasses.fields(a))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def trajectory(length: int, seed: int, **changes) -> Trajectory:
    rng = np.random.default_rng(seed)
    fields = {
        "prompt_ids": rng.integers(0, 2**31 - 1, 3),
        "response_ids": rng.integers(0, 100, length),
        "response_mask": rng.random(length) < 0.5,
        "logprobs": -rng.random(length).astype(np.float32) / 3,  # not representable in few decimal digits
        "segments": (Segment("policy", "a\n"), Segment("tool", "déjà \ud800 ☃")),
        "stop": Stop.STOP_STRING,
        "policy_version": 7,
        "seed": 2**63 - 1,
        "turns": 2,
        "tool_calls": 1,
    }
    return Trajectory(**{**fields, **changes})


def group(ordinal: int, **prompt) -> ScoredGroup:
    fields = {
        "ordinal": ordinal,
        "uid": "gsm8k/17",
        "token_ids": (5, 6, 7),
        "messages": ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None}),
        "ground_truth": {"target": ["4", "four"]},
        "data_source": "openai/gsm8k",
        "extra_info": {"index": 17, "split": "train", "is": {"is": "tuple", "of": []}},
    }
    scores = (
        Score(1.0, {"format": 0.1, "acc": 1.0}, ScoreStatus.OK, pred="4"),
        Score(-0.0, status=ScoreStatus.TIMEOUT, masked=True),
    )
    return ScoredGroup(Prompt(**{**fields, **prompt}), (trajectory(4, ordinal), trajectory(0, 9)), scores, Score(0.5))


def round_trip(state: DriverState, folder) -> DriverState:
    state.save(folder)
    return DriverState.load(folder)


def test_carried_groups_come_back_to_the_bit(tmp_path):
    carried = {12: group(12), 13: Dropped(4, 17), 15: group(15, ground_truth="4", extra_info={}, messages=())}
    state = DriverState(3, 12, carried, {"kl_coef": 0.1 + 0.2, "keep_rate": 1 / 3})
    loaded = round_trip(state, tmp_path)
    assert same(state, loaded)
    assert loaded.carried[12].trajectories[0].logprobs.dtype == np.float32
    assert not loaded.carried[12].trajectories[0].logprobs.flags.writeable


def test_the_comparison_above_sees_what_it_must():
    assert not same(group(1), group(1, token_ids=(5, 6, 8)))
    assert not same(trajectory(4, 1), trajectory(4, 1, logprobs=np.nextafter(trajectory(4, 1).logprobs, 1)))
    assert not same((1,), [1]) and not same(1, True) and not same(1.0, 1) and not same(0.0, -0.0)
    assert not same(np.float32(1), 1.0) and not same({"a": 1, "b": 2}, {"b": 2, "a": 1})


VALUES = {
    "floats": [0.1, -0.0, 1e-323, math.inf, -math.inf, math.nan, 1.7976931348623157e308],
    "ints": [0, -1, 2**63, -(10**40), True, None],
    "text": ["", "\x00", "\ud800", "line\u2028break", "☃"],
    "nested": {"a": [(), (1, [2, ({"b": ()},)])], "": {}},
    "keys": {1: "int", "1": "str", (1, 2): "tuple", None: "none", 1.5: "float"},
    "tags": {"is": "Stop", "of": "eos", "more": [{"is": 1}]},
    "arrays": {"f16": np.arange(3, dtype=np.float16), "u8": np.zeros((2, 0, 3), np.uint8), "b": np.array([[True]])},
    "zero-dimensional": np.array(3.5),
    "strided": np.arange(12).reshape(3, 4).T,
    "big endian": np.arange(3, dtype=">i4"),
    "scalars": [np.float32(0.1), np.int64(-(2**63)), np.bool_(True), np.uint32(2**32 - 1), np.float64(math.nan)],
    "bytes": b"\x00\xff",
    "times": [datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC), datetime.date(1, 1, 1)],
    "clock": [datetime.time(23, 59, 59, 999999), datetime.datetime.max],
    "decimal": [decimal.Decimal("1.10"), decimal.Decimal("NaN")],
    "proxy": MappingProxyType({"a": 1}),
    "rng": {"random": random.Random(3).getstate(), "numpy": np.random.RandomState(3).get_state()},
}


@pytest.mark.parametrize("name", VALUES)
def test_whatever_a_row_may_hold_comes_back(name, tmp_path):
    value = VALUES[name]
    loaded = round_trip(DriverState(1, 0, values={"value": value}), tmp_path).values["value"]
    if name == "decimal":
        assert [str(item) for item in loaded] == ["1.10", "NaN"]
    elif name == "strided":
        assert np.array_equal(loaded, value) and loaded.dtype == value.dtype
    else:
        assert same(value, loaded)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["is", "of"]) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(nested)
def test_any_nesting_comes_back(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("nested")
    assert same(value, round_trip(DriverState(1, 0, values={"value": value}), folder).values["value"])


@pytest.mark.parametrize("value", [{1, 2}, datetime.timedelta(1), object(), np.array([object()]), np.array(["a"])])
def test_what_cannot_be_stored_is_named(value, tmp_path):
    bad = group(4, extra_info={"when": [0, value]})
    with pytest.raises(InputError, match=r"carried\[4\].prompt.extra_info\['when'\]\[1\] is a .*cannot store"):
        DriverState(1, 0, {4: bad}).save(tmp_path)


def test_the_files_are_json_and_plain_arrays(tmp_path):
    DriverState(3, 12, {12: group(12)}, {"kl_coef": 0.2}).save(tmp_path)
    fields = json.loads((tmp_path / "driver.json").read_text())
    assert (fields["step"], fields["next_ordinal"], fields["values"]) == (3, 12, {"kl_coef": 0.2})
    with np.load(tmp_path / "driver.npz", allow_pickle=False) as arrays:
        assert {arrays[name].dtype.name for name in arrays.files} == {"int32", "bool", "float32"}


# ---------------------------------------------------------------- tensors


def test_an_optimizer_comes_back_to_the_bit(tmp_path):
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 3) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01) for model in models]

    def step(index):
        models[index](torch.ones(2, 5)).square().sum().backward()
        optimizers[index].step()
        optimizers[index].zero_grad()

    step(0)
    save_tensors(tmp_path / "actor" / "optimizer.pt", optimizers[0].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(load_tensors(tmp_path / "actor" / "optimizer.pt"))
    for index in (0, 1):
        step(index)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_values_that_a_safe_load_refuses_are_refused_on_saving(tmp_path):
    for name, value in {
        "np": np.float64(1.0),
        "array": np.zeros(2),
        "set": {1},
        "ordered": OrderedDict(a=1),
        "key": {(1, 2): 3},
    }.items():
        with pytest.raises(InputError, match=r"x.pt\['state'\]\[1\].*(can be stored)"):
            save_tensors(tmp_path / "x.pt", {"state": [0, value], "name": name})
    assert not (tmp_path / "x.pt").exists()


def draw() -> tuple[float, float, float, float]:
    return (random.gauss(0, 1), np.random.normal(), float(torch.rand(())), float(np.random.rand()))


def test_all_generators_go_on_where_they_were(tmp_path):
    random.gauss(0, 1), np.random.normal()  # both keep a second number back for the next call
    save_tensors(tmp_path / "rng.pt", rng_state())
    expected = [draw() for _ in range(5)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert draw() != expected[0]
    set_rng_state(load_tensors(tmp_path / "rng.pt"))
    assert [draw() for _ in range(5)] == expected


def test_a_seed_is_for_all_generators():
    drawn = []
    for seed in (2**40, 2**40, 3):
        seed_generators(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[1], drawn[2], strict=True))


@pytest.mark.gpu
def test_cuda_generators_go_on_too(tmp_path):
    save_tensors(tmp_path / "rng.pt", rng_state())
    expected = torch.rand(3, device="cuda")
    set_rng_state(load_tensors(tmp_path / "rng.pt"))
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_importing_the_checkpoint_layer_is_cheap():
    modules = "core.checkpoint.store, core.cluster.signals, core.learner.hf_export"
    code = f"import sys, {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
