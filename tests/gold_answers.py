"""Gold answers, reference solutions and model outputs of the public data sets under ``DATA_DIR``."""

from __future__ import annotations

import ast
import csv
import json
import os
from pathlib import Path

from reward_scores import math_reward


def data_dir() -> Path:
    return Path(os.environ["DATA_DIR"])


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in (data_dir() / path).read_text(encoding="utf-8").splitlines()]


def math_solutions() -> list[tuple[str, str]]:
    """Solution text and gold answer."""
    rows = [(row["solution"], row.get("answer")) for path in ("math", "math500") for row in lines(f"{path}/test.jsonl")]
    return [(solution, gold or math_reward.unbox(math_reward.last_box(solution))) for solution, gold in rows]


def math_golds() -> list[str]:
    """Every different gold answer of MATH, sorted."""
    train = json.loads((data_dir() / "math/train_answers_only.json").read_text(encoding="utf-8"))
    return sorted({row["answer"] for row in train if row["answer"]} | {gold for _, gold in math_solutions()})


def qa_golds() -> list[list[str]]:
    """Gold answers of every question."""
    nq = ("NQ-open.dev", "NQ-open.efficientqa.dev.1.1", "NQ-open.efficientqa.test.1.1")
    found = [row["answer"] for name in nq for row in lines(f"nq_open/{name}.jsonl")]
    for path in ("nq_open/topics.dpr.nq.dev", "triviaqa/topics.dpr.trivia.dev", "triviaqa/topics.dpr.trivia.test"):
        with (data_dir() / f"{path}.txt").open(encoding="utf-8", newline="") as file:
            found += [ast.literal_eval(row[1]) for row in csv.reader(file, delimiter="\t")]
    found += [row["golden_answers"] for row in lines("popqa/popqa_1000_all_relations.jsonl")]
    for path in ("hotpotqa/hotpotqa_500", "musique/musique_500", "2wikimultihopqa/2wiki_500", "bamboogle/bamboogle"):
        found += [[row["answer"]] for row in lines(f"{path}.jsonl")]
    return found
