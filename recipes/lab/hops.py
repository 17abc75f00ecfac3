"""The hops task: follow a cycle, given as shuffled edges, for a few steps.

A prompt such as ``fk mb cf bm ... =c3=`` lists the eight edges of one cycle over eight random
letters and asks which letter is three hops from ``c``. Two kinds of answer earn the reward when the
letter after ``#`` is right: the *chain* writes the path first (``cfkp#p``), the *direct* answer
writes only ``#p``. Following one edge is a lookup, which a tiny transformer learns; following
several inside one forward pass is out of its reach. So a policy that writes the path can be right
every time, and one that does not can only guess.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from core.files import replacing

LETTERS = string.ascii_lowercase
CYCLE = 8
HOPS = (2, 3, 4, 5)
DATA_SOURCE = "lab/hops"
PROMPT_CHARS = CYCLE * 3 + 4  # "ab " eight times, then "=a3="


@dataclass(frozen=True)
class Hops:
    """A question. ``cycle`` holds the letters in walking order, ``order`` the edges as the prompt
    lists them."""

    cycle: str
    order: tuple[int, ...]
    hops: int

    @property
    def start(self) -> str:
        return self.cycle[0]

    @property
    def path(self) -> str:
        """The letters visited, start included: ``hops + 1`` of them."""
        return self.cycle[: self.hops + 1]

    @property
    def answer(self) -> str:
        return self.cycle[self.hops]

    @property
    def prompt(self) -> str:
        edges = (self.cycle[at] + self.cycle[(at + 1) % CYCLE] for at in self.order)
        return f"{' '.join(edges)} ={self.start}{self.hops}="

    @property
    def chain(self) -> str:
        """The answer that shows its work."""
        return f"{self.path}#{self.answer}"

    @property
    def key(self) -> str:
        """The cycle, whatever letter it starts from: questions about one cycle never fall on both
        sides of a split."""
        least = self.cycle.index(min(self.cycle))
        return self.cycle[least:] + self.cycle[:least]


def direct(letter: str) -> str:
    """Return the answer that shows no work."""
    return f"#{letter}"


def draw(rng: random.Random) -> Hops:
    cycle = "".join(rng.sample(LETTERS, CYCLE))
    order = tuple(rng.sample(range(CYCLE), CYCLE))
    return Hops(cycle, order, rng.choice(HOPS))


def draw_many(count: int, seed: str, without: Iterable[str] = ()) -> Iterator[Hops]:
    """Yield ``count`` questions about distinct cycles, none of which has its key in ``without``.

    The same seed yields the same questions on every machine.
    """
    rng = random.Random(hashlib.sha256(seed.encode()).digest())
    seen = set(without)
    while count:
        question = draw(rng)
        if question.key not in seen:
            seen.add(question.key)
            count -= 1
            yield question


def held_out(count: int, seed: int) -> list[Hops]:
    """Return the questions that neither the warm start nor reinforcement learning sees."""
    return list(draw_many(count, f"hops test {seed}"))


def splits(train: int, test: int, seed: int) -> dict[str, list[Hops]]:
    """Return train and test questions about different cycles."""
    tests = held_out(test, seed)
    keys = {question.key for question in tests}
    return {"train": list(draw_many(train, f"hops train {seed}", keys)), "test": tests}


def row(question: Hops, split: str, index: int) -> dict:
    """Return the question as a row in verl's schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": question.prompt,
        "ability": "lookup",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, "hops": question.hops},
    }


def write_parquet(questions: Iterable[Hops], split: str, path: Path) -> None:
    """Write the rows to ``path``; a killed process leaves the old file or the new one, never half
    of one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([row(q, split, index) for index, q in enumerate(questions)])
    with replacing(path) as partial:
        pq.write_table(table, partial)
