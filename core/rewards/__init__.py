"""The reward layer: it turns a trajectory into a score and gives every failure of a scorer a status."""

from core.rewards.failures import RewardError
from core.rewards.layer import RewardLayer

__all__ = ["RewardError", "RewardLayer"]
