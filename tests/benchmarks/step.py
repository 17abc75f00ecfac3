"""Where a step's time goes: tokens a second, seconds by phase, peak memory, model FLOPs
utilisation.

    python -m tests.benchmarks.step [--steps 5] [--repeats 3] [--threads 2] [--dtype fp32]
        [--former FOLDER] [--beside "KEY=VALUE ..."]

The workload is that of ``tests/benchmarks/trl`` (32 prompts x 8 answers of 64 tokens, 3.2 M
parameters), through the ordinary trainer. **Formula.** A forward pass over a token costs ``2 N + 4
L H s`` FLOPs: N the parameters of the matrix products (head included, embedding table not), L
layers, H hidden size, s the mean number of positions it attends to. Generating costs one forward
pass for each prompt (shared by its answers) and for each new token; the update three for each of
these tokens (forward, and twice that backward), since it shares the prompts, too. Repeated prompts
would count for nothing. Utilisation is that over the seconds of the phase, over the measured peak:
the best of ten products of two 2048 x 2048 matrices, same precision, same threads. A figure is the
median of the repeats; with ``--former``, a clone with earlier code takes turns with this one, with
``--beside`` this code under other keys.
Writes ``results/benchmarks/step.{json,md}``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from core.tracking.run_manifest import hardware
from tests.benchmarks.model_3m import PROMPTS, SAMPLES, model_3m
from tests.benchmarks.trl.compare import prepare, run

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS = 64


def matmul_peak(threads: int, dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of a product of two square matrices, the best of ten."""
    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def flops(
    prompt: float,
    *,
    prompts: int = PROMPTS,
    answers: int = PROMPTS * SAMPLES,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, float]:
    """FLOPs of a step's generation and of its update, by the formula above. ``prompt`` is the
    prompts' mean length."""
    model = model_3m()
    config = model.config
    matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed_tokens" not in name
    )
    attention = 4 * config.num_hidden_layers * config.hidden_size

    def forward(tokens: float, attended: float) -> float:
        return tokens * (2 * matrices + attention * attended)

    once = forward(prompts * prompt, prompt / 2) + forward(
        answers * new_tokens, prompt + new_tokens / 2
    )
    return {"gen": once, "update_actor": 3 * once}


def prompt_length(folder: Path) -> float:
    """Return the prompts' mean number of tokens: one a character."""
    prompts = (folder / "prompts.jsonl").read_text().splitlines()
    return sum(len(json.loads(line)) for line in prompts) / len(prompts)


def measure(args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        options = {"steps": args.steps, "dtype": args.dtype, "max-new": NEW_TOKENS}
        sides = {"ours": (ROOT, options)}
        if args.former:
            sides["former"] = args.former, options
        if args.beside:
            sides["beside"] = ROOT, options | {"keys": args.beside}
        runs = {side: [] for side in sides}
        for repeat in range(args.repeats):
            for side in sorted(sides, reverse=repeat % 2 == 0):
                root, given = sides[side]
                found = run("ours", sys.executable, folder, "fixed", args.threads, root, **given)
                runs[side].append(found)
        work = flops(prompt_length(folder))
    peak = matmul_peak(args.threads, {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype])
    found = {side: middle(several) for side, several in runs.items()}
    return {
        "repeats": args.repeats,
        "dtype": args.dtype,
        "threads": args.threads,
        "hardware": f"{hardware()['cpu']}, {hardware()['instructions']}",
        **found["ours"],
        "new_tokens_per_second": PROMPTS * SAMPLES * NEW_TOKENS / found["ours"]["seconds_per_step"],
        "matmul_peak_gflops": peak / 1e9,
        "mfu": {name: flop / found["ours"]["phases_s"][name] / peak for name, flop in work.items()},
        "former": found.get("former"),
        "beside": found.get("beside"),
        "beside_keys": args.beside,
    }


def middle(runs: list[dict]) -> dict:
    """Return the medians of several runs of one side."""
    names = runs[0]["phases"]
    return {
        "seconds_per_step": median(one["seconds"] for one in runs),
        "peak_rss_mib": median(one["peak_rss_mib"] for one in runs),
        "phases_s": {
            name.removeprefix("timing_s/"): median(one["phases"][name] for one in runs)
            for name in names
        },
    }


def table(report: dict) -> str:
    lines = [
        "# A step, by phase",
        "",
        "Generated by `python -m tests.benchmarks.step`, whose head states workload and formula. "
        f"{report['hardware']}, {report['threads']} threads, {report['dtype']}, medians of "
        f"{report['repeats']} runs.",
        "",
        f"{report['seconds_per_step']:.2f} s a step, {report['new_tokens_per_second']:.0f} new "
        f"tokens/s, peak resident "
        f"memory {report['peak_rss_mib']:.0f} MiB (interpreter and libraries included), measured "
        f"matmul peak "
        f"{report['matmul_peak_gflops']:.0f} GFLOP/s.",
        "",
    ]
    others = {  # heading -> what was measured in turn with it
        "the former code": report["former"],
        f"with {report['beside_keys']}": report["beside"],
    }
    others = {heading: other for heading, other in others.items() if other}
    headings = ["phase", "seconds", "share", "model FLOPs utilisation", *others]
    lines += [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for name, seconds in sorted(report["phases_s"].items(), key=lambda item: -item[1]):
        mfu = f"{report['mfu'][name]:.1%}" if name in report["mfu"] else ""
        cells = [name, f"{seconds:.3f}", f"{seconds / report['phases_s']['step']:.0%}", mfu]
        for other in others.values():
            cells.append(f"{other['phases_s'][name]:.3f}" if name in other["phases_s"] else "")
        lines.append(f"| {' | '.join(cells)} |")
    for heading, other in others.items():
        lines += [
            "",
            f"{heading[0].upper()}{heading[1:]}: {other['seconds_per_step']:.2f} s a step, "
            f"{other['peak_rss_mib']:.0f} MiB.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--former", type=Path, help="a clone with earlier code")
    parser.add_argument("--beside", metavar="KEYS", help="key=value ..., to run in turn with none")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    args = parser.parse_args()
    report = measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "step.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
