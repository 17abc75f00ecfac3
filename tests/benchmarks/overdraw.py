"""Groups drawn beyond those that a step expects to need: how long a step takes, and what the margin costs.

    python -m tests.benchmarks.overdraw

Dynamic sampling begins as many groups as the keep rate suggests. Where fewer pass, more are begun late, and each of
them may need as long as the longest answer. A margin of z standard deviations of the number that passes begins more at
once. Simulated in virtual time at DAPO's size: 512 groups of 16 answers out of at most 1,536 prompts at once, answers
of 5,000 tokens on average and up to 20,480, half of the variance of a length's logarithm being the prompt's, and a
keep rate near 0.55. An engine writes a token a unit of time; a unit here is 16 tokens. Which groups train does not
depend on the margin. Writes ``results/benchmarks/overdraw.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from core.data.sampler import sampling_seed
from core.engines import SampleRequest, SamplingParams
from core.rollout import collect as collecting
from core.rollout.collect import CollectLimits, CollectState, collect
from core.types import Prompt, ScoredGroup
from reward_scores.score import Score
from tests.benchmarks.collecting import mixed
from tests.scripted_engine import ScriptedEngine

TARGET = Path("results/benchmarks/overdraw.md")
UNIT = 16  # tokens


@dataclass(frozen=True)
class Workload:
    """Sizes of DAPO's 32B run; ``slots`` are the answers that all engines decode at once."""

    steps: int = 4
    wanted: int = 512
    wave: int = 1536
    samples: int = 16
    slots: int = 4096
    median: int = 3000 // UNIT
    spread: float = 1.0  # of the logarithm
    limit: int = 20_480 // UNIT
    certain: float = 0.3  # of the Beta distribution of a prompt's share of right answers: lower, more are all alike


@dataclass(frozen=True)
class Outcome:
    """What the steps of one run took: tokens of time a step, drawn groups a kept one, and the ordinals that trained."""

    seconds: float
    drawn: float
    tokens: float
    batches: tuple[tuple[int, ...], ...]


def simulate(work: Workload, margin: float, seed: int) -> Outcome:
    """Collect the steps of a run with a margin of so many standard deviations."""
    engine = ScriptedEngine(None, lambda request: [7] * _length(work, request), max_concurrency=work.slots)

    async def roll_group(ordinal: int) -> ScoredGroup:
        sampling = SamplingParams(max_tokens=work.limit)
        seeds = [sampling_seed(seed, ordinal, i) for i in range(work.samples)]
        requests = [SampleRequest((1 + ordinal,), sampling, one) for one in seeds]
        answers = await asyncio.gather(*map(engine.sample, requests))
        chance = random.Random(zlib.crc32(f"{seed} {ordinal}".encode()))
        right = chance.betavariate(work.certain, work.certain)
        scores = tuple(Score(float(chance.random() < right)) for _ in answers)
        return ScoredGroup(Prompt(ordinal, str(ordinal), (1,), (), "", "test"), tuple(answers), scores)

    def too_few_expected(step: collecting._Step) -> bool:
        kept = sum(isinstance(one, ScoredGroup) for ordinal, one in step.decided.items() if ordinal < step.next_to_draw)
        rate = max(step.keep_rate(), 0.01)
        some = len(step.in_flight)
        return kept + some * rate - margin * math.sqrt(some * rate * (1 - rate)) < step.limits.wanted

    async def run() -> Outcome:
        state, batches = CollectState(keep_rate=0.55), []
        limits = CollectLimits(work.wanted, work.wave, 100 * work.wave)
        for _ in range(work.steps):
            collected = await collect(roll_group, mixed, state, limits)
            batches.append(tuple(group.prompt.ordinal for group in collected.groups))
            state = collected.state
        begun = len(engine.records) / (work.samples * work.wanted * work.steps)
        return Outcome(engine.now / work.steps, begun, sum(engine.busy_time()), tuple(batches))

    # Without a margin the rule is core's own.
    rule = patch.object(collecting._Step, "too_few_expected", too_few_expected) if margin else nullcontext()
    with rule:
        return asyncio.run(run())


def _length(work: Workload, request: SampleRequest) -> int:
    prompt = random.Random(request.prompt_ids[0]).gauss(0, 1)
    own = random.Random(request.seed).gauss(0, 1)
    length = work.median * math.exp(work.spread * (prompt + own) / math.sqrt(2))
    return max(1, min(work.limit, round(length)))


def render(work: Workload, found: dict[float, list[Outcome]]) -> str:
    first = found[0.0]
    same = all(one.batches == other.batches for runs in found.values() for one, other in zip(runs, first, strict=True))
    rows = []
    for margin, runs in found.items():
        ratios = [one.seconds / other.seconds for one, other in zip(runs, first, strict=True)]
        low, high = min(ratios), max(ratios)
        rows.append(
            f"| {margin:g} | {statistics.fmean(one.seconds for one in runs) * UNIT:,.0f} | "
            f"{statistics.fmean(ratios):.3f} ({low:.3f} to {high:.3f}) | "
            f"{statistics.fmean(one.drawn for one in runs):.3f} | "
            f"{statistics.fmean(one.tokens / other.tokens for one, other in zip(runs, first, strict=True)):.3f} |"
        )
    return "\n".join(
        [
            "# A margin of groups at DAPO's size",
            "",
            "Generated by `python -m tests.benchmarks.overdraw`, whose head says what is simulated. "
            f"{len(first)} seeds of {work.steps} steps. The same training batches with every margin: "
            f"{'yes' if same else 'NO'}.",
            "",
            "| margin, standard deviations | tokens of time a step | of that without a margin (range over seeds) | "
            "groups begun a kept one | tokens written, relative |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overdraw")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--margins", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    args = parser.parse_args()
    work = Workload()
    found = {margin: [simulate(work, margin, seed) for seed in range(1, args.seeds + 1)] for margin in args.margins}
    TARGET.write_text(render(work, found), encoding="utf-8")
    print(TARGET.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
