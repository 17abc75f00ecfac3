"""The steps of ``hour_b.sh``: vLLM and Ray on a GPU, beside a learner that shares it."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.config import compose
from core.engines import SampleRequest, SamplingParams
from core.types import TrainBatch, Trajectory
from tests.faults.kill_and_resume import AtPoint, run_uninterrupted, run_with_kills
from tests.faults.tiny_run import command
from tests.faults.tiny_run import prepare as prepare_run
from tests.gpu import grpo
from tests.gpu.grpo import Size
from tests.padded import batch_of_padded

if TYPE_CHECKING:
    from core.cluster.ray_workers import RayWorkers

SHAPES = {"full": Size(151_936, 2048, 11_008, 36, 16, 2), "tiny": Size(512, 128, 64, 2, 4, 2)}  # Qwen2.5-3B's
GIB = 2**30


def settings(device: str, size: str, folder: Path, *more: str) -> Any:
    """Return the configuration of one rank and one vLLM engine on the same GPU, for a model of random weights."""
    grpo.prepare(folder, SHAPES[size])
    length = 1024 if size == "full" else 32
    dtype = "bfloat16" if device == "cuda" else "float32"
    keys = [f"actor_rollout_ref.model.path={folder / 'model'}"]
    keys += [f"actor_rollout_ref.model.tokenizer_path={folder / 'tokenizer'}", "trainer.backend=ray"]
    keys += [f"trainer.device={device}", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm"]
    keys += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", f"actor_rollout_ref.rollout.dtype={dtype}"]
    keys += [f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}", f"data.max_response_length={length}"]
    keys += [f"data.max_prompt_length={length}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    keys += [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={8 * length}", "actor_rollout_ref.actor.optim.lr=1e-6"]
    keys += [f"actor_rollout_ref.rollout.enforce_eager={device == 'cpu'}"]
    return compose("grpo", [*keys, *more])


@contextmanager
def workers_of(config: Any, device: str) -> Iterator[RayWorkers]:
    from core.cluster.ray_workers import RayWorkers
    from core.learner.models import load_tokenizer

    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    workers = RayWorkers(config, tokenizer, torch.device(device), needs_ref=False, needs_critic=False)
    try:
        yield workers
    finally:
        workers.close()


def answers_of(workers: RayWorkers, count: int, length: int, vocabulary: int) -> list[Trajectory]:
    """Return answers to random prompts, each of the full length."""
    chance = random.Random(0)
    sampling = SamplingParams(max_tokens=length, ignore_eos=True)
    prompts = [tuple(chance.randrange(4, vocabulary) for _ in range(length // 2)) for _ in range(count)]

    async def all_of_them() -> list[Trajectory]:
        requests = [SampleRequest(prompt, sampling, seed) for seed, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(workers.engine.sample, requests))

    return asyncio.run(all_of_them())


def batch_of(answers: list[Trajectory]) -> TrainBatch:
    """Return answers of one length as a batch; each has a random advantage."""
    ids = torch.tensor(np.stack([np.concatenate([one.prompt_ids, one.response_ids]) for one in answers]))
    begins = len(answers[0].prompt_ids)
    mine = (torch.arange(ids.shape[1]) >= begins).expand(ids.shape)
    logprobs = torch.zeros(ids.shape)
    logprobs[:, begins:] = torch.tensor(np.stack([one.logprobs for one in answers]), dtype=torch.float32)
    noise = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0)) * mine
    return batch_of_padded(
        input_ids=ids,
        attention_mask=torch.ones_like(mine),
        response_mask=mine,
        loss_mask=mine,
        group=torch.arange(len(answers)) // 2,
        reward=torch.zeros(len(answers)),
        in_group_stats=torch.ones(len(answers), dtype=torch.bool),
        rollout_log_probs=logprobs,
        old_log_probs=logprobs,
        advantages=noise,
    )


def sync(device: str, size: str, folder: Path) -> dict[str, Any]:
    """Update, weight sync and answers, twenty times, engine and learner on one GPU: seconds, and memory at the end."""
    repeats, length = (20, 256) if size == "full" else (3, 12)
    config = settings(device, size, folder)
    with workers_of(config, device) as workers:
        workers.sync_weights(0)
        found = []
        for version in range(1, repeats + 1):
            batch = batch_of(answers_of(workers, 8, length, SHAPES[size].vocabulary))
            start = time.perf_counter()
            workers.update_actor(batch, 1.0)
            updated = time.perf_counter()
            probe = workers.sync_weights(version)["rollout_corr/probe_diff"]
            row = {"version": version, "update, s": updated - start, "sync, s": time.perf_counter() - updated}
            found.append({**row, "probe": probe, "GiB in use": in_use(workers, device)})
        import ray

        weights = ray.get(workers.learners[0].call.remote("weights", workers.weight_sync.dtype))
    gib = sum(weight.size for weight in weights) / GIB
    rate = gib / statistics.median(row["sync, s"] for row in found)
    return {"weights, GiB": gib, "buckets' limit, GiB": workers.weight_sync.limit / GIB, "GiB/s": rate, "rows": found}


def in_use(workers: RayWorkers, device: str) -> float:
    """Return what is taken of the GPU, by all processes."""
    if device == "cpu":
        return 0.0
    import ray

    read = lambda self: torch.cuda.mem_get_info()  # noqa: E731
    free, total = ray.get(workers.learners[0].__ray_call__.remote(read))
    return (total - free) / GIB


def mismatch(device: str, size: str, folder: Path) -> dict[str, Any]:
    """How far log-probs of engine and learner differ over 500 random answers: what bounds of the probe follow from."""
    count, length = (500, 256) if size == "full" else (6, 12)
    with workers_of(settings(device, size, folder), device) as workers:
        workers.sync_weights(0)
        answers = answers_of(workers, count, length, SHAPES[size].vocabulary)
        batch = batch_of(answers)
        mine, _ = workers.compute_log_probs(batch)
    own = batch.response_mask.bool()
    engine, learner = batch.rollout_log_probs[own].double(), mine[own].double()
    apart = (engine - learner).abs()
    beyond = (apart > 0.25 + learner.abs() / 64).double().mean()
    levels = (0.5, 0.9, 0.99, 0.999, 0.9999, 1.0)
    rows = [{"share of tokens": level, "difference at most": float(apart.quantile(level))} for level in levels]
    return {"tokens": int(own.sum()), "beyond the probe's bound for bf16": float(beyond), "rows": rows}


def decode(device: str, size: str, folder: Path) -> dict[str, Any]:
    """Tokens a second of our engine beside vLLM alone, on the same prompts and weights of the same shape."""
    count, length = (512, 512) if size == "full" else (4, 16)
    config = settings(device, size, folder)
    with workers_of(config, device) as workers:
        workers.sync_weights(0)
        answers_of(workers, count, length, SHAPES[size].vocabulary)  # compiled and warm
        start = time.perf_counter()
        answers = answers_of(workers, count, length, SHAPES[size].vocabulary)
        ours = count * length / (time.perf_counter() - start)
    prompts = [{"prompt_token_ids": list(map(int, one.prompt_ids))} for one in answers]
    import ray

    ray.shutdown()
    theirs = plain(config, prompts, length, device)
    return {"answers": count, "ours, tokens/s": ours, "vLLM alone, tokens/s": theirs, "ours / alone": ours / theirs}


def plain(config: Any, prompts: list[dict], length: int, device: str) -> float:
    """Return the tokens a second of vLLM's own front end."""
    from vllm import LLM
    from vllm import SamplingParams as Sampling

    part = config.actor_rollout_ref.rollout
    more = (
        {"kv_cache_memory_bytes": GIB} if device == "cpu" else {"gpu_memory_utilization": part.gpu_memory_utilization}
    )
    llm = LLM(
        model=str(config.actor_rollout_ref.model.path),
        tokenizer=str(config.actor_rollout_ref.model.tokenizer_path),
        dtype=part.dtype,
        enforce_eager=part.enforce_eager,
        max_model_len=2 * length,
        **more,
    )
    sampling = Sampling(max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)
    for _ in range(2):
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
    return len(prompts) * length / seconds


def killed(device: str, size: str, folder: Path) -> dict[str, Any]:
    """A GRPO run over Ray, learner and vLLM on one GPU, killed in its fourth step and started again."""
    prepare_run(folder, hidden_size=128)
    steps = 10 if size == "full" else 5
    over_ray = ("trainer.backend=ray", f"trainer.device={device}", "actor_rollout_ref.rollout.name=vllm")
    over_ray += ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.save_freq=1")
    over_ray += ("actor_rollout_ref.rollout.enforce_eager=True",)
    if device == "cpu":
        over_ray += ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",)
    run = command(folder, "grpo", steps, *over_ray)
    run_uninterrupted(run, folder / "whole", timeout=240)
    run_with_kills(run, folder / "killed", [AtPoint("update", 4)], random.Random(0), timeout=240)
    names = ("whole", "killed")
    whole, again = ([json.loads(line) for line in (folder / name / "metrics.jsonl").open()] for name in names)
    if [line["step"] for line in whole] != [line["step"] for line in again]:
        raise RuntimeError(f"the run that was killed has the steps {[line['step'] for line in again]}")
    name = "actor/pg_loss"
    losses = [(one[name], other[name]) for one, other in zip(whole, again, strict=True) if name in one]
    same = sum(one == other for one, other in losses)
    return {"steps": steps, "losses equal to the bit": f"{same} of {len(losses)}"}


STEPS = {"sync": sync, "mismatch": mismatch, "decode": decode, "killed": killed}
