"""The figures task: four answers that are equally frequent, held-out figures, pictures of a token a
cell."""

from __future__ import annotations

from collections import Counter, defaultdict

from core.vision.pictures import read_picture
from recipes.lab import figures
from recipes.lab.figures import Figure
from tests.pictures import picture_format


def test_whoever_does_not_look_is_right_in_one_of_four():
    for drawn in figures.RECIPE.splits().values():
        by_kind = defaultdict(Counter)
        for one in drawn:
            by_kind[one.question[0]][one.answer] += 1
        for counts in by_kind.values():
            assert len(counts) == 4 and max(counts.values()) < 0.35 * counts.total()


def test_no_arrangement_of_the_test_is_trained_on():
    found = {
        split: {one.cells for one in drawn} for split, drawn in figures.RECIPE.splits().items()
    }
    assert not found["train"] & found["test"] and len(found["test"]) > 50
    assert not any(map(figures.is_held_out, found["train"]))


def test_a_picture_follows_from_its_seed_and_is_a_token_a_cell():
    one = Figure("rgby", "m", 3)
    assert one.drawn() == one.drawn() != Figure("rgby", "m", 4).drawn()
    assert (
        read_picture(one.drawn(), picture_format(), decode=True).tokens
        == figures.ROWS * figures.COLUMNS
    )
