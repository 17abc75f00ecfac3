"""Tallies: keep a running total of digits to add and to take away, until a stop, and leave out what stands behind it.

    4:+3_-9_.0_+2_=    ->    +37-98.#8                short: each operation with the total after it, modulo 10
                       ->    +37-98._______#8         long: it dithers before it ends, the longer the more it did

    python -m recipes.lab.tallies

A question of difficulty d has d places for operations. The stop is behind the first two or further on: most are early,
and some at the end. What is behind it distracts. Right answers have between 10 and about 190 tokens, with a long tail.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

from recipes.lab.families import Family, FamilyRecipe, Question

DITHER = 14  # signs an operation
MEAN_STEPS = 0.3  # beyond the first two, as a share of the places: a long tail


def draw(rng: random.Random, difficulty: int) -> Question:
    first = rng.randrange(10)
    stop = 2 + min(int(rng.expovariate(1 / (MEAN_STEPS * difficulty))), difficulty - 3)
    signs = [rng.choice("+-") if place != stop else "." for place in range(difficulty)]
    digits = [rng.randint(1, 3) if place != stop else 0 for place in range(difficulty)]
    totals, done = [first], []
    for sign, digit in zip(signs[:stop], digits, strict=False):
        totals.append((totals[-1] + (digit if sign == "+" else -digit)) % 10)
        done.append(f"{sign}{digit}{totals[-1]}")

    def hasty(rng: random.Random) -> str:
        last = rng.randrange(stop)
        return f"{''.join(done[:last])}.#{totals[last]}"

    return Question(
        prompt=f"{first}:{''.join(f'{sign}{digit}_' for sign, digit in zip(signs, digits, strict=True))}=",
        gold=str(totals[-1]),
        short=f"{''.join(done)}.#{totals[-1]}",
        long=f"{''.join(done)}.{DITHER * stop * '_'}#{totals[-1]}",
        hasty=hasty,
        guess=lambda rng: f"#{rng.randrange(10)}",
        endless="_",
        steps=stop,
    )


RECIPE = FamilyRecipe(
    difficulty=12,
    pool=8,
    task_steps=800,
    hold_steps=760,
    loss_bound=0.06,
    short_share=0.05,
    long_share=0.2,
    endless_chars=200,
)
FAMILY = Family("tallies", (*string.digits, *"+-_:=.#"), (), draw, RECIPE, Path(__file__))

if __name__ == "__main__":
    FAMILY.command()
