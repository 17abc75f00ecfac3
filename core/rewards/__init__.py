"""The reward layer: from a trajectory to a score, with every failure in sight."""

from core.rewards.custom import RewardConfigError
from core.rewards.layer import RewardError, RewardLayer, status_rates

__all__ = ["RewardConfigError", "RewardError", "RewardLayer", "status_rates"]
