"""MATH (Hendrycks et al. 2021), 7,500 training and 5,000 test problems, with the prompt of verl's
script.

    python -m data_preprocess.math_dataset --local_dir ~/data/math \\
        [--local_dataset_path DIR_OR_FILES]

Beyond verl's columns, ``extra_info`` keeps the problem, its solution, level and subject.
"""

from __future__ import annotations

import sys
from typing import Any

from data_preprocess.cli import Example, Source, run
from data_preprocess.schema import make_row
from reward_scores.math_reward import last_box, unbox

HUB = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def gold(example: Example) -> str | None:
    """Return the content of the solution's last box, or the given answer where there is no
    solution."""
    solution = example.get("solution")
    return unbox(last_box(solution)) if solution else example.get("answer")


def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
    problem = example["problem"]
    answer = gold(example)
    if not answer:
        return None
    prompt = [{"role": "user", "content": f"{problem} {INSTRUCTION}"}]
    level = example.get("level")
    return make_row(
        HUB,
        prompt,
        answer,
        "math",
        split=split,
        index=index,
        answer=example.get("solution"),
        question=problem,
        level=None if level is None else str(level),
        subject=example.get("type") or example.get("subject"),
    )


SOURCE = Source(name="math_dataset", hub=HUB, config=None, folder="~/data/math", make_row=row)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
