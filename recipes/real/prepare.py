"""Prepare the real model and the instructions task: the model's folder, and prompts to train on and to be held out.

    python -m recipes.real.prepare [--data-only] [--dtype bfloat16]

Writes ``outputs/real/model/`` and ``outputs/real/instructions/{train,test,openings}.parquet``. The openings are the
training topics without constraints: the model's answers to them become demonstrations
(``recipes/real/demonstrations.py``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core.errors import InputError
from data_preprocess.schema import Written, write_rows
from recipes.real.instructions import HELD_OUT, TRAIN, Instruction, instructions_of, opening, row

FOLDER = Path("outputs/real")
TRAIN_PROMPTS, TEST_PROMPTS = 4096, 200
ANYTHING = (("max_words", 200),)  # openings are graded by nobody; a row needs a ground truth


def write_instructions(folder: Path) -> list[Written]:
    """Write the three files of the task; the same on every machine."""
    rows = {
        "train": [row(one, "train", at) for at, one in enumerate(instructions_of(TRAIN, TRAIN_PROMPTS, seed=1))],
        "test": [row(one, "test", at) for at, one in enumerate(instructions_of(HELD_OUT, TEST_PROMPTS, seed=1))],
        "openings": [
            {
                **row(Instruction(topic, ANYTHING), "openings", at),
                "prompt": [{"role": "user", "content": opening(topic)}],
            }
            for at, topic in enumerate(TRAIN.topics)
        ],
    }
    return [write_rows(folder / f"{name}.parquet", lines) for name, lines in rows.items()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.real.prepare", description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the saved weights")
    parser.add_argument("--data-only", action="store_true", help="leave the model out: another is trained")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write into (default: %(default)s)")
    args = parser.parse_args()
    try:
        for written in write_instructions(args.out / "instructions"):
            print(written, flush=True)
        if args.data_only:
            return 0
        from recipes.real.model import prepare_model

        print(f"model: {prepare_model(args.out / 'model', args.dtype)}, dequantised Q4_1", flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
