"""The knowledge task with passages that contradict each other: a fact has changed, and some passages do not know it.

    the boss of bavu is still zuru.        the boss of bavu is now keli.        ->    <answer> keli</answer>

    python -m recipes.search_r1.conflicts

It is a task with room, as those of ``recipes/lab/families.py``: difficulty is a number (how many passages about a fact
are out of date), any answer is paid a little, and four base models mostly guess, or say what they find first.
Everything is in ``outputs/lab/conflicts/``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.lab.families import BASES, OUTPUTS, TEST, base_models
from recipes.lab.tokenizer import build_tokenizer
from recipes.search_r1 import knowledge, knowledge_model
from recipes.search_r1.knowledge import Question
from recipes.search_r1.knowledge_model import KnowledgeRecipe

FOLDER = OUTPUTS / "conflicts"
DATA_SOURCE = "lab/conflicts"
DIFFICULTY = 2  # a search shows three passages
WORDS = (*knowledge.WORDS, " now", " still")  # as many words in each passage: BM25 finds them equally good
RECIPE = KnowledgeRecipe(pool=8, hold_steps=360, search_share=0.2, ramble_share=0.1, hasty_share=0.2)


@dataclass(frozen=True)
class ChangedBase(knowledge.KnowledgeBase):
    """``outdated[name, relation]`` holds what passages say that do not know the fact as it is now."""

    outdated: Mapping[tuple[str, str], Sequence[str]]

    def source(self, question: Question) -> str:
        return DATA_SOURCE

    def passages(self) -> list[dict[str, str]]:
        """Return the corpus: distractors, and for each fact what is out of date before what holds.

        BM25 finds the passages of a fact equally good and shows them in this order.
        """
        texts = [passage["contents"] for passage in super().passages()[len(self.facts) :]]
        for (name, relation), value in self.facts.items():
            earlier = self.outdated[name, relation]
            said = [*(f"is still {one}" for one in earlier), f"is now {value}"]
            texts += [f"{name}\nthe {relation} of {name} {one}." for one in said]
        return [{"id": str(number), "contents": text} for number, text in enumerate(texts)]


def draw(seed: int | str, difficulty: int = DIFFICULTY) -> ChangedBase:
    """Draw a knowledge base in which ``difficulty`` passages about a fact are out of date, and one is not."""
    plain, rng = knowledge.draw(seed), knowledge.rng_for(f"conflicts {seed}")
    people, outdated = sorted({name for name, _ in plain.facts}), {}
    for (name, relation), value in plain.facts.items():
        others = [other for other in people if other not in (name, value)]
        outdated[name, relation] = rng.sample(others, difficulty)
    return ChangedBase(plain.facts, plain.sightings, outdated)


def prepare(seeds: Iterable[int] = range(1, BASES + 1)) -> list[Path]:
    """Make what is missing: data, index, and for each of these seeds the base model ``base/seed-<n>/current``."""
    knowledge_model.write_with_index(FOLDER, 1, test=TEST, draw=draw)
    code = (Path(module.__file__) for module in (knowledge, knowledge_model))
    rows = partial(knowledge_model.rows, draw=draw)
    tokenizer = build_tokenizer(knowledge.ALPHABET, WORDS)
    return base_models(FOLDER, RECIPE, tokenizer, rows, seeds, Path(__file__), *code)


if __name__ == "__main__":
    text = "Makes the data, the index and the base models of questions whose passages contradict each other."
    argparse.ArgumentParser("python -m recipes.search_r1.conflicts", description=text).parse_args()
    print("base models:", *prepare())
