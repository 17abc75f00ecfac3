"""Countdown in small: reach a target from three numbers with plus and minus, each number used once.

A prompt such as ``358=x=`` gives the numbers and, as a letter, the target (:data:`TOTALS` numbers the letters). An
answer may try signs before it answers: ``-5p+8x;`` is one attempt, each sign and number followed by the running
total as a letter, so that a total is one token and "the target is reached" is an equality of tokens. The answer stands
in ``<answer>3-5+8</answer>`` and is graded by ``reward_scores/countdown.py``, which looks at nothing else. Several
sign patterns may be right, attempts cost tokens, and an answer that is cut off earns nothing.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from core.files.durable_files import replacing

NUMBERS = range(1, 10)
COUNT = 3
TOTALS = string.ascii_letters[:45]  # one a total, from 1-9-9 = -17 to 9+9+9 = 27
LOWEST = -17
ATTEMPT_END = ";"
TAGS = ("<answer>", "</answer>")
ALPHABET = (*string.digits, *TOTALS, "+", "-", "=", ATTEMPT_END)
DATA_SOURCE = "countdown"
PROMPT_CHARS = COUNT + 3
ATTEMPT_CHARS = 3 * (COUNT - 1) + 1
ANSWER_TOKENS = 2 * COUNT + 2  # tags, numbers, signs, end of sequence
PATTERNS = tuple("".join(signs) for signs in itertools.product("+-", repeat=COUNT - 1))


@dataclass(frozen=True)
class Countdown:
    """A question: the numbers in their order, and the target."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{''.join(map(str, self.numbers))}={letter(self.target)}="

    @property
    def solutions(self) -> list[str]:
        """The sign patterns that reach the target."""
        return [signs for signs in PATTERNS if totals(self.numbers, signs)[-1] == self.target]

    def attempt(self, signs: str) -> str:
        """Return the signs with their numbers and running totals: ``-5p+8x;``."""
        steps = zip(signs, self.numbers[1:], totals(self.numbers, signs), strict=True)
        return "".join(f"{sign}{number}{letter(total)}" for sign, number, total in steps) + ATTEMPT_END

    def answer(self, signs: str) -> str:
        rest = "".join(f"{sign}{number}" for sign, number in zip(signs, self.numbers[1:], strict=True))
        return f"{TAGS[0]}{self.numbers[0]}{rest}{TAGS[1]}"


def letter(total: int) -> str:
    return TOTALS[total - LOWEST]


def totals(numbers: tuple[int, ...], signs: str) -> list[int]:
    """Return the running total after each sign."""
    signed = [number if sign == "+" else -number for sign, number in zip(signs, numbers[1:], strict=True)]
    return list(itertools.accumulate(signed, initial=numbers[0]))[1:]


def questions(numbers: tuple[int, ...]) -> list[Countdown]:
    """Return every question about the numbers in this order: the totals from 0 up that some signs reach."""
    reached = {totals(numbers, signs)[-1] for signs in PATTERNS}
    return [Countdown(numbers, target) for target in sorted(reached) if target >= 0]


def splits(test: int, seed: int) -> dict[str, list[Countdown]]:
    """Return questions about ``test`` held-out choices of ordered numbers, and those about all others to train on."""
    rng = random.Random(f"countdown {seed}")
    every = list(itertools.product(NUMBERS, repeat=COUNT))
    rng.shuffle(every)
    parts = {"train": every[test:], "test": every[:test]}
    found = {name: [q for numbers in part for q in questions(numbers)] for name, part in parts.items()}
    for part in found.values():
        rng.shuffle(part)
    return found


def row(question: Countdown, split: str, index: int) -> dict:
    """Return the question as a row in verl's schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": question.prompt,
        "ability": "search",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": question.target, "numbers": list(question.numbers)},
        },
        "extra_info": {"split": split, "index": index, "solutions": len(question.solutions)},
    }


def write_parquet(rows: Iterable[Countdown], split: str, path: Path) -> None:
    """Write the rows to ``path``; a killed process leaves the old file or the new one, never half of one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([row(q, split, index) for index, q in enumerate(rows)])
    with replacing(path) as partial:
        pq.write_table(table, partial)
