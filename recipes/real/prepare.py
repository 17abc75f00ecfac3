"""Prepare the real model and a task: the model's folder, and prompts to train on and to be held
out.

    python -m recipes.real.prepare [--task instructions|passages|arithmetic|search] \\
        [--data-only] [--dtype bfloat16]

Writes ``outputs/real/model/`` and ``outputs/real/TASK/*.parquet``: ``train``, the held-out
``test``, the two controls of ``recipes/real/controls.py`` and what fine-tuning starts from. For
instructions that is ``openings``, the training topics without constraints: the model's answers to
them become demonstrations (``recipes/real/demonstrations.py``). Passages and arithmetic have
``demonstrations`` at once. Search has a corpus, and questions ``to_demonstrate`` with
``recipes/search_r1/demonstrations.py``. passages and search read public data under ``DATA_DIR``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import InputError
from data_preprocess.schema import Written, write_rows
from recipes.real import arithmetic, passages, search
from recipes.real.controls import control_files
from recipes.real.instructions import HELD_OUT, TRAIN, Instruction, instructions_of, opening, row

FOLDER = Path("outputs/real")
TRAIN_PROMPTS = 4096
TEST_PROMPTS = 200
ANYTHING = (("max_words", 200),)  # openings are graded by nobody; a row needs a ground truth


def instruction_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the three files of the instructions task; the same on every machine."""
    return {
        "train": [
            row(one, "train", at)
            for at, one in enumerate(instructions_of(TRAIN, TRAIN_PROMPTS, seed=1))
        ],
        "test": [
            row(one, "test", at)
            for at, one in enumerate(instructions_of(HELD_OUT, TEST_PROMPTS, seed=1))
        ],
        "openings": [
            {
                **row(Instruction(topic, ANYTHING), "openings", at),
                "prompt": [{"role": "user", "content": opening(topic)}],
            }
            for at, topic in enumerate(TRAIN.topics)
        ],
    }


TASKS: dict[str, Callable[[], dict[str, list[dict[str, Any]]]]] = {
    "instructions": instruction_rows,
    "passages": passages.rows_of,
    "arithmetic": arithmetic.rows_of,
    "search": search.rows_of,
}


def write_task(task: str, folder: Path) -> list[Written]:
    """Write the files of a task into ``folder``. Raises InputError where data that it reads is
    missing."""
    rows = TASKS[task]()
    rows |= control_files(rows["train"])
    return [write_rows(folder / f"{name}.parquet", lines) for name, lines in rows.items()]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.real.prepare", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--task", choices=TASKS, default="instructions", help="the task (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the saved weights"
    )
    parser.add_argument(
        "--data-only", action="store_true", help="leave the model out: another is trained"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="the folder to write into (default: %(default)s)"
    )
    args = parser.parse_args()
    try:
        for written in write_task(args.task, args.out / args.task):
            print(written, flush=True)
        if args.task == "search":
            print(search.write_corpus(args.out / args.task / "corpus.jsonl"), flush=True)
        if args.data_only:
            return 0
        from recipes.real.model import prepare_model

        print(
            f"model: {prepare_model(args.out / 'model', args.dtype)}, dequantised Q4_1", flush=True
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
