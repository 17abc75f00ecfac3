"""The sigmoid through a run's validations: known curves come back, with intervals that hold what they promise."""

import numpy as np
import pytest

from core.errors import InputError
from results.reporting.scaling import FEWEST, fit_sigmoid, sigmoid

STEPS = np.arange(5, 85, 5.0)


def curve(start=0.1, asymptote=0.8, midpoint=20.0, exponent=2.0, costs=STEPS):
    return [start + (asymptote - start) / (1 + (midpoint / c) ** exponent) for c in costs]


def test_the_sigmoid_by_hand():
    """Half of the rise at the midpoint; at twice the midpoint with B = 2, 1 / (1 + 1/4) of it."""
    assert sigmoid(20.0, 0.1, 0.9, 20.0, 3.0) == pytest.approx(0.5)
    assert sigmoid(40.0, 0.0, 1.0, 20.0, 2.0) == pytest.approx(0.8)
    assert sigmoid(1e9, 0.1, 0.7, 20.0, 2.0) == pytest.approx(0.7)


@pytest.mark.parametrize("truth", [(0.8, 20.0, 2.0), (0.97, 6.0, 1.3), (0.6, 35.0, 4.0)])
@pytest.mark.parametrize("known", [True, False])
def test_a_curve_without_noise_comes_back(truth, known):
    fit = fit_sigmoid(STEPS, curve(0.1, *truth), 0.1 if known else None, 20_000)
    tolerance = 0.02 if known else 0.1
    for found, true in zip((fit.asymptote, fit.midpoint, fit.exponent), truth, strict=True):
        assert found.value == pytest.approx(true, rel=4 * tolerance)
        assert found.low <= true * (1 + tolerance) and found.high >= true * (1 - tolerance)
    assert fit.at(200).value == pytest.approx(curve(0.1, *truth, costs=[200])[0], abs=0.02)
    assert fit.weight.sum() == pytest.approx(1)


def test_units_of_the_cost_move_the_midpoint_alone():
    steps, tokens = (fit_sigmoid(scale * STEPS, curve(), 0.1, 500) for scale in (1, 16_000))
    assert tokens.midpoint.value == pytest.approx(16_000 * steps.midpoint.value, rel=1e-6)
    assert tokens.asymptote == steps.asymptote
    assert tokens.exponent.value == pytest.approx(steps.exponent.value, rel=1e-6)
    assert tokens.at(16_000 * 200).value == pytest.approx(steps.at(200).value, abs=1e-6)


def test_more_questions_and_more_points_say_more():
    def width(found):
        return found.high - found.low

    few, many = (fit_sigmoid(STEPS[:6], curve()[:6], 0.1, n).at(80) for n in (50, 5000))
    long = fit_sigmoid(STEPS, curve(), 0.1, 50).at(80)
    assert width(few) > width(many) and width(few) > width(long)


def test_the_interval_of_a_forecast_holds_about_nine_in_ten():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(40):
        truth = (rng.uniform(0.5, 1.0), rng.uniform(4, 30), rng.uniform(1, 4))
        values = rng.binomial(300, curve(0.1, *truth)) / 300
        try:
            expected = fit_sigmoid(STEPS[:8], values[:8], 0.1, 300).at(STEPS[-1])
        except InputError:  # it rises later
            inside += 0.9
            continue
        inside += expected.low <= values[-1] <= expected.high
    assert 32 <= inside <= 40


@pytest.mark.parametrize(
    ("values", "start", "message"),
    [
        (curve()[: FEWEST - 1], 0.1, "3 validations after the start are too few for a sigmoid: 4 are needed"),
        ([], None, "0 validations after the start are too few"),
        ([0.97, 0.98, 0.98, 0.99], 0.96, "the first validation has 96.0 % already"),
        ([0.99, 0.99, 0.99, 1.0], None, "the first validation has 99.0 % already"),
        ([0.31, 0.3, 0.32, 0.31], 0.3, "did not rise by more than its questions' noise: 30.0 % at first, 32.0 %"),
        ([0.3, 0.2, 0.1, 0.05], 0.4, "did not rise"),
        ([0.0] * 5, 0.0, "did not rise"),
        ([0.1, 0.5, 1.5, 2.0], 0.0, "0.1 to 2 is no accuracy between 0 and 1"),
        ([0.1, 0.5, float("nan"), 0.7], 0.0, "no accuracy"),
    ],
)
def test_what_is_no_rise_is_refused_with_the_reason(values, start, message):
    with pytest.raises(InputError, match=message):
        fit_sigmoid(STEPS[: len(values)], values, start, 500)
