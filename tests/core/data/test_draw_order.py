"""Seeds, and the order in which examples are drawn: a function of the seed and the ordinal
alone."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.draw_order import DrawOrder, derive_seed, permutation, sampling_seed

LENGTHS = st.integers(1, 30)
SEEDS = st.integers(0, 2**63 - 1)


@given(LENGTHS, SEEDS, st.booleans())
def test_each_epoch_has_every_example_once(length, seed, shuffle):
    order = DrawOrder(length, seed, shuffle)
    for epoch in range(3):
        drawn = [order.index(epoch * length + index) for index in range(length)]
        assert sorted(drawn) == list(range(length))
        if not shuffle:
            assert drawn == list(range(length))


@given(LENGTHS, SEEDS, st.randoms(use_true_random=False))
def test_the_order_of_asking_does_not_matter(length, seed, random):
    forward = [DrawOrder(length, seed).index(ordinal) for ordinal in range(60)]
    asked = [ordinal for ordinal in range(60) for _ in range(2)]
    random.shuffle(asked)
    order = DrawOrder(length, seed)
    assert all(order.index(ordinal) == forward[ordinal] for ordinal in asked)
    assert DrawOrder(length, seed).index(59) == forward[59]  # a resumed run asks in the middle


def test_epochs_and_seeds_have_orders_of_their_own():
    starts = ((1, 0), (1, 50), (2, 0))
    orders = [[DrawOrder(50, seed).index(start + i) for i in range(50)] for seed, start in starts]
    assert all(one != other for one, other in pairwise([*orders, list(range(50)), orders[0]]))
    with pytest.raises(ValueError, match="starts at 0, got -1"):
        DrawOrder(3, 1).index(-1)


def test_orders_and_seeds_never_change():
    """Recorded: a run resumes into the order and the seeds that it began with, under any numpy."""
    order = DrawOrder(8, seed=1)
    assert [order.index(i) for i in range(8)] == [2, 7, 1, 6, 3, 0, 4, 5]
    assert permutation(6, 1, 0).tolist() == [3, 5, 0, 1, 2, 4]
    assert sampling_seed(1, 0, 0) == 2936282811276623825
    assert 0 <= sampling_seed(2**70, -(2**70), 0) < 2**63


def test_samples_have_seeds_of_their_own_that_are_no_neighbours():
    seeds = np.array(
        [
            sampling_seed(1, ordinal, sample)
            for ordinal in range(-100, 6_150)
            for sample in range(16)
        ]
    )
    gaps = np.diff(np.sort(seeds))
    # An engine that expands a seed into seed, seed + 1, ... meets none
    assert seeds.min() >= 0 and gaps.min() > 64


def test_every_argument_and_the_purpose_count():
    numbers = [
        (ordinal, index, turn)
        for ordinal in (-1, 0, 1)
        for index in (-1, 0, 1, 2)
        for turn in (0, 1)
    ]
    assert (
        len(
            {sampling_seed(1, *one) for one in numbers}
            | {sampling_seed(2, *one) for one in numbers}
        )
        == 48
    )
    assert (
        len({sampling_seed(1, 2, 3, 4), sampling_seed(12, 3, 4), derive_seed("order", 1, 2, 3, 4)})
        == 3
    )
