"""Trails: follow edges from a letter to where they end, past other trails that lead elsewhere.

    b>q x>m q>k k>. ... =b=    ->    bqk.#k                    short: the letters
                               ->    bb>q,qq>k,kk>.,#k         long: each letter with its edge

    python -m recipes.lab.trails

A question of difficulty d has d letters and as many edges, one token each; ``k>.`` is the end of a trail. The trail in
question has two edges or more: most have few, and some nearly all letters. The others are trails that distract.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

from recipes.lab.families import Family, FamilyRecipe, Question

LETTERS = string.ascii_lowercase[:12]
MEAN_HOPS = 0.3  # beyond the first two, as a share of the letters: a long tail
WORDS = tuple(f"{a}>{b}" for a in LETTERS for b in (*LETTERS, ".") if a != b)


def draw(rng: random.Random, difficulty: int) -> Question:
    letters = rng.sample(LETTERS, difficulty)
    hops = 2 + min(int(rng.expovariate(1 / (MEAN_HOPS * difficulty))), difficulty - 3)
    path, rest = letters[: hops + 1], letters[hops + 1 :]
    walked = edges(path)
    shown = list(walked)
    while rest:
        cut = rng.randint(2, 5)
        shown += edges(rest[:cut])
        rest = rest[cut:]
    rng.shuffle(shown)

    def hasty(rng: random.Random) -> str:
        stop = rng.randint(1, len(path) - 1)
        return f"{''.join(path[:stop])}.#{path[stop - 1]}"

    return Question(
        prompt=f"{''.join(shown)}={path[0]}=",
        gold=path[-1],
        short=f"{''.join(path)}.#{path[-1]}",
        long=f"{''.join(f'{edge[0]}{edge},' for edge in walked)}#{path[-1]}",
        hasty=hasty,
        guess=lambda rng: f"#{rng.choice(letters)}",
        endless=f"{walked[0][0]}{walked[0]},",
        steps=hops,
    )


def edges(path: list[str]) -> list[str]:
    """Return the trail's edges, its end among them."""
    return [f"{a}>{b}" for a, b in zip(path, [*path[1:], "."], strict=True)]


RECIPE = FamilyRecipe(difficulty=12)
FAMILY = Family("trails", (*LETTERS, *"=.,#"), WORDS, draw, RECIPE, Path(__file__))

if __name__ == "__main__":
    FAMILY.command()
