"""Rules on the keys of on-policy distillation (see core/config/rules.py)."""

from core.config.rules import Broken
from recipes.opd.config_schema import OPDConfig


def the_kl_counts(config: OPDConfig) -> Broken:
    if config.algorithm.use_kl_in_reward and config.distillation.reward_weight == 0:
        rule = "adds to the task's reward, and distillation.reward_weight=0 takes none of it"
        fix = "leave it out, or raise distillation.reward_weight"
        yield "algorithm.use_kl_in_reward", rule, fix


PROBLEMS = (the_kl_counts,)
