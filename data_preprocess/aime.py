"""AIME 2024, I and II: 30 problems, each once, with DAPO's prompt; for evaluation as avg@32.

    python -m data_preprocess.aime --local_dir ~/data/dapo/aime2024 \\
        [--local_dataset_path DIR_OR_FILES]

DAPO's published file holds each problem 32 times, for ``val_kwargs.n=1``; here ``n`` is 32. Answers
lose their leading zeros (025 is 25), as there: the scorer compares text. The data source is
aime2024, there it is math_dapo.
"""

from __future__ import annotations

import sys

from data_preprocess.cli import Example, run
from data_preprocess.dapo_math import gold, question_source

HUB = "BytedTsinghua-SIA/AIME-2024"


def gold_number(example: Example) -> str:
    """Return the answer without leading zeros."""
    answer = gold(example)
    return answer and (answer.lstrip("0") or "0")


FOLDER = "~/data/dapo/aime2024"
SOURCE = question_source("aime", HUB, FOLDER, "test", "aime2024", gold_number)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
