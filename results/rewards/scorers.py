"""Count what the readers of answers get wrong on the pairs of ``pairs.jsonl``, by kind, and write
``scorers.md``.

``python -m results.rewards.scorers`` writes the table. A pair is an answer, a gold one and whether
a careful person would call it right; false right trains a policy to write wrong answers, false
wrong only slows it down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reward_scores import math_dapo, math_reward, prime_math, qa_em
from reward_scores.equivalence import equivalent
from reward_scores.prm800k import grade_answer
from reward_scores.symbolic import math_verify_equal

FOLDER = Path(__file__).parent
Row = dict[str, Any]


def pairs() -> list[Row]:
    return [
        json.loads(line)
        for line in (FOLDER / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def _boxed(scorer: Any, method: str) -> Callable[[Row], bool]:
    return lambda row: scorer.score(f"\\boxed{{{row['answer']}}}", row["gold"], {}, method).acc == 1


def _response(scorer: Any, method: str) -> Callable[[Row], bool]:
    return lambda row: scorer.score(row["answer"], row["gold"], {}, method).acc == 1


def _short(method: str) -> Callable[[Row], bool]:
    return lambda row: (
        qa_em.score(f"<answer>{row['answer']}</answer>", {"target": row["gold"]}, {}, method).acc
        == 1
    )


READERS: dict[str, dict[str, Callable[[Row], bool]]] = {
    "answer": {
        "robust": lambda row: equivalent(row["answer"], row["gold"]),
        "math_verify": lambda row: math_verify_equal(row["answer"], row["gold"]),
        "math_reward, published": lambda row: math_reward.is_equiv(row["answer"], row["gold"]),
        "math_dapo, published": _boxed(math_dapo, "fallback"),
        "prime_math, published": _boxed(prime_math, "published"),
        "geo3k, published": lambda row: grade_answer(row["answer"], row["gold"]),
    },
    "response": {
        "robust": _response(math_dapo, "robust"),
        "math_verify": _response(math_dapo, "math_verify"),
        "math_dapo, published": _response(math_dapo, "fallback"),
        "math_reward, published": _response(math_reward, "published"),
    },
    "short": {"robust": _short("robust"), "em, published": _short("em")},
}


def mistakes(kind_of_reader: str, judge: Callable[[Row], bool]) -> Iterator[tuple[Row, bool]]:
    """Yield the rows that a reader judges otherwise than the pair says, with what it said."""
    for row in pairs():
        if row["reader"] == kind_of_reader and (said := bool(judge(row))) != row["right"]:
            yield row, said


def table() -> str:
    """Return the page: one table a kind of reader, with false right / false wrong of each kind of
    pair."""
    lines = ["# What the readers of answers get wrong", ""]
    lines += [
        "Cells are false right / false wrong. Written by `python -m results.rewards.scorers`."
    ]
    for reader, judges in READERS.items():
        kinds = list(dict.fromkeys(row["kind"] for row in pairs() if row["reader"] == reader))
        sizes = {
            kind: sum(row["kind"] == kind for row in pairs() if row["reader"] == reader)
            for kind in kinds
        }
        lines += [
            "",
            f"| kind | pairs | {' | '.join(judges)} |",
            f"|---|---|{'---|' * len(judges)}",
        ]
        wrong = {name: list(mistakes(reader, judge)) for name, judge in judges.items()}
        for kind in [*kinds, "all"]:
            cells = []
            for name in judges:
                said = [said for row, said in wrong[name] if kind in ("all", row["kind"])]
                cells.append(f"{sum(said)} / {len(said) - sum(said)}")
            lines.append(
                f"| {kind} | {sizes.get(kind, sum(sizes.values()))} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    about = "Count what the readers of answers get wrong, and write results/rewards/scorers.md."
    argparse.ArgumentParser(
        prog="python -m results.rewards.scorers", description=about
    ).parse_args()
    (FOLDER / "scorers.md").write_text(table(), encoding="utf-8")
    print(f"wrote {FOLDER / 'scorers.md'}")


if __name__ == "__main__":
    main()
