"""The instructions task: "Write something short about {topic}." with one or two constraints that a
program can check.

Training and held-out prompts share no topic, requested word or number.
``reward_scores/instructions.py`` scores them. :func:`rewrite` changes a text of the model so that
it keeps the constraints: demonstrations for fine-tuning are made of the model's own sentences, and
nobody else's.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data_preprocess.schema import make_row
from recipes.real.words import TOPICS, WORDS
from reward_scores import instructions

DATA_SOURCE = "real/instructions"
TWO_CONSTRAINTS = 0.5  # the share of prompts with two


@dataclass(frozen=True)
class Vocabulary:
    """What prompts of a split are made of; splits have no element in common."""

    topics: tuple[str, ...]
    words: tuple[str, ...]
    times: tuple[int, ...]  # how often a word is requested
    most_words: tuple[int, ...]
    sentences: tuple[int, ...]
    items: tuple[int, ...]
    without: tuple[str, ...]


TRAIN = Vocabulary(
    TOPICS[60:], WORDS[40:], (1, 3), (8, 12, 15, 20), (1, 3), (2, 4), (",", "z", "k")
)
HELD_OUT = Vocabulary(TOPICS[:60], WORDS[:40], (2,), (10, 18), (2,), (3,), ("x", "v"))


@dataclass(frozen=True)
class Instruction:
    """A prompt: its topic and its constraints, as ``reward_scores/instructions.py`` reads them."""

    topic: str
    constraints: tuple[tuple[Any, ...], ...]

    @property
    def prompt(self) -> str:
        wishes = " ".join(WORDING[kind](*arguments) for kind, *arguments in self.constraints)
        return f"{opening(self.topic)} {wishes}"

    @property
    def ground_truth(self) -> str:
        return json.dumps([list(constraint) for constraint in self.constraints])


def opening(topic: str) -> str:
    return f"Write something short about {topic}."


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


WORDING: dict[str, Callable[..., str]] = {
    "lower_case": lambda: "Use only lowercase letters.",
    "upper_case": lambda: "Use only capital letters.",
    "first_word": lambda word: f'Begin with the word "{word}".',
    "last_word": lambda word: f'End with the word "{word}".',
    "word_times": lambda word, times: f'Use the word "{word}" at least {_plural(times, "time")}.',
    "max_words": lambda most: f"Use at most {most} words.",
    "sentences": lambda number: f"Write exactly {_plural(number, 'sentence')}.",
    "list_items": lambda number: (
        f'Write a list of exactly {number} lines, each beginning with "- ".'
    ),
    "in_quotes": lambda: "Put your whole answer in double quotation marks.",
    "without": lambda character: (
        "Do not use any comma." if character == "," else f'Do not use the letter "{character}".'
    ),
    "in_order": lambda first, second: f'Use the word "{first}" and, after it, the word "{second}".',
}
# Pairs of kinds that contradict each other, or that one sentence cannot satisfy
CONFLICTS = {
    frozenset(pair)
    for pair in (
        ("lower_case", "upper_case"),
        ("list_items", "sentences"),
        ("list_items", "first_word"),
        ("list_items", "in_quotes"),
        ("list_items", "max_words"),
        ("sentences", "max_words"),
        ("in_quotes", "sentences"),
        ("in_order", "word_times"),
    )
}


def draw_constraint(kind: str, vocabulary: Vocabulary, rng: random.Random) -> tuple[Any, ...]:
    """Return a constraint of the kind with arguments of the vocabulary."""
    match kind:
        case "first_word" | "last_word":
            return kind, rng.choice(vocabulary.words)
        case "word_times":
            return kind, rng.choice(vocabulary.words), rng.choice(vocabulary.times)
        case "in_order":
            return kind, *rng.sample(vocabulary.words, 2)
        case "max_words":
            return kind, rng.choice(vocabulary.most_words)
        case "sentences":
            return kind, rng.choice(vocabulary.sentences)
        case "list_items":
            return kind, rng.choice(vocabulary.items)
        case "without":
            return kind, rng.choice(vocabulary.without)
    return (kind,)


def is_possible(instruction: Instruction) -> bool:
    """Return whether no constraint forbids what another requires: a letter of a requested word,
    say."""
    kinds = [constraint[0] for constraint in instruction.constraints]
    forbidden = {
        constraint[1] for constraint in instruction.constraints if constraint[0] == "without"
    }
    requested = [
        word for kind, *words in instruction.constraints if kind != "without" for word in words
    ]
    letters = "".join(word for word in requested if isinstance(word, str))
    return (
        len(set(kinds)) == len(kinds)
        and frozenset(kinds) not in CONFLICTS
        and not forbidden & set(letters)
    )


def draw(vocabulary: Vocabulary, rng: random.Random) -> Instruction:
    while True:
        number = 2 if rng.random() < TWO_CONSTRAINTS else 1
        kinds = [rng.choice(list(WORDING)) for _ in range(number)]
        constraints = tuple(draw_constraint(kind, vocabulary, rng) for kind in kinds)
        instruction = Instruction(rng.choice(vocabulary.topics), constraints)
        if is_possible(instruction):
            return instruction


def instructions_of(vocabulary: Vocabulary, number: int, seed: int) -> Iterator[Instruction]:
    """Yield different instructions, the same on every machine."""
    rng = random.Random(f"instructions {seed}")
    drawn = set()
    while len(drawn) < number:
        instruction = draw(vocabulary, rng)
        if instruction not in drawn:
            drawn.add(instruction)
            yield instruction


def row(instruction: Instruction, split: str, index: int) -> dict[str, Any]:
    """Return a row in verl's schema."""
    messages = [{"role": "user", "content": instruction.prompt}]
    return make_row(
        DATA_SOURCE, messages, instruction.ground_truth, "instructions", split=split, index=index
    )


# -- demonstrations ------------------------------------------------------------------------------


def split_sentences(text: str) -> list[str]:
    """Return the complete sentences of a text, markup and line breaks removed."""
    plain = re.sub(r"[*_#\"\u201c\u201d]", "", " ".join(text.split()))
    return [sentence.strip() for sentence in re.findall(r"[^.!?]+[.!?]", plain)]


def rewrite(instruction: Instruction, text: str) -> str | None:
    """Return the text changed to keep the constraints, or None where the simple changes below do
    not get there.

    What decides the length comes first, what touches every character last.
    """
    draft = Draft(split_sentences(text)[:2])
    if not draft.sentences:
        return None
    for kind in REWRITES:
        for constraint in instruction.constraints:
            if constraint[0] == kind:
                draft = REWRITES[kind](draft, *constraint[1:])
    rewritten = draft.text()
    score = instructions.score(rewritten, instruction.ground_truth)
    return rewritten if score.value == 1 else None


@dataclass(frozen=True)
class Draft:
    """A text on its way to an answer: sentences, then how they are joined and what is done to their
    letters."""

    sentences: list[str]
    joined: str = " "
    finish: Callable[[str], str] = str

    def text(self) -> str:
        return self.finish(self.joined.join(self.sentences))

    def edit(self, change: Callable[[list[str]], list[str]]) -> Draft:
        return dataclasses.replace(self, sentences=change(list(self.sentences)))

    def then(self, change: Callable[[str], str]) -> Draft:
        before = self.finish
        return dataclasses.replace(self, finish=lambda text: change(before(text)))


def _shorten(sentence: str, words: int) -> str:
    return " ".join(sentence.split()[:words]).rstrip(",;:.!?") + "."


def _sentences(draft: Draft, number: int) -> Draft:
    fillers = ["It is worth a thought.", "Many people know it well.", "There is more to say."]
    return draft.edit(lambda sentences: (sentences + fillers)[:number])


def _list_items(draft: Draft, number: int) -> Draft:
    clauses = [
        _shorten(clause, 8)
        for s in draft.sentences
        for clause in re.split(r"[,;:] ", s)
        if len(clause) > 8
    ]
    fillers = [
        "It is worth a thought.",
        "Many people know it well.",
        "There is more to say.",
        "It stays in mind.",
    ]
    items = [f"- {clause[0].upper()}{clause[1:]}" for clause in (clauses + fillers)[:number]]
    return dataclasses.replace(draft.edit(lambda _: items), joined="\n")


def _max_words(draft: Draft, most: int) -> Draft:
    return draft.edit(lambda sentences: [_shorten(sentences[0], max(4, most - 4))])


def _first_word(draft: Draft, word: str) -> Draft:
    def begin(sentences: list[str]) -> list[str]:
        return [f"{word.capitalize()}: {sentences[0]}", *sentences[1:]]

    return draft.edit(begin)


def _append(draft: Draft, words: str) -> Draft:
    """Put words before the end of the last sentence."""
    return draft.edit(lambda sentences: [*sentences[:-1], f"{sentences[-1].rstrip('.!?')}{words}."])


def _word_times(draft: Draft, word: str, times: int) -> Draft:
    phrases = [f", with {word}", f", some {word}", f" and more {word}"]
    return _append(draft, "".join(phrases[:times]))


def _in_order(draft: Draft, first: str, second: str) -> Draft:
    return _append(draft, f", with {first} and {second}")


def _without(draft: Draft, character: str) -> Draft:
    if character == ",":
        return draft.then(lambda text: text.replace(",", ""))
    return draft.edit(
        lambda sentences: [
            " ".join(word for word in sentence.split(" ") if character not in word.lower())
            for sentence in sentences
        ]
    )


# In the order in which they are applied.
REWRITES: dict[str, Callable[..., Draft]] = {
    "without": _without,
    "sentences": _sentences,
    "list_items": _list_items,
    "max_words": _max_words,
    "in_order": _in_order,
    "word_times": _word_times,
    "last_word": lambda draft, word: _append(draft, f", just like {word}"),
    "first_word": _first_word,
    "in_quotes": lambda draft: draft.then(lambda text: f'"{text}"'),
    "lower_case": lambda draft: draft.then(str.lower),
    "upper_case": lambda draft: draft.then(str.upper),
}
