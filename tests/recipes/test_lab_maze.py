"""The maze of the lab: its drawing, its score, its splits, and what a guesser reaches."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from recipes.lab import maze
from recipes.lab.maze import NAMES, RECIPE, Maze
from reward_scores import SCORERS
from reward_scores.maze import check_ground_truth, score

# a┌b┐##    from a to i; the loop gives two shortest paths, e leads nowhere
# d├e┘f╷ ...
SMALL = Maze(
    3,
    {0: [1, 3], 1: [0, 4], 3: [0, 4, 6], 4: [1, 3], 6: [3, 7], 7: [6, 8], 8: [7, 5], 5: [8]},
    (0, 3, 6, 7, 8),
)


def test_the_drawing_and_the_truth_have_the_passages_and_the_rock():
    assert SMALL.prompt == "a┌b┐##\nd├e┘f╷\ng└h─i┘\n=ai="
    assert SMALL.truth == "ai ab ad be de dg fi gh hi"


@pytest.mark.parametrize(
    ("answer", "right", "wall"),
    [
        ("adghi", 1, 0),
        ("abedghi", 1, 0),  # the other way
        ("adedghi\n", 1, 0),  # turns around in a room
        ("adghihi", 1, 0),  # passes the goal and comes back
        ("adgh", 0, 0),  # stops before the goal
        ("adghif", 0, 0),  # goes past it
        ("dghi", 0, 0),  # starts elsewhere
        ("adehi", 0, 1),  # through the wall between e and h
        ("ai", 0, 1),
        ("aadghi", 0, 1),  # a room has no passage to itself
        ("adg hi", 0, 0),  # is no path
        ("", 0, 0),
    ],
)
def test_a_path_is_right_if_it_joins_the_ends_and_crosses_no_wall(answer, right, wall):
    graded = score(answer, SMALL.truth)
    assert (graded.value, graded.parts["wall"]) == (right, wall)
    assert SCORERS[maze.DATA_SOURCE](answer, SMALL.truth) == graded


def test_steps_of_wrong_answers_are_counted_apart():
    right, wrong = score("adghi", SMALL.truth), score("adedg", SMALL.truth)
    assert (right.parts["steps"], right.parts["wrong_steps"]) == (4.0, 0.0)
    assert (wrong.parts["steps"], wrong.parts["wrong_steps"]) == (4.0, 4.0)


def test_a_ground_truth_needs_ends_and_passages():
    assert check_ground_truth(SMALL.truth) is None
    assert check_ground_truth("ai") and check_ground_truth("ai abd") and check_ground_truth(3)


@pytest.fixture(scope="module")
def splits():
    return dataclasses.replace(RECIPE, test_mazes=100).splits(train=300)


def test_splits_share_no_maze_and_neither_does_the_warm_start(monkeypatch):
    """With a pool of 60 mazes, so that draws without the exclusion would certainly meet."""
    pool = list(maze.MazeRecipe(size=4, kept=0.5).mazes(60, "pool"))
    monkeypatch.setattr(maze, "draw", lambda rng, *_: rng.choice(pool))
    small = maze.MazeRecipe(examples=40, test_mazes=20)
    drawn = small.splits(train=40)
    prompts = {name: {each.prompt for each in mazes} for name, mazes in drawn.items()}
    assert len(prompts["train"]) == 40 and len(prompts["test"]) == 20
    assert not prompts["train"] & prompts["test"]
    task, mixture = small.episodes(small.new_tokenizer())
    assert len(task) == 40 and not prompts["test"] & {prompt for prompt, _ in task + mixture}


def test_mazes_fit_into_the_preset_and_several_answers_are_right(splits):
    tokenizer = RECIPE.new_tokenizer()
    rng = random.Random(1)
    lengths = set()
    for each in splits["test"]:
        assert len(tokenizer.encode(each.prompt)) <= 96 and len(each.path) < maze.LIMIT
        assert tokenizer.decode(tokenizer.encode(each.prompt)) == each.prompt
        path = "".join(NAMES[room] for room in each.path)
        assert score(path, each.truth).value == 1
        walks = {maze.walk(each, rng, turn=1.0) for _ in range(20)}
        right = {len(walk) for walk in walks if score(walk, each.truth).value}
        assert all(score(walk, each.truth).parts["wall"] == 0 for walk in walks)
        lengths.add(len(right) > 1)
    assert lengths == {True, False}


def chance(each: Maze, way: tuple[int, ...]) -> float:
    """Return how likely a walk over rooms not yet visited, which does not see the walls, goes on
    from the end of ``way`` to the goal without crossing one."""
    if way[-1] == each.path[-1]:
        return 1.0
    onward = [room for room in maze.neighbours(way[-1], each.size) if room not in way]
    through = [room for room in onward if room in each.passages[way[-1]]]
    return sum(chance(each, (*way, room)) for room in through) / max(1, len(onward))


def test_who_does_not_see_the_walls_has_a_pass_at_64_below_one_percent(splits):
    pass_at_64 = [1 - (1 - chance(each, each.path[:1])) ** 64 for each in splits["train"]]
    assert statistics.fmean(pass_at_64) < 0.01
    assert chance(SMALL, (0,)) == pytest.approx(1 / 8 + 1 / 12)  # over d and g, over b and e


def test_a_walk_without_a_plan_arrives_in_a_fifth_to_two_fifths_of_the_mazes(splits):
    rng = random.Random(1)
    walks = [
        (maze.walk(each, rng, RECIPE.turn), each) for each in splits["train"] for _ in range(9)
    ]
    assert 0.2 < statistics.fmean(score(walk, each.truth).value for walk, each in walks) < 0.4
