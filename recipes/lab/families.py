"""Families of tasks with room: what they share. A family's file draws questions and the answers to learn from.

Difficulty is a number. A warm start teaches both right ways to answer, a short and a long one, and then a mixture in
which they are rare: most answers guess, stop early, or never end. So accuracy can rise and fall, lengths have a tail,
and a limit cuts answers off. A guess is paid too (``family_score.py``), and validation does not count it as right.

Four base models a family differ in their weights and in what they were shown: a run of seed n starts from number
1 + (n - 1) % 4.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_preprocess.schema import make_row, write_rows
from recipes.lab.tokenizer import build_tokenizer
from recipes.lab.warm_start import Row, WarmStart, as_row, build

OUTPUTS = Path("outputs/lab")
BASES = 4
TRAIN, TEST = 4096, 256
ENDLESS = "endless"
Rows = Callable[[Any, Any], tuple[list[Row], list[Row]]]


@dataclass(frozen=True)
class Question:
    """A prompt, the sign that answers it, and the answers to learn from. ``key`` tells questions apart."""

    prompt: str
    gold: str
    short: str
    long: str
    hasty: Callable[[random.Random], str]  # stops early, which is mostly wrong
    guess: Callable[[random.Random], str]
    endless: str  # what is repeated by an answer that never ends
    steps: int  # that a right answer takes


@dataclass(frozen=True)
class FamilyRecipe(WarmStart):
    """Settings of the warm start, with its answers. Shares are of the mixture; the rest guess."""

    difficulty: int = 16
    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    task_steps: int = 400  # one seed looks edges up after 250 steps, another after 350
    mixture_steps: int = 60
    hold_steps: int = 360
    short_share: float = 0.1
    long_share: float = 0.1
    hasty_share: float = 0.25
    endless_share: float = 0.15
    endless_chars: int = 48
    loss_bound: float = 0.35
    examples: int = 12_000


@dataclass(frozen=True)
class Family:
    """A family by its name: ``draw(rng, difficulty)`` makes a question of the alphabet's characters and the words."""

    name: str
    alphabet: Sequence[str]
    words: Sequence[str]
    draw: Callable[[random.Random, int], Question]
    recipe: FamilyRecipe
    code: Path

    @property
    def folder(self) -> Path:
        return OUTPUTS / self.name

    def questions(self, count: int, seed: str, without: Iterable[str] = ()) -> Iterator[Question]:
        """Yield ``count`` questions of different prompts, none of ``without``, the same on every machine."""
        rng, seen = random.Random(hashlib.sha256(f"{self.name} {seed}".encode()).digest()), set(without)
        while count:
            one = self.draw(rng, self.recipe.difficulty)
            if one.prompt not in seen:
                seen.add(one.prompt)
                count -= 1
                yield one

    def splits(self) -> dict[str, list[Question]]:
        tests = list(self.questions(TEST, "test"))
        return {"train": list(self.questions(TRAIN, "train", (q.prompt for q in tests))), "test": tests}

    def rows(self, recipe: FamilyRecipe, tokenizer: Any) -> tuple[list[Row], list[Row]]:
        """Return right answers, short and long ones, and the mixture. No held-out question is among them."""
        rng, eos = random.Random(recipe.seed), tokenizer.eos_token
        tests = (q.prompt for q in self.questions(TEST, "test"))
        drawn = list(self.questions(recipe.examples, f"warm start {recipe.seed}", tests))

        def row(one: Question, text: str) -> Row:
            end = "" if text == ENDLESS else eos
            text = (one.endless * recipe.endless_chars)[: recipe.endless_chars] if text == ENDLESS else text
            return as_row(one.prompt, [(text + end, True)], tokenizer)

        task = [row(one, rng.choice((one.short, one.long))) for one in drawn]
        return task, [row(one, mixed(one, recipe, rng)) for one in drawn]

    def prepare(self, seeds: Iterable[int] = range(1, BASES + 1)) -> list[Path]:
        """Make what is missing: the data, and for each of these seeds the base model ``base/seed-<n>/current``."""
        for split, drawn in self.splits().items():
            rows = [self.example(one, split, index) for index, one in enumerate(drawn)]
            write_rows(self.folder / f"{split}.parquet", rows)
        tokenizer = build_tokenizer(self.alphabet, self.words)
        return base_models(self.folder, self.recipe, tokenizer, self.rows, seeds, self.code)

    def command(self) -> None:
        """Prepare data and base models, as the command of the family's file."""
        program = f"python -m recipes.lab.{self.name}"
        argparse.ArgumentParser(program, description="Makes the task's data and its base models.").parse_args()
        print("base models:", *self.prepare())

    def example(self, one: Question, split: str, index: int) -> dict[str, Any]:
        facts = {"split": split, "index": index, "steps": one.steps}
        return make_row(f"lab/{self.name}", one.prompt, one.gold, "following", **facts)


def base_models(
    folder: Path, recipe: WarmStart, tokenizer: Any, rows: Rows, seeds: Iterable[int], *code: Path
) -> list[Path]:
    """Make what is missing of ``folder/base/seed-<n>/current`` and return the folders.

    ``rows(recipe, tokenizer)`` are the episodes of a seed; ``code`` makes them, beside the files of this folder. A seed
    that fails is followed by one that no other base model has.
    """
    files, made = (*code, Path(__file__), Path(__file__).with_name("tokenizer.py")), []
    for seed in seeds:
        one, root = replace(recipe, seed=seed), folder / "base" / f"seed-{seed}"
        made.append(build(root, one, tokenizer, lambda r=one: rows(r, tokenizer), *files, apart=BASES))
    return made


def mixed(one: Question, recipe: FamilyRecipe, rng: random.Random) -> str:
    """Draw an answer of the mixture; ENDLESS stands for one without an end."""
    kinds = (one.short, one.long, one.hasty(rng), ENDLESS, one.guess(rng))
    shares = (recipe.short_share, recipe.long_share, recipe.hasty_share, recipe.endless_share)
    return rng.choices(kinds, (*shares, 1 - sum(shares)))[0]
