"""The passages task: a question, the Wikipedia passage that answers it, and an answer of a few
words.

Questions are NQ-open's with their gold passages (the oracle file of lost-in-the-middle). Training
and held-out questions share no page of Wikipedia. ``recipes/real/search.py`` asks the same
questions without the passages.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import InputError
from data_preprocess.open_qa import answers_of, question_of
from data_preprocess.schema import make_row

DATA_SOURCE = "real/passages"
NQ_FILE = "nq_open_oracle/nq-open-oracle.jsonl.gz"
NQ_SOURCE = "github.com/nelson-liu/lost-in-the-middle, qa_data/nq-open-oracle.jsonl.gz"
# Of a passage: 2,529 of the 2,655 questions; the others would make every step longer
MOST_WORDS = 100
HELD_OUT = 200
DEMONSTRATIONS = 400
PROMPT = (
    "Answer the question with a few words of the passage and nothing else.\n\nPassage: "
    "{passage}\n\n"
    "Question: {question}"
)


@dataclass(frozen=True)
class Question:
    """A question with its gold answers and the passage that holds one of them."""

    text: str
    answers: tuple[str, ...]
    title: str
    passage: str

    @property
    def answer(self) -> str:
        """The shortest gold answer that the passage holds, or the shortest of all."""
        inside = [answer for answer in self.answers if answer in self.passage]
        return min(inside or self.answers, key=len)


def data_file(name: str, source: str) -> Path:
    """Return a file of public data under ``DATA_DIR``. Raises InputError where there is none."""
    folder = os.environ.get("DATA_DIR")
    if not folder:
        raise InputError(
            [
                f"DATA_DIR: is not set, and the task reads {name} there; set it to a "
                f"folder with {source}"
            ]
        )
    path = Path(folder).expanduser() / name
    if not path.is_file():
        raise InputError(
            [f"DATA_DIR={folder}: has no {name}, which the task reads; put it there, from {source}"]
        )
    return path


def read_questions(path: Path) -> list[Question]:
    """Return the questions whose passage has at most :data:`MOST_WORDS` words. Raises InputError
    for a damaged file."""
    questions = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                example = json.loads(line)
                (page,) = example["ctxs"]
                passage = " ".join(page["text"].split())
                question = Question(
                    question_of(example), tuple(answers_of(example)), page["title"], passage
                )
                if len(passage.split()) <= MOST_WORDS:
                    questions.append(question)
    except (OSError, EOFError, ValueError, KeyError) as error:
        reason = (
            f"cannot be read as questions with a passage each ({type(error).__name__}: {error})"
        )
        raise InputError([f"{path}: {reason}; take it anew from {NQ_SOURCE}"]) from error
    return questions


def split_questions(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """Return held-out questions (``test``), those of demonstrations, and those of reinforcement
    learning (``train``).

    No page of Wikipedia is in two of them. The same on every machine.
    """
    titles = sorted({question.title for question in questions})
    random.Random("passages").shuffle(titles)
    order = {title: at for at, title in enumerate(titles)}
    ordered = sorted(questions, key=lambda question: (order[question.title], question.text))
    splits: dict[str, list[Question]] = {"test": [], "demonstrations": [], "train": []}
    sizes = {"test": HELD_OUT, "demonstrations": DEMONSTRATIONS, "train": len(questions)}
    names = iter(sizes)
    title = None
    name = next(names)
    for question in ordered:
        if len(splits[name]) >= sizes[name] and question.title != title:
            name = next(names)
        splits[name].append(question)
        title = question.title
    return splits


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """Return a row in verl's schema."""
    content = PROMPT.format(passage=f"{question.title}. {question.passage}", question=question.text)
    messages = [{"role": "user", "content": content}]
    target = {"target": list(question.answers)}
    return make_row(
        DATA_SOURCE, messages, target, "reading", split=split, index=index, question=question.text
    )


def rows_of() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every file. Those of demonstrations have the gold answer as response."""
    splits = split_questions(read_questions(data_file(NQ_FILE, NQ_SOURCE)))
    rows = {
        name: [row(one, name, at) for at, one in enumerate(chosen)]
        for name, chosen in splits.items()
    }
    answers = [question.answer for question in splits["demonstrations"]]
    pairs = zip(rows["demonstrations"], answers, strict=True)
    return {**rows, "demonstrations": [{**line, "response": answer} for line, answer in pairs]}
