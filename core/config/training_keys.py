"""The keys of data, models, their updates and the objective; :mod:`core.config.schema` puts all
sections together."""

from __future__ import annotations

from typing import Annotated, Literal

from core.config import registry
from core.config.section import (
    AboveOne,
    Betas,
    ClipLow,
    Count,
    Day,
    DType,
    FrozenDict,
    Names,
    NonNegative,
    NumberOrText,
    OffOrCount,
    OffOrSize,
    Open,
    Paths,
    PathsOrNone,
    Positive,
    PositiveShare,
    Section,
    Share,
    Size,
    execution,
    files,
    key,
    names,
)

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ULYSSES, LAYERS, MICRO = (
    "ulysses_sequence_parallel_size",
    "tensor_model_parallel_size",
    "ppo_micro_batch_size_per_gpu",
)
FSDP = f"{ACTOR}.fsdp_config"
# When a key has an effect, as rules.unmet reads it: a name that begins with a dot is of the key's
# own section
OVER_RAY = "trainer.backend=ray"
EPISODES = "actor_rollout_ref.rollout.agent_loop!=None"
SEARCHES = "plays_episodes"
WEIGHED = ".bypass_mode=False & .rollout_is"
BY_NUMBER, DIVIDED = ".use_dynamic_bsz=False", ".loss_agg_mode=seq-mean-token-sum-norm"

AdvEstimator = Annotated[str, names(*registry.ESTIMATORS)]
LossMode = Annotated[str, names(*registry.POLICY_LOSSES)]
LossAggMode = Literal[*registry.LOSS_AGG_MODES]
KLKind = Literal[*registry.KL_KINDS]


class DataConfig(Section):
    train_files: Paths = files(
        ("~/data/rlhf/gsm8k/train.parquet",),
        "files of training examples, parquet or JSON lines (.jsonl)",
    )
    val_files: PathsOrNone = files(
        ("~/data/rlhf/gsm8k/test.parquet",),
        "files of validation questions, parquet or JSON lines (.jsonl); []: none",
    )
    prompt_key: str = key("prompt", "column that holds the prompt, a list of chat messages")
    image_key: str = key(
        "images", "column that holds the pictures of a prompt, one for each <image> in it"
    )
    reward_fn_key: str = key(
        "data_source", "column that names the data source, which chooses the scorer"
    )
    max_prompt_length: Count = key(
        512, "tokens of the prompt; in a search episode, of prompt and episode"
    )
    max_response_length: Count = key(
        512, "tokens of the answer, tools' included; search episodes: of one turn"
    )
    max_start_length: Count | None = key(
        None, "search episodes: prompt's tokens; null: max_prompt_length", SEARCHES
    )
    max_obs_length: Count = key(500, "search episodes: tokens of what a search returns", SEARCHES)
    train_batch_size: Count = key(1024, "prompts a step")
    gen_batch_size: Count | None = key(
        None, "prompts in flight at most", "generates", follows="data.train_batch_size"
    )
    train_max_samples: OffOrCount = key(-1, "examples of all training files together; -1: all")
    val_max_samples: OffOrCount = key(
        -1, "examples of each validation file; -1: all", "needs_engine"
    )
    shuffle: bool = key(True, "training examples in a random order, another one in each epoch")
    seed: Size | None = key(None, "decides the order of the training examples; null: trainer.seed")
    filter_overlong_prompts: bool = key(
        False, "leave out examples whose prompt is longer than max_prompt_length"
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", "of a longer prompt: the end that is cut"
    )
    apply_chat_template_kwargs: Open = key(
        FrozenDict(), "arguments of the tokenizer's apply_chat_template"
    )
    chat_template_date: Day | None = key(
        None, "today's date for chat templates that write one; null: that of the run's first start"
    )


# --- models and their updates ---


class OptimConfig(Section):
    lr: NonNegative = key(1e-6, "learning rate after the warm-up")
    weight_decay: NonNegative = key(0.01, "of AdamW")
    betas: Betas = key((0.9, 0.999), "of AdamW")
    lr_warmup_steps: OffOrSize = key(-1, "RL steps of warm-up; -1: lr_warmup_steps_ratio decides")
    lr_warmup_steps_ratio: Share = key(
        0.0, "warm-up as a share of the run's RL steps", ".lr_warmup_steps=-1"
    )
    lr_scheduler_type: Literal["constant", "cosine"] = key(
        "constant", "learning rate after the warm-up"
    )
    min_lr_ratio: Share | None = key(
        0.0, "where a cosine ends, as a share of lr; null: 0", ".lr_scheduler_type=cosine"
    )


class AdaptedModel(Section):
    """A model that trains, as a whole or by adapters."""

    override_config: Open | None = key(FrozenDict(), "fields of the model's own configuration")
    enable_gradient_checkpointing: bool = execution(
        True, "recompute activations: less memory, more time"
    )
    lora_rank: Size = key(
        0, "rank of the adapters that train in place of the weights; 0: all weights train"
    )
    lora_alpha: Count = key(
        16, "the adapters' output is scaled by lora_alpha / lora_rank", ".lora_rank"
    )
    target_modules: Names = key(
        ("all-linear",), "all-linear, ends of layers' names, or one pattern", ".lora_rank"
    )
    exclude_modules: Names | None = key(
        None, "layers without adapters, written likewise; null: none", ".lora_rank"
    )


class ModelConfig(AdaptedModel):
    path: str = files(
        "~/models/deepseek-llm-7b-chat",
        "model to start from: hub id (org/name), folder (/, ./) or URL",
    )
    tokenizer_path: str | None = key(None, "hub id or folder of the tokenizer; null: path")
    custom_chat_template: str | None = key(
        None, "chat template, as Jinja text; null: the tokenizer's own"
    )
    trust_remote_code: bool = execution(False, "run Python code that comes with the model")


class FSDPConfig(Section):
    dtype: DType | None = key(
        None, "number format of the passes; weights are float32", follows=f"{FSDP}.dtype"
    )
    param_offload: bool = execution(
        False, "keep weights in host memory until a phase needs them", OVER_RAY
    )
    optimizer_offload: bool = execution(
        False, "keep the optimizer's state in host memory until updates", OVER_RAY
    )
    offload_policy: bool = execution(
        False, "keep all of it in host memory; the CPU takes the steps", OVER_RAY
    )
    fsdp_size: OffOrCount = execution(
        -1, "ranks that share one copy of the state; -1: all", OVER_RAY
    )


class PolicyLossConfig(Section):
    loss_mode: LossMode = key("vanilla", "policy loss")
    clip_cov_ratio: PositiveShare = key(
        0.0002, "Clip-Cov: share of a step's tokens that are dropped"
    )
    clip_cov_lb: float = key(1.0, "lower covariance bound of Clip-Cov candidates")
    clip_cov_ub: float = key(5.0, "upper covariance bound of Clip-Cov candidates")
    kl_cov_ratio: PositiveShare = key(
        0.0002, "KL-Cov: share of an optimizer step's tokens with a KL penalty"
    )
    ppo_kl_coef: NonNegative = key(0.1, "KL-Cov: coefficient of the KL penalty to the old policy")


class Sharing(Section):
    """How the ranks of a learner share what they compute."""

    ulysses_sequence_parallel_size: Count = execution(1, "ranks that share each sequence", OVER_RAY)
    tensor_model_parallel_size: Count = execution(
        1, "ranks that share each layer; FSDP2 shards over others", OVER_RAY
    )

    @property
    def together(self) -> int:
        """Return the ranks that get the same sequences: they share each sequence, or each layer, or
        both."""
        return self.ulysses_sequence_parallel_size * self.tensor_model_parallel_size


class LearnerConfig(Sharing):
    """What actor and critic have in common."""

    strategy: Literal["fsdp", "fsdp2"] = execution("fsdp", "both mean PyTorch's FSDP2", OVER_RAY)
    ppo_mini_batch_size: Count = key(256, "prompts an optimizer step")
    ppo_micro_batch_size_per_gpu: Count | None = execution(
        None, "trajectories of a rank's pass", BY_NUMBER
    )
    use_dynamic_bsz: bool | None = execution(
        None, "fill passes by tokens; null: where no micro-batch size is given"
    )
    ppo_max_token_len_per_gpu: Count = execution(
        16384, "tokens in one pass, if filled by tokens", ".use_dynamic_bsz"
    )
    ppo_epochs: Count = key(1, "times that a step's trajectories are trained on")
    shuffle: bool = key(False, "trajectories in a random order in each epoch of updates")
    loss_agg_mode: LossAggMode = key("token-mean", "how the losses of tokens become one number")
    loss_scale_factor: Positive | None = key(
        None, "divisor; null: data.max_response_length", DIVIDED
    )
    grad_clip: Positive = key(1.0, "largest norm of the gradient of an update")
    optim: OptimConfig = OptimConfig()


class ActorConfig(LearnerConfig):
    clip_ratio: ClipLow = key(
        0.2, "distance from 1 at which the ratio to old probabilities is clipped", "generates"
    )
    clip_ratio_low: NonNegative | None = key(
        None, "lower bound's distance", "generates", follows=f"{ACTOR}.clip_ratio"
    )
    clip_ratio_high: NonNegative | None = key(
        None, "upper bound's", "generates", follows=f"{ACTOR}.clip_ratio"
    )
    clip_ratio_c: AboveOne = key(
        3.0, "bound of the ratio where the advantage is negative (dual clip)", "generates"
    )
    entropy_coeff: float = key(0.0, "coefficient of the entropy, which the loss rewards")
    use_kl_loss: bool = key(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: NonNegative = key(0.001, "coefficient of the KL in the loss", ".use_kl_loss")
    kl_loss_type: KLKind = key("low_var_kl", "estimator of the KL in the loss", ".use_kl_loss")
    state_masking: bool = key(
        True, "tokens that tools wrote carry no loss; False is Search-R1's ablation", EPISODES
    )
    tau_pos: Positive = key(1.0, "SAPO: temperature for positive advantages", "generates")
    tau_neg: Positive = key(1.05, "SAPO: temperature for negative advantages", "generates")
    freeze_vision_tower: bool = key(
        False, "the part of the model that reads pictures does not train"
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


class RefConfig(Sharing):
    ulysses_sequence_parallel_size: Count | None = execution(
        None, "as there", OVER_RAY, follows=f"{ACTOR}.{ULYSSES}"
    )
    tensor_model_parallel_size: Count | None = execution(
        None, "as there", OVER_RAY, follows=f"{ACTOR}.{LAYERS}"
    )
    fsdp_config: FSDPConfig = key(FSDPConfig(), used_if=f"{MODEL}.lora_rank=0 & {OVER_RAY}")


class CriticModelConfig(AdaptedModel):
    path: str | None = files(None, "org/name on the hub or a folder", follows=f"{MODEL}.path")
    trust_remote_code: bool | None = execution(
        None, "as there", follows=f"{MODEL}.trust_remote_code"
    )
    override_config: Open | None = key(None, "as there", follows=f"{MODEL}.override_config")
    fsdp_config: FSDPConfig = FSDPConfig()


class CriticConfig(LearnerConfig):
    enable: bool | None = key(None, "train a critic; null: where the estimator reads values")
    ppo_mini_batch_size: Count | None = key(
        None, "prompts an update", follows=f"{ACTOR}.ppo_mini_batch_size"
    )
    ppo_micro_batch_size_per_gpu: Count | None = execution(
        None, "as there", BY_NUMBER, follows=f"{ACTOR}.{MICRO}"
    )
    ppo_max_token_len_per_gpu: Count = execution(
        32768, "tokens in one pass, if filled by tokens", ".use_dynamic_bsz"
    )
    ppo_epochs: Count | None = key(
        None, "times that trajectories are trained on", follows=f"{ACTOR}.ppo_epochs"
    )
    shuffle: bool | None = key(None, "trajectories in a random order", follows=f"{ACTOR}.shuffle")
    cliprange_value: Positive = key(
        0.5, "how far a value may move from the old one before its loss is clipped"
    )
    loss_agg_mode: LossAggMode | None = key(
        None, "how losses become one number", follows=f"{ACTOR}.loss_agg_mode"
    )
    loss_scale_factor: Positive | None = key(
        None, "divisor", DIVIDED, follows=f"{ACTOR}.loss_scale_factor"
    )
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)


# --- the objective ---


class RolloutCorrectionConfig(Section):
    """Importance weights and rejection of samples of another policy
    (core/algorithm/rollout_correction.py)."""

    bypass_mode: bool = key(
        False, "the engine's log-probs are the old ones: no pass for them, and one ratio"
    )
    rollout_is: Literal["token", "sequence"] | None = key(
        None, "importance weights; null: none", ".bypass_mode=False"
    )
    rollout_is_threshold: NumberOrText = key(
        2.0, 'upper bound; "lower_upper" drops what is outside', WEIGHED
    )
    rollout_is_batch_normalize: bool = key(False, "scale the weights to a mean of one", WEIGHED)
    rollout_rs: str | None = key(None, "rejection, by one or several statistics; null: none")
    rollout_rs_threshold: NumberOrText | None = key(
        None, "upper bounds, one or one a statistic", ".rollout_rs"
    )
    rollout_rs_threshold_lower: NonNegative | None = key(
        None, "lower bounds; null: 1 / threshold", ".rollout_rs"
    )
    rollout_token_veto_threshold: PositiveShare | None = key(
        None, "one such ratio drops the sequence; null: off"
    )

    @property
    def weighs(self) -> bool:
        """Whether the loss of a token is multiplied by an importance weight."""
        return self.rollout_is is not None

    @property
    def uses_old_log_probs(self) -> bool:
        """Whether the learner's log-probs before the update are compared with the engine's."""
        rejects = self.rollout_rs is not None or self.rollout_token_veto_threshold is not None
        return not self.bypass_mode and (self.weighs or rejects)


class KLCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = key(
        "fixed", "a coefficient that stays, or moves towards target_kl"
    )
    kl_coef: NonNegative = key(0.001, "coefficient of the KL in the reward")
    horizon: Positive = key(
        10000, "sequences over which the adaptive coefficient moves", ".type=adaptive"
    )
    target_kl: Positive = key(0.1, "the KL that the adaptive coefficient aims at", ".type=adaptive")


class AlgorithmConfig(Section):
    adv_estimator: AdvEstimator = key("gae", "advantage estimator")
    gamma: Share = key(1.0, "discount a token")
    lam: Share = key(1.0, "lambda of generalised advantage estimation")
    norm_adv_by_std_in_grpo: bool = key(
        True, "divide by the group's standard deviation; False is Dr. GRPO"
    )
    use_kl_in_reward: bool = key(False, "take the KL to the reference policy off the reward")
    kl_penalty: KLKind = key("kl", "estimator of the KL in the reward", ".use_kl_in_reward")
    kl_ctrl: KLCtrlConfig = key(KLCtrlConfig(), used_if=".use_kl_in_reward")
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
