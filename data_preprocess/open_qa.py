"""Open-domain question answering in Search-R1's rows: answers and files; prompts are in
``search_r1_prompts.py``.

A question loses the white space around it and gets a question mark where it ends without one, as in
the published scripts.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.files import written_here
from data_preprocess.cli import Example, read_file
from data_preprocess.schema import make_row
from data_preprocess.search_r1_prompts import PROMPTS, SEARCH_PROMPT

HUB = "RUC-NLPIR/FlashRAG_datasets"


def make_qa_row(
    name: str, example: Example, split: str, index: int, prompt: str = SEARCH_PROMPT
) -> dict[str, Any]:
    """Return the row of a question.

    Raises InputError if question or answer is missing: evaluation drops no row.
    """
    question = question_of(example)
    answers = answers_of(example)
    if not question or not answers:
        missing = "question" if not question else "answer"
        raise InputError(
            f"{name}: example {index} of {split} has no {missing} ({', '.join(example)}); mend the "
            "file"
        )
    target = {"target": answers}
    chat = [{"role": "user", "content": prompt.replace("{question}", question)}]
    return make_row(
        name, chat, target, "fact-reasoning", split=split, index=index, question=question
    )


def question_of(example: Example) -> str:
    question = str(example.get("question") or "").strip()
    return question if not question or question.endswith("?") else f"{question}?"


def answers_of(example: Example) -> list[str]:
    """Return all accepted answers in order, each once. Any of the published forms is read."""
    answers: list[Any] = []
    for name in ("golden_answers", "answers", "answer", "possible_answers", "answer_aliases"):
        value = example.get(name)
        if isinstance(value, str) and name == "possible_answers":
            value = json.loads(value)  # PopQA holds a list as text
        if isinstance(value, Mapping):  # SQuAD's and TriviaQA's own forms
            named = [value.get(key) for key in ("value", "text", "aliases")]
            value = [
                one for part in named for one in ([part] if isinstance(part, str) else part or ())
            ]
        several = value is not None and not isinstance(value, str | int | float)
        answers += list(value) if several else [value]
    said = [str(answer) for answer in answers if answer is not None]
    return list(dict.fromkeys(answer for answer in said if answer.strip()))


def read(path: Path) -> Iterable[Example]:
    """Return the examples of a .jsonl (plain or .gz), .json, .parquet or DPR topics (.txt) file."""
    if not path.is_file():
        raise InputError(
            f"{path}: there is no such file; give name=FILE, or a folder of FlashRAG's layout"
        )
    names = path.name.removesuffix(".gz")
    if names.endswith(".txt"):
        return _topics(path)
    return _lines(path) if names.endswith(".jsonl") else read_file(path)


def _lines(path: Path) -> Iterator[Example]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{path} line {number}: not JSON ({error}); download it again"
                ) from error


def _topics(path: Path) -> Iterator[Example]:
    """Return the examples of DPR's topics: a question, a tab, and the answers as a Python list."""
    with open(path, encoding="utf-8", newline="") as file:
        for question, answers in csv.reader(file, delimiter="\t"):
            yield {
                "question": question,
                "golden_answers": [str(answer) for answer in ast.literal_eval(answers)],
            }


def examples_of(
    name: str, splits: Sequence[str], local: Mapping[str, Path] | None, hub: str
) -> tuple[str, Iterable[Example]]:
    """Return the first of ``splits`` that the set has, and its examples.

    They are read from local files or, if ``local`` is None, from the hub.
    """
    if local is not None:
        path, split = _local_file(name, splits, local)
        return split, read(path)
    return _from_hub(name, splits, hub)


def _local_file(name: str, splits: Sequence[str], local: Mapping[str, Path]) -> tuple[Path, str]:
    if name in local:
        path = local[name]
        return path, next((split for split in splits if split in path.name), splits[0])
    folders = [path for key, path in local.items() if not key]
    for folder in folders:
        for split in splits:
            for suffix in (".jsonl", ".jsonl.gz", ".json", ".parquet"):
                path = folder / name / f"{split}{suffix}"
                if path.is_file():
                    return path, split
    where = ", ".join(map(str, folders)) or "the files given"
    files = " or ".join(f"{name}/{split}.jsonl" for split in splits)
    raise InputError(
        f"{name}: {where} hold no {files}; give {name}=FILE as well, or leave it out with --sets"
    )


def _from_hub(name: str, splits: Sequence[str], hub: str) -> tuple[str, Iterable[Example]]:
    import datasets

    try:
        loaded = datasets.load_dataset(hub, name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"--hub={hub}: {name} could not be loaded ({error}); check the id and the network, or "
            "give --local_dataset_path"
        ) from error
    split = next((split for split in splits if split in loaded), None)
    if split is None:
        raise InputError(
            f"--hub={hub}: {name} has {', '.join(loaded)}, none of {', '.join(splits)}"
        )
    return split, loaded[split]


def arguments(
    name: str, description: str | None, folder: str, sets: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that both commands share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m data_preprocess.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--local_dir",
        "--local_save_dir",
        type=written_here,
        default=folder,
        help="The folder to write (default %(default)s).",
    )
    add(
        "--local_dataset_path",
        nargs="+",
        metavar="PATH",
        help="What to read instead of the hub: a folder with <set>/<split>.jsonl, and name=FILE "
        "for single sets.",
    )
    add("--hub", default=HUB, help="The data set's id on the hub (default %(default)s).")
    add(
        "--prompt",
        choices=sorted(PROMPTS),
        default="search",
        help="The prompt: with a search engine, or without (r1; default %(default)s).",
    )
    add(
        "--sets",
        nargs="+",
        choices=sets,
        default=list(sets),
        help="The sets to write (default: all).",
    )
    return parser


def local_files(texts: Sequence[str] | None) -> dict[str, Path] | None:
    """Return the files of ``name=FILE`` by name, and a folder under the empty name.

    Return None if there are none.
    """
    if not texts:
        return None
    files = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not path or "/" in name:
            name, path = "", text
        files[name] = Path(path).expanduser()
    return files
