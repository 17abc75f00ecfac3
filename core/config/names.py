"""The types of keys whose values are names: those of the tables of ``registry.py``, and what a user may add."""

from __future__ import annotations

from typing import Annotated, Literal

from core.config import limits, registry

AdvEstimator = Annotated[str, limits.names(*registry.ESTIMATORS)]
LossMode = Annotated[str, limits.names(*registry.POLICY_LOSSES)]
AgentLoop = Annotated[str, limits.names(*registry.AGENT_LOOPS)]
EngineName = Literal[*registry.ENGINES]
RewardManager = Annotated[str, limits.registered_names(*registry.REWARD_MANAGERS)]
LossAggMode = Literal[*registry.LOSS_AGG_MODES]
KLKind = Literal[*registry.KL_KINDS]
Logger = Annotated[str, limits.names(*registry.LOGGERS)]
