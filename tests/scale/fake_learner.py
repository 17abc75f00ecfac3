"""A learner rank of a run script on fake tensors: one of as many ranks as the script has, in this
process.

The code that runs is that of ``core.cluster.fsdp`` and ``core.learner``. The list below says what
is replaced.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.cluster import fsdp, learner_rank
from core.cluster.split_layers import split_layers
from core.config.composition import compose
from core.config.schema import Config
from core.learner import learner, log_probs, packed_attention, passes, step_models
from core.learner.batching import mini_batches
from core.learner.step_settings import GPU_LOGITS
from core.model_shapes import Shape
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch
from results.reporting.run_scripts import Script
from tests.padded import batch_of_padded
from tests.scale.meter import GPU, HOST, Meter

# What is replaced, and is not as on a GPU:
# - Weights are neither read nor broadcast; the checks of numbers at the start (head, packing) are
# left out.
# - What ranks agree on as numbers (passes, metrics) is this rank's own; the fake group exchanges
# nothing.
# - Indices of tokens and the cutting into passes are computed with real numbers, because shapes
# follow from them.
# - Attention is `varlen_attn`, as on a GPU.
# - DTensor's all-to-all is NCCL's operation, not the fallback for a CPU; its scratch memory is not
# counted.
# - The head's chunks are as large as on a GPU of 64 GiB or more.
# - Of the head's chunks the first, second and last run.
# - What DTensor computes to learn shapes is not counted: no rank allocates it.


def config_of(script: Script, shape: Shape, layers: int, folder: Path) -> Config:
    """Return the script's configuration with a model of its shape and so many layers."""
    fields = {
        **{
            "hidden_size": shape.hidden,
            "num_hidden_layers": layers,
            "intermediate_size": shape.mlp,
        },
        **{
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": shape.vocab,
        },
        **{"tie_word_embeddings": shape.tied, "max_position_embeddings": 2**17},
    }
    kind = ("qwen2", "Qwen2ForCausalLM") if shape.bias else ("llama", "LlamaForCausalLM")
    config = {"model_type": kind[0], "architectures": [kind[1]], **fields}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = f"actor_rollout_ref.model.path={folder}"
    return compose(script.recipe, [*script.arguments, path])


@contextmanager
def group(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group that exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function outside of fake mode."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


class RanksAlone(fsdp.ProcessRanks):
    """Ranks that are as busy as this one."""

    def all_reduce_max(self, count: int) -> int:
        return count

    def gather(self, value: Any) -> list[Any]:
        return [value]


@contextmanager
def fake_rank(config: Config) -> Iterator[tuple[learner_rank.LearnerRank, Meter]]:
    """Yield the policy of rank 0 on fake tensors, and the meter of what happens inside the
    block."""
    offloads = config.actor_rollout_ref.actor.fsdp_config.offload_policy
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(fake, offloads)
    with group(config.trainer.nnodes * config.trainer.n_gpus_per_node), ExitStack() as stack:
        for target, value in _replaced(meter):
            stack.enter_context(patch(target, value))
        stack.enter_context(fake)
        stack.enter_context(meter)
        with meter.at(HOST if offloads else GPU):
            rank = learner_rank.LearnerRank(
                config, torch.device("cpu"), needs_ref=False, needs_critic=False
            )
        yield rank, meter


def _replaced(meter: Meter) -> Iterator[tuple[str, Any]]:
    """Yield what is replaced, as (name, by what)."""
    step, propagate = learner.Stepper.step, ShardingPropagator._propagate_tensor_meta_non_cached

    def load(model: Any, dtype: torch.dtype, on_meta: bool) -> torch.nn.Module | None:
        return real(fsdp_load)(model, dtype, on_meta=True) if on_meta else None

    def step_of(stepper: Any, sums: MetricSums) -> None:
        with meter.at(HOST if meter.offloads else GPU):
            step(stepper, sums)

    def propagate_uncounted(*args: Any) -> Any:
        with meter.at(None):
            return propagate(*args)

    fsdp_load = step_models.load_policy
    yield "core.learner.step_models.load_policy", load
    yield (
        "core.learner.step_models.add_adapters",
        lambda module, *_: module and real(add_adapters)(module, *_),
    )
    yield "core.cluster.learner_rank.fill", lambda *_, **__: None
    yield "core.cluster.split_layers.split_layers", real(split_layers)
    yield "core.cluster.learner_rank.copy", SimpleNamespace(deepcopy=real(copy.deepcopy))
    yield "core.cluster.fsdp.init_device_mesh", real(fsdp.init_device_mesh)
    yield "core.cluster.learner_rank.init_device_mesh", real(fsdp.init_device_mesh)
    yield "core.cluster.learner_rank.ProcessRanks", RanksAlone
    for check in ("check_head", "check_packing"):
        yield f"core.learner.passes.{check}", lambda model: None
    yield "core.algorithm.checks.require", lambda *_: None
    # Which tokens are alike is in no fake tensor
    yield "core.learner.passes.can_share", lambda module: False
    for method in ("padded", "adding", "rows"):
        yield f"core.types.TrainBatch.{method}", real(getattr(TrainBatch, method))
    yield "core.learner.learner.split_zero_gradient", real(learner.split_zero_gradient)
    yield (
        "core.learner.passes.LearnerModel.micro_batches_of_rank",
        real(passes.LearnerModel.micro_batches_of_rank),
    )
    yield "core.learner.learner.Stepper.step", step_of
    yield "core.learner.passes.forward_inputs", real(packed_attention.forward_inputs)
    yield "core.learner.packed_attention._by_length", packed_attention._varlen
    yield "core.learner.log_probs.logits_at_a_time", lambda device: GPU_LOGITS
    yield "core.learner.log_probs._chunks", _few_chunks(log_probs._chunks)
    yield "torch.distributed.tensor._collective_utils.local_tensor_mode", lambda: True
    name = f"{ShardingPropagator.__module__}.ShardingPropagator._propagate_tensor_meta_non_cached"
    yield name, propagate_uncounted


add_adapters = step_models.add_adapters


def _few_chunks(
    chunks: Callable[[int, int], Iterator[slice]],
) -> Callable[[int, int], Iterator[slice]]:
    """Return ``chunks`` without those between the second and the last, which take no more
    memory."""

    def few(total: int, rows: int) -> Iterator[slice]:
        parts = list(chunks(total, rows))
        yield from parts if len(parts) < 4 else (parts[0], parts[1], parts[-1])

    return few


def full_batch(config: Config, sequences: int) -> TrainBatch:
    """Return one optimizer step of sequences of full length, answers too."""
    with unset_fake_temporarily():
        prompt, length = (
            config.data.max_prompt_length,
            config.data.max_prompt_length + config.data.max_response_length,
        )
        written = (torch.arange(length) >= prompt).repeat(sequences, 1)
        every, ones = torch.ones(sequences, length), torch.ones(sequences)
        fields = ("rollout_log_probs", "old_log_probs", "ref_log_prob")
        batch = batch_of_padded(
            input_ids=every.long(),
            attention_mask=every.bool(),
            response_mask=written,
            loss_mask=written,
            group=torch.arange(sequences),
            reward=ones,
            in_group_stats=ones.bool(),
            advantages=written.float(),
            **{name: -written.float() for name in fields},
        )
        (step,) = mini_batches(batch, prompts=sequences, scale_factor=1.0)
        return step


def first_step(rank: learner_rank.LearnerRank, meter: Meter) -> None:
    """Take an optimizer step with gradients of zero, after which Adam's moments are there."""
    with meter.at(HOST if meter.offloads else GPU):
        for parameter in rank.models.actor.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        rank.models.actor.stepper.begin_update(1.0)
        rank.models.actor.stepper.step(MetricSums())
