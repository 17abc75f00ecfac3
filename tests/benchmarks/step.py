"""Where a step's time goes: tokens a second, seconds by phase, peak memory, model FLOPs utilisation.

    python -m tests.benchmarks.step [--steps 5] [--threads 2] [--dtype fp32]

The workload is 32 prompts x 8 answers of 64 tokens with a model of 3.2 M parameters, through the ordinary trainer.
**Formula.** A forward pass over a token costs ``2 N + 4 L H s`` FLOPs: N the parameters of the matrix products (head
included, embedding table not), L layers, H hidden size, s the mean number of positions it attends to. Generating costs
one forward pass for each prompt (shared by its answers) and for each new token; the update three for each of these
tokens (forward, and twice that backward), since it shares the prompts, too. Repeated prompts would count for nothing.
Utilisation is that over the seconds of the phase, over the measured peak: the best of ten products of two 2048 x 2048
matrices, same precision, same threads.
Writes ``results/benchmarks/step.{json,md}``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from core.tracking.run_manifest import hardware
from tests.benchmarks.model_3m import PROMPTS, SAMPLES, model_3m
from tests.tiny import tiny_tokenizer

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
    prompt: float, *, prompts: int = PROMPTS, answers: int = PROMPTS * SAMPLES, new_tokens: int = NEW_TOKENS
) -> dict[str, float]:
    """FLOPs of a step's generation and of its update, by the formula above. ``prompt`` is the prompts' mean length."""
    model = model_3m()
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    attention = 4 * config.num_hidden_layers * config.hidden_size

    def forward(tokens: float, attended: float) -> float:
        return tokens * (2 * matrices + attention * attended)

    once = forward(prompts * prompt, prompt / 2) + forward(answers * new_tokens, prompt + new_tokens / 2)
    return {"gen": once, "update_actor": 3 * once}


def prepare(folder: Path) -> float:
    """Write model and prompts, and return the prompts' mean number of tokens: one a character."""
    model_3m().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    prompts = [f"what is {i} + {i * 7 % 31}? the answer is" for i in range(4096)]
    truth = {"ability": "none", "reward_model": {"style": "rule", "ground_truth": "none"}}
    rows = [
        {"data_source": "benchmark", "prompt": text, **truth, "extra_info": {"split": "train", "index": i}}
        for i, text in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    return sum(map(len, prompts)) / len(prompts)


def run(folder: Path, args: argparse.Namespace) -> dict:
    """Train in a process of its own and return what it measured."""
    options = {"model": folder / "model", "rows": folder / "prompts.parquet", "max-new": NEW_TOKENS}
    options |= {"steps": args.steps, "threads": args.threads, "dtype": args.dtype}
    command = [sys.executable, "-m", "tests.benchmarks.timed_run"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work = flops(prepare(folder))
        found = run(folder, args)
    peak = matmul_peak(args.threads, {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype])
    phases = {name.removeprefix("timing_s/"): seconds for name, seconds in found["phases"].items()}
    return {
        "dtype": args.dtype,
        "threads": args.threads,
        "hardware": hardware()["cpu"],
        "seconds_per_step": found["seconds"],
        "new_tokens_per_second": PROMPTS * SAMPLES * NEW_TOKENS / found["seconds"],
        "peak_rss_mib": found["peak_rss_mib"],
        "phases_s": phases,
        "matmul_peak_gflops": peak / 1e9,
        "mfu": {name: flop / phases[name] / peak for name, flop in work.items()},
    }


def table(report: dict) -> str:
    lines = [
        "# A step, by phase",
        "",
        "Generated by `python -m tests.benchmarks.step`, whose head states workload and formula. "
        f"{report['hardware']}, {report['threads']} threads, {report['dtype']}.",
        "",
        f"{report['seconds_per_step']:.2f} s a step, {report['new_tokens_per_second']:.0f} new tokens/s, peak resident "
        f"memory {report['peak_rss_mib']:.0f} MiB (interpreter and libraries included), measured matmul peak "
        f"{report['matmul_peak_gflops']:.0f} GFLOP/s.",
        "",
        "| phase | seconds | share | model FLOPs utilisation |",
        "|---|---|---|---|",
    ]
    for name, seconds in sorted(report["phases_s"].items(), key=lambda item: -item[1]):
        mfu = f"{report['mfu'][name]:.1%}" if name in report["mfu"] else ""
        lines.append(f"| {name} | {seconds:.3f} | {seconds / report['phases_s']['step']:.0%} | {mfu} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
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
