"""Packed rows beside padded ones: real tokens a second and peak memory of an update, on a long-tailed mix of lengths.

    python -m tests.benchmarks.packing [--threads 2] [--device cpu|cuda] [--dtype fp32|bf16] [--repeats 3]

Workload: 64 answers, prompts of 32 tokens, lengths lognormal (median 48, at most 512: the longest is many times the
usual one), one optimizer step of GRPO, forward and backward. Every answer has a prompt of its own, so that what
``core.learner.packing`` saves for padded rows in one process is not looked at. Model: 3.2 M parameters on the
CPU; on a
GPU that of Qwen2.5-0.5B's shape. Three ways to cut it into passes: *rows*, 8 a pass in the order of drawing, padded to
the longest of all, as a plain loop does; *bucketed*, rows of similar length under a token budget, padding included;
*packed*, under the same budget. Each in a process of its own; memory is what the update adds to what was held (resident
memory on the CPU, allocated memory on a GPU). Writes ``results/benchmarks/packing.{json,md}``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from core.algorithm.losses import MetricSums
from core.config import compose
from core.learner.batching import mini_batches
from core.learner.learner import Actor
from core.learner.packing import Layout
from core.tracking.run_manifest import hardware
from core.types import TrainBatch
from tests.benchmarks.decode import model_3m
from tests.benchmarks.head_memory import MIB, Peak, _resident
from tests.padded import batch_of_padded

ROOT = Path(__file__).resolve().parents[2]
ROWS, PROMPT, MEDIAN, SIGMA, LONGEST = 64, 32, 48, 1.0, 512
WAYS = ("rows", "bucketed", "packed")
ACTOR = "actor_rollout_ref.actor"


def lengths() -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, ROWS)
    drawn[0] = LONGEST
    return PROMPT + np.clip(drawn.astype(int), 1, LONGEST)


def batch(vocabulary: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    length, width = torch.from_numpy(lengths())[:, None], PROMPT + LONGEST
    position = torch.arange(width)
    response = (position >= PROMPT) & (position < length)
    noise = torch.randn((ROWS, width), generator=generator) * response
    whole = batch_of_padded(
        input_ids=torch.randint(4, vocabulary, (ROWS, width), generator=generator),
        attention_mask=position < length,
        response_mask=response,
        loss_mask=response,
        group=torch.arange(ROWS) // 8,
        reward=torch.zeros(ROWS),
        in_group_stats=torch.ones(ROWS, dtype=torch.bool),
        rollout_log_probs=noise,
        old_log_probs=noise - 6,
        advantages=noise,
    )
    (step,) = mini_batches(whole, prompts=ROWS, scale_factor=float(LONGEST))
    return step


def grouped_batch(
    *, prompts: int, answers: int, prompt_tokens: int, longest: int, vocabulary: int = 40_000
) -> TrainBatch:
    """Return an optimizer step's batch with so many answers to each prompt, of lognormal lengths."""
    rows, width = prompts * answers, prompt_tokens + longest
    generator = torch.Generator().manual_seed(0)
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 2), 0.5, rows).astype(int)
    length, position = torch.from_numpy(prompt_tokens + drawn.clip(5, longest))[:, None], torch.arange(width)
    response = (position >= prompt_tokens) & (position < length)
    ids = torch.randint(100, vocabulary, (rows, width), generator=generator)
    ids[:, :prompt_tokens] = ids[::answers, :prompt_tokens].repeat_interleave(answers, 0)
    noise = torch.randn((rows, width), generator=generator) * response
    whole = batch_of_padded(
        input_ids=ids,
        attention_mask=position < length,
        response_mask=response,
        loss_mask=response,
        group=torch.arange(rows) // answers,
        reward=torch.zeros(rows),
        in_group_stats=torch.ones(rows, dtype=torch.bool),
        rollout_log_probs=noise,
        advantages=noise,
    )
    (step,) = mini_batches(whole, prompts=prompts, scale_factor=float(longest))
    return step


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One way, in this process."""
    torch.set_num_threads(args.threads)
    device, on_gpu = torch.device(args.device), args.device == "cuda"
    module = model_05b() if on_gpu else model_3m().requires_grad_(True)
    budget = [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu={args.budget}"]
    rows = [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"]
    actor = Actor(
        module.to(device).train(),
        compose("grpo", rows if args.way == "rows" else budget).actor_rollout_ref.actor,
        temperature=1.0,
        compute_dtype=torch.bfloat16 if args.dtype == "bf16" else None,
        layout=Layout(packed=args.way == "packed"),
    )
    actor.mismatch = MetricSums()
    whole = batch(module.config.vocab_size)
    actor.accumulate(whole.rows(whole.lengths.argsort()[:8]), MetricSums())  # kernels are loaded, gradients are there
    pieces = [whole.rows(slice(i, i + 8)) for i in range(0, ROWS, 8)] if args.way == "rows" else None
    seconds, held = [], torch.cuda.memory_allocated() if on_gpu else _resident()
    with Peak() as peak:
        for _ in range(args.repeats):
            _finish(on_gpu)
            start = time.perf_counter()
            if pieces is None:
                actor.accumulate(whole, MetricSums())
            for piece in pieces or ():
                actor.micro_batch_loss(piece.to(device), MetricSums()).backward()
            _finish(on_gpu)
            seconds.append(time.perf_counter() - start)
    top = torch.cuda.max_memory_allocated() if on_gpu else peak.bytes
    passes = len(pieces or actor.micro_batches_of_rank(actor.size, whole))
    return {"seconds": min(seconds), "mib": (top - held) / MIB, "passes": passes}


def _finish(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def model_05b() -> torch.nn.Module:
    """Random weights in the shape of Qwen2.5-0.5B."""
    from tests.gpu.grpo import SIZES, make_model

    return make_model(SIZES["0.5b"])


def table(report: dict) -> str:
    tokens, base = report["tokens"], report["ways"]["rows"]
    lines = [
        "# Packed rows beside padded ones",
        "",
        "Generated by `python -m tests.benchmarks.packing`, whose head states the workload. "
        f"{report['hardware']}, {report['device']}, {report['dtype']}, {report['threads']} threads; {ROWS} rows of "
        f"{tokens} tokens in all, the longest {LONGEST + PROMPT}; token budget {report['budget']}.",
        "",
        "| passes | number | seconds | real tokens/s | speed, rows = 1 | peak memory, MiB | memory, rows = 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, one in report["ways"].items():
        lines.append(
            f"| {way} | {one['passes']} | {one['seconds']:.2f} | {tokens / one['seconds']:.0f} "
            f"| {base['seconds'] / one['seconds']:.2f} | {one['mib']:.0f} | {one['mib'] / base['mib']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a pass")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    ways = {}
    for way in WAYS:
        command = [sys.executable, "-m", "tests.benchmarks.packing", *sys.argv[1:], "--way", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        ways[way] = json.loads(done.stdout)
    found = hardware()
    report = {
        "hardware": ", ".join(found["gpus"]) if args.device == "cuda" else found["cpu"],
        **{name: getattr(args, name) for name in ("device", "dtype", "threads", "budget", "repeats")},
        "tokens": int(lengths().sum()),
        "ways": ways,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "packing.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "packing.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
