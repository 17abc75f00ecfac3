"""Demonstrations for fine-tuning: search episodes that a program plays with a real index, one
search each.

    python -m recipes.search_r1.demonstrations QUESTIONS.parquet \\
        --index DIR --model MODEL --out DEMONSTRATIONS.parquet

Questions are rows as those of training whose ``extra_info`` also has ``title`` and ``passage`` of
the gold passage, as the corpus has it, and the ``answer`` to give. The query is the question
without its function words or, where only that finds the gold passage, the title. A question whose
gold passage neither finds is left out. The ids are those that a policy would write turn by turn,
and what the search engine wrote is not trained on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import InputError
from data_preprocess.schema import Written, write_rows
from recipes.search_r1.index.passages import Passage
from recipes.search_r1.search_loop import information, show_passage

_FUNCTION_WORDS = """
 a an and at be been by did do does for from had has have how in is it its many much of on or s
that the to was were what when where which who whom whose why with you
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
Retrieve = Callable[[list[str], int], list[list[Passage]]]


def keywords(question: str) -> str:
    """Return the words of a question without function words."""
    return " ".join(
        word for word in re.findall(r"[\w']+", question) if word.lower() not in FUNCTION_WORDS
    )


def find_query(
    facts: Mapping[str, str], retrieve: Retrieve, topk: int
) -> tuple[str, list[Passage]] | None:
    """Return the first query whose passages hold the gold one, with the passages; None where none
    does."""
    queries = [query for query in (keywords(facts["question"]), facts["title"]) if query]
    for query, passages in zip(queries, retrieve(queries, topk), strict=True):
        if facts["passage"] in [passage.contents for passage in passages]:
            return query, passages
    return None


def play(
    facts: Mapping[str, str],
    query: str,
    passages: Sequence[Passage],
    room: int,
    encode: Callable[[str], list[int]],
) -> list[tuple[str, bool]] | None:
    """Return an episode as stretches of text, each with whether the policy writes it.

    None if the block has no room for the passage that answers.
    """
    place = [passage.contents for passage in passages].index(facts["passage"])
    number = place + 1
    block = information(passages, room, encode)
    if block is None or show_passage(number, passages[place]).strip() not in block:
        return None
    return [
        (f"<think>I have to look this up.</think>\n<search>{query}</search>", True),
        (block, False),
        (f"<think>Doc {number} answers it.</think>\n<answer>{facts['answer']}</answer>", True),
    ]


def demonstrations(
    rows: Iterable[Mapping[str, Any]], retrieve: Retrieve, tokenizer: Any, topk: int, room: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of the third form of ``recipes/sft/README.md``: ids, and the mask of those that
    the policy writes."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for row in rows:
        facts = row["extra_info"]
        if (search := find_query(facts, retrieve, topk)) is None:
            continue
        if (episode := play(facts, *search, room, encode)) is None:
            continue
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
        stretches = [(encode(text), written) for text, written in episode]
        yield {
            **row,
            "prompt": prompt,
            "prompt_ids": encode(prompt),
            "response_ids": [token for ids, _ in stretches for token in ids],
            "response_mask": [written for ids, written in stretches for _ in ids],
        }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of questions. Raises InputError where it is none, or a gold passage
    is missing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            [f"{path}: cannot be read as a parquet file ({error}); give the questions"]
        ) from error
    needed = {"question", "title", "passage", "answer"}
    for at, row in enumerate(rows):
        if missing := needed - {
            name for name, value in (row.get("extra_info") or {}).items() if value
        }:
            raise InputError(
                [
                    f"{path}: row {at} has no extra_info.{min(missing)}; add it (see "
                    f"this module's head)"
                ]
            )
    return rows


def write_demonstrations(
    questions: Path, index: Path, model: str, out: Path, topk: int, room: int
) -> Written:
    """Write the demonstrations. Raises InputError for a file, an index or a tokenizer that cannot
    be read."""
    from core.learner.models import read_tokenizer
    from recipes.search_r1.index.opening import make_retriever
    from recipes.search_r1.index.passages import RetrievalError, RetrieverOptions

    rows = read_rows(questions)
    try:
        retriever = make_retriever(RetrieverOptions(index=index, mmap=False))
    except (RetrievalError, OSError) as error:
        raise InputError(
            [f"--index={index}: cannot be opened ({error}); recipes.search_r1.index.cli makes one"]
        ) from error
    try:
        tokenizer = read_tokenizer(model, "--model")
    except (OSError, ValueError) as error:
        raise InputError(
            [f"--model={model}: has no tokenizer ({str(error).splitlines()[0]}); give another"]
        ) from error
    return write_rows(out, list(demonstrations(rows, retriever.retrieve, tokenizer, topk, room)))


def main() -> int:
    name = "python -m recipes.search_r1.demonstrations"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "questions",
        type=Path,
        metavar="QUESTIONS.parquet",
        help="questions with their gold passages",
    )
    add(
        "--index",
        type=Path,
        required=True,
        help="the folder that recipes.search_r1.index.cli wrote",
    )
    add("--model", required=True, help="a folder or a hub id, of which the tokenizer is read")
    add("--out", type=Path, required=True, help="the parquet file to write")
    add(
        "--topk",
        type=int,
        default=3,
        help="passages that a search shows, retriever.topk (default: %(default)s)",
    )
    add(
        "--room",
        type=int,
        default=500,
        help="tokens of a search's block, data.max_obs_length (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        written = write_demonstrations(
            args.questions, args.index, args.model, args.out, args.topk, args.room
        )
        print(written, flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
