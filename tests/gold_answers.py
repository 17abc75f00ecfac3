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


def gsm8k_golds(*files: str) -> list[tuple[str, str]]:
    """Solution text and gold number, without separators."""
    solutions = [row["answer"] for file in files or ("train", "test") for row in lines(f"gsm8k/{file}.jsonl")]
    return [(solution, solution.rpartition("#### ")[2].strip().replace(",", "")) for solution in solutions]


def math_solutions() -> list[tuple[str, str]]:
    """Solution text and gold answer."""
    rows = [(row["solution"], row.get("answer")) for path in ("math", "math500") for row in lines(f"{path}/test.jsonl")]
    return [(solution, gold or math_reward.unbox(math_reward.last_box(solution))) for solution, gold in rows]


def math_golds() -> list[str]:
    """Every different gold answer of MATH, sorted."""
    train = json.loads((data_dir() / "math/train_answers_only.json").read_text(encoding="utf-8"))
    return sorted({row["answer"] for row in train if row["answer"]} | {gold for _, gold in math_solutions()})


def aime_golds() -> list[str]:
    old = json.loads((data_dir() / "aime_1983_2023/aime_train.json").read_text(encoding="utf-8"))
    return [str(row["answer"]) for row in old] + [row["answer"] for row in lines("aime2024/test.jsonl")]


def qa_rows() -> dict[str, list[list[str]]]:
    """Gold answers of every question, by data set."""
    nq = ("NQ-open.dev", "NQ-open.efficientqa.dev.1.1", "NQ-open.efficientqa.test.1.1")
    sets = {"nq": [row["answer"] for name in nq for row in lines(f"nq_open/{name}.jsonl")]}
    for name, path in (
        ("nq", "nq_open/topics.dpr.nq.dev"),
        *[("triviaqa", f"triviaqa/topics.dpr.trivia.{part}") for part in ("dev", "test")],
    ):
        with (data_dir() / f"{path}.txt").open(encoding="utf-8", newline="") as file:
            sets.setdefault(name, []).extend(ast.literal_eval(row[1]) for row in csv.reader(file, delimiter="\t"))
    sets["popqa"] = [row["golden_answers"] for row in lines("popqa/popqa_1000_all_relations.jsonl")]
    single = {
        "hotpotqa": "hotpotqa_500",
        "musique": "musique_500",
        "2wikimultihopqa": "2wiki_500",
        "bamboogle": "bamboogle",
    }
    for name, file in single.items():
        sets[name] = [[row["answer"]] for row in lines(f"{name}/{file}.jsonl")]
    return sets


def qa_golds() -> list[list[str]]:
    return [golds for each in qa_rows().values() for golds in each]


def qa_outputs() -> list[tuple[str, str]]:
    """What models really answered (R1-Searcher's first stage, ten answers a question), and the gold answer."""
    rows = lines("r1_searcher_train/stage_1.jsonl")
    return [(text.strip(), row["answer"]) for row in rows for text in row["pred_anses"] if text.strip()]
