"""The tokens that Clip-Cov and KL-Cov treat apart (arXiv:2505.22617): those of a high covariance.

The covariance of a token is ``(A - mean A) (log p - mean log p)``: a likely token with a high advantage, whose update
lowers the entropy most. Means, ranks and draws are over all tokens of an optimizer step that carry loss. Published
implementations take them over a micro-batch, so that what is selected depends on memory settings, and from the
log-probs of the pass under way; Clip-Cov's also leave out what the ratio's bounds clip. Here the log-probs are the old
ones, which are known before the step is split: in the first optimizer step after a rollout these are the same, and
nothing is clipped; later steps differ. The epochs of a batch select the same tokens.

These functions select; the losses are in :mod:`core.algorithm.losses`. Source: the paper's definition as verl
implements it; of the paper the abstract alone was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from core.config.sections.actor import PolicyLossConfig


def covariances(log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor) -> Tensor:
    """Return each token's covariance, [N] float64, 0 where it carries no loss. All inputs are [N]."""
    mask = carries_N.bool()
    count = mask.sum().clamp(min=1)
    a, b = (value.double().masked_fill(~mask, 0) for value in (advantages_N, log_prob_N))
    return ((a - a.sum() / count) * (b - b.sum() / count)).masked_fill(~mask, 0)


def clip_cov_tokens(log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor, config: PolicyLossConfig) -> Tensor:
    """Return tokens drawn at random from those whose covariance is between ``clip_cov_lb`` and ``clip_cov_ub``.

    They are ``clip_cov_ratio`` of the tokens that carry loss, rounded down, at least one, or all candidates where those
    are fewer. The draw is seeded with the number of these tokens: repeated, it is the same.

    Shapes:
        log_prob_N, advantages_N, carries_N  [N], all tokens of an optimizer step; carries_N is bool or 0/1
        result                               [N] bool
    """
    covariance, tokens = covariances(log_prob_N, advantages_N, carries_N), int(carries_N.bool().sum())
    inside = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub) & carries_N.bool()
    candidates = inside.nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(tokens))
    selected = torch.zeros_like(inside)
    selected[candidates[order[: max(int(config.clip_cov_ratio * tokens), 1)].to(candidates.device)]] = True
    return selected


def kl_cov_tokens(log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor, config: PolicyLossConfig) -> Tensor:
    """Return the tokens of the highest covariance: ``kl_cov_ratio`` of those with loss, rounded down, at least one.

    Of equal ones the first is taken. Shapes as :func:`clip_cov_tokens`.
    """
    carries = carries_N.bool()
    covariance = covariances(log_prob_N, advantages_N, carries).masked_fill(~carries, -torch.inf)
    tokens = int(carries.sum())
    highest = covariance.argsort(descending=True, stable=True)[: min(max(int(config.kl_cov_ratio * tokens), 1), tokens)]
    selected = torch.zeros_like(carries)
    selected[highest] = True
    return selected
