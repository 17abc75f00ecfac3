"""The reward layer: from a trajectory to a score, with every failure in sight."""

from core.errors import InputError
from core.rewards.layer import RewardError, RewardLayer

__all__ = ["InputError", "RewardError", "RewardLayer"]
