"""Power, quantiles and letters against published tables, hand-worked cases and simulation."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from results.reporting.comparison import letters, question_p, welch_p
from results.reporting.power import (
    _chi_square_quantile,
    careful_deviation,
    detectable_by_question,
    detectable_over_seeds,
    detectable_shift,
    seeds_needed,
    t_test_power,
)


def answers_that_differ(up: int, down: int, n: int = 200) -> tuple[dict[str, float], dict[str, float]]:
    a = {str(i): float(i < down) for i in range(n)}
    return a, {str(i): float(down <= i < down + up) for i in range(n)}


# --- power ---


@pytest.mark.parametrize(("n", "effect", "power"), [(64, 0.5, 0.8015), (26, 0.8, 0.8075), (17, 1.0, 0.8070)])
def test_power_of_two_groups_as_tables_have_it(n, effect, power):
    """Cohen 1988, table 2.4.1, to the digits that G*Power gives."""
    assert t_test_power(effect * (n / 2) ** 0.5, 2 * n - 2) == pytest.approx(power, abs=2e-4)


def test_power_without_a_difference_is_the_level():
    for df in (1, 2, 4, 30, 1000):
        assert t_test_power(0.0, df) == pytest.approx(0.05, abs=1e-5)
    assert detectable_shift(5000) == pytest.approx(1.95996 + 0.84162, abs=2e-3)


@pytest.mark.parametrize(
    ("probability", "df", "quantile"), [(0.95, 1, 3.8415), (0.2, 4, 1.6488), (0.2, 1, 0.0642), (0.95, 100, 124.342)]
)
def test_quantiles_of_chi_square_as_tables_have_them(probability, df, quantile):
    assert _chi_square_quantile(probability, df) == pytest.approx(quantile, abs=1e-3)


def test_seeds_grow_with_the_spread_and_shrink_with_the_difference():
    assert seeds_needed(0.01, 0.01) == 18  # one more than Student's test with equal variances needs
    assert seeds_needed(0.01, 0.02) > seeds_needed(0.01, 0.01) > seeds_needed(0.02, 0.01) >= 2
    assert seeds_needed(0.0, 0.01) is None and seeds_needed(1e-5, 0.01) is None and seeds_needed(0.1, 0.0) == 2
    assert seeds_needed(0.001, 0.0079) == 981 and seeds_needed(0.001, 0.01) is None


def test_a_careful_deviation_is_larger_than_the_samples_and_approaches_it():
    few, many = [0.59, 0.60, 0.61], [0.59, 0.61] * 200
    assert careful_deviation(few, few) == pytest.approx(0.01 * (4 / 1.6488) ** 0.5, rel=1e-4)
    assert 1.0 < careful_deviation(many, many) / 0.01 < 1.05
    assert careful_deviation([0.6], [0.7]) is None and careful_deviation([0.6, 0.6], [0.7]) == 0.0


def test_what_is_detectable():
    assert detectable_over_seeds([0.6], [0.6, 0.7]) is None and detectable_over_seeds([0.6, 0.6], [0.6, 0.6]) is None
    wide, narrow = ([0.60 - spread, 0.60, 0.60 + spread] for spread in (0.02, 0.01))
    assert detectable_over_seeds(wide, wide) == pytest.approx(2 * detectable_over_seeds(narrow, narrow))
    assert detectable_by_question([0.0] * 500) == pytest.approx(6 / 500) and detectable_by_question([0.0] * 5) is None
    mixed = [1.0] * 20 + [-1.0] * 20 + [0.0] * 460
    by_t = detectable_shift(499) * statistics.stdev(mixed) / 500**0.5
    assert detectable_by_question(mixed) == pytest.approx(by_t + 2 / 500)


# --- p ---


@pytest.mark.parametrize(
    ("up", "down", "p"), [(4, 0, 0.125), (5, 0, 0.0625), (6, 0, 0.03125), (5, 5, 1.0), (15, 6, 0.0783539), (0, 0, 1.0)]
)
def test_the_exact_test_of_questions(up, down, p):
    assert question_p(*answers_that_differ(up, down)) == pytest.approx(p, abs=1e-6)
    assert question_p(*answers_that_differ(down, up)) == pytest.approx(p, abs=1e-6)


def test_questions_with_several_answers_are_tested_by_the_signs_of_their_differences():
    a = dict.fromkeys("abcdef", 0.5)
    assert question_p(a, {**a, "a": 1.0, "b": 0.75, "c": 1.0}) == pytest.approx(2 / 8)
    assert question_p(a, {**a, "a": 1.0, "b": 0.25}) == pytest.approx(1.0)
    many = {str(i): 0.5 for i in range(100)}
    better = {uid: 0.75 if int(uid) < 40 else 0.5 for uid in many}
    assert question_p(many, better) < 1e-6


def test_one_seed_and_equal_seeds_have_no_p_over_seeds():
    assert welch_p([0.5], [0.5, 0.6]) is None and welch_p([0.5, 0.5], [0.6, 0.6]) is None
    assert welch_p([0.50, 0.51, 0.52], [0.60, 0.61, 0.62]) < 0.001


# --- letters ---


def test_letters_by_hand():
    assert letters([], ["x", "y"]) == {"x": "a", "y": "a"}
    assert letters([("x", "z")], ["x", "y", "z"]) == {"x": "a", "y": "ab", "z": "b"}


def test_names_share_a_letter_exactly_where_they_do_not_differ():
    draw = random.Random(1)
    for _ in range(200):
        names = [str(i) for i in range(draw.randint(2, 9))]
        pairs = [pair for pair in itertools.combinations(names, 2) if draw.random() < draw.choice([0.1, 0.5, 0.9])]
        given = letters(pairs, names)
        for x, y in itertools.combinations(names, 2):
            assert bool(set(given[x]) & set(given[y])) == ((x, y) not in pairs)
