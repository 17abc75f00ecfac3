"""What the grading pool withstands, and what it costs: ``python -m tests.benchmarks.reward_bombs`` writes the report.

Grades 1,000 answers of which 5 % are bombs (:mod:`tests.bombs`), counts the verdicts that differ from what the answer
deserves and the processes that are left, then measures answers a second in process and in the pool. Fails (exit 1)
for a wrong verdict, a process left, or a run beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.rewards.custom_reward import CustomFunction
from core.rewards.grader_pool import Pool, cores
from core.rewards.grader_supervisor import TAKE_S
from core.rewards.grading import InProcess, Job, RewardManager, Scorers
from reward_scores import SCORERS
from tests.bombs import EXPECTED, HANGS
from tests.pools import BOMBS, Case, cases, grade, marked, none_left

REPORT = Path("results/rewards/grading_pool.md")
WORKERS, TIMEOUT_S, MEMORY_MB = 2, 2.0, 512
COUNT, SHARE = 1000, 0.05
EACH_S, START_S = 0.1, 10.0  # of any other bomb (it costs a worker), and of the pool's start, on a busy machine
LEAVE_A_DEAF_WORKER = ("babble", "impostor")  # they answer in the worker's stead and go on
MEASURED = (  # data source, method
    *(("openai/gsm8k", "strict"), ("lighteval/MATH", "published"), ("lighteval/MATH", "robust")),
    *(("lighteval/MATH", "math_verify"), ("math_dapo", "fallback"), ("numina_cn_k12", "published"), ("nq", "em")),
    ("countdown", None),
)
LONG = 4000  # characters before the answer


@dataclass(frozen=True)
class Outcome:
    found: list[Case]
    statuses: list[str]
    seconds: float
    bound: float
    left: int

    @property
    def differ(self) -> int:
        return sum(not case.holds(status) for case, status in zip(self.found, self.statuses, strict=True))

    @property
    def good(self) -> bool:
        return self.differ == 0 and self.left == 0 and self.seconds <= self.bound


def bound(found: Sequence[Case]) -> float:
    """Seconds that the run may take: the deadlines of what hangs, shared by the workers, and a little for the rest."""
    names = [case.job.response.partition("bomb:")[2] for case in found]
    waits = sum(TIMEOUT_S * (HANGS in EXPECTED[n]) + TAKE_S * (n in LEAVE_A_DEAF_WORKER) + EACH_S for n in names if n)
    return START_S + waits / WORKERS


def bomb_run() -> Outcome:
    found = cases(COUNT, SHARE)
    with marked() as processes:
        pool = Pool(
            Scorers(custom=CustomFunction(BOMBS)), num_workers=WORKERS, timeout_s=TIMEOUT_S, memory_limit_mb=MEMORY_MB
        )
        start = time.perf_counter()
        results = grade(pool, [case.job for case in found])
        seconds = time.perf_counter() - start
        pool.close()
        left = 0 if none_left(processes) else len(processes())
    return Outcome(found, [result.status.value for result in results], seconds, bound(found), left)


def rate(manager: RewardManager, jobs: list[Job], seconds: float) -> float:
    """Answers a second; the first round, in which modules are imported, is not counted."""

    async def rounds() -> float:
        await asyncio.gather(*map(manager.run, jobs))
        start, graded = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            await asyncio.gather(*map(manager.run, jobs))
            graded += len(jobs)
        return graded / (time.perf_counter() - start)

    return asyncio.run(rounds())


def rates(seconds: float) -> dict[str, tuple[float, float]]:
    """Scorer and method -> answers a second in process and in the pool."""
    found = {}
    for source, method in MEASURED:
        scorer, options = SCORERS[source], {"method": method} if method else {}
        scorers = Scorers({scorer.name: options})
        jobs = [Job(source, "so " * (LONG // 3) + text, gold, {}) for text, gold, _ in scorer.examples] * 50
        pool = Pool(scorers, num_workers=WORKERS, memory_limit_mb=1024)
        pool.preload(scorer.libraries(**options))
        found[f"{scorer.name} {method or ''}".strip()] = (
            rate(InProcess(scorers), jobs, seconds),
            rate(pool, jobs, seconds),
        )
        pool.close()
    return found


def report(outcome: Outcome, measured: dict[str, tuple[float, float]]) -> str:
    kinds: dict[str, Counter] = {}
    for case, status in zip(outcome.found, outcome.statuses, strict=True):
        kinds.setdefault(case.job.response if "bomb:" in case.job.response else "no bomb", Counter())[
            status, case.expected
        ] += 1
    bombs = sum("bomb:" in case.job.response for case in outcome.found)
    lines = [
        "# The grading pool",
        "",
        "Written by `python -m tests.benchmarks.reward_bombs`: do not edit.",
        "",
        "## Bombs",
        "",
        f"{len(outcome.found)} answers, {bombs} of them bombs of {len(EXPECTED)} kinds (`tests/bombs.py`), "
        f"{WORKERS} workers, {TIMEOUT_S:g} s an answer, {MEMORY_MB} MiB a worker: "
        f"{outcome.differ} verdicts differ from what the answer deserves, {outcome.left} processes are left, "
        f"{outcome.seconds:.1f} s (bound {outcome.bound:.1f} s).",
        "",
        "The bound: the deadline of each answer that hangs "
        f"(and {TAKE_S:g} s for each that answers in its worker's stead and goes on), {EACH_S:g} s for each bomb, "
        f"divided by the workers, plus {START_S:g} s.",
        "",
        "| answer | count | status | deserved |",
        "|---|---:|---|---|",
    ]
    for kind, counts in sorted(kinds.items(), key=lambda item: (item[0] != "no bomb", item[0])):
        for (status, expected), count in sorted(counts.items()):
            lines.append(f"| {kind.removeprefix('bomb:')} | {count} | {status} | {expected} |")
    lines += [
        "",
        "## Throughput",
        "",
        f"Answers a second, {LONG} characters each, the scorer's own examples; {WORKERS} workers, "
        f"{cores()} cores ({platform.machine()}, Python {platform.python_version()}), "
        f"load average at the end {os.getloadavg()[0]:.1f}.",
        "",
        "| scorer | in process | pool | pool / in process |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {here:,.0f} | {there:,.0f} | {there / here:.2f} |"
            for name, (here, there) in sorted(measured.items())
        ),
        "",
        "In process, scoring holds up the loop that generates; in the pool it does not. What the pool costs is the way "
        "there and back as JSON, so that it is slower for a scorer that takes microseconds.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each throughput measurement")
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    outcome = bomb_run()
    text = report(outcome, rates(options.seconds))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(text)
    return int(not outcome.good)


if __name__ == "__main__":
    sys.exit(main())
