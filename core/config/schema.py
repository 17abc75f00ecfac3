"""The configuration: its sections, of ``core/config/sections``, put together.

Keys and defaults are those of verl v0.6.1 in the subset that does something here; a default that differs is listed in
``core/config/README.md``. A default of None that stands for another key's value is filled in by
:func:`core.config.defaults.resolve`, so a resolved configuration holds None only where a description gives its meaning.

Units: a *prompt* is an example of the data, a *trajectory* one answer to it (``rollout.n`` of them a prompt). Batch
sizes named ``..._per_gpu`` count trajectories in one pass of one rank, and are memory settings: they cannot change the
result.
"""

from __future__ import annotations

from core.config import when
from core.config.section import Section, bookkeeping, execution, key
from core.config.sections.actor import ActorConfig, RefConfig
from core.config.sections.algorithm import AlgorithmConfig
from core.config.sections.critic import CriticConfig
from core.config.sections.data import DataConfig
from core.config.sections.model import ModelConfig
from core.config.sections.reward import (
    CustomRewardFunctionConfig,
    RewardModelConfig,
)
from core.config.sections.rollout import RolloutConfig
from core.config.sections.trainer import (
    GlobalProfilerConfig,
    RayKwargsConfig,
    TrainerConfig,
)


class ActorRolloutRefConfig(Section):
    hybrid_engine: bool = execution(True, "learner and engine alternate on the same GPUs; False: it has its own")
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = key(RefConfig(), used_if=when.REFERENCE)
    rollout: RolloutConfig = RolloutConfig()


class Config(Section):
    """The whole configuration; ``config.actor_rollout_ref.rollout.n`` is verl's key of that name.

    A recipe may add keys of its own in a subclass: see :mod:`core.config.recipes`.
    """

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = key(CriticConfig(), used_if=when.CRITIC)
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray_kwargs: RayKwargsConfig = bookkeeping(RayKwargsConfig(), used_if=when.OVER_RAY)
    global_profiler: GlobalProfilerConfig = bookkeeping(GlobalProfilerConfig())

    @property
    def generates(self) -> bool:
        """Whether a step collects answers; a recipe that trains on what stands in files overrides it."""
        return True

    @property
    def drops_groups(self) -> bool:
        """Whether a step leaves groups out, so that more prompts are drawn; a recipe that filters overrides it."""
        return False

    @property
    def needs_engine(self) -> bool:
        """Whether anything in the run is answered by an engine, in a step or in a validation."""
        return True

    @property
    def learner_ranks(self) -> int:
        """The processes that hold the learner: one a GPU over Ray, one in all where the trainer's own process does."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node if self.trainer.backend == "ray" else 1
