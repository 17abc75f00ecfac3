"""PPO's surrogate with a penalty in place of the clip (arXiv:1707.06347, eq. 8).

``actor_rollout_ref.actor.policy_loss.loss_mode=recipes.ppo.functions:kl_penalty``. The penalty is
on the change since the rollout. Core's KL loss is on the distance from the start.
"""

from torch import Tensor

from core.algorithm.losses import LossInputs, Stats


def kl_penalty(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A r + beta KL[old, new]`` with ``policy_loss.ppo_kl_coef`` as beta.

    ``r - 1 - log r`` estimates the KL of a token that the old policy sampled, without bias and
    never below 0 (arXiv:2402.03300, eq. 4, with the roles of the policies exchanged).
    """
    ratio = x.log_ratio.exp()
    kl = ratio - 1 - x.log_ratio
    loss = -x.advantages * ratio + x.config.policy_loss.ppo_kl_coef * kl
    return loss, x.stats(pg_clipfrac=None, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio)
