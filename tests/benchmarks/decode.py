"""Tokens a second of the hf engine and of transformers' ``generate``, turn by turn in one process.

    python -m tests.benchmarks.decode [--threads 2] [--repeats 5] [--json FILE]

Workload: 32 prompts of 24 tokens, 8 samples each (a GRPO step's batch of 256), on a model of 3.2 M parameters
(hidden 256, 4 layers, vocabulary 512, Qwen2), fp32 unless ``--dtype bf16``. *fixed*: 64 new tokens each.
*tailed*: ended by EOS, geometric lengths of mean 64, at most 512; the EOS logit stands above the others by
construction of the weights. Tokens are counted up to the EOS, for both alike. ``generate`` gets its defaults, a
dynamic cache and the padded batch; the engine gets 256 requests. Wall time and CPU time are both reported: on a
machine that others use, the second is the steadier one.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from core.engines import SampleRequest, SamplingParams
from core.engines.hf import HFEngine
from tests.tiny import tiny_tokenizer

EOS, VOCAB, PROMPTS, SAMPLES, PROMPT_LENGTH = 1, 512, 32, 8, 24
NEVER = -25.0  # a logit of EOS that no sampling reaches: every response is as long as it may be


def model_3m(mean_length: int | None = None) -> PreTrainedModel:
    """The benchmark's model. It ends a response with probability 1/mean_length a token, or never."""
    torch.manual_seed(0)
    shape = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4)
    config = Qwen2Config(
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        **shape,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    _set_eos(model, math.log((VOCAB - 1) / (mean_length - 1)) if mean_length else NEVER)
    return model


def _set_eos(model: PreTrainedModel, logit: float) -> None:
    # Channel 0 of the residual stream is made a constant, and only the EOS logit reads it.
    model.model.embed_tokens.weight[:, 0] = 0.1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    with torch.inference_mode():
        hidden = model.model(torch.randint(2, VOCAB, (16, 64))).last_hidden_state
    model.lm_head.weight[EOS] = 0
    model.lm_head.weight[EOS, 0] = logit / hidden[..., 0].mean()


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(row) for row in torch.randint(2, VOCAB, (PROMPTS, PROMPT_LENGTH), generator=generator).tolist()]


def engine_run(engine: HFEngine, most: int, fixed: bool, seed: int) -> int:
    """Tokens written by one batch of requests."""
    sampling = SamplingParams(max_tokens=most, ignore_eos=fixed)
    requests = [SampleRequest(p, sampling, seed * 1000 + i) for i, p in enumerate(prompts() * SAMPLES)]

    async def gather() -> list:
        return await asyncio.gather(*map(engine.sample, requests))

    return sum(len(trajectory.response_ids) for trajectory in asyncio.run(gather()))


@torch.inference_mode()
def generate_run(model: PreTrainedModel, most: int, fixed: bool, seed: int) -> int:
    torch.manual_seed(seed)
    ids = torch.tensor(prompts()).repeat_interleave(SAMPLES, 0)
    options = dict(do_sample=True, top_k=0, max_new_tokens=most, min_new_tokens=most if fixed else None)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, PROMPT_LENGTH:]
    ended = (written == EOS).cumsum(-1)
    return written.numel() if fixed else int((ended - (written == EOS).long() == 0).sum())


def measure(run: Callable[[int], int], seed: int) -> tuple[float, float]:
    """Tokens a second of wall time and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run(seed)
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def compare(name: str, most: int, mean: int | None, dtype: torch.dtype, repeats: int) -> dict:
    """Medians, extremes and the ratio of medians for one workload; the order is swapped every repeat."""
    model = model_3m(mean).to(dtype)
    engine = HFEngine(copy.deepcopy(model), tiny_tokenizer())
    fixed = mean is None
    sides = {
        "engine": lambda seed: engine_run(engine, most, fixed, seed),
        "generate": lambda seed: generate_run(model, most, fixed, seed),
    }
    for run in sides.values():
        run(0)
    seen: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sorted(sides, reverse=bool(repeat % 2)):
            seen[side].append(measure(sides[side], repeat + 1))
    row: dict = {"workload": name, "dtype": str(dtype).removeprefix("torch."), "repeats": repeats}
    for kind, clock in enumerate(("wall", "cpu")):
        speeds = {side: [pair[kind] for pair in pairs] for side, pairs in seen.items()}
        row[clock] = {side: _spread(values) for side, values in speeds.items()}
        ratios = [e / g for e, g in zip(speeds["engine"], speeds["generate"], strict=True)]
        row[clock]["ratio"] = _spread(ratios)
    return row


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", choices=("fixed", "tailed"))
    parser.add_argument("--json", help="append one line a workload to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    for name, most, mean in (("fixed", 64, None), ("tailed", 512, 64)):
        if options.only in (None, name):
            row = {"threads": options.threads, **compare(name, most, mean, dtype, options.repeats)}
            for clock in ("wall", "cpu"):
                cells = (
                    f"{key} {v['median']:.4g} ({v['low']:.4g} to {v['high']:.4g})" for key, v in row[clock].items()
                )
                print(f"{name} {row['dtype']} tokens/s by {clock} time: " + ", ".join(cells), flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
