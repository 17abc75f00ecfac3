"""The key of asymmetric REINFORCE."""

from core.config.schema import Config
from core.config.section import key

PAPER = "AsymRE"


class AsymREConfig(Config):
    """The core's configuration with the shift of the baseline."""

    baseline_shift: float = key(
        -0.1, "what the baseline is above the group's mean score; below 0: right answers weigh more"
    )


SCHEMA = AsymREConfig
