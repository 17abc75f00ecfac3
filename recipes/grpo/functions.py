"""The estimator of rejection sampling (arXiv:2402.03300, section 5.2.1).

``algorithm.adv_estimator=recipes.grpo.functions:right_answers`` with the loss ``gpg``, which is
``-A log p``: fine-tuning on the answers that earned the reward, without a penalty for the others.
"""

from torch import Tensor

from core.algorithm.advantages import AdvantageInputs


def right_answers(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return the reward itself: the gradient coefficient of eq. 10, 1 for right answers, else 0."""
    advantages = inputs.spread(inputs.rewards_B)
    return advantages, advantages
