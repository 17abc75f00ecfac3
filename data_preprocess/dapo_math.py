"""DAPO-Math-17k (arXiv:2503.14476, section 3.5): 17,398 problems with integer answers, each once.

    python -m data_preprocess.dapo_math --local_dir ~/data/dapo/dapo_math \\
        [--local_dataset_path DIR_OR_FILES]

The published file holds each problem about 100 times (1.79 million rows); it is read row by row and
the first of each is kept. Copies of it that were cleaned by others, with a bare ``prompt``,
``problem`` or ``question``, are read too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from data_preprocess.cli import Example, Source, run
from data_preprocess.schema import make_row

HUB = "BytedTsinghua-SIA/DAPO-Math-17k"
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def problem(example: Example) -> str:
    """Return the problem without the instructions around it.

    Raises KeyError where the example has none.
    """
    text = example.get("prompt") or example.get("problem") or example["question"]
    if not isinstance(text, str):
        text = text[-1]["content"]
    return text.removeprefix(BEFORE).removesuffix(AFTER)


def gold(example: Example) -> str:
    """Return the answer, from the published schema or from a column.

    Raises KeyError where the example has none.
    """
    published = (example.get("reward_model") or {}).get("ground_truth")
    answer = example["answer"] if published is None else published
    return "" if answer is None else str(answer).strip()


def question_row(
    example: Example, data_source: str, answer: str, split: str, index: int
) -> dict[str, Any]:
    """Return a row with DAPO's prompt, which training and evaluation share."""
    question = problem(example)
    prompt = [{"role": "user", "content": f"{BEFORE}{question}{AFTER}"}]
    published = (example.get("extra_info") or {}).get("index", example.get("id"))
    source_id = None if published is None else str(published)
    return make_row(
        data_source,
        prompt,
        answer,
        "math",
        split=split,
        index=index,
        question=question,
        source_id=source_id,
    )


def same_question(row: dict[str, Any]) -> str:
    return row["extra_info"]["question"].strip()


def question_source(
    name: str,
    hub: str,
    folder: str,
    only: str,
    data_source: str,
    read_gold: Callable[[Example], str] = gold,
) -> Source:
    """Return a data set of questions with DAPO's prompt, each question once, in one split."""

    def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
        answer = read_gold(example)
        return question_row(example, data_source, answer, split, index) if answer else None

    return Source(name, hub, None, folder, row, only, same_question)


SOURCE = question_source("dapo_math", HUB, "~/data/dapo/dapo_math", "train", "math_dapo")


if __name__ == "__main__":
    sys.exit(run(SOURCE))
