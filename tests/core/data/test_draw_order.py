from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.data.draw_order import Order, Place, Stage, apportion, permutation, sampling_seed

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def weighted_stages(draw):
    """Stages in which every data set gets at least one row of a block."""
    sizes = draw(SIZES)
    weights = tuple(draw(st.lists(st.floats(0.5, 2.0), min_size=len(sizes), max_size=len(sizes))))
    if min(apportion(sum(sizes), weights)) < 1:
        weights = tuple(1.0 for _ in sizes)
    return Stage(sizes, weights)


@given(SIZES, SEEDS, st.booleans())
def test_each_epoch_has_every_row_once(sizes, seed, shuffle):
    order = Order([Stage(sizes)], seed, shuffle)
    rows = {Place(0, dataset, row) for dataset, size in enumerate(sizes) for row in range(size)}
    for epoch in range(3):
        drawn = [order.place(epoch * order.length + index) for index in range(order.length)]
        assert Counter(drawn) == Counter(rows)
        if not shuffle:
            assert drawn == sorted(rows)


@given(weighted_stages(), SEEDS, st.booleans())
def test_each_block_holds_the_weights_and_no_row_comes_early(stage, seed, shuffle):
    order = Order([stage], seed, shuffle)
    shares = apportion(stage.rows, stage.weights)
    assert sum(shares) == stage.rows
    drawn = [order.place(ordinal) for ordinal in range(5 * stage.rows)]
    for start in range(0, len(drawn), stage.rows):
        datasets = Counter(place.dataset for place in drawn[start : start + stage.rows])
        assert tuple(datasets[dataset] for dataset in range(len(stage.sizes))) == shares
    for dataset, size in enumerate(stage.sizes):
        rows = [place.row for place in drawn if place.dataset == dataset]
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))


@given(weighted_stages(), st.integers(1, 30), SIZES, SEEDS, st.randoms(use_true_random=False))
def test_the_order_of_asking_does_not_matter(first, prompts, sizes, seed, random):
    stages = [Stage(first.sizes, first.weights, prompts), Stage(sizes)]
    forward = [Order(stages, seed).place(ordinal) for ordinal in range(60)]
    asked = [ordinal for ordinal in range(60) for _ in range(2)]
    random.shuffle(asked)
    order = Order(stages, seed)
    assert all(order.place(ordinal) == forward[ordinal] for ordinal in asked)
    assert Order(stages, seed).place(59) == forward[59]  # a resumed run asks in the middle


@given(st.lists(st.tuples(SIZES, st.integers(1, 20)), min_size=1, max_size=4), SEEDS)
def test_a_stage_lasts_as_long_as_it_says_and_the_last_for_ever(parts, seed):
    stages = [Stage(sizes, prompts=prompts) for sizes, prompts in parts]
    order = Order(stages, seed)
    assert order.length == sum(prompts for _, prompts in parts)
    wanted = [number for number, (_, prompts) in enumerate(parts) for _ in range(prompts)]
    assert [order.place(ordinal).stage for ordinal in range(order.length)] == wanted
    assert order.place(order.length + 1000).stage == len(stages) - 1
    first = sum(prompts for _, prompts in parts[:-1])
    drawn = {order.place(first + index) for index in range(stages[-1].rows)}
    assert len(drawn) == stages[-1].rows  # a stage begins with an epoch of its own


@settings(max_examples=25)
@given(st.integers(0, 50), SEEDS)
def test_a_permutation_has_every_index_once(size, seed):
    assert sorted(permutation(size, seed)) == list(range(size))


def test_weights_give_the_share_that_they_say():
    order = Order([Stage((70, 30), (1.0, 3.0))], seed=7)
    first = Counter(order.place(ordinal).dataset for ordinal in range(100))
    assert first == {0: 25, 1: 75}
    assert apportion(10, (1, 1, 1)) == (4, 3, 3)
    assert apportion(10, (0.26, 0.74)) == (3, 7)
    assert apportion(10, (33, 33, 34)) == (3, 3, 4)


def test_unshuffled_weights_alternate_and_keep_the_file_order():
    order = Order([Stage((4, 4), (1.0, 1.0))], seed=1, shuffle=False)
    assert [order.place(ordinal)[1:] for ordinal in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_epochs_seeds_and_stages_have_orders_of_their_own():
    orders = [
        [Order([Stage((50,))], seed).place(start + i).row for i in range(50)]
        for seed, start in ((1, 0), (1, 50), (2, 0))
    ]
    later = Order([Stage((50,), prompts=50), Stage((50,))], 1)
    orders.append([later.place(50 + i).row for i in range(50)])
    assert all(one != other for one, other in pairwise([*orders, list(range(50))]))
    assert orders[0] != orders[2] and orders[0] != orders[3]


def test_weighted_epochs_have_orders_of_their_own():
    order = Order([Stage((40, 40), (1.0, 3.0))], seed=1)
    places = [order.place(ordinal) for ordinal in range(320)]
    walks = [[place.row for place in places if place.dataset == 1][start : start + 40] for start in range(0, 240, 40)]
    assert len({tuple(walk) for walk in walks}) == 6
    blocks = [tuple(place.dataset for place in places[start : start + 80]) for start in range(0, 320, 80)]
    assert len(set(blocks)) == 4


def test_the_order_is_uniform():
    """Each row is equally often first: chi-square of 2,000 seeds over 5 rows, 4 degrees of freedom."""
    counts = np.bincount([permutation(5, seed)[0] for seed in range(2000)])
    assert ((counts - 400) ** 2 / 400).sum() < 18.5  # p = 0.001


def test_the_order_never_changes():
    """Recorded: a run resumes into the order that it began with, under any numpy."""
    order = Order([Stage((5, 3))], seed=1)
    assert [order.place(i)[1:] for i in range(8)] == [(0, 2), (1, 2), (0, 1), (1, 1), (0, 3), (0, 0), (0, 4), (1, 0)]
    assert permutation(6, 1, 0).tolist() == [3, 5, 0, 1, 2, 4]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "at least one stage"),
        ([Stage(())], "at least one row"),
        ([Stage((3, 0))], "at least one row"),
        ([Stage((3, 3), (1.0,))], "1 weights for 2"),
        ([Stage((3, 3), (1.0, 0.0))], "positive"),
        ([Stage((3, 3), (1.0, float("nan")))], "positive"),
        ([Stage((3, 3), (1.0, 0.01))], "less than one of 6 rows"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        Order(stages, 1)


def test_a_negative_ordinal_is_refused():
    with pytest.raises(ValueError, match="starts at 0, got -1"):
        Order([Stage((3,))], 1).place(-1)


def test_every_sample_and_turn_has_a_seed_of_its_own():
    numbers = [(ordinal, index, turn) for ordinal in (-1, 0, 1) for index in (-1, 0, 1, 2) for turn in (0, 1)]
    assert len({sampling_seed(1, *one) for one in numbers} | {sampling_seed(2, *one) for one in numbers}) == 48
