"""Demonstrations for the instructions task: the model's own sentences, changed by a program to keep
constraints.

    python -m recipes.real.demonstrations outputs/real/openings.jsonl --out DEMONSTRATIONS.parquet

The answers are those to ``openings.parquet`` (``python -m core.evaluate generate``), the
constraints are drawn anew from the training vocabulary. An answer whose changes do not keep the
constraints is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import InputError
from data_preprocess.schema import Written, write_rows
from recipes.real.instructions import TRAIN, Instruction, draw, opening, rewrite, row


def demonstrations(
    answers: Sequence[Mapping[str, Any]], number: int, seed: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield rows with a prompt and the response to it, at most ``number``, and at most four from
    one answer."""
    rng = random.Random(f"demonstrations {seed}")
    topics = {opening(topic): topic for topic in TRAIN.topics}
    seen: set[tuple[str, str]] = set()
    for answer in rng.sample(4 * list(answers), 4 * len(answers)):
        if len(seen) == number:
            return
        topic = next(topic for question, topic in topics.items() if question in answer["prompt"])
        instruction = Instruction(topic, draw(TRAIN, rng).constraints)
        response = rewrite(instruction, answer["response"])
        if response is None or (instruction.prompt, response) in seen:
            continue
        seen.add((instruction.prompt, response))
        yield {**row(instruction, "demonstrations", len(seen)), "response": response}


def write_demonstrations(answers: Path, out: Path, number: int) -> Written:
    """Write the demonstrations of a file of answers. Raises InputError for a file without
    answers."""
    try:
        lines = [
            json.loads(line) for line in answers.read_text(encoding="utf-8").split("\n") if line
        ]
    except (OSError, json.JSONDecodeError) as error:
        fix = "make it with python -m core.evaluate generate"
        raise InputError([f"{answers}: cannot be read as answers ({error}); {fix}"]) from error
    return write_rows(out, list(demonstrations(lines, number)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.real.demonstrations", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "answers", type=Path, metavar="ANSWERS.jsonl", help="the answers to openings.parquet"
    )
    parser.add_argument("--out", type=Path, required=True, help="the parquet file to write")
    parser.add_argument(
        "--number", type=int, default=800, help="The most demonstrations (default: %(default)s)."
    )
    args = parser.parse_args()
    try:
        print(write_demonstrations(args.answers, args.out, args.number), flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
