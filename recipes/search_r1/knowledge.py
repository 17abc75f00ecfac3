"""The knowledge task: questions about people who do not exist, answerable only by looking them up.

A knowledge base gives each of ``PEOPLE`` made-up names a boss, a mother, ...: other names. Names,
relations and facts are drawn anew from a seed, so no weight can hold them, and guessing is right
once in ``PEOPLE`` times. A question follows one relation or two::

    Q: who is the boss of bavu?                   Q: who is the boss of the mother of bavu?

The corpus has a passage for every fact and, as distractors, passages that mention people and answer
nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.files import write_atomic
from data_preprocess.schema import make_row, write_rows
from recipes.search_r1.search_loop import AFTER, BEFORE, INVALID

DATA_SOURCE = "lab/knowledge"
PEOPLE, RELATIONS_EACH, DISTRACTORS = 120, 5, 400  # 600 facts in 1,000 passages
HOPS = (1, 2)
SYLLABLES = ["".join(pair) for pair in itertools.product("bdfgklmnprtvz", "aou")]
NAMES = sorted(
    random.Random(0).sample(["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)], 240)
)
RELATIONS = (
    "boss",
    "mother",
    "father",
    "friend",
    "rival",
    "cook",
    "guide",
    "pilot",
    "patron",
    "king",
)
PLACES = ("north", "south", "east", "west", "coast", "market", "river", "tower")

# Every piece of text that occurs is one token of the tiny model: what the loop writes, the words,
# the tags.
WORDS = (
    *(f" {word}" for word in (*NAMES, *RELATIONS, *PLACES, "the", "of", "is", "saw", "in", "who")),
    *(
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        "Q:",
        f"{BEFORE}Doc 1(Title:",
        AFTER,
        BEFORE,
        INVALID,
    ),
    *(f"\nDoc {number}(Title:" for number in range(2, 10)),
)
THOUGHT = ("<think>", "</think>")  # further tokens of a model that thinks
ALPHABET = (")", "?", ".", ":", "Ġ", "Ċ")  # as a byte-level vocabulary spells them


@dataclass(frozen=True)
class Question:
    """``relations`` are followed from ``start``, one after the other."""

    start: str
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        path = "".join(f" the {relation} of" for relation in reversed(self.relations))
        return f"who is{path} {self.start}?"

    @property
    def prompt(self) -> str:
        return f"Q: {self.text}"


@dataclass(frozen=True)
class KnowledgeBase:
    """``facts[name, relation]`` is a name; ``sightings`` are the distractors: who saw whom
    where."""

    facts: dict[tuple[str, str], str]
    sightings: tuple[tuple[str, str, str], ...]

    def answer(self, question: Question) -> str:
        name = question.start
        for relation in question.relations:
            name = self.facts[name, relation]
        return name

    def passages(self) -> list[dict[str, str]]:
        """Return the corpus: ``{id, contents}`` with the title in the first line."""
        texts = [
            f"{name}\nthe {relation} of {name} is {value}."
            for (name, relation), value in self.facts.items()
        ]
        texts += [
            f"{one}\n{one} saw {other} in the {place}." for one, other, place in self.sightings
        ]
        return [{"id": str(number), "contents": text} for number, text in enumerate(texts)]

    def source(self, question: Question) -> str:
        """Return the data source of a question, by which validation reports it."""
        return f"{DATA_SOURCE}_{len(question.relations)}hop"

    def questions(self, rng: random.Random) -> dict[int, list[Question]]:
        """Return every question, by hops, shuffled. Two different relations follow each other."""
        people = sorted({name for name, _ in self.facts})
        relations = sorted({relation for _, relation in self.facts})
        found = {
            1: [Question(name, (relation,)) for name in people for relation in relations],
            2: [
                Question(name, pair)
                for name in people
                for pair in itertools.permutations(relations, 2)
            ],
        }
        for questions in found.values():
            rng.shuffle(questions)
        return found


def rng_for(purpose: str) -> random.Random:
    """Return a generator that is the same on every machine."""
    return random.Random(hashlib.sha256(purpose.encode()).digest())


def draw(seed: int | str) -> KnowledgeBase:
    """Draw a knowledge base. Nobody is one's own boss."""
    rng = rng_for(f"knowledge {seed}")
    people = rng.sample(NAMES, PEOPLE)
    relations = rng.sample(RELATIONS, RELATIONS_EACH)
    facts = {
        (name, relation): rng.choice([other for other in people if other != name])
        for name in people
        for relation in relations
    }
    sightings = tuple((*rng.sample(people, 2), rng.choice(PLACES)) for _ in range(DISTRACTORS))
    return KnowledgeBase(facts, sightings)


def splits(base: KnowledgeBase, seed: int, train: int, test: int) -> dict[str, list[Question]]:
    """Return ``train`` and ``test`` questions, half of them of two hops. No test question is
    trained on."""
    by_hops = base.questions(rng_for(f"questions {seed}"))
    tests = [question for hops in HOPS for question in by_hops[hops][: test // 2]]
    rest = {hops: by_hops[hops][test // 2 :] for hops in HOPS}
    trains = [question for hops in HOPS for question in rest[hops][: train // 2]]
    return {"train": trains, "test": tests}


def row(question: Question, base: KnowledgeBase, split: str, index: int) -> dict[str, Any]:
    """Return the question as a row in verl's schema."""
    gold = {"target": [base.answer(question)]}
    asked = question.text
    return make_row(
        base.source(question),
        question.prompt,
        gold,
        "lookup",
        split=split,
        index=index,
        question=asked,
    )


def write(folder: Path, seed: int, train: int = 800, test: int = 400) -> None:
    """Write ``corpus.jsonl``, ``train.parquet`` and ``test.parquet`` of a seed, each all or
    nothing."""
    base = draw(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(
        folder / "corpus.jsonl", "".join(json.dumps(passage) + "\n" for passage in base.passages())
    )
    for split, questions in splits(base, seed, train, test).items():
        rows = [row(question, base, split, index) for index, question in enumerate(questions)]
        write_rows(folder / f"{split}.parquet", rows)


# --- what the warm start learns from: stretches of text, and whether the policy writes them ---

Stretch = tuple[str, bool]


def queries(question: Question, base: KnowledgeBase) -> list[str]:
    """Return the queries that lead to the answer, in order."""
    name = question.start
    found = []
    for relation in question.relations:
        found.append(f"{relation} {name}")
        name = base.facts[name, relation]
    return found


def searching(
    question: Question, base: KnowledgeBase, blocks: Sequence[str], thinks: bool = False
) -> list[Stretch]:
    """Return an episode that looks everything up; ``blocks`` are the results of its searches.

    ``thinks`` puts before each action, in tags, what it is about.
    """
    episode: list[Stretch] = []
    for query, block in zip(queries(question, base), blocks, strict=True):
        relation, name = query.split()
        fact = f" the {relation} of {name}"
        thought = f"<think>{fact}</think>" if thinks else ""
        episode += [(f"{thought}<search> {query}</search>", True), (block, False)]
    answer = base.answer(question)
    thought = f"<think>{fact} is {answer}</think>" if thinks else ""
    return [*episode, (f"{thought}<answer> {answer}</answer>", True)]


def guessing(rng: random.Random, thinks: bool = False) -> list[Stretch]:
    """Return an episode that guesses at once."""
    thought = "<think> who</think>" if thinks else ""
    return [(f"{thought}<answer> {rng.choice(NAMES)}</answer>", True)]


def rambling(rng: random.Random, thinks: bool = False) -> list[Stretch]:
    """Return an episode without an action at first, and a guess after the complaint."""
    return [(f" {rng.choice(NAMES)}?", True), (INVALID, False), *guessing(rng, thinks)]
