"""A real corpus with questions whose gold passages are inside, from files of public data sets.

Passages: NQ-open's gold passages, PopQA's paragraphs, the HotpotQA and MuSiQue training corpora,
and as distractors two of 2WikiMultihopQA and a thousand of wiki-18; equal ones once. Questions:
NQ-open, PopQA, HotpotQA, MuSiQue.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Page = tuple[str, str]  # title, text
Question = tuple[str, str, list[Page]]  # set, question, gold passages


def write(data: Path, folder: Path) -> tuple[Path, Path]:
    """Writes ``corpus.jsonl`` and ``questions.jsonl`` (set, question, ids of the gold passages)
    into ``folder``."""
    numbers: dict[Page, int] = {}
    for page in _pages(data):
        numbers.setdefault(_clean(page), len(numbers))
    folder.mkdir(parents=True, exist_ok=True)
    corpus, questions = folder / "corpus.jsonl", folder / "questions.jsonl"
    _write_lines(
        corpus,
        ({"id": str(n), "contents": f'"{title}"\n{text}'} for (title, text), n in numbers.items()),
    )
    _write_lines(
        questions,
        (
            {
                "set": name,
                "question": question,
                "gold": [str(numbers[_clean(page)]) for page in gold],
            }
            for name, question, gold in _questions(data)
        ),
    )
    return corpus, questions


def _clean(page: Page) -> Page:
    title, text = page
    return " ".join(title.split()), " ".join(text.split())


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _nq(data: Path) -> list[dict[str, Any]]:
    with gzip.open(
        data / "nq_open_oracle/nq-open-oracle.jsonl.gz", "rt", encoding="utf-8"
    ) as lines:
        return [json.loads(line) for line in lines]


def _pages(data: Path) -> Iterator[Page]:
    for _, _, gold in _questions(data):
        yield from gold
    for title, sentences in _json(data / "hotpotqa/hotpotqa_train_corpus.json").items():
        yield title, "".join(sentences)
    wiki2 = (
        "2wikimultihopqa/2wikimultihopqa_corpus.json",
        "2wikimultihopqa/2wikimultihopqa_sft_corpus.json",
    )
    for name in ("musique/musique_train_corpus.json", *wiki2):
        yield from ((row["title"], row["text"]) for row in _json(data / name))
    with open(data / "wiki_passages/flashrag_wiki18_1000.jsonl", encoding="utf-8") as lines:
        for line in lines:
            title, _, text = json.loads(line)["contents"].partition("\n")
            yield title.strip('"'), text


def _questions(data: Path) -> Iterator[Question]:
    for row in _nq(data):
        yield "nq", row["question"], [(page["title"], page["text"]) for page in row["ctxs"]]
    for row in _json(data / "popqa/popqa_1000_with_paragraphs.json"):
        yield (
            "popqa",
            row["question"],
            [(page["title"], page["text"]) for page in row["paragraphs"]],
        )
    for row in _json(data / "hotpotqa/hotpotqa_train.json"):
        gold = {title for title, _ in row["supporting_facts"]}
        yield (
            "hotpotqa",
            row["question"],
            [(t, "".join(text)) for t, text in row["context"] if t in gold],
        )
    for row in _json(data / "musique/musique_train.json"):
        gold_pages = [
            (p["title"], p["paragraph_text"]) for p in row["paragraphs"] if p["is_supporting"]
        ]
        yield "musique", row["question"], gold_pages
