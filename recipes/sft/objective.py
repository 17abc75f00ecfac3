"""The objective of supervised fine-tuning: the log-likelihood of what others wrote.

:func:`likelihood` is a policy loss, and ``config/sft.yaml`` names it by its path. So the weights of
tokens, micro-batches, packing and ranks are those of every other objective.
"""

from __future__ import annotations

from torch import Tensor

from core.algorithm.losses import LossInputs


def likelihood(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-log p`` of each token of the mask, 0 elsewhere, which ``actor.loss_agg_mode``
    averages.

    A likelihood reads neither old log-probs nor advantages. ``nll`` of the stats is the same,
    averaged over tokens whatever the loss is averaged over.
    """
    nll = -inputs.log_prob
    return nll, {"nll": nll.detach().float()}
