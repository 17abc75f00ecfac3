"""The keys that only DAPO has: group filtering and what long answers cost."""

from __future__ import annotations

from typing import Literal

from core.config.schema import ActorRolloutRefConfig, Config, RewardModelConfig
from core.config.section import NonNegative, Section, Size, bookkeeping, key, needs
from core.config.training_keys import ActorConfig, AlgorithmConfig

PAPER = "DAPO"


class FilterGroupsConfig(Section):
    enable: bool = key(
        False, "draw more prompts in place of those whose answers all score the same"
    )
    metric: str | None = key(
        "acc", "part of the score that has to differ; null: acc", needs("enable")
    )
    max_num_gen_batches: Size = key(
        10,
        "most prompts drawn for one step, in units of gen_batch_size; 0: ten times those it needs",
        needs("enable"),
    )
    on_exhausted: Literal["train", "raise"] = key(
        "train", "at that limit: train on the groups there are, or end the run", needs("enable")
    )


class OverlongBufferConfig(Section):
    enable: bool = key(
        False, "take a penalty off the reward of answers near data.max_response_length"
    )
    len: Size = key(0, "tokens before the limit in which the penalty grows", needs("enable"))
    penalty_factor: NonNegative = key(0.0, "the penalty at the limit", needs("enable"))
    log: bool = bookkeeping(False, "record the penalty as a metric", needs("enable"))


class DAPOAlgorithmConfig(AlgorithmConfig):
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()


class DAPORewardModelConfig(RewardModelConfig):
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class DAPOActorConfig(ActorConfig):
    overlong_filtering: bool = key(False, "truncated answers carry no loss")


class DAPOActorRolloutRefConfig(ActorRolloutRefConfig):
    actor: DAPOActorConfig = DAPOActorConfig()


class DAPOConfig(Config):
    """The core's configuration with DAPO's keys."""

    actor_rollout_ref: DAPOActorRolloutRefConfig = DAPOActorRolloutRefConfig()
    reward_model: DAPORewardModelConfig = DAPORewardModelConfig()
    algorithm: DAPOAlgorithmConfig = DAPOAlgorithmConfig()

    @property
    def drops_groups(self) -> bool:
        """Return whether a step leaves groups out."""
        return self.algorithm.filter_groups.enable


SCHEMA = DAPOConfig
