"""Learning-rate multipliers."""

import math
from types import SimpleNamespace

import pytest

from core.learner.step_settings import constant, cosine, multiplier, warmup_steps


def config(**fields):
    defaults = {
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.0,
        "lr_scheduler_type": "constant",
        "min_lr_ratio": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


def test_the_first_step_moves_the_weights_and_the_warm_up_ends_on_time():
    warm = config(lr_warmup_steps=4)
    assert [multiplier(warm, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert multiplier(config(), 0, 100) == 1


def test_cosine_by_hand():
    """Two steps of warm-up in ten, down to 0.2: half way at index 6, and the last step is above the minimum."""
    cos = config(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.2)
    values = [multiplier(cos, step, 10) for step in range(10)]
    assert values[:2] == [0.5, 1]
    assert values[6] == pytest.approx(0.6)
    assert values[9] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert values[1:] == sorted(values[1:], reverse=True)
    assert values[2] == 1


@pytest.mark.parametrize("total", [1, 2, 10])
def test_no_step_of_a_cosine_trains_at_zero(total):
    values = [multiplier(config(lr_scheduler_type="cosine"), step, total) for step in range(total)]
    assert values[0] == 1 and min(values) > 0


def test_warm_up_by_ratio_or_by_count():
    assert warmup_steps(config(lr_warmup_steps_ratio=0.285), 100) == 28
    assert warmup_steps(config(lr_warmup_steps_ratio=0.5, lr_warmup_steps=0), 100) == 0


def test_without_warm_up_every_schedule_starts_at_one():
    assert constant(0, 0) == cosine(0, 0, 10) == 1
