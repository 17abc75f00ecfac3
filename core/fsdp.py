"""One rank of a learner that several processes share: models sharded by PyTorch's FSDP2, and their state.

The passes and the updates are those of ``core.learner``. Gradients are summed over the ranks, not averaged: the loss
weights of an optimizer step sum to one over all of them. Nothing here knows how the processes were started; the
process group exists when :class:`LearnerRank` is made.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from core.export import export_hf, load_weights
from core.learner import Actor, Critic, Policy, Ranks
from core.metrics import Means
from core.models import load_critic, load_policy, load_tokenizer
from core.provenance import ModelFingerprint
from core.run_state import load_tensors
from core.types import TrainBatch
from core.workers import compute_dtype, pass_size, probe_ids, probe_log_probs

if TYPE_CHECKING:
    from core.config.schema import Config, FSDPConfig

# Models return views (a slice of the logits); nothing here works in place on them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

OPTIMIZER = "optimizer"  # folder of the sharded optimizer in a checkpoint's actor/ and critic/


class ProcessRanks(Ranks):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.lead = dist.get_rank() == 0

    def most(self, count: int) -> int:
        value = torch.tensor(count)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def total(self, means: Means) -> Means:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, means)
        whole = Means()
        for part in parts:
            whole.merge(part)
        return whole

    def inside(self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return module.forward_of(function, *args, **kwargs)


def make_mesh(device: torch.device, shards: int) -> DeviceMesh:
    """All ranks in one group, or groups of ``shards`` ranks (``fsdp_size``) that each hold the whole model."""
    world = dist.get_world_size()
    if shards in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % shards:
        raise ValueError(f"fsdp_config.fsdp_size={shards}: must divide the {world} ranks; change one of them")
    return init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard"))


def shard(module: nn.Module, config: FSDPConfig, device: torch.device) -> nn.Module:
    """Shards every transformer block, then the rest, as ``config`` says; parameters keep their dtype as masters.

    Offloading is FSDP2's: parameters, gradients and optimizer live on the CPU together, whichever key asks for it.
    """
    dtype = compute_dtype(config.dtype)
    options: dict[str, Any] = {"mesh": make_mesh(device, config.fsdp_size)}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offloads(config):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    names = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [part for part in module.modules() if type(part).__name__ in names]
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    # The root too is resharded: a pass without gradients must not leave weights behind that the next step outdates.
    fully_shard(module, reshard_after_forward=True, **options)
    for part in _sharded(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    if config.forward_prefetch:
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    module.forward_of = MethodType(lambda self, function, *args, **kwargs: function(self, *args, **kwargs), module)
    register_fsdp_forward_method(module, "forward_of")
    return module


def offloads(config: FSDPConfig) -> bool:
    return config.param_offload or config.optimizer_offload or config.offload_policy


def reshard(module: nn.Module) -> None:
    """After a pass without gradients: with ``reshard_after_forward=False`` blocks would keep weights that go stale."""
    for part in _sharded(module):
        part.reshard()


def _sharded(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


@torch.no_grad()
def fill(module: nn.Module, source: nn.Module | None, device: torch.device, *, buffers: bool = True) -> None:
    """Copies the weights of rank 0's ``source`` (None elsewhere) into the ranks' shards, one tensor at a time."""

    def broadcast(like: Tensor, value: Tensor | None) -> Tensor:
        whole = torch.empty(like.shape, dtype=like.dtype, device=device) if value is None else value.to(device)
        dist.broadcast(whole, 0)
        return whole

    for name, parameter in module.named_parameters():
        whole = broadcast(parameter, source and source.get_parameter(name).detach())
        mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(mine.to_local())
    for name, buffer in list(module.named_buffers()) if buffers else ():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, broadcast(buffer, source and source.get_buffer(name)))


@torch.no_grad()
def gather(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor] | None:
    """The whole state dict on rank 0's CPU, None elsewhere; all ranks must call it. Tied weights share a tensor."""
    lead, found, seen = dist.get_rank() == 0, {}, {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            wanted = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            seen[id(value)] = whole.detach().to("cpu", wanted) if lead else None
        found[name] = seen[id(value)]
    return found if lead else None


def save_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every rank writes its part (torch.distributed.checkpoint); any number of ranks can read it."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=folder)


def load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Reads what :func:`save_optimizer` wrote, on these ranks or, without a process group, in this process."""
    import torch.distributed.checkpoint as dcp

    state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(module, optimizer, state["optimizer"])


def load_whole_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Shards the ``optimizer.pt`` of a checkpoint that the in-process backend wrote."""
    whole, names = load_tensors(path), [name for name, _ in module.named_parameters()]
    state = {
        "state": {names[index]: value for index, value in whole["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in whole["param_groups"]],
    }
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))


class LearnerRank:
    """This rank's part of policy, reference and critic: ``core.workers``' phases on the rank's share of a batch.

    Rank 0 reads the weights and hands them out, so no other process ever holds a whole model. All ranks call the
    same methods in the same order. ``master_dtype`` is float32 but in tests.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        *,
        needs_ref: bool,
        needs_critic: bool,
        master_dtype: torch.dtype = torch.float32,
    ):
        self.config, self.device = config, device
        self.ranks = ProcessRanks()
        self.skeletons: dict[str, nn.Module] = {}
        part, critic = config.actor_rollout_ref, config.critic

        def policy(on_meta: bool) -> nn.Module:
            return load_policy(part.model, master_dtype, on_meta=on_meta)

        source = policy(on_meta=False) if self.ranks.lead else None
        temperature = part.rollout.temperature or 1.0
        shared = {"ranks": self.ranks, "device": device}
        module = self.sharded("actor", policy(on_meta=True), source, part.actor.fsdp_config)
        self.actor = Actor(module, part.actor, temperature=temperature, **shared)
        self.ref = self.critic = None
        if needs_ref:
            module = self.sharded("ref", policy(on_meta=True), source, part.ref.fsdp_config).requires_grad_(False)
            self.ref = Policy(module, temperature=temperature, **shared)
        if needs_critic:
            seed = config.trainer.seed
            source = load_critic(critic.model, seed, master_dtype) if self.ranks.lead else None
            empty = load_critic(critic.model, seed, master_dtype, on_meta=True)
            self.critic = Critic(self.sharded("critic", empty, source, critic.model.fsdp_config), critic, **shared)

    def sharded(self, name: str, skeleton: nn.Module, source: nn.Module | None, config: FSDPConfig) -> nn.Module:
        """The weightless ``skeleton``, sharded and filled; the skeleton itself is kept for names and exports."""
        self.skeletons[name] = copy.deepcopy(skeleton)
        if source is not None and getattr(source, "generation_config", None) is not None:
            self.skeletons[name].generation_config = source.generation_config
        module = shard(skeleton, config, self.device)
        module.to_empty(device="cpu" if offloads(config) else self.device)
        fill(module, source, self.device)
        return module

    def trained(self) -> dict[str, Actor | Critic]:
        return {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        return {name: ModelFingerprint.of(self.skeletons[name]) for name in self.trained()}

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        found = self.actor.log_probs(batch, pass_size(self.config.actor_rollout_ref.rollout))
        reshard(self.actor.module)
        return found

    def compute_ref_log_prob(self, batch: TrainBatch) -> tuple[Tensor]:
        return self.ref.log_probs(batch, pass_size(self.config.actor_rollout_ref.ref))[:1]

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor]:
        found = self.critic.values(batch)
        reshard(self.critic.module)
        return (found,)

    def update_actor(self, steps: list[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        return self.actor.update(steps, lr_multiplier)

    def update_critic(self, steps: list[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        return self.critic.update(steps, lr_multiplier)

    def probe(self) -> tuple[tuple[int, ...], Any]:
        """The fixed text, and the policy's log-probs of it, [n - 1] float32."""
        ids = probe_ids(self.actor.module.config.vocab_size)
        found = probe_log_probs(self.actor)
        reshard(self.actor.module)
        return ids, found

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        return gather(self.actor.module, dtype)

    def save(self, folder: str) -> None:
        """``actor/`` and ``critic/``: a Hugging Face folder, and the optimizer in parts. All ranks see ``folder``."""
        tokenizer = load_tokenizer(self.config.actor_rollout_ref.model) if self.ranks.lead else None
        for name, part in self.trained().items():
            state = gather(part.module)
            if self.ranks.lead:
                export_hf(self.skeletons[name], tokenizer, Path(folder, name), state_dict=state)
            save_optimizer(part.module, part.stepper.optimizer, Path(folder, name, OPTIMIZER))

    def load(self, folder: str) -> None:
        """What these, or any other number of ranks, or the in-process backend saved."""
        for name, part in self.trained().items():
            whole = None
            if self.ranks.lead:
                whole = copy.deepcopy(self.skeletons[name]).to_empty(device="cpu")
                whole.tie_weights()
                load_weights(whole, Path(folder, name))
            fill(part.module, whole, self.device, buffers=False)
            if Path(folder, name, OPTIMIZER).is_dir():
                load_optimizer(part.module, part.stepper.optimizer, Path(folder, name, OPTIMIZER))
            else:
                load_whole_optimizer(part.module, part.stepper.optimizer, Path(folder, name, "optimizer.pt"))
