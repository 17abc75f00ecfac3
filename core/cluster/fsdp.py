"""Shard models over ranks by PyTorch's FSDP2: how they are split, filled and gathered again.

Gradients are summed over the ranks, not averaged: the loss weights of an optimizer step sum to one
over all of them.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from core.config.training_keys import FSDPConfig
from core.learner.models import compute_dtype
from core.learner.passes import Ranks

# Models return views (a slice of the logits); nothing here works in place on them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class ProcessRanks(Ranks):
    """The ranks of the default process group. ``together`` neighbours have the same sequences."""

    def __init__(self, together: int = 1) -> None:
        self.is_rank_zero = dist.get_rank() == 0
        self.together = together

    def all_reduce_max(self, count: int) -> int:
        value = torch.tensor(count)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values[:: self.together]

    def with_gathered_params(
        self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return module.forward_of(function, *args, **kwargs)

    def reshard(self, module: nn.Module) -> None:
        reshard(module)


def make_mesh(device: torch.device, copy_size: int, layer_size: int = 1) -> DeviceMesh:
    """Return the ranks as copies of the model, each of ``copy_size`` ranks (``fsdp_size``).

    A size below 1, or of more ranks than there are, stands for all of them. The axes are
    ``replicate`` (copies), ``shard`` and ``tensor`` (``layer_size`` neighbours that share each
    layer). Axes of one rank are left out, except for ``shard``.
    """
    world = dist.get_world_size()
    size = copy_size if 0 < copy_size < world else world
    axes = {"replicate": world // size, "shard": size // layer_size, "tensor": layer_size}
    axes = {name: ranks for name, ranks in axes.items() if ranks > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def shard(
    module: nn.Module, config: FSDPConfig, device: torch.device, layer_size: int = 1
) -> nn.Module:
    """Split layers over ``layer_size`` ranks, shard every transformer block, then the rest.

    Parameters keep their dtype as masters. With ``offload_policy`` parameters, gradients and
    optimizer live on the CPU. Gradients are summed over the ranks that read other sequences. Each
    of the ranks that share a layer has the complete sum.
    """
    dtype = compute_dtype(config.dtype)
    mesh = make_mesh(device, config.fsdp_size, layer_size)
    if layer_size > 1:
        from core.cluster.split_layers import split_layers

        split_layers(module, mesh["tensor"])
        mesh = mesh[mesh.mesh_dim_names[:-1]]
    options: dict[str, Any] = {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if config.offload_policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    names = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [part for part in module.modules() if type(part).__name__ in names]
    for block in blocks:
        fully_shard(block, reshard_after_forward=True, **options)
    # The root is resharded too: weights that a pass without gradients left gathered would be old
    # after the next step.
    fully_shard(module, reshard_after_forward=True, **options)
    for part in [*blocks, module]:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def forward_of(self: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    module.forward_of = MethodType(forward_of, module)
    register_fsdp_forward_method(module, "forward_of")
    return module


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments of an optimizer; its step counts stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, DTensor):
                state[name] = value.to(device)


def reshard(module: nn.Module) -> None:
    """Drop gathered weights after a pass without gradients, so that none go stale."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def fill(
    module: nn.Module,
    source: nn.Module | Mapping[str, Tensor] | None,
    device: torch.device,
    *,
    everything: bool = True,
) -> None:
    """Copy the weights of rank 0's ``source`` into the ranks' shards, one tensor at a time.

    ``source`` is None on other ranks. ``everything`` includes buffers and frozen weights, which a
    checkpoint leaves unchanged.
    """
    lead = dist.get_rank() == 0
    values = dict(source.named_parameters()) if isinstance(source, nn.Module) else source

    def broadcast(like: Tensor, value: Tensor | None) -> Tensor:
        if value is None:
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        else:
            whole = value.to(device)
        dist.broadcast(whole, 0)
        return whole

    for name, parameter in module.named_parameters():
        if everything or parameter.requires_grad:
            whole = broadcast(parameter, values[name].detach() if lead else None)
            parameter.to_local().copy_(local_part(parameter, whole))
    if everything:
        for name, buffer in list(module.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            whole = broadcast(buffer, source.get_buffer(name) if lead else None)
            setattr(module.get_submodule(owner), leaf, whole)


def local_part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have whole, as a parameter is sharded."""
    mesh = parameter.device_mesh
    placements = parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def rank_part(parameter: nn.Parameter, whole: Tensor, *, device: torch.device) -> Tensor:
    """Return this rank's part, on a device, of a parameter's optimizer state.

    A tensor of another shape than the parameter's (a count of steps) stays whole.
    """
    if whole.shape != parameter.shape:
        return whole.to(device)
    part = local_part(parameter, whole.to(parameter.device_mesh.device_type)).to(device)
    return like_sharded(parameter, part)


def like_sharded(value: DTensor, part: Tensor) -> DTensor:
    """Return a tensor of which this rank holds ``part``, sharded as ``value`` is."""
    return DTensor.from_local(
        part,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


@torch.no_grad()
def gather(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor] | None:
    """Return sharded tensors whole on rank 0's CPU, None elsewhere. All ranks must call it.

    Tied weights share a tensor.
    """
    lead = dist.get_rank() == 0
    state: dict[str, Tensor] = {}
    seen: dict[int | str, Tensor | None] = {}
    for name, value in weights:
        # A merged weight is gone before the next comes, and its id may come again
        key = id(value) if isinstance(value, nn.Parameter) else name
        if key not in seen:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            seen[key] = whole.detach().to("cpu", copy=True) if lead else None
        state[name] = seen[key]
    return state if lead else None


def gathered(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a weight whole, in a dtype and on a device. All ranks that share it must call.

    The shards are converted first, so that what travels has the size of ``dtype``, and what FSDP2
    offloaded travels between the GPUs.
    """
    if not isinstance(value, DTensor):
        return value.detach().to(device, dtype)
    return like_sharded(value, value.detach().to_local().to(device, dtype)).full_tensor()
