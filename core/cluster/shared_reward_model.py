"""A reward model whose weights several ranks share by FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from core.cluster.fsdp import ProcessRanks, fill, shard
from core.learner.models import load_classifier
from core.rewards.reward_model import RewardModel

if TYPE_CHECKING:
    from core.config.sections.reward import RewardModelConfig


def shared_reward_model(config: RewardModelConfig, device: torch.device) -> RewardModel:
    """Return this rank's part of a reward model; rank 0 reads the weights. Raises InputError."""
    source = load_classifier(config.model)[0] if dist.get_rank() == 0 else None
    module, by_token = load_classifier(config.model, on_meta=True)
    shard(module, config.model.fsdp_config, device)
    module.to_empty(device="cpu" if config.model.fsdp_config.offload_policy else device)
    fill(module, source, device)
    return RewardModel(config, device, (module, by_token), ProcessRanks())
