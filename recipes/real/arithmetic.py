"""The arithmetic task: sums and differences in words ("What is seventeen plus forty-two?"),
answered by a number.

Held-out questions have pairs of operands that neither training nor demonstrations have, in either
order and for either operation. An answer counts in digits or in words.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from data_preprocess.schema import make_row

DATA_SOURCE = "real/arithmetic"
# Of an operand. With 60, fine-tuning on 400 answers taught the form alone: the digits of a sum
# stayed as good as drawn.
LEAST = 2
MOST = 20
# Of 171; the others are those of reinforcement learning
HELD_OUT_PAIRS = 40
DEMONSTRATION_PAIRS = 60
PROMPTS = {"test": 200, "demonstrations": 400, "train": 640}
NAMES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen
"""
ONES = tuple(NAMES.split())
TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ENDING = " Answer with the number only."
WORDING = {
    "plus": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "How much is {a} and {b} together?",
        "Anna has {a} apples and buys {b} more. How many apples does she have now?",
    ),
    "minus": (
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "How much is left when {b} is taken from {a}?",
        "A train has {a} passengers and {b} get off. How many are still on it?",
    ),
}
Pair = tuple[int, int]


def words_of(number: int) -> str:
    """Return a number from 0 to 99 in words."""
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


def accepted(number: int) -> list[str]:
    """Return the forms of a number that count: digits, and words with or without hyphens."""
    words = words_of(number)
    return list(dict.fromkeys([str(number), words, words.replace("-", " ")]))


def split_pairs() -> dict[str, list[Pair]]:
    """Return the pairs of operands of each split, the smaller number first; none is in two
    splits."""
    pairs = list(itertools.combinations(range(LEAST, MOST + 1), 2))
    random.Random("arithmetic").shuffle(pairs)
    rest = HELD_OUT_PAIRS + DEMONSTRATION_PAIRS
    return {
        "test": pairs[:HELD_OUT_PAIRS],
        "demonstrations": pairs[HELD_OUT_PAIRS:rest],
        "train": pairs[rest:],
    }


def row(pair: Pair, split: str, index: int, rng: random.Random) -> dict[str, Any]:
    """Return a row in verl's schema: the pair in either order, an operation, and a wording."""
    operation = rng.choice(list(WORDING))
    larger = max(pair)
    smaller = min(pair)
    a, b = (larger, smaller) if operation == "minus" or rng.random() < 0.5 else (smaller, larger)
    value = a + b if operation == "plus" else a - b
    prompt = rng.choice(WORDING[operation]).format(a=words_of(a), b=words_of(b)) + ENDING
    facts = {"split": split, "index": index, "operands": [a, b], "operation": operation}
    return make_row(
        DATA_SOURCE,
        [{"role": "user", "content": prompt}],
        {"target": accepted(value)},
        "math",
        **facts,
    )


def draw(pairs: Sequence[Pair], split: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield ``number`` rows with different prompts, the same on every machine; every pair has its
    turn."""
    rng = random.Random(f"arithmetic {split}")
    drawn = set()
    for pair in itertools.cycle(pairs):
        if len(drawn) == number:
            return
        line = row(pair, split, len(drawn), rng)
        prompt = line["prompt"][0]["content"]
        if prompt not in drawn:
            drawn.add(prompt)
            yield line


def rows_of() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every file. Those of demonstrations have the number in digits as
    response."""
    pairs = split_pairs()
    rows = {split: list(draw(pairs[split], split, number)) for split, number in PROMPTS.items()}
    for line in rows["demonstrations"]:
        line["response"] = line["reward_model"]["ground_truth"]["target"][0]
    return rows
