"""Advantages of right and of wrong answers apart (arXiv:2506.01347, section 2.2 and 4)."""

from torch import Tensor

from core.algorithm.advantages import AdvantageInputs

LAMBDA = 0.1  # weight of right answers in W-REINFORCE, as published


def of_samples(x: AdvantageInputs, right: float, wrong: float) -> tuple[Tensor, Tensor]:
    """Return ``right`` for tokens of answers with a score above 0, ``-wrong`` for the others."""
    right_B = (x.reward > 0).double()
    advantages = x.spread(right * right_B - wrong * (1 - right_B))
    return advantages, advantages


def psr(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Reinforce right answers alone: positive sample reinforcement."""
    return of_samples(x, right=1.0, wrong=0.0)


def nsr(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Penalise wrong answers alone: negative sample reinforcement."""
    return of_samples(x, right=0.0, wrong=1.0)


def w_reinforce(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Penalise wrong answers, and reinforce right ones by a tenth."""
    return of_samples(x, right=LAMBDA, wrong=1.0)
