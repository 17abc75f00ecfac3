"""How a step's seconds grow with the number of answers and with their length, beside the FLOP formula.

    python -m tests.benchmarks.growth [--steps 2] [--threads 2]

The model, the prompts and the formula are those of ``tests/benchmarks/step.py``, whose head states it: 8 prompts with
8 to 128 answers of 64 tokens each, and 8 prompts with 8 answers of 64 to 2,048 tokens. Every size is a run of its own,
and its seconds are the median of its steps but the first (small sizes take more steps); micro-batches have at most
8,192 tokens. **Goal**: seconds grow as the FLOPs do, within 15 %. What grows slower had overhead at the small size,
what grows faster wastes work at the large one, or waits for memory: decoding reads all stored keys and values for each
new token, and a number that was read is worth four FLOPs. The last columns say how many bytes that is, and the seconds
they take at the measured rate: the best of ten sums of 1 GiB, same threads.
Writes ``results/benchmarks/growth.{json,md,svg}``; ``--table`` draws the committed numbers again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core.tracking.run_manifest import hardware
from results.reporting.pages import Curves, Line, Table, draw, markdown_table
from tests.benchmarks.decode import model_3m
from tests.benchmarks.step import ROOT, flops, prompt_length
from tests.benchmarks.trl.compare import prepare, run

PROMPTS, LEAST = 8, 64
ANSWERS, TOKENS = (64, 128, 256, 512, 1024), (64, 256, 512, 1024, 2048)
GOAL = 0.15
PHASES = ("timing_s/update_actor", "timing_s/gen")
MICRO_TOKENS = 8192
LEAST_TOKENS = 80_000  # of all answers of all timed steps: small steps are timed more often


def memory_rate(threads: int) -> float:
    """Bytes a second that a sum of 1 GiB reads, the best of ten."""
    torch.set_num_threads(threads)
    data, times = torch.ones(2**28), []
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def cache_bytes(prompt: float, *, prompts: int, answers: int, new_tokens: int) -> float:
    """Bytes of keys and values that decoding reads: of a prompt once a step for all its answers."""
    config = model_3m().config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    columns = prompts * prompt + answers * new_tokens / 2  # of all rows, in the mean of the steps
    return 2 * config.num_hidden_layers * width * 4 * new_tokens * columns


def measure(steps: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        length = prompt_length(folder)
        sizes = [("answers", answers, LEAST) for answers in ANSWERS] + [("tokens", LEAST, size) for size in TOKENS]
        points = []
        for axis, answers, tokens in sizes:
            shape = {"prompts": PROMPTS, "n": answers // PROMPTS, "max-new": tokens}
            size = {"prompts": PROMPTS, "answers": answers, "new_tokens": tokens}
            timed = max(steps, LEAST_TOKENS // (answers * tokens))
            options = {"steps": 1 + timed, "dtype": "fp32", "micro-tokens": MICRO_TOKENS, **shape}
            found = run("ours", sys.executable, folder, "fixed", threads, **options)
            point = {"axis": axis, "answers": answers, "tokens": tokens, "cache_bytes": cache_bytes(length, **size)}
            points.append({**point, "flops": sum(flops(length, **size).values()), **found})
            print(axis, answers, tokens, f"{found['seconds']:.2f} s", flush=True)
    rate = memory_rate(threads)
    return {"threads": threads, "hardware": hardware()["cpu"], "memory_bytes_per_second": rate, "points": points}


def growth(
    points: Sequence[Mapping[str, Any]], axis: str, phase: str | None = None
) -> list[tuple[Mapping[str, Any], float, float]]:
    """Return the points of one axis, each with the growth of its FLOPs and of its seconds since the smallest.

    ``phase``: of this phase's seconds. Both phases have FLOPs that grow alike.
    """
    mine = [point for point in points if point["axis"] == axis]
    seconds = [point["phases"][phase] if phase else point["seconds"] for point in mine]
    return [(one, one["flops"] / mine[0]["flops"], t / seconds[0]) for one, t in zip(mine, seconds, strict=True)]


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page."""
    rows, worst = [], 0.0
    of_phases = dict.fromkeys(PHASES, 0.0)
    for axis in ("answers", "tokens"):
        for name in PHASES:
            off = [seconds / work - 1 for _, work, seconds in growth(report["points"], axis, name)]
            of_phases[name] = max(of_phases[name], *map(abs, off))
        for point, work, seconds in growth(report["points"], axis):
            off = seconds / work - 1
            worst = max(worst, abs(off))
            shape = [f"{point[name]:,}" for name in ("answers", "tokens")]
            row = [*shape, f"{point['seconds']:.2f}", f"{work:.2f}", f"{seconds:.2f}", f"{off:+.0%}"]
            of_phase = [point["phases"][name] for name in PHASES]
            read = point["cache_bytes"]
            waits = read / report["memory_bytes_per_second"]
            rows.append([*row, *(f"{value:.2f}" for value in of_phase), f"{read / 1e9:.1f}", f"{waits:.2f}"])
    header = ["answers a step", "tokens an answer", "s a step", "growth of FLOPs", "growth of seconds", "difference"]
    header += ["s of the update", "s of generation", "GB of keys and values read", "s they take"]
    verdict = "met" if worst <= GOAL else "NOT met"
    text = (
        "Generated by `python -m tests.benchmarks.growth`, whose head states workload and formula. "
        f"{report['hardware']}, {report['threads']} threads, fp32, "
        f"memory read at {report['memory_bytes_per_second'] / 1e9:.1f} GB/s.\n\n"
        f"Goal: seconds grow as the FLOPs do, within {GOAL:.0%}: {verdict}, the largest difference is {worst:.0%}, "
        f"that of the update alone {of_phases[PHASES[0]]:.0%}, of generation alone {of_phases[PHASES[1]]:.0%}."
    )
    picture = "![Seconds and FLOPs, both as growth since the smallest step](growth.svg)"
    return f"# Growth of a step\n\n{text}\n\n{picture}\n\n{markdown_table(Table(header, rows))}\n"


def picture(report: Mapping[str, Any]) -> str:
    """Return an SVG: growth of the seconds over growth of the FLOPs, both as powers of two."""
    lines, most = [], 0.0
    for at, axis in enumerate(("answers", "tokens")):
        pairs = [(math.log2(work), math.log2(seconds)) for _, work, seconds in growth(report["points"], axis)]
        most = max(most, pairs[-1][0])
        lines.append(Line(f"more {axis}", *map(list, zip(*pairs, strict=True)), at))
    lines.append(Line("as the FLOPs", [0.0, most], [0.0, most], 2))
    svg, _ = draw(Curves("Growth of seconds, log2", lines, x="growth of FLOPs, log2"), 0, ground="white")
    end = svg.index(">") + 1
    return f'{svg[:end]}<rect width="100%" height="100%" fill="#ffffff"/>{svg[end:]}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="Timed steps of the large sizes.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="Draw the committed numbers again.")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    args = parser.parse_args()
    kept = args.out / "growth.json"
    report = json.loads(kept.read_text()) if args.table else measure(args.steps, args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "growth.md").write_text(page(report))
    (args.out / "growth.svg").write_text(picture(report))
    print(page(report))


if __name__ == "__main__":
    main()
