"""Learning-rate multipliers."""

import math
from types import SimpleNamespace

import pytest

from core.learner.step_settings import multiplier, warmup_steps


def config(**fields):
    defaults = {
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.0,
        "lr_scheduler_type": "constant",
    }
    return SimpleNamespace(**{**defaults, "min_lr_ratio": None, **fields})


def test_the_first_step_moves_the_weights_and_the_warm_up_ends_on_time():
    warm = config(lr_warmup_steps=4)
    assert [multiplier(warm, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert multiplier(config(), 0, 100) == 1
    assert warmup_steps(config(lr_warmup_steps_ratio=0.285), 100) == 28
    assert warmup_steps(config(lr_warmup_steps_ratio=0.5, lr_warmup_steps=0), 100) == 0


def test_cosine_by_hand():
    """Two steps of warm-up in ten, down to 0.2: half way at index 6, and the last step is above the
    minimum."""
    cos = config(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.2)
    values = [multiplier(cos, step, 10) for step in range(10)]
    assert values[:3] == [0.5, 1, 1] and values[1:] == sorted(values[1:], reverse=True)
    assert values[6] == pytest.approx(0.6)
    assert values[9] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    for total in (1, 2, 10):  # without warm-up it begins at 1, and no step trains at 0
        values = [
            multiplier(config(lr_scheduler_type="cosine"), step, total) for step in range(total)
        ]
        assert values[0] == 1 and min(values) > 0
