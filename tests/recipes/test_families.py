"""Tasks with room: questions have one answer, difficulty is a number, and a guess is paid but never right."""

from __future__ import annotations

import random
import re
import statistics
from dataclasses import replace

import pytest

from recipes.lab import families, tallies, trails, warm_start
from recipes.lab.families import ENDLESS, mixed
from recipes.lab.family_score import WELL_FORMED, compute_score

FAMILIES = [trails.FAMILY, tallies.FAMILY]


def followed(prompt: str) -> str:
    """Answer a trail by its prompt alone."""
    next_of, at = dict(re.findall(r"(\w)>(.)", prompt)), prompt[-2]
    while next_of[at] != ".":
        at = next_of[at]
    return at


def added(prompt: str) -> str:
    """Answer a tally by its prompt alone."""
    before = prompt.partition(".")[0]
    return str(sum(int(number) for number in re.findall(r"[+-]?\d", before)) % 10)


@pytest.mark.parametrize(("family", "answer"), zip(FAMILIES, (followed, added), strict=True))
def test_every_right_answer_follows_from_the_prompt(family, answer):
    for one in family.questions(200, "test of the tests"):
        assert answer(one.prompt) == one.gold
        for text in (one.short, one.long):
            assert compute_score("", text, one.gold)["acc"] == 1
        rng = random.Random(1)
        assert compute_score("", one.endless * 9, one.gold) == {"score": 0, "acc": 0, "well_formed": 0}
        assert compute_score("", one.guess(rng), one.gold)["score"] in (WELL_FORMED, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_have_a_tail_and_grow_with_difficulty(family):
    def lengths(difficulty: int) -> list[int]:
        rng = random.Random(2)
        return sorted(len(family.draw(rng, difficulty).long) for _ in range(500))

    one = lengths(family.recipe.difficulty)
    assert one[-1] > 2 * statistics.median(one)
    assert statistics.fmean(one) > 1.2 * statistics.fmean(lengths(family.recipe.difficulty // 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_questions_are_not_trained_on(family):
    small = {"examples": 500}
    splits = family.splits()
    tests = {one.prompt for one in splits["test"]}
    assert len(tests) == families.TEST and not tests & {one.prompt for one in splits["train"]}
    warm = family.questions(small["examples"], "warm start 1", tests)
    assert not tests & {one.prompt for one in warm}
    assert [one.prompt for one in family.splits()["test"]] == [one.prompt for one in splits["test"]]


def test_an_answer_without_an_end_teaches_no_totals():
    """Written 200 tokens long, totals in it would be most of those that carry loss, and wrong ones."""
    for one in tallies.FAMILY.questions(50, "endless"):
        assert not re.search(r"\d", one.endless)


def test_shares_of_the_mixture_are_the_recipes():
    rng, recipe = (
        random.Random(3),
        replace(trails.RECIPE, short_share=0.3, long_share=0.2, hasty_share=0, endless_share=0.1),
    )
    drawn = list(trails.FAMILY.questions(1500, "shares"))
    texts = [(one, mixed(one, recipe, rng)) for one in drawn]
    assert sum(text == one.short for one, text in texts) / 1500 == pytest.approx(0.3, abs=0.04)
    assert sum(text == ENDLESS for _, text in texts) / 1500 == pytest.approx(0.1, abs=0.03)
    assert sum(len(text) == 2 for _, text in texts) / 1500 == pytest.approx(0.4, abs=0.04)


def test_a_base_model_that_fails_is_tried_with_a_seed_of_no_other(tmp_path, monkeypatch):
    tried = []

    def train(recipe, tokenizer, task, mixture):
        tried.append(recipe.seed)
        raise warm_start.BaseModelError("it never learns")

    monkeypatch.setattr(warm_start, "train", train)
    for seed in range(1, families.BASES + 1):
        with pytest.raises(warm_start.BaseModelError):
            families.base_models(tmp_path, trails.RECIPE, None, lambda recipe, tokenizer: ([], []), [seed])
    assert len(tried) == len(set(tried)) == families.BASES * warm_start.SEEDS


def test_a_guess_is_paid_and_not_right():
    assert compute_score("", "#a", "b") == {"score": WELL_FORMED, "acc": 0, "well_formed": 1}
    assert compute_score("", "abc.#b", "b") == {"score": 1, "acc": 1, "well_formed": 1}
    assert compute_score("", "b", "b") == {"score": 0, "acc": 0, "well_formed": 0}
    assert compute_score("", "#bc", "b")["score"] == 0
    assert compute_score("", "#a", "b", well_formed=0.05)["score"] == 0.05
