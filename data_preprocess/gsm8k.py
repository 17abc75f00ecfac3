"""GSM8K (Cobbe et al. 2021), 7,473 training and 1,319 test questions, with the prompt of verl's
script.

    python -m data_preprocess.gsm8k --local_dir ~/data/gsm8k \\
        [--local_dataset_path DIR_OR_FILES]
"""

from __future__ import annotations

import re
import sys
from typing import Any

from data_preprocess.cli import Example, Source, run
from data_preprocess.schema import make_row

HUB = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_GOLD = re.compile(r"#### (-?[0-9.,]+)")


def gold(solution: str) -> str | None:
    """Return the number after ``####`` without its thousands separators."""
    match = _GOLD.search(solution)
    return match.group(1).replace(",", "") if match else None


def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
    question = example["question"]
    solution = example["answer"]
    answer = gold(solution)
    if answer is None:
        return None
    prompt = [{"role": "user", "content": f"{question} {INSTRUCTION}"}]
    return make_row(
        HUB, prompt, answer, "math", split=split, index=index, answer=solution, question=question
    )


SOURCE = Source(name="gsm8k", hub=HUB, config="main", folder="~/data/gsm8k", make_row=row)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
