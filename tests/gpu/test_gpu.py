"""What only a GPU can show: its kernels, its precision, its memory. The same on the CPU where it
means something.

make test-gpu          (needs CUDA; the CPU's part runs with the ordinary tests)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from core.cluster.learner_rank import LearnerRank
from core.cluster.workers import LocalWorkers
from core.engines.hf import HFEngine
from core.engines.weight_buckets import Staging
from core.learner.batching import MicroBatchSize, make_batch
from core.learner.log_probs import token_log_probs_and_entropy
from core.learner.passes import Policy, WeightSyncError
from core.types import Prompt, ScoredGroup
from reward_scores.score import Score
from tests.core.engine_contract import ask, sample_all
from tests.core.ray_cluster import cluster_config, mixed_batch, write_model
from tests.optimizer_steps import update_actor
from tests.tiny import tiny_model, tiny_tokenizer

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CUDA = pytest.param(torch.device("cuda"), id="cuda", marks=on_gpu)
both = pytest.mark.parametrize("device", [pytest.param(torch.device("cpu"), id="cpu"), CUDA])
only_cuda = pytest.mark.parametrize("device", [CUDA])
precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# 16 numbers a head: flash kernels want a multiple of 8
HEADS = {"hidden_size": 64, "num_attention_heads": 4}
MIB = 2**20


def model(device):
    return tiny_model(initializer_range=0.08, **HEADS).to(device)


def policy(device, dtype):
    compute = None if dtype is torch.float32 else dtype
    return Policy(model(device), temperature=1.0, compute_dtype=compute)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), **HEADS)


def workers(folder, device, dtype, *overrides):
    kinds = ("rollout.dtype", "actor.fsdp_config.dtype", "ref.fsdp_config.dtype")
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    extra = [f"actor_rollout_ref.{kind}={name}" for kind in kinds]
    config = cluster_config(folder, *extra, *overrides)
    return LocalWorkers(config, tiny_tokenizer(), device, needs_ref=True, needs_critic=False)


@both
@precisions
def test_the_learner_reads_what_the_engine_wrote(device, dtype):
    """Log-probs of sampled answers: the engine's, from its cache, and the learner's."""
    engine = HFEngine(
        model(device), tiny_tokenizer(), dtype=None if dtype is torch.float32 else dtype
    )
    requests = [
        ask((50 + i // 4, 60, 61 + i), seed=i, max_tokens=24, ignore_eos=True) for i in range(16)
    ]
    answers = sample_all(engine, requests)
    engine.close()
    prompt = Prompt(0, "0", (), (), "x", "test")
    batch = make_batch([ScoredGroup(prompt, (one,), (Score(0.0),)) for one in answers], 0)
    found = policy(device, dtype).log_probs(batch, MicroBatchSize(max_tokens=128))[0]
    difference = (found - batch.rollout_log_probs)[batch.response_mask].abs()
    assert float(difference.mean()) < (1e-4 if dtype is torch.float32 else 0.02)
    assert float(difference.max()) < (1e-3 if dtype is torch.float32 else 0.5)


@both
@precisions
def test_sequences_together_are_read_as_each_alone(device, dtype):
    """In bf16 on a GPU this is the variable-length kernel."""
    batch, size = mixed_batch(), MicroBatchSize(max_tokens=128)
    found = [
        policy(device, dtype).log_probs(batch, one)
        for one in (size, MicroBatchSize(max_sequences=1))
    ]
    exact = policy(device, torch.float32).log_probs(batch, size)
    bound = 1e-4 if dtype is torch.float32 else 0.1
    for packed, alone, truth in zip(*found, exact, strict=True):
        assert (
            float((packed - alone).abs().max()) < bound
            and float((packed - truth).abs().max()) < bound
        )


@both
@precisions
def test_gradients_of_sequences_together_are_those_of_each_alone(device, dtype):
    grads = []
    for size in (MicroBatchSize(max_tokens=10_000), MicroBatchSize(max_sequences=1)):
        reader = policy(device, dtype)
        for _, micro in reader.micro_batches_of_rank(size, mixed_batch().to(device)):
            (reader.token_stats(micro)[0] * micro.advantages).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in reader.module.parameters()]))
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < (
        1e-4 if dtype is torch.float32 else 0.05
    )


@both
@precisions
def test_a_sync_reaches_the_engine(folder, device, dtype, monkeypatch):
    one = workers(folder, device, dtype)
    update_actor(one, mixed_batch())
    # In float32 there is nothing to hand over, and the copy is one onto itself
    one.one_copy = False
    assert one.sync_weights(1)["rollout_corr/probe_diff"] < (
        1e-4 if dtype is torch.float32 else 0.1
    )
    if dtype is torch.float32:
        return
    for _ in range(5):
        update_actor(one, mixed_batch(), 5.0)
    monkeypatch.setattr(one.engine, "update_weights", lambda *_: None)
    # Weights are not compared: the probe has to notice it
    monkeypatch.setattr(type(one.engine), "weights", {})
    with pytest.raises(WeightSyncError, match="stale"):
        one.sync_weights(2)


@both
def test_a_bf16_step_is_near_the_fp32_one_and_keeps_fp32_masters(folder, device):
    metrics, moved = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        one = workers(folder, device, dtype)
        before = {
            key: value.detach().clone() for key, value in one.models.actor.module.named_parameters()
        }
        metrics[dtype] = update_actor(one, mixed_batch())
        after = dict(one.models.actor.module.named_parameters())
        assert {value.dtype for value in after.values()} == {torch.float32}
        state = one.models.actor.stepper.optimizer.state_dict()["state"].values()
        assert {value.dtype for entry in state for value in entry.values()} == {torch.float32}
        moved[dtype] = torch.cat(
            [(after[key].detach() - value).flatten() for key, value in before.items()]
        )
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
        assert metrics[torch.bfloat16][name] == pytest.approx(
            metrics[torch.float32][name], rel=0.1, abs=0.01
        )
    cosine = torch.nn.functional.cosine_similarity(*moved.values(), dim=0)
    assert float(cosine) > 0.8 and all(value.abs().sum() > 0 for value in moved.values())


@only_cuda
def test_the_memory_of_the_head_does_not_grow_with_the_logits(device):
    """131072 x 4096 logits in float32 are 2 GiB; both cases fit what one chunk of 32 MiB needs."""

    def peak(vocabulary: int, tokens: int) -> float:
        hidden = torch.randn(tokens, 64, device=device, requires_grad=True)
        weight = torch.randn(vocabulary, 64, device=device).requires_grad_()
        labels = torch.randint(0, vocabulary, (tokens,), device=device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        token_log_probs_and_entropy(hidden, weight, labels, chunk_elements=2**23)[
            0
        ].sum().backward()
        gradients = sum(one.grad.numel() * one.grad.element_size() for one in (hidden, weight))
        return (torch.cuda.max_memory_allocated() - held - gradients) / MIB

    small, large = peak(8192, 1024), peak(131072, 4096)
    # The weight's gradient is once more there while it is being summed
    assert large <= 1.2 * small + 64


def _rank(rank: int, folder: str, model_path: Path, offload: bool) -> None:
    """One rank over NCCL against the in-process backend, in float32."""
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=1)
    device = torch.device("cuda")
    extra = [f"actor_rollout_ref.actor.fsdp_config.param_offload={offload}"]
    config = cluster_config(model_path, *extra, ranks=1)
    one = LearnerRank(config, device, needs_ref=True, needs_critic=True)
    alone = LocalWorkers(config, tiny_tokenizer(), device, needs_ref=True, needs_critic=True)
    from core.learner.batching import mini_batching

    steps = list(
        mini_batching(config.actor_rollout_ref.actor, config.data.max_response_length)(
            mixed_batch()
        )
    )
    found, expected = (
        one.models.update_actor(steps, 1.0),
        update_actor(alone, mixed_batch()),
    )
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    batch = mixed_batch()
    mine = one.models.compute_log_probs(batch)[0]
    torch.testing.assert_close(mine, alone.models.compute_log_probs(batch)[0], rtol=1e-3, atol=1e-3)
    weights = one.weights(torch.bfloat16)
    buckets = one.buckets(weights, 2**20, Staging(2**20, device))
    assert [weight for bucket in buckets for weight in bucket.weights] == weights
    dist.destroy_process_group()


@only_cuda
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
def test_a_sharded_rank_trains_as_the_in_process_backend(folder, device, offload, tmp_path):
    mp.spawn(_rank, args=(str(tmp_path), folder, offload), nprocs=1)
