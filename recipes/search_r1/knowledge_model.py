"""The base model of the search lab: it can search and read, and does so in about three episodes of
ten.

    python -m recipes.search_r1.knowledge_model --seed 1

Writes ``outputs/lab/knowledge/seed-<n>/`` (corpus, BM25 index, questions) and
``outputs/lab/knowledge/base/<hash>/``, to which ``base/current`` points. The model learns from
knowledge bases of its own; none is that of a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from recipes.lab.base_model import Episode, WarmStart, locked
from recipes.lab.tokenizer import build_tokenizer
from recipes.search_r1 import knowledge
from recipes.search_r1.search_loop import information

FOLDER = Path("outputs/lab/knowledge")


@dataclass(frozen=True)
class KnowledgeRecipe(WarmStart):
    """Settings of the warm start, with its episodes."""

    task: ClassVar[str] = "knowledge"

    search_share: float = 0.3  # of the mixture
    ramble_share: float = 0.05  # of the mixture; the rest guess
    bases: int = 24  # knowledge bases of the warm start
    questions_each: int = 1200
    passages: tuple[int, ...] = (3,)  # of a search, in one knowledge base after another
    thinks: bool = False  # writes a thought before each action, as the format reward wants it

    def new_tokenizer(self) -> Any:
        thought = knowledge.THOUGHT if self.thinks else ()
        return build_tokenizer(knowledge.ALPHABET, (*knowledge.WORDS, *thought))

    def episodes(self, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
        """Return searching episodes, and the mixture.

        No end-of-sequence token follows: the closing tag ends a turn.
        """
        rng = random.Random(self.seed)
        drawn = list(questions(self, tokenizer))
        rng.shuffle(drawn)
        task: list[Episode] = []
        mixture: list[Episode] = []
        for base, question, blocks in drawn:
            episode = knowledge.searching(question, base, blocks, self.thinks)
            searching = (question.prompt, episode)
            task.append(searching)
            kind = rng.random()
            if kind < self.search_share:
                mixture.append(searching)
            elif kind < self.search_share + self.ramble_share:
                mixture.append((question.prompt, knowledge.rambling(rng, self.thinks)))
            else:
                mixture.append((question.prompt, knowledge.guessing(rng, self.thinks)))
        return task, mixture


RECIPE = KnowledgeRecipe()
# It thinks, and writes no action at first more often, so that a reward for the format has a say
THINKING = KnowledgeRecipe(thinks=True, ramble_share=0.4)


def searcher(
    base: knowledge.KnowledgeBase, folder: Path, topk: int = 3
) -> Callable[[list[str]], list[list[Any]]]:
    """Return a BM25 search of a knowledge base's passages, in this process."""
    from recipes.search_r1.index.build import build_index
    from recipes.search_r1.index.opening import make_retriever
    from recipes.search_r1.index.passages import RetrieverOptions

    folder.mkdir(parents=True)
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps(passage) + "\n" for passage in base.passages()), encoding="utf-8"
    )
    build_index(corpus, folder / "index", ("bm25",))
    retriever = make_retriever(RetrieverOptions(index=folder / "index", mmap=False))
    return lambda queries: retriever.retrieve(queries, topk)


def questions(
    recipe: KnowledgeRecipe, tokenizer: Any
) -> Iterator[tuple[knowledge.KnowledgeBase, knowledge.Question, list[str]]]:
    """Yield questions of the warm start with the blocks of their searches, one knowledge base after
    another."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for number in range(recipe.bases):
        base = knowledge.draw(f"warm start {recipe.seed} {number}")
        chosen = knowledge.splits(base, number, recipe.questions_each, 0)["train"]
        asked = [knowledge.queries(question, base) for question in chosen]
        flat = sorted({query for queries in asked for query in queries})
        topk = recipe.passages[number % len(recipe.passages)]
        with tempfile.TemporaryDirectory() as folder:
            found = dict(zip(flat, searcher(base, Path(folder) / "kb", topk)(flat), strict=True))
        for question, queries in zip(chosen, asked, strict=True):
            yield base, question, [information(found[query], 10**6, encode) for query in queries]


def write_with_index(folder: Path, seed: int, **options: Any) -> None:
    """Write the data of a seed (``knowledge.write``) and the BM25 index of its passages, one
    process at a time.

    A finished index of the same passages is kept: runs may be reading it.
    """
    from recipes.search_r1.index.build import build_index
    from recipes.search_r1.index.passages import RetrievalError

    corpus = folder / "corpus.jsonl"
    index = folder / "index"
    with locked(folder):
        knowledge.write(folder, seed, **options)
        try:
            build_index(corpus, index)
        except RetrievalError:  # it is of other passages
            shutil.rmtree(index)
            build_index(corpus, index)


def prepare(seed: int, folder: Path = FOLDER, recipe: KnowledgeRecipe = RECIPE) -> Path:
    """Make what is missing: knowledge and index of a seed, and the base model.

    Return the model's folder, which is below ``base``, or below ``base_1_3_5`` for other passages
    and ``base_thinking`` for one that thinks.
    """
    write_with_index(folder / f"seed-{seed}", seed)
    passages = map(str, recipe.passages) if recipe.passages != RECIPE.passages else ()
    thinking = ("thinking",) if recipe.thinks else ()
    return recipe.build(folder / "_".join(("base", *passages, *thinking)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m recipes.search_r1.knowledge_model", description=__doc__
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="The seeds of the knowledge (default 1)."
    )
    parser.add_argument(
        "--passages", type=int, nargs="+", default=RECIPE.passages,
        help="Passages of a search in the warm start, in turn (default 3).",
    )  # fmt: skip
    parser.add_argument(
        "--thinking", action="store_true", help="A model that thinks, and rambles more often."
    )
    asked = parser.parse_args()
    recipe = dataclasses.replace(
        THINKING if asked.thinking else RECIPE, passages=tuple(asked.passages)
    )
    for seed in asked.seed:
        base_model = prepare(seed, recipe=recipe)
    print(f"base model: {base_model}", flush=True)
