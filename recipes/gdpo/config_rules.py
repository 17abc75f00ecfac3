"""Rules on GDPO's keys (see core/config/rules.py)."""

from core.config.rules import Broken
from core.config.schema import Config


def parts_hold_no_kl(config: Config) -> Broken:
    if config.algorithm.use_kl_in_reward:
        rule = "adds to the score, and GDPO's advantages are made of the score's parts"
        fix = "leave it out; actor_rollout_ref.actor.use_kl_loss=True adds the KL to the loss"
        yield "algorithm.use_kl_in_reward", rule, fix


PROBLEMS = (parts_hold_no_kl,)
