"""The maze task of the lab: the answer is a path, written as the names of the rooms on it.

``recipes/lab/maze.py`` makes the questions. A ground truth such as ``ac ab bc`` has the start and
the goal first, then every pair of rooms with a passage between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores.score import Score, graded, no_answer

EXAMPLES = (
    ("abc", "ac ab bc", 1.0),
    ("ababc\n", "ac ab bc", 1.0),  # who turns around arrives too
    ("cba", "ac ab bc", 0.0),
    ("ac", "ac ab bc", 0.0),
    ("ab", "ac ab bc", 0.0),
    ("bc", "ac ab bc", 0.0),
)


def score(response: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None) -> Score:
    """Return 1 for a path from the start to the goal that crosses no wall.

    ``steps`` counts the passages of the answer, ``wrong_steps`` those of a wrong one, and ``wall``
    is 1 where it crosses a wall.
    """
    path = response.strip()
    if not path.isalnum():  # a name is a letter or a digit
        return no_answer(steps=0.0, wrong_steps=0.0, wall=0.0)
    ends, *passages = ground_truth.split()
    open_pairs = {*passages, *(pair[::-1] for pair in passages)}
    wall = any(a + b not in open_pairs for a, b in zip(path, path[1:], strict=False))
    right = path[0] + path[-1] == ends and not wall
    steps = float(len(path) - 1)
    return graded(right, path, steps=steps, wrong_steps=0.0 if right else steps, wall=float(wall))


def check_ground_truth(ground_truth: Any) -> str | None:
    if isinstance(ground_truth, str):
        words = ground_truth.split()
        if len(words) > 1 and all(len(word) == 2 for word in words):
            return None
    return f"must be start and goal, then pairs of rooms, as 'ac ab bc', got {ground_truth!r:.80}"
