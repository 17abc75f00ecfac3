"""Streaming collection beside waves, on the same prompts with long-tailed lengths: idle engine time and wasted tokens.

    python -m tests.benchmarks.collecting

A *wave* is the published scheme: generate ``gen_batch_size`` prompts, wait for all of them, filter, repeat until the
step has its groups. *Streaming* is ``core.rollout.collect``. Both answer the same prompts with the same lengths and
verdicts,
which are functions of a prompt and a sample number (a policy that stands still), in virtual time: an engine with a
bounded number of slots, one second a token. Where a step ends, both go on after the last prompt that was trained, so
that batches can be compared; the published code would drop the rest of the wave. *Idle* are the seconds in which an
average slot has no request while a step is collected. *Wasted* are tokens of answers that neither train nor decide
which groups train: surplus groups that are drawn again, and answers that are aborted. Writes
``results/benchmarks/collecting.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.data.draw_order import sampling_seed
from core.engines import SampleRequest, SamplingParams
from core.rollout.collect import CollectLimits, CollectState, collect, collect_ahead, fresh_enough
from core.types import Prompt, ScoredGroup
from reward_scores.score import Score
from tests.scripted_engine import ScriptedEngine

TARGET = Path("results/benchmarks/collecting.md")
GOAL = 1.5  # times fewer wasted tokens at staleness 1


@dataclass(frozen=True)
class Workload:
    """``wanted`` groups a step out of waves of ``wave`` prompts; lengths are log-normal and cut at ``limit``."""

    steps: int = 12
    wanted: int = 32
    wave: int = 96
    samples: int = 8
    slots: int = 256
    median: int = 150
    spread: float = 1.1  # of the logarithm: the longest of a wave is about 20 times the median
    limit: int = 4096


@dataclass(frozen=True)
class Outcome:
    """One run: the ordinals of each step, virtual seconds, idle seconds of an average slot, and tokens."""

    batches: tuple[tuple[int, ...], ...]
    seconds: float
    idle: float
    trained_tokens: int
    wasted_tokens: float
    total_tokens: float


class Simulation:
    """An engine and the groups that it makes; ``seed`` is the run's."""

    def __init__(self, work: Workload, seed: int):
        self.work, self.seed = work, seed
        self.engine = ScriptedEngine(None, self.respond, max_concurrency=work.slots)
        self.tokens: dict[int, int] = {}  # of every group that was filtered

    def respond(self, request: SampleRequest) -> list[int]:
        length = random.Random(f"length {request.seed}").lognormvariate(0, self.work.spread) * self.work.median
        return [7] * max(1, min(self.work.limit, round(length)))

    async def roll_group(self, ordinal: int) -> ScoredGroup:
        sampling = SamplingParams(max_tokens=self.work.limit)
        requests = [
            SampleRequest((1,), sampling, sampling_seed(self.seed, ordinal, i)) for i in range(self.work.samples)
        ]
        answers = await asyncio.gather(*map(self.engine.sample, requests))
        rng = random.Random(f"verdicts {self.seed} {ordinal}")
        right = rng.betavariate(0.5, 0.5)  # many prompts are nearly always right or nearly always wrong
        scores = tuple(Score(float(rng.random() < right)) for _ in answers)
        self.tokens[ordinal] = sum(len(answer.response_ids) for answer in answers)
        return ScoredGroup(Prompt(ordinal, str(ordinal), (1,), (), "", "test"), tuple(answers), scores)

    def outcome(self, batches: list[tuple[int, ...]], useful: set[int]) -> Outcome:
        """``useful``: the ordinals whose answers trained or were filtered out, once each."""
        busy = sum(self.engine.busy_time())
        spent = sum(self.tokens[ordinal] for ordinal in useful)
        trained = sum(self.tokens[ordinal] for batch in batches for ordinal in batch)
        idle = self.engine.now - busy / self.work.slots
        return Outcome(tuple(batches), self.engine.now, idle, trained, busy - spent, busy)


def mixed(group: ScoredGroup) -> bool:
    return len({score.value for score in group.scores}) > 1


async def waves(simulation: Simulation, work: Workload) -> Outcome:
    start, batches = 0, []
    for _ in range(work.steps):
        kept, at = [], start
        while len(kept) < work.wanted:
            groups = await asyncio.gather(*map(simulation.roll_group, range(at, at + work.wave)))
            kept += [group.prompt.ordinal for group in groups if mixed(group)]
            at += work.wave
        batches.append(tuple(kept[: work.wanted]))
        start = batches[-1][-1] + 1
    return simulation.outcome(batches, set(range(start)))


async def streaming(simulation: Simulation, work: Workload, staleness: int = 0) -> Outcome:
    state, batches = CollectState(keep_rate=0.5), []
    limits = CollectLimits(work.wanted, work.wave, 100 * work.wave)
    for step in range(work.steps):
        simulation.engine.update_weights((), step)
        state = fresh_enough(state, step - staleness)
        collected = await collect(simulation.roll_group, mixed, state, limits, ahead=staleness > 0)
        batches.append(tuple(group.prompt.ordinal for group in collected.groups))
        state = collected.state
        if staleness and step < work.steps - 1:  # behind the update in a run; an update takes no time here
            state = await collect_ahead(simulation.roll_group, mixed, collected, limits)
    return simulation.outcome(batches, set(range(state.next_ordinal)))


SCHEMES: dict[str, Callable] = {
    "waves": waves,
    "streaming, staleness 0": streaming,
    "streaming, staleness 1": lambda simulation, work: streaming(simulation, work, staleness=1),
}


def simulate(scheme: str, work: Workload, seed: int) -> Outcome:
    return asyncio.run(SCHEMES[scheme](Simulation(work, seed), work))


def render(work: Workload, outcomes: dict[str, list[Outcome]]) -> str:
    first = outcomes["waves"]
    same = all([o.batches for o in found] == [o.batches for o in first] for found in outcomes.values())
    rows = []
    for name, found in outcomes.items():
        steps = [o.seconds / work.steps for o in found]
        faster = statistics.fmean(a.seconds / b.seconds for a, b in zip(first, found, strict=True))
        wasted = statistics.fmean(o.wasted_tokens / o.trained_tokens for o in found)
        fewer = statistics.fmean(a.wasted_tokens / b.wasted_tokens for a, b in zip(first, found, strict=True))
        idle = statistics.fmean(o.idle / work.steps for o in found)
        rows.append(
            f"| {name} | {statistics.fmean(steps):.0f} | {faster:.2f} | {idle:.0f} | {wasted:.2f} | {fewer:.2f} |"
        )
    met = rows[-1].split("|")[-2].strip()
    return "\n".join(
        [
            "# Streaming collection beside waves",
            "",
            "Generated by `python -m tests.benchmarks.collecting`, whose head says what is compared and how. Virtual "
            f"time; {len(first)} seeds of {work.steps} steps; {work.wanted} groups of {work.samples} answers a step, "
            f"waves of {work.wave} prompts, {work.slots} slots, log-normal lengths (median {work.median}, at most "
            f"{work.limit}).",
            "",
            f"The same training batches in every scheme: {'yes' if same else 'NO'}. Wasted tokens at staleness 1, goal "
            f"at least {GOAL} times fewer than waves: {met}, {'met' if float(met) >= GOAL else 'not met'}.",
            "",
            "| scheme | s a step | times as fast | idle s a step | wasted a trained token | times fewer wasted |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.collecting")
    parser.add_argument("--seeds", type=int, default=5)
    work = Workload()
    seeds = range(1, parser.parse_args().seeds + 1)
    outcomes = {scheme: [simulate(scheme, work, seed) for seed in seeds] for scheme in SCHEMES}
    TARGET.write_text(render(work, outcomes), encoding="utf-8")
    print(TARGET.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
