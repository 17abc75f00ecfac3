"""Prepare the lab: the data of the hops task and the tiny base model.

    python -m recipes.lab.prepare

Writes ``outputs/lab/data/{train,test}.parquet`` and ``outputs/lab/base/<hash>/``, to which
``outputs/lab/base/current`` points. A base model that is there is kept; the data take a second and
are written again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from recipes.lab import hops

FOLDER = Path("outputs/lab")
TRAIN_QUESTIONS = 10_240


@dataclass(frozen=True)
class Prepared:
    train_file: Path
    test_file: Path
    base_model: Path


def prepare(
    folder: Path = FOLDER,
    recipe: hops.HopsRecipe = hops.RECIPE,
    train_questions: int = TRAIN_QUESTIONS,
) -> Prepared:
    """Make what is missing in ``folder``. The test questions are no part of the warm start."""
    recipe.write(recipe.splits(train_questions), folder / "data")
    base_model = recipe.build(folder / "base")
    return Prepared(folder / "data" / "train.parquet", folder / "data" / "test.parquet", base_model)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m recipes.lab.prepare",
        description="Make the data and the base model of the lab in outputs/lab/.",
    ).parse_args()
    prepared = prepare()
    print(
        f"data: {prepared.train_file} and {prepared.test_file}\nbase model: {prepared.base_model}",
        flush=True,
    )


if __name__ == "__main__":
    main()
