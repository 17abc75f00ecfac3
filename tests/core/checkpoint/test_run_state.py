"""What a checkpoint holds besides weights comes back equal to the bit, of the same types, without
pickle."""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
from types import MappingProxyType

import numpy as np
import pytest
import torch

from core.checkpoint.run_state import (
    DriverState,
    load_tensors,
    rng_state,
    save_tensors,
    seed_generators,
    set_rng_state,
)
from core.errors import InputError
from core.types import Dropped, KeptSets, Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus
from tests.checkpoints import RUN


def same(a, b) -> bool:
    """Equal in type and to the bit, all the way down; a read-only mapping may come back as a
    dict."""
    if isinstance(a, MappingProxyType):
        a = dict(a)
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(
            same(getattr(a, item.name), getattr(b, item.name)) for item in dataclasses.fields(a)
        )
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
        # Not representable in few decimal digits
        "logprobs": -rng.random(length).astype(np.float32) / 3,
        "segments": (Segment("policy", "a\n"), Segment("tool", "déjà \ud800 ☃")),
        "stop": Stop.STOP_STRING,
        "policy_version": 7,
        "seed": 2**63 - 1,
        "turns": 2,
        "tool_calls": 1,
        "kept": KeptSets(np.arange(length, dtype=np.int32), np.ones(length, np.int32)),
    }
    return Trajectory(**{**fields, **changes})


def group(ordinal: int) -> ScoredGroup:
    prompt = Prompt(
        ordinal,
        f"gsm8k/{ordinal}",
        (5, 6, 7),
        ({"role": "user", "content": "2+2?"},),
        "4",
        "openai/gsm8k",
    )
    scores = (
        Score(1.0, {"format": 0.1, "acc": 1.0}, pred="4", notes={"why": "right"}),
        Score(-0.0, status=ScoreStatus.TIMEOUT, masked=True),
    )
    return ScoredGroup(
        prompt, (trajectory(4, ordinal), trajectory(0, 9, tool_rewards=(0.5,))), scores, scores[0]
    )


PROMPTS = {ordinal: group(ordinal).prompt for ordinal in (12, 15)}


def round_trip(state: DriverState, folder) -> DriverState:
    state.save(folder)
    return DriverState.load(folder, PROMPTS.__getitem__)


def test_carried_groups_come_back_to_the_bit_and_their_prompts_are_drawn_again(tmp_path):
    carried = {12: group(12), 13: Dropped(4, 17), 15: group(15)}
    state = DriverState(3, 12, carried, {"kl_coef": 0.1 + 0.2, "keep_rate": 1 / 3})
    loaded = round_trip(state, tmp_path)
    assert same(state, loaded) and loaded.carried[12].prompt is PROMPTS[12]
    assert not same(state, dataclasses.replace(loaded, carried={**carried, 12: group(15)})), (
        "the comparison sees it"
    )


VALUES = {
    "floats": [0.1, -0.0, 1e-323, math.inf, -math.inf, math.nan, 1.7976931348623157e308],
    "ints": [0, -1, 2**63, -(10**40), True, None],
    "text": ["", "\x00", "line\u2028break", "☃"],
    "nested": {"a": [(), (1, [2, ({"b": ()},)])], "": {}, 1: "int"},
    "rng": random.Random(3).getstate(),
}


def test_values_come_back(tmp_path):
    assert same(VALUES, round_trip(DriverState(1, 0, values=VALUES), tmp_path).values)
    number = round_trip(
        DriverState(1, 0, values={"of a user's function": np.float32(0.1)}), tmp_path
    )
    assert number.values["of a user's function"] == np.float32(0.1)


def test_values_that_a_safe_load_refuses_are_refused_on_saving(tmp_path):
    """Now, and not at the resume."""
    for value in (RUN, subprocess.run, range(3)):
        with pytest.raises(InputError, match=r"driver.pt: .*cannot be stored"):
            DriverState(1, 0, values={"state": [0, value]}).save(tmp_path)


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
    seeded = []
    for seed in (2**40, 2**40, 3):
        seed_generators(seed)
        seeded.append(draw())
    assert seeded[0] == seeded[1] and all(a != b for a, b in zip(seeded[1], seeded[2], strict=True))
