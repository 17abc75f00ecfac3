"""The objective of supervised fine-tuning: the log-likelihood of what others wrote.

:func:`likelihood` has the signature of a policy loss, and ``config/sft.yaml`` names it by its path. So the weights of
tokens, micro-batches, packing and ranks are those of every other objective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from core.algorithm.padded import works_on_flat_tokens

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig


@works_on_flat_tokens
def likelihood(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-log p`` of each token of the mask, 0 elsewhere, which ``actor.loss_agg_mode`` averages.

    Old log-probs and advantages belong to the signature; a likelihood reads neither.

    Shapes:
        all tensors  [N]
        stats        nll: the same, averaged over tokens whatever the loss is averaged over  [N]
    """
    nll = -log_prob_N.masked_fill(~response_mask_N, 0)
    return nll, {"nll": nll.detach().float()}
