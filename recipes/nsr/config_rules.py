"""Rules on the keys of this recipe (see core/config/rules.py)."""

from core.config.rules import Broken
from core.config.schema import Config


def a_sign_holds_no_kl(config: Config) -> Broken:
    if config.algorithm.use_kl_in_reward and ":" in config.algorithm.adv_estimator:
        rule = "adds to the score, of which these advantages read only whether it is above 0"
        fix = "leave it out; actor_rollout_ref.actor.use_kl_loss=True adds the KL to the loss"
        yield "algorithm.use_kl_in_reward", rule, fix


PROBLEMS = (a_sign_holds_no_kl,)
