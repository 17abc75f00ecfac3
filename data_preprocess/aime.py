"""AIME 2024, I and II: 30 problems, each once, with DAPO's prompt; for evaluation as avg@32.

    python -m data_preprocess.aime --local_dir ~/data/dapo/aime2024 [--local_dataset_path
    DIR_OR_FILES]

DAPO's published file holds each problem 32 times, for ``val_kwargs.n=1``; here ``n`` is 32. Answers
lose their leading zeros (025 is 25), as there: the scorer compares text. The data source is
aime2024, there it is math_dapo.
"""

from __future__ import annotations

import sys
from typing import Any

from data_preprocess.cli import Example, Source, run
from data_preprocess.dapo_math import gold, question_row, same_question

HUB = "BytedTsinghua-SIA/AIME-2024"


def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
    answer = gold(example)
    return (
        question_row(example, "aime2024", answer.lstrip("0") or "0", split, index)
        if answer
        else None
    )


SOURCE = Source(
    name="aime",
    hub=HUB,
    config=None,
    folder="~/data/dapo/aime2024",
    make_row=row,
    only="test",
    key=same_question,
)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
