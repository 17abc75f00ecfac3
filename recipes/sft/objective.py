"""The objective of supervised fine-tuning: the log-likelihood of what others wrote.

:func:`likelihood` has the signature of a policy loss, and ``config/sft.yaml`` names it by its path. So the weights of
tokens, micro-batches, packing and ranks are those of every other objective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig


def likelihood(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-log p`` of each token of the mask, 0 elsewhere, which ``actor.loss_agg_mode`` averages.

    Old log-probs and advantages belong to the signature; a likelihood reads neither.

    Shapes:
        all tensors  [B, T]
        stats        nll: the same, averaged over tokens whatever the loss is averaged over  [B, T]
    """
    nll = -log_prob_BT.masked_fill(~response_mask_BT, 0)
    return nll, {"nll": nll.detach().float()}
