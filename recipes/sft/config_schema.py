"""The keys of supervised fine-tuning. See ``core/config/recipes.py``.

The names of columns are those of verl's SFT trainers. A demonstration's length is bounded by
``data.max_prompt_length + data.max_response_length``, by which runs are planned.

What belongs to reinforcement learning is no key here: a constant stands for it, which core reads.
"""

from __future__ import annotations

from typing import ClassVar

from core.config.schema import (
    ActorRolloutRefConfig,
    Config,
    HealthBound,
    HealthConfig,
    RolloutConfig,
    TrainerConfig,
)
from core.config.section import PathsMaybeEmpty, files, key
from core.config.training_keys import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    PolicyLossConfig,
    RefConfig,
)

PAPER = "supervised fine-tuning"


class DemonstrationConfig(DataConfig):
    """The core's section ``data``, with the columns of demonstrations."""

    gen_batch_size: ClassVar[None] = None
    val_files: PathsMaybeEmpty = files(
        (), "parquet files of questions that a validation answers; empty: there is none"
    )
    messages_key: str = key(
        "messages", "column of a whole chat: its assistant turns are trained on"
    )
    tools_key: str = key("tools", "column, if a file has it, of the chat template's tools")
    enable_thinking_key: str = key(
        "enable_thinking", "column, if a file has it, of a row's enable_thinking"
    )
    response_key: str = key(
        "response",
        "column of the answers to prompt_key if a file has no chats; extra_info.answer is a field "
        "of a column",
    )


class LikelihoodConfig(PolicyLossConfig):
    clip_cov_ratio: ClassVar[float] = 0.0002
    clip_cov_lb: ClassVar[float] = 1.0
    clip_cov_ub: ClassVar[float] = 5.0
    kl_cov_ratio: ClassVar[float] = 0.0002
    ppo_kl_coef: ClassVar[float] = 0.1


class SFTActorConfig(ActorConfig):
    clip_ratio: ClassVar[float] = 0.2
    clip_ratio_low: ClassVar[float] = 0.2
    clip_ratio_high: ClassVar[float] = 0.2
    clip_ratio_c: ClassVar[float] = 3.0
    use_kl_loss: ClassVar[bool] = False
    kl_loss_coef: ClassVar[float] = 0.0
    kl_loss_type: ClassVar[str] = "kl"
    tau_pos: ClassVar[float] = 1.0
    tau_neg: ClassVar[float] = 1.05
    policy_loss: LikelihoodConfig = LikelihoodConfig()


class QuestionsRolloutConfig(RolloutConfig):
    """The engine that answers the questions of a validation; ``val_kwargs`` are its settings."""

    n: ClassVar[int] = 1  # a line of data.train_files is one demonstration
    do_sample: ClassVar[bool] = True
    temperature: ClassVar[float] = 1.0  # the likelihood is that of the model itself
    top_p: ClassVar[float] = 1.0
    top_k: ClassVar[int] = -1
    kept_sets: ClassVar[bool] = False
    ignore_eos: ClassVar[bool] = False


class SFTModelsConfig(ActorRolloutRefConfig):
    actor: SFTActorConfig = SFTActorConfig()
    ref: ClassVar[RefConfig] = RefConfig(
        ulysses_sequence_parallel_size=1, tensor_model_parallel_size=1
    )
    rollout: QuestionsRolloutConfig = QuestionsRolloutConfig()


class SFTHealthConfig(HealthConfig):
    reward_drop: ClassVar[HealthBound] = HealthBound()
    reward_window: ClassVar[int] = 10
    logp_diff: ClassVar[HealthBound] = HealthBound()
    entropy_gap: ClassVar[HealthBound] = HealthBound()
    zero_variance: ClassVar[HealthBound] = HealthBound()
    scorer_errors: ClassVar[HealthBound] = HealthBound()


class SFTTrainerConfig(TrainerConfig):
    critic_warmup: ClassVar[int] = 0
    max_staleness: ClassVar[int] = 0
    rollout_data_dir: ClassVar[None] = None
    health: SFTHealthConfig = SFTHealthConfig()


class SFTConfig(Config):
    """The core's configuration, without reinforcement learning."""

    data: DemonstrationConfig = DemonstrationConfig()
    actor_rollout_ref: SFTModelsConfig = SFTModelsConfig()
    critic: ClassVar[CriticConfig] = CriticConfig(enable=False)
    algorithm: ClassVar[AlgorithmConfig] = AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    trainer: SFTTrainerConfig = SFTTrainerConfig()

    generates: ClassVar[bool] = False  # a step trains on files, and only validations generate

    @property
    def needs_engine(self) -> bool:
        """Return whether there are questions to answer: without them no engine is made."""
        return bool(self.data.val_files)


SCHEMA = SFTConfig
