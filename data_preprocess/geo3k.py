"""Geometry3K (Lu et al. 2021, arXiv:2105.04165), about 3,000 questions about figures, with the
prompt of verl's script.

    python -m data_preprocess.geo3k --local_dir ~/data/geo3k \\
        [--local_dataset_path DIR_OR_FILES]

The hub's split ``validation`` is left out, as published.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from core.vision.pictures import MARKER
from data_preprocess.cli import Example, Source, run
from data_preprocess.schema import make_row

HUB = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)


def stored(image: Any) -> dict[str, Any]:
    """Return a picture for a parquet file; one that ``datasets`` decoded is written as PNG."""
    if isinstance(image, dict):
        return {"bytes": image.get("bytes"), "path": image.get("path")}
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
    """Return the row of a question, None without an answer.

    Most questions have the marker of their figure already.
    """
    problem = example["problem"]
    answer = example["answer"]
    images = [stored(image) for image in example["images"]]
    if not answer:
        return None
    if MARKER not in problem:
        problem = MARKER * len(images) + problem
    prompt = [{"role": "user", "content": f"{problem} {INSTRUCTION}"}]
    text_row = make_row(
        HUB, prompt, answer, "math", split=split, index=index, answer=answer, question=problem
    )
    return {**text_row, "images": images}


SOURCE = Source(name="geo3k", hub=HUB, config=None, folder="~/data/geo3k", make_row=row)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
