"""What each process of ``test_fsdp`` runs: a learner rank over gloo, without Ray."""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from core.cluster.fsdp import gather
from core.cluster.learner_rank import LearnerRank
from core.learner import packed_attention
from core.learner.batching import contributing_sequences, mini_batching, rank_shares
from core.learner.learner import zero_advantage_gives_no_gradient
from core.learner.lora import merged_weights, trained_weights
from core.learner.saving import FILE_SIZE
from core.tracking.metric_sums import MetricSums

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def run(rank: int, world: int, folder: Path, jobs: dict) -> None:
    """Does each of ``jobs`` (name -> (function or its name here, config, keywords)); rank 0 writes
    ``<name>.pt``."""
    faulthandler.enable()  # says where, should a rank ever die of a signal
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for name, (what, config, options) in jobs.items():
        does = globals()[what] if isinstance(what, str) else what
        found = does(rank, world, config, **options)
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
    store.set(f"done{rank}", "")
    store.wait([f"done{each}" for each in range(world)])
    # No rank leaves while another still receives from it, and none through the interpreter's end:
    # there a thread of gloo that lets a tensor go, or two stores that delete one file, now and then
    # abort a rank whose work is done
    os._exit(0)


def learner(config, dtype="float64", critic=True, ref=False):
    return LearnerRank(
        config, torch.device("cpu"), needs_ref=ref, needs_critic=critic, master_dtype=DTYPES[dtype]
    )


def share(batch, rank, world, config):
    """The rank's rows; neighbours that share a sequence or a layer have the same."""
    together = config.actor_rollout_ref.actor.together
    index = rank_shares(batch.lengths, world // together)[rank // together]
    return batch.rows(index)


def steps(config, batch, rank, world):
    actor = config.actor_rollout_ref.actor
    cut = mini_batching(actor, config.data.max_response_length, actor.policy_loss.loss_mode)
    return [share(step, rank, world, config) for step in cut(batch)]


def train(
    rank,
    world,
    config,
    batch,
    dtype="float64",
    updates=1,
    save=None,
    load=None,
    ref=False,
    file_size=None,
):
    """Metrics of each update, and the weights and log-probs at the end."""
    one = learner(config, dtype, ref=ref)
    models = one.models
    if load:
        one.load(str(load))
    metrics = []
    for _ in range(updates):
        mine = steps(config, batch, rank, world)
        metrics.append({**models.update_critic(mine, 1.0), **models.update_actor(mine, 1.0)})
    log_probs = models.compute_log_probs(batch)[0]  # every rank the whole batch
    values = models.compute_values(batch)
    weights = {name: gather(merged_weights(part.module)) for name, part in models.trained.items()}
    found = {"metrics": metrics, "weights": weights, "log_probs": log_probs, "values": values}
    if save:
        with patch("core.learner.saving.FILE_SIZE", file_size or FILE_SIZE):
            torch.save(one.save(str(save)), f"{save}_rank_{rank}.pt")
    return {**found, "ref": models.compute_ref_log_prob(batch)} if "ref" in models.frozen else found


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def train_by_all_to_all(rank, world, config, **options):
    """What ``train`` finds with the all-to-all that a GPU gets. DTensor falls back to an all-gather
    on a CPU."""
    name = "torch.distributed.tensor._collective_utils.local_tensor_mode"
    with patch(name, return_value=True), Operations() as seen:
        found = train(rank, world, config, **options)
    return {
        **found,
        "exchanges": sum(
            count for name, count in seen.calls.items() if "shard_dim_alltoall" in name
        ),
    }


def in_own_precision(norm, hidden):
    """The root mean square in the precision of what comes in, where transformers takes float32."""
    return (
        norm.weight
        * hidden
        * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    )


def train_sharing_prompts(rank, world, config, batch, **options):
    """What ``train`` finds where prompts are shared in float64, too, and in how many passes of this
    rank."""
    passes, lay_out = [], packed_attention.shared_prompts

    def counted(ids_N, mask_N, lengths_B, group_B):
        found = lay_out(ids_N, mask_N, lengths_B, group_B)
        if found is not None:
            passes.append(len(lengths_B))
        return found

    with ExitStack() as stack:
        stack.enter_context(patch("core.learner.passes.can_share", lambda module: True))
        stack.enter_context(patch.object(Qwen2RMSNorm, "forward", in_own_precision))
        stack.enter_context(patch.object(packed_attention, "shared_prompts", counted))
        return {**train(rank, world, config, batch, **options), "shared": passes}


def gradients(rank, world, config, batch, dtype="float32"):
    """Those of one optimizer step over the whole batch, and the loss."""
    models = learner(config, dtype, critic=False).models
    (step,) = mini_batching(config.actor_rollout_ref.actor, 24)(batch)
    busy = contributing_sequences(
        step,
        skip_zero_advantage=zero_advantage_gives_no_gradient(config.actor_rollout_ref.actor),
    )
    means = MetricSums()
    models.actor.mismatch = MetricSums()
    models.actor.accumulate(share(step.rows(busy.nonzero()[:, 0]), rank, world, config), means)
    grads = {
        name: parameter.grad.full_tensor()
        for name, parameter in trained_weights(models.actor.module).items()
    }
    total = models.actor.ranks.gather_metrics(means)
    return {"grads": grads, "loss": total.sums["pg_loss"]}
