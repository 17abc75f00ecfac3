"""The adapter for functions that work on [B, T]: a user's estimator or policy loss, named by its path.

Everything else works on the flat tokens of a batch. A function that is marked with :func:`works_on_flat_tokens` does so
too, and is called as the functions of the tables are: with ``AdvantageInputs`` or ``LossInputs``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from core.types import pad, token_places

Function = TypeVar("Function", bound=Callable[..., Any])
OF_TOKENS = ("response_mask", "values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
AS_THEY_ARE = ("group", "in_group_stats", "baseline", "gamma", "lam", "norm_adv_by_std_in_grpo", "epsilon")


@dataclass(frozen=True, eq=False)
class PaddedAdvantageInputs:
    """What an estimator gets that is named by its path; it returns advantages and returns, [B, T] each.

    ``token_level_rewards`` has the score on the policy's last token, and what each token adds to it. The other fields
    are those of ``AdvantageInputs``, with [B, T] where those have [N].
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group: Tensor
    in_group_stats: Tensor | None = None
    values: Tensor | None = None
    baseline: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
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


def works_on_flat_tokens(function: Function) -> Function:
    """Mark an estimator or a policy loss that works on flat tokens, so that nothing is padded for it."""
    function.works_on_flat_tokens = True
    return function


def is_padded(function: Callable[..., Any]) -> bool:
    """Return whether a function that was named by its path works on padded tensors, as it does unless marked."""
    return not getattr(function, "works_on_flat_tokens", False)


def pads_estimator(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Return an estimator of ``AdvantageInputs`` that calls one of :class:`PaddedAdvantageInputs`."""

    def estimate(inputs: Any) -> tuple[Tensor, Tensor]:
        fields = {name: getattr(inputs, name) for name in (*AS_THEY_ARE, *OF_TOKENS)}
        fields["token_level_rewards"] = inputs.at_actions(inputs.action_rewards())
        for name in ("token_level_rewards", *OF_TOKENS):
            if fields[name] is not None:
                fields[name] = pad(fields[name], inputs.lengths)
        advantages_BT, returns_BT = function(PaddedAdvantageInputs(**fields))
        mask_BT = token_places(inputs.lengths)
        return advantages_BT[mask_BT], returns_BT[mask_BT]

    return estimate


def pads_loss(function: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> Callable[..., Any]:
    """Return a policy loss of ``LossInputs`` that calls ``f(log_prob, old_log_prob, advantages, mask, config)``.

    All tensors of the function are [B, T], and so are the loss and the stats that it returns.
    """

    def loss(inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        tensors_N = inputs.log_prob, inputs.old_log_prob, inputs.advantages, inputs.mask
        loss_BT, stats = function(*(pad(value_N, inputs.lengths) for value_N in tensors_N), inputs.config)
        mask_BT = token_places(inputs.lengths)
        return loss_BT[mask_BT], {name: value_BT[mask_BT] for name, value_BT in stats.items()}

    return loss
