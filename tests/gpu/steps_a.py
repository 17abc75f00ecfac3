"""The steps of ``hour_a.sh``: what a GPU does with the learner's parts. Neither vLLM nor Ray is
imported."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Config

from core.cluster.fsdp import ProcessRanks, reshard, shard
from core.config.composition import compose
from core.learner import log_probs
from core.learner.batching import MicroBatchSize, mini_batching
from core.learner.learner import Actor
from core.learner.models import load_policy
from core.model_shapes import MODELS, Shape
from core.plan import block_bytes, gathered_bytes, head_bytes, update_bytes
from core.types import TrainBatch
from tests.padded import batch_of_padded

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocab=512, tied=False, bias=True)


def shape_of(name: str, size: str, layers: int | None = None) -> Shape:
    """Return a model's shape with fewer layers, or the tiny one of a rehearsal."""
    shape = MODELS[name] if size == "full" else TINY
    return shape if layers is None or size != "full" else replace(shape, layers=layers)


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of two square matrices, the best of ten."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / clock(device.type, lambda: a @ b, repeats=10)[0]


def clock(device: str, function: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """Return the seconds of the fastest call after one that warms up, and the GiB that a call adds
    on the GPU.

    What the first call leaves there (an optimizer's moments) is not counted.
    """
    cuda, times, held = device == "cuda", [], 0
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:]), (torch.cuda.max_memory_allocated() - held) / GIB if cuda else 0.0


def kernels(device: str, size: str, folder: Path) -> dict[str, Any]:
    """Tests that need a GPU: packed as padded, bf16, sync, sharding over NCCL, offloading."""
    chosen = ["-m", "gpu"] if device == "cuda" else ["-m", "not gpu"]
    report = folder / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *chosen,
    ]
    done = subprocess.run(
        [*command, "tests/gpu/test_gpu.py"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    broken = [
        case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None
    ]
    if done.returncode or not counts["tests"]:
        raise RuntimeError(f"{counts}: {', '.join(broken) or 'no test ran'}\n{done.stdout[-3000:]}")
    return counts


def head(device: str, size: str, folder: Path) -> dict[str, Any]:
    """The chunked head at the width of 32B, forward and backward, by the size of its chunks."""
    vocabulary, hidden, tokens = (152_064, 5120, 22_528) if size == "full" else (512, 64, 256)
    chunks = [2**power for power in range(23, 31)] if size == "full" else [2**12, 2**14, 2**17]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    states = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, hidden, device=device, dtype=dtype) / hidden**0.5
    ).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    rows, exact = [], None
    for elements in chunks:

        def call(elements: int = elements) -> Tensor:
            states.grad = weight.grad = None
            found, _ = log_probs.token_log_probs_and_entropy(
                states, weight, labels, chunk_elements=elements
            )
            found.sum().backward()
            return found.detach()

        seconds, gib = clock(device, call)
        found = call()
        exact = found if exact is None else exact
        # One product forward, three backward
        rate = 4 * 2 * tokens * vocabulary * hidden / seconds / 1e12
        row = {"chunk elements": elements, "seconds": seconds, "TFLOP/s": rate, "GiB": gib}
        rows.append({**row, "difference": float((found - exact).abs().max())})
    return {"tokens": tokens, "vocabulary": vocabulary, "rows": rows}


def one_rank(device: str) -> None:
    """Make this process the only rank of a process group."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def sharded_actor(shape: Shape, device: str, tokens: int, folder: Path) -> tuple[Actor, Any]:
    """Return an Actor of random weights as a rank has it (FSDP2, world 1), and its
    configuration."""
    one_rank(device)
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
    }
    sizes |= {
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocab,
    }
    model = Qwen2Config(
        **sizes, max_position_embeddings=32768, tie_word_embeddings=shape.tied, use_cache=False
    )
    model.save_pretrained(folder)
    keys = [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.model.use_remove_padding=True",
    ]
    keys += [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}"]
    keys += [f"data.{name}_length={tokens // 2}" for name in ("max_prompt", "max_response")]
    keys += [
        f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
        "actor_rollout_ref.rollout.name=hf",
    ]
    keys += [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.device=cpu",
    ]
    config = compose("grpo", keys)
    part = config.actor_rollout_ref.actor
    module = shard(
        load_policy(config.actor_rollout_ref.model, on_meta=True),
        part.fsdp_config,
        torch.device(device),
    )
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = parameter.to_local()
            values.fill_(1.0) if "norm" in name else values.normal_(0.0, 0.02)
    # Its frequencies are buffers, for which there are no weights
    rotary = type(module.model.rotary_emb)(module.config)
    module.model.rotary_emb = rotary.to(device)
    options = {"temperature": 1.0, "device": torch.device(device), "ranks": ProcessRanks()}
    return Actor(module, part, **options), config


def batch_of(rows: int, length: int, vocabulary: int) -> TrainBatch:
    """Return rows of one length, half prompt and half answer, each with an advantage."""
    generator = torch.Generator().manual_seed(0)
    answer = (torch.arange(length) >= length // 2).expand(rows, length)
    values = torch.randn(rows, length, generator=generator) * answer
    return batch_of_padded(
        input_ids=torch.randint(4, vocabulary, (rows, length), generator=generator),
        attention_mask=torch.ones(rows, length, dtype=torch.bool),
        response_mask=answer,
        loss_mask=answer,
        group=torch.arange(rows),
        reward=torch.zeros(rows),
        in_group_stats=torch.ones(rows, dtype=torch.bool),
        rollout_log_probs=values - 12.0 * answer,
        old_log_probs=values - 12.0 * answer,
        advantages=values,
    )


def pass_flops(shape: Shape, rows: int, length: int) -> float:
    """Return the FLOPs of one forward pass: 2 a parameter and token, and causal attention."""
    matrices = shape.layers * shape.block + shape.vocab * shape.hidden
    return rows * length * (2 * matrices + 2 * shape.layers * shape.q_size * length)


def layers(device: str, size: str, folder: Path) -> dict[str, Any]:
    """Eight layers of 32B at its true width, 22,528 tokens a pass: utilisation, and memory beside
    the plan's."""
    shape = shape_of("Qwen/Qwen2.5-32B", size, layers=8)
    tokens, rows = (22_528, 4) if size == "full" else (256, 4)
    actor, config = sharded_actor(shape, device, tokens, folder)
    batch = batch_of(rows, tokens // rows, shape.vocab)
    part, length = config.actor_rollout_ref.actor, config.data.max_response_length

    def update() -> None:
        actor.update(mini_batching(part, length, part.policy_loss.loss_mode)(batch), 1.0)

    def read() -> None:
        actor.log_probs(batch, MicroBatchSize(max_tokens=tokens))
        reshard(actor.module)

    (update_s, update_gib), (read_s, read_gib) = clock(device, update), clock(device, read)
    kind = (torch.bfloat16, 8192) if device == "cuda" else (torch.float32, 512)
    peak = matmul_peak(torch.device(device), *kind)
    forward = pass_flops(shape, rows, tokens // rows)
    logits = log_probs.logits_at_a_time(torch.device(device))
    plan = update_bytes(shape, tokens, 2, checkpointing=True, ranks=1, logits=logits)
    return {
        "parameters": shape.parameters,
        "tokens of a pass": tokens,
        "update, s": update_s,
        "update, share of the measured peak": 3 * forward / update_s / peak,
        "log-probs, s": read_s,
        "log-probs, share of the measured peak": forward / read_s / peak,
        "measured peak, TFLOP/s": peak / 1e12,
        "update adds, GiB": update_gib,
        "the plan says, GiB": (plan + gathered_bytes(shape, 2)) / GIB,
        "log-probs add, GiB": read_gib,
        "a layer keeps by the plan, GiB": tokens * block_bytes(shape, 2) / GIB,
        "the head takes by the plan, GiB": head_bytes(shape, tokens, 2, logits=logits) / GIB,
    }


STEPS = {"kernels": kernels, "head": head, "layers": layers}
