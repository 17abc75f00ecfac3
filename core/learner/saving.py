"""A model and its optimizer in a checkpoint's ``actor/`` and ``critic/``, whole or in the parts of several ranks.

The folder around them, and what else a checkpoint holds, is the business of ``core/checkpoint``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from core.checkpoint.provenance import ModelFingerprint
from core.checkpoint.run_state import load_tensors
from core.learner.hf_export import export_hf, load_weights
from core.learner.learner import Actor, Critic
from core.learner.lora import add_adapters, fingerprint, has_adapters, load_adapters, save_adapters, trained_weights
from core.learner.models import load_critic, load_policy

if TYPE_CHECKING:
    from core.config.schema import Config

OPTIMIZER = "optimizer"  # folder of the sharded optimizer in a checkpoint's actor/ and critic/


def save_model(module: nn.Module, tokenizer: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a Hugging Face folder, or, of a model with adapters, what is trained alone in peft's format.

    ``weights`` stand in for the module's own, where those are elsewhere.
    """
    if not has_adapters(module):
        export_hf(module, tokenizer, folder, state_dict=weights)
        return
    save_adapters(module, weights or trained_weights(module), folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_model(module: nn.Module, folder: Path) -> None:
    """Load what :func:`save_model` wrote."""
    if not has_adapters(module):
        load_weights(module, folder)
        return
    trained = trained_weights(module)
    for name, value in load_adapters(list(trained), folder).items():
        trained[name].copy_(value)


def load_optimizer(part: Actor | Critic, folder: Path) -> None:
    """Load the optimizer of ``actor/`` or ``critic/``, whole or in the parts that several ranks wrote."""
    if (folder / "optimizer.pt").exists():
        part.stepper.optimizer.load_state_dict(load_tensors(folder / "optimizer.pt"))
        return
    load_sharded_optimizer(part.module, part.stepper.optimizer, folder / OPTIMIZER)


def save_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write this rank's part (torch.distributed.checkpoint); any number of ranks can read it."""
    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=folder)


def load_sharded_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load what :func:`save_optimizer` wrote, on these ranks or, without a process group, in this process."""
    state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(module, optimizer, state["optimizer"])


def load_whole_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Shard the ``optimizer.pt`` of a checkpoint that the in-process backend wrote."""
    whole, names = load_tensors(path), list(trained_weights(module))
    state = {
        "state": {names[index]: value for index, value in whole["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in whole["param_groups"]],
    }
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))


def planned_fingerprints(config: Config, *, critic: bool) -> dict[str, ModelFingerprint]:
    """Return architecture and shapes of the models that ``config`` names, before any weight is read."""
    part, seed = config.actor_rollout_ref, config.trainer.seed
    made = {"actor": add_adapters(load_policy(part.model, on_meta=True), part.model, seed)}
    if critic:
        made["critic"] = add_adapters(load_critic(config.critic.model, seed, on_meta=True), config.critic.model, seed)
    return {name: fingerprint(module, fetched=False) for name, module in made.items()}
