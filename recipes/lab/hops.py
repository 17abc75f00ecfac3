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
from typing import Any, ClassVar

from data_preprocess.schema import make_row
from recipes.lab.base_model import Episode, Labelled, WarmStart, draw_distinct, draw_splits
from recipes.lab.tokenizer import build_tokenizer

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
    return draw_distinct(draw, count, rng, without)


def splits(train: int, test: int, seed: int) -> dict[str, list[Hops]]:
    """Return train and test questions about different cycles."""

    def draw_split(count: int, split: str, without: Iterable[str] = ()) -> Iterator[Hops]:
        return draw_many(count, f"hops {split} {seed}", without)

    return draw_splits(draw_split, train, test)


@dataclass(frozen=True)
class HopsRecipe(WarmStart):
    """Settings of the warm start, with its answers. Shares are of the mixture; the rest guess."""

    task: ClassVar[str] = "hops"

    layers: int = 2
    positions: int = 256
    tied: bool = False
    batch_size: int = 128
    task_steps: int = 250
    mixture_steps: int = 80
    hold_steps: int = 180
    warmup_steps: int = 20
    loss_bound: float = 0.15
    chain_share: float = 0.1
    junk_share: float = 0.1  # digits that answer nothing
    test_questions: int = 500  # these are kept out of the warm start
    data_seed: int = 1

    def new_tokenizer(self) -> Any:
        return build_tokenizer()

    def splits(self, train: int = 10_240) -> dict[str, list[Hops]]:
        return splits(train, self.test_questions, self.data_seed)

    def row(self, question: Hops, split: str, index: int) -> dict[str, Any]:
        facts = {"split": split, "index": index, "hops": question.hops}
        return make_row(DATA_SOURCE, question.prompt, question.answer, "lookup", **facts)

    def episodes(self, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
        """Return chains, and the mixture. No held-out question is among them."""
        rng = random.Random(self.seed)
        held_out = splits(0, self.test_questions, self.data_seed)["test"]
        tests = {question.key for question in held_out}
        chains = self.task_steps * self.batch_size
        questions = draw_many(self.steps * self.batch_size, f"hops warm start {self.seed}", tests)
        task = []
        mixture = []
        for at, question in enumerate(questions):
            answer = question.chain if at < chains else self.mixture_answer(question, rng)
            episode = (question.prompt, [(answer + tokenizer.eos_token, True)])
            (task if at < chains else mixture).append(episode)
        return task, mixture

    def mixture_answer(self, question: Hops, rng: random.Random) -> str:
        """Draw a chain, digits that answer nothing, or a guess: any letter of the cycle."""
        kind = rng.random()
        if kind < self.chain_share:
            return question.chain
        if kind < self.chain_share + self.junk_share:
            return "".join(rng.choices(string.digits, k=rng.randint(1, max(HOPS))))
        return direct(rng.choice(question.cycle))

    def choose(self, examples: list[Labelled], step: int, rng: random.Random) -> list[Labelled]:
        """Return the step's examples in the order in which they were drawn, each of them once."""
        first = (step if step < self.task_steps else step - self.task_steps) * self.batch_size
        return examples[first : first + self.batch_size]


RECIPE = HopsRecipe()
