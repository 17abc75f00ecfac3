"""Programs judged a second: HumanEval's references, contest-like scripts, and programs that misbehave.

``DATA_DIR=... python -m tests.benchmarks.code_rewards [--answers 40] [--threads 2]`` prints one line a kind of answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reward_scores import unit_tests
from reward_scores.sandbox import isolation

SUM = {"inputs": [f"{n} {n}\n" for n in range(10)], "outputs": [f"{2 * n}\n" for n in range(10)]}
SCRIPT = "a, b = map(int, input().split())\nprint(a + b)"
MISBEHAVING = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: os._exit(0)",
    "x = bytearray(1 << 40)",
    "import socket\nsocket.socket()",
    "while True: print('x' * 10**6)",
)
Answer = tuple[str, Any]


def answers(count: int) -> dict[str, list[Answer]]:
    found = {
        "scripts, 10 tests each": [(SCRIPT, SUM)] * count,
        "misbehaving, 10 tests each": [(MISBEHAVING[n % len(MISBEHAVING)], SUM) for n in range(count)],
    }
    data = Path(os.environ.get("DATA_DIR") or "") / "humaneval" / "HumanEval.jsonl.gz"
    if data.is_file():
        with gzip.open(data, "rt") as file:
            rows = [json.loads(line) for line in file][:count]
        found["HumanEval, assertions"] = [(row["prompt"] + row["canonical_solution"], row) for row in rows]
    return found


def measure(given: Sequence[Answer], threads: int) -> tuple[float, float, float]:
    """Answers a second, median seconds of an answer, and the share that passes."""

    def one(answer: Answer) -> tuple[float, float]:
        start = time.perf_counter()
        acc = unit_tests.score(f"```python\n{answer[0]}\n```", answer[1]).acc
        return time.perf_counter() - start, acc

    one(given[0])
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        seconds, accs = zip(*pool.map(one, given), strict=True)
    return len(given) / (time.perf_counter() - start), statistics.median(seconds), statistics.fmean(accs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(f"{isolation()}, {options.threads} at a time, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for kind, given in answers(options.answers).items():
        rate, median, passing = measure(given, options.threads)
        print(f"{kind:28} {rate:6.1f} answers/s   median {1000 * median:6.0f} ms   {passing:.0%} pass")


if __name__ == "__main__":
    main()
