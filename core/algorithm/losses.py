"""Policy losses, the value loss, and the weights that turn per-token losses into the objective.

A policy loss is a pure function ``f(inputs: LossInputs) -> (loss_N, stats)`` of the tokens of a
micro-batch: one of :data:`core.config.registry.POLICY_LOSSES` or a user's own, whose attribute
``select`` may choose tokens of the whole mini-batch beforehand. The objective is
``(loss_N * weight_N).sum()`` with the weights of :func:`loss_weights`, which are those of a whole
mini-batch: parts add up to the whole, however it is split. ``stats`` are detached [N] tensors, to
be averaged over response tokens. Losses and stats are 0 outside the mask, also where inputs are NaN
there. Below, ``r = exp(log p - log p_old)`` and ``A`` is the advantage.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.algorithm.sequences import mean_by_sequence, spread_over_tokens, sum_by_sequence
from core.config import registry
from core.config.code_by_path import load_object
from core.config.training_keys import ActorConfig, PolicyLossConfig

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a float32 ratio has no digits left
# A float32 log-ratio below it may be rounding: its sign would depend on the micro-batch
SAME_POLICY = 1e-4
Stats = dict[str, Tensor]
PolicyLoss = Callable[["LossInputs"], tuple[Tensor, Stats]]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of every policy loss: N tokens in B sequences, prompts included.

    Tensors of tokens are 0 outside the mask, and so are gradients, never NaN.
    """

    log_prob: Tensor  # [N] float: of the policy that trains
    old_log_prob: Tensor  # [N] float: of the policy before the update
    advantages: Tensor  # [N] float
    mask: Tensor  # [N] bool: True where the policy wrote the token
    config: ActorConfig
    lengths: Tensor  # [B] int64: tokens of each sequence
    # [N] bool: tokens that the loss treats apart, chosen from the whole mini-batch
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.mask.bool())
        for name in ("log_prob", "old_log_prob", "advantages"):
            object.__setattr__(self, name, getattr(self, name).masked_fill(~self.mask, 0))

    @property
    def log_ratio(self) -> Tensor:
        """Return ``log r``, [N], bounded by +-20."""
        return (self.log_prob - self.old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def clipped(self, ratio_N: Tensor) -> Tensor:
        """Clamp a ratio to ``[1 - clip_ratio_low, 1 + clip_ratio_high]``."""
        return ratio_N.clamp(1 - self.config.clip_ratio_low, 1 + self.config.clip_ratio_high)

    def surrogate(self, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``max(-A r, -A clip(r))`` (arXiv:1707.06347, eq. 7), [N].

        The second tensor is True where the clip decides it, [N] bool.
        """
        plain = -self.advantages * ratio_N
        bounded = -self.advantages * self.clipped(ratio_N)
        return torch.maximum(plain, bounded), bounded > plain

    def mean_over_sequence(self, values_N: Tensor) -> Tensor:
        """Put the mean over a sequence's policy tokens on each of its tokens, [N] -> [N]."""
        mean_B = mean_by_sequence(values_N, self.mask, self.lengths)
        return spread_over_tokens(mean_B, self.lengths)

    def stats(self, **stats: Tensor | None) -> Stats:
        """Return the stats of a loss; None stands for one that is always 0."""
        zeros = torch.zeros_like(self.log_prob)
        return {
            name: (zeros if value is None else value).detach().float().masked_fill(~self.mask, 0)
            for name, value in stats.items()
        }


def policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of this name, or a user's own.

    That is ``package.module:function`` or ``path/file.py:function``. Raises InputError: neither a
    name of the table nor a path that leads to a function.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return load_object(registry.policy_loss(name).function, key)


# -- losses with a clip --------------------------------------------------------------------------


def vanilla(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with dual clip (arXiv:1912.09729).

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where A < 0 at most ``-A c``. With high > low
    it is DAPO's clip-higher (arXiv:2503.14476, eq. 10). Raises ValueError: ``clip_ratio_c`` is not
    above 1.
    """
    c = x.config.clip_ratio_c
    if c <= 1:
        raise ValueError(f"actor.clip_ratio_c={c}: the dual clip's bound on the ratio must be > 1")
    surrogate, clips = x.surrogate(x.log_ratio.exp())
    negative = x.advantages < 0
    bound = -x.advantages * c
    loss = torch.where(negative, torch.minimum(surrogate, bound), surrogate)
    return loss, x.stats(
        pg_clipfrac=clips,
        pg_clipfrac_high=clips & ~negative,  # the part of pg_clipfrac above 1
        pg_clipfrac_lower=(surrogate > bound) & negative,
        ppo_kl=-x.log_ratio,
    )


def gspo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Use a sequence-level ratio with a token-level gradient: GSPO-token (arXiv:2507.18071).

    Equations 13 and 14: ``s = exp(mean over the sequence's tokens of log r)`` is clipped as in PPO;
    its gradient flows through each token's log-prob. Its paper averages per sequence first
    (``aggregation`` in the table).
    """
    log_ratio = x.log_prob - x.old_log_prob
    sequence_log_ratio = x.mean_over_sequence(log_ratio.detach())
    ratio = (x.log_prob - x.log_prob.detach() + sequence_log_ratio).clamp(max=10.0).exp()
    loss, clips = x.surrogate(ratio)
    return loss, x.stats(pg_clipfrac=clips, pg_clipfrac_lower=None, ppo_kl=-log_ratio)


def geo_mean(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A`` times the geometric mean of a sequence's ratios: GMPO (arXiv:2507.20673).

    Each token's log-ratio is bounded by ``[-clip_ratio_low, clip_ratio_high]`` where that makes the
    objective smaller. Averaged per sequence, whose tokens share an advantage.
    """
    log_ratio = x.log_prob - x.old_log_prob
    bounded = log_ratio.clamp(-x.config.clip_ratio_low, x.config.clip_ratio_high)
    sign = x.advantages.sign()
    smaller = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = x.mean_over_sequence(smaller).clamp(max=10.0).exp()
    clips = log_ratio != bounded
    return -x.advantages * ratio, x.stats(
        pg_clipfrac=clips & (x.advantages > 0),
        pg_clipfrac_lower=clips & (x.advantages < 0),
        ppo_kl=-log_ratio,
    )


def cispo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Clip the importance weight, not the gradient: CISPO (arXiv:2506.13585, eq. 4 and 5).

    ``-stop_gradient(clip(r, 1 - low, 1 + high)) A log p``: every token keeps a gradient.
    """
    ratio = x.log_ratio.detach().exp()
    weight = x.clipped(ratio)
    stats = x.stats(pg_clipfrac=weight != ratio, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio)
    return -weight * x.advantages * x.log_prob, stats


# -- losses without a clip -----------------------------------------------------------------------


def sapo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Use a soft gate in place of the clip (SAPO, arXiv:2511.20347).

    ``-A * 4 / tau * sigmoid(tau (r - 1))``, where the sign of A selects tau. Averaged per sequence.
    """
    tau = torch.full_like(x.advantages, x.config.tau_neg)
    tau = tau.masked_fill(x.advantages > 0, x.config.tau_pos)
    loss = -x.advantages * torch.sigmoid(tau * (x.log_ratio.exp() - 1)) * (4.0 / tau)
    return loss, x.stats(pg_clipfrac=None, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio)


def gpg(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return the policy gradient ``-A log p`` of GPG (arXiv:2504.02546), which is REINFORCE's."""
    return -x.advantages * x.log_prob, x.stats(ppo_kl=x.old_log_prob - x.log_prob)


# -- losses with selected tokens (arXiv:2505.22617) ----------------------------------------------
#
# The covariance of a token is ``(A - mean A) (log p - mean log p)``: where a likely token has a
# high advantage, its update lowers the entropy most. It is taken over all tokens of an optimizer
# step that carry loss, by old log-probs. Published implementations take it over a micro-batch, so
# that memory settings decide what is selected. The source is the paper's definition as verl
# implements it; of the paper the abstract alone was read. A token that is clipped at the weights of
# its optimizer step has no gradient to lose: the learner leaves it out of Clip-Cov's draw, as verl
# does.


def clip_cov(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate without dual clip, and 0 for the selected tokens: Clip-Cov.

    A selected token loses its gradient and keeps its place in the denominators.
    """
    loss, clips = x.surrogate(x.log_ratio.exp())
    return loss.masked_fill(x.selected, 0), x.stats(
        pg_clipfrac=clips,
        cov_selected=x.selected,
        pg_clipfrac_lower=None,
        ppo_kl=-x.log_ratio,
    )


def kl_cov(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A r``, and ``ppo_kl_coef |log r|`` more for the selected tokens: KL-Cov.

    Nothing is clipped. While the policy is still the old one ``|log r|`` has no gradient, so with
    one optimizer step a rollout this is the plain policy gradient. In published code the sign of a
    rounding error is its gradient then; here ``|log r|`` below 1e-4 counts as 0. Rounding in bf16
    is larger and still decides the sign. ``ppo_kl`` is ``|log r|``.
    """
    distance = x.log_ratio.abs()
    penalized = x.selected & (distance > SAME_POLICY)
    penalty = x.config.policy_loss.ppo_kl_coef * distance.masked_fill(~penalized, 0)
    return -x.advantages * x.log_ratio.exp() + penalty, x.stats(
        cov_selected=x.selected,
        pg_clipfrac=None,
        pg_clipfrac_lower=None,
        ppo_kl=distance,
    )


def clip_cov_tokens(
    log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor, config: PolicyLossConfig
) -> Tensor:
    """Draw tokens whose covariance is between ``clip_cov_lb`` and ``clip_cov_ub``.

    They are put into a random order, and the first of them are drawn: ``clip_cov_ratio`` of the
    tokens that carry loss, rounded down and at least one, or all candidates if there are fewer. The
    seed of the order is the number of tokens that carry loss, so a repeated step has the same
    order.

    Shapes:
        log_prob_N, advantages_N, carries_N  [N], all tokens of an optimizer step; carries_N is
                bool or 0/1
        result  [N] int32, the highest first: positive where drawn, negative where a token waits to
                take the place of a clipped one, 0 elsewhere
    """
    carries = carries_N.bool()
    covariance = covariances(log_prob_N, advantages_N, carries)
    tokens = int(carries.sum())
    within = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    candidates = (carries & within).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(tokens)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    drawn = max(int(config.clip_cov_ratio * tokens), 1)
    place = drawn - torch.arange(len(candidates), device=candidates.device)
    selection_order = torch.zeros_like(carries, dtype=torch.int32)
    selection_order[candidates[order]] = torch.where(place > 0, place, place - 1).int()
    return selection_order


def kl_cov_tokens(
    log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor, config: PolicyLossConfig
) -> Tensor:
    """Return the tokens of the highest covariance, [N] bool.

    They are ``kl_cov_ratio`` of the tokens with loss, rounded down and at least one. Of equal
    tokens the first is taken. Other shapes are those of :func:`clip_cov_tokens`.
    """
    carries = carries_N.bool()
    tokens = int(carries.sum())
    covariance = covariances(log_prob_N, advantages_N, carries).masked_fill(~carries, -torch.inf)
    highest = covariance.argsort(descending=True, stable=True)
    count = min(max(int(config.kl_cov_ratio * tokens), 1), tokens)
    selected = torch.zeros_like(carries)
    selected[highest[:count]] = True
    return selected


def covariances(log_prob_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return each token's covariance, [N] float64; 0 outside the mask."""
    count = mask_N.sum().clamp(min=1)
    a = advantages_N.double().masked_fill(~mask_N, 0)
    b = log_prob_N.double().masked_fill(~mask_N, 0)
    return ((a - a.sum() / count) * (b - b.sum() / count)).masked_fill(~mask_N, 0)


# -- the critic and the objective ----------------------------------------------------------------


def value_loss(
    values_N: Tensor,
    returns_N: Tensor,
    old_values_N: Tensor,
    cliprange_value: float,
    response_mask_N: Tensor,
) -> tuple[Tensor, Stats]:
    """Return the critic's clipped squared error.

    It is ``0.5 max((V - R)^2, (clip(V, V_old +- eps) - R)^2)``, the value-function clipping of
    PPO's reference implementation (Huang et al. 2022, "The 37 implementation details of PPO",
    detail 9).

    Shapes:
        all tensors  [N]
        stats        vf_clipfrac  [N]
    """
    outside = ~response_mask_N.bool()
    values = values_N.masked_fill(outside, 0)
    returns = returns_N.masked_fill(outside, 0)
    old_values = old_values_N.masked_fill(outside, 0)
    near_old = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    plain = (values - returns).square()
    bounded = (near_old - returns).square()
    vf_clipfrac = (bounded > plain).detach().float()
    return 0.5 * torch.maximum(plain, bounded), {"vf_clipfrac": vf_clipfrac}


def loss_weights(
    loss_mask_N: Tensor, lengths_B: Tensor, mode: str, *, scale_factor: float = 1.0
) -> Tensor:
    """Return each token's share of the objective: the loss is ``(loss_N * weight_N).sum()``.

    With M tokens and S sequences that have a token of the mask in the whole mini-batch, and L_i
    tokens in sequence i:

        token-mean               1 / M            (arXiv:2503.14476, eq. 12)
        seq-mean-token-mean      1 / (S L_i)      (arXiv:2402.03300, eq. 3)
        seq-mean-token-sum       1 / S
        seq-mean-token-sum-norm  1 / (S C), C = ``scale_factor``   (arXiv:2503.20783)

    The first two sum to one. A mini-batch without a token gets zeros.

    Shapes:
        loss_mask_N  [N]  bool or 0/1
        result       [N]  float32; float64 for a float64 mask

    Raises ValueError: an unknown mode.
    """
    mask = loss_mask_N.bool()
    ones_B = torch.ones(len(lengths_B), dtype=torch.float64, device=lengths_B.device)
    tokens_B = sum_by_sequence(mask.double(), lengths_B)
    sequences = tokens_B.count_nonzero().clamp(min=1)
    if mode == "token-mean":
        share_B = ones_B / tokens_B.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        share_B = ones_B / tokens_B.clamp(min=1) / sequences
    elif mode == "seq-mean-token-sum":
        share_B = ones_B / sequences
    elif mode == "seq-mean-token-sum-norm":
        share_B = ones_B / sequences / scale_factor
    else:
        modes = ", ".join(registry.LOSS_AGG_MODES)
        raise ValueError(f"actor.loss_agg_mode={mode}: choose one of {modes}")
    dtype = torch.float64 if loss_mask_N.dtype == torch.float64 else torch.float32
    return torch.where(mask, spread_over_tokens(share_B.to(dtype), lengths_B), 0)
