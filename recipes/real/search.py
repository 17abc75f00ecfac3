"""The search task: the questions of ``recipes/real/passages.py`` without their passages, and a
corpus to search in.

The corpus is the gold passages of all questions, the held-out ones included, and 1,000 other
passages of Wikipedia. The questions are split as in the passages task. Prompt and episodes are
those of Search-R1 (``recipes/search_r1``), whose commands make the index and play the
demonstrations (``recipes/real/start.sh``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.files import file_sha256, write_atomic
from data_preprocess.open_qa import make_qa_row
from data_preprocess.schema import Written
from recipes.real.passages import (
    NQ_FILE,
    NQ_SOURCE,
    Question,
    data_file,
    read_questions,
    split_questions,
)

DATA_SOURCE = "real/search"
OTHER_FILE = "wiki_passages/flashrag_wiki18_1000.jsonl"
OTHER_SOURCE = "github.com/RUC-NLPIR/FlashRAG, examples/quick_start/indexes/sample_data.jsonl"


def questions() -> list[Question]:
    return read_questions(data_file(NQ_FILE, NQ_SOURCE))


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """Return a row in verl's schema, with Search-R1's prompt."""
    return make_qa_row(
        DATA_SOURCE, {"question": question.text, "answers": question.answers}, split, index
    )


def rows_of() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every file. Those of ``to_demonstrate`` also have their gold passages."""
    splits = split_questions(questions())
    rows = {
        name: [row(one, name, at) for at, one in enumerate(chosen)]
        for name, chosen in splits.items()
    }
    for line, question in zip(rows["demonstrations"], splits["demonstrations"], strict=True):
        line["extra_info"] |= {
            "title": question.title,
            "passage": contents_of(question),
            "answer": question.answer,
        }
    return {"train": rows["train"], "test": rows["test"], "to_demonstrate": rows["demonstrations"]}


def contents_of(question: Question) -> str:
    """Return the gold passage as the corpus has it: the title in quotes, a line break, the text."""
    return f'"{question.title}"\n{question.passage}'


def corpus() -> Iterator[str]:
    """Yield the passages, each once. Raises InputError for a file that cannot be read."""
    path = data_file(OTHER_FILE, OTHER_SOURCE)
    try:
        others = [
            json.loads(line)["contents"]
            for line in path.read_text(encoding="utf-8").split("\n")
            if line
        ]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            [f"{path}: cannot be read as passages ({error}); take it anew from {OTHER_SOURCE}"]
        ) from error
    yield from dict.fromkeys([*map(contents_of, questions()), *others])


def write_corpus(path: Path) -> Written:
    """Write the passages as JSON lines of ``id`` and ``contents``."""
    lines = [json.dumps({"id": str(at), "contents": text}) for at, text in enumerate(corpus())]
    write_atomic(path, "\n".join(lines) + "\n")
    return Written(path, len(lines), file_sha256(path))
