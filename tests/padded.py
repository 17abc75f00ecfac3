"""Batches and estimators as padded tensors, [B, T]: the form in which tests write their numbers
down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.algorithm.advantages import AdvantageInputs, estimator, inputs_of
from core.algorithm.losses import LossInputs, loss_weights, policy_loss
from core.config.training_keys import AlgorithmConfig
from core.types import BATCH_FIELDS, TrainBatch

OF_TOKENS = ("response_mask", "values")


@dataclass(frozen=True, eq=False)
class PaddedAdvantageInputs:
    """The fields of ``AdvantageInputs``, with [B, T] where those have [N], and rewards of single
    tokens."""

    token_level_rewards: Tensor
    response_mask: Tensor
    group: Tensor
    in_group_stats: Tensor | None = None
    values: Tensor | None = None
    baseline: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    @property
    def counted_B(self) -> Tensor:
        """Return the sequences that enter statistics, [B] bool."""
        everything = torch.ones_like(self.group, dtype=torch.bool)
        return everything if self.in_group_stats is None else self.in_group_stats.bool()

    @property
    def rewards_B(self) -> Tensor:
        """Return each sequence's reward, [B] float64, 0 of those that were not scored."""
        return self.token_level_rewards.sum(-1, dtype=torch.float64).masked_fill(~self.counted_B, 0)


def batch_of_padded(
    *, attention_mask: Tensor, pad_id: int = 0, **fields: Tensor | None
) -> TrainBatch:
    """Return the batch of fields of which those of tokens are padded on the right."""
    of_tokens = {
        name
        for name, value in fields.items()
        if value is not None and BATCH_FIELDS[name].metadata["axes"] == "N"
    }
    flat = {
        name: value[attention_mask] if name in of_tokens else value
        for name, value in fields.items()
    }
    return TrainBatch(attention_mask.sum(dim=1), pad_id).adding(**flat)


def on_padded(
    estimator: Callable[[AdvantageInputs], tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an estimator of :class:`PaddedAdvantageInputs`, whose sequences have no padding, that
    calls a flat one."""

    def estimate(inputs: PaddedAdvantageInputs) -> tuple[Tensor, Tensor]:
        advantages, returns = estimator(flat_inputs(inputs))
        padded = advantages.view(inputs.response_mask.shape)
        return padded, padded if returns is advantages else returns.view(padded.shape)

    return estimate


def flat_inputs(inputs: PaddedAdvantageInputs) -> AdvantageInputs:
    """Return the same inputs on flat tokens; rewards of single tokens stay where they are."""
    count, width = inputs.response_mask.shape
    fields: dict[str, Any] = {
        one.name: getattr(inputs, one.name) for one in dataclasses.fields(inputs)
    }
    rewards = fields.pop("token_level_rewards")
    flat = {
        name: fields[name] if fields[name] is None else fields[name].flatten() for name in OF_TOKENS
    }
    lengths = torch.full((count,), width)
    return AdvantageInputs(
        rewards.new_zeros(count), lengths, token_rewards=rewards.flatten(), **{**fields, **flat}
    )


def padded_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return the policy loss of this name as a function of [B, T] tensors without padding, and the
    section actor."""
    flat = policy_loss(name)

    def loss(
        log_prob: Tensor, old: Tensor, adv: Tensor, mask: Tensor, config: Any, *selected: Tensor
    ) -> Any:
        tensors = (value.flatten() for value in (log_prob, old, adv, mask))
        lengths = torch.full((len(mask),), mask.shape[1])
        loss_N, stats = flat(
            LossInputs(*tensors, config, lengths, *(one.flatten() for one in selected))
        )
        return loss_N.view(mask.shape), {
            name: value.view(mask.shape) for name, value in stats.items()
        }

    return loss


def padded_loss_weights(mask_BT: Tensor, mode: str, **options: Any) -> Tensor:
    """Return the loss weights, [B, T], of sequences without padding."""
    lengths = torch.full((len(mask_BT),), mask_BT.shape[1])
    return loss_weights(mask_BT.flatten(), lengths, mode, **options).view(mask_BT.shape)


def estimate(batch: TrainBatch, config: AlgorithmConfig) -> TrainBatch:
    """Return the batch with the advantages and returns of the configured estimator."""
    advantages_N, returns_N = estimator(config.adv_estimator)(inputs_of(batch, config))
    return batch.adding(advantages=advantages_N, returns=returns_N)
