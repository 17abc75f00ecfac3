"""The reward layer: it turns a trajectory into a score and gives every failure of a scorer a status."""

from core.rewards.layer import RewardError, RewardLayer

__all__ = ["RewardError", "RewardLayer"]
