"""The key of GDPO: which parts of a score train, and with which weight."""

from core.config.schema import Config
from core.config.section import Open, key

PAPER = "GDPO"


class GDPOConfig(Config):
    """The core's configuration with the parts of a score."""

    reward_weights: Open = key({"acc": 1.0}, "weight of each part of the score, by the part's name")


SCHEMA = GDPOConfig
