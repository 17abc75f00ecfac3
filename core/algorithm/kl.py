"""The KL to a reference policy: its estimators, its penalty in the reward and the coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from core.algorithm.sequences import mean_by_sequence
from core.config import registry
from core.types import TrainBatch


def kl_penalty(
    log_prob: Tensor, ref_log_prob: Tensor, kind: str, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) at each token, [...] of [...].

    With a mask the estimate is 0 outside it, whatever is there. ``d = log p - log p_ref`` of a
    token that the policy sampled; the estimators are those of J. Schulman, "Approximating KL
    divergence" (2020, joschu.net/blog/kl-approx.html).

    ================  =============================  ============================
    kind              value                          gradient in ``log_prob``
    ================  =============================  ============================
    kl, k1            ``d``                          1
    abs               ``|d|``                        ``sign(d)``
    mse, k2           ``d^2 / 2``                    ``d``
    low_var_kl, k3    ``exp(-d) - 1 + d``            ``1 - exp(-d)``
    kind + "+"        that of the kind               that of k2
    ================  =============================  ============================

    k3 is clamped to [-10, 10] (and d to +-20 before), as published: beyond about d = -2.6 its
    gradient is 0. The "+" forms are straight-through: k2's gradient is the one whose expectation
    is that of the KL itself. There is no full KL over the vocabulary: log-probs are kept for
    sampled tokens only. Raises NotImplementedError, as verl: an unknown kind.
    """
    if kind not in registry.KL_KINDS:
        kinds = ", ".join(registry.KL_KINDS)
        raise NotImplementedError(f"KL estimator {kind!r} is not known: choose one of {kinds}")
    difference = log_prob - ref_log_prob
    if mask is not None:
        difference = difference.masked_fill(~mask.bool(), 0)
    half_square = 0.5 * difference.square()
    name = kind.removesuffix("+")
    if name in ("kl", "k1"):
        value = difference
    elif name == "abs":
        value = difference.abs()
    elif name in ("mse", "k2"):
        value = half_square
    else:
        bounded = difference.clamp(-20.0, 20.0)
        value = ((-bounded).exp() - 1 + bounded).clamp(-10.0, 10.0)
    if kind.endswith("+"):
        return value.detach() + (half_square - half_square.detach())
    return value


def kl_rewards(
    batch: TrainBatch, controller: KLController, kind: str
) -> tuple[Tensor, KLController, dict[str, float]]:
    """Return what the penalty adds to each token's reward: ``-coefficient * kl``, [N].

    The source is arXiv:1909.08593, eq. 2. Returns the next controller and the metrics too.
    ``actor/reward_kl_penalty`` is the mean over sequences of their token means, where an empty
    sequence counts as 0, as published. ``actor/reward_kl_penalty_coeff`` is the coefficient that
    was used, before its update.
    """
    mask = batch.response_mask
    kl_N = kl_penalty(batch.old_log_probs.detach(), batch.ref_log_prob.detach(), kind, mask)
    mean = float(mean_by_sequence(kl_N, mask.bool(), batch.lengths).mean())
    metrics = {
        "actor/reward_kl_penalty": mean,
        "actor/reward_kl_penalty_coeff": controller.value,
    }
    return -controller.value * kl_N, controller.updated(mean, len(batch)), metrics


@dataclass(frozen=True)
class KLController:
    """The coefficient of the penalty: fixed, or steered to a target KL.

    ``kind`` is fixed or adaptive (arXiv:1909.08593, section 2.2). An adaptive coefficient is
    multiplied by ``1 + clip(kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon`` after each step.
    """

    kind: str
    value: float
    target_kl: float = 0.1
    horizon: float = 10000

    def updated(self, current_kl: float, n_steps: int) -> KLController:
        """Return the controller after ``n_steps`` sequences whose mean KL was ``current_kl``."""
        if self.kind == "fixed":
            return self
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        return replace(self, value=self.value * (1 + error * n_steps / self.horizon))

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def with_state(self, state: dict[str, float]) -> KLController:
        """Return the controller as it was when ``state`` was saved.

        A fixed coefficient, the target and the horizon stay the configured ones.
        """
        if self.kind == "fixed":
            return self
        return replace(self, value=float(state["value"]))
