"""The keys of data, models, their updates and the objective; see :mod:`core.config.schema`."""

from typing import Annotated, Literal

from core.config import registry
from core.config.section import (
    AboveOne,
    Betas,
    ClipLow,
    Condition,
    Count,
    Day,
    DType,
    ModuleNames,
    NonNegative,
    OffOrCount,
    OffOrSize,
    Open,
    Paths,
    PathsMaybeEmpty,
    Positive,
    PositiveShare,
    Section,
    Share,
    Size,
    execution,
    files,
    key,
    name_or_code_path,
    needs,
)

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ULYSSES = "ulysses_sequence_parallel_size"
LAYERS = "tensor_model_parallel_size"
PROMPTS = "data.train_batch_size"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
GSM8K = "~/data/rlhf/gsm8k"

AdvEstimator = Annotated[str, name_or_code_path(*registry.ESTIMATORS)]
LossMode = Annotated[str, name_or_code_path(*registry.POLICY_LOSSES)]
LossAggMode = Literal[*registry.LOSS_AGG_MODES]
KLKind = Literal[*registry.KL_KINDS]
Level = Literal["token", "sequence"]
Truncation = Literal["error", "left", "right", "middle"]

# When keys have an effect
OVER_RAY = needs("trainer.backend", "ray")
ANSWERS = Condition(lambda c, section: c.needs_engine, "nothing is answered in this run")
ADAPTERS = needs("lora_rank")
BY_NUMBER = needs("use_dynamic_bsz", False)
BY_TOKENS = needs("use_dynamic_bsz")
DIVIDED = needs("loss_agg_mode", "seq-mean-token-sum-norm")
BY_RATIO = needs("lr_warmup_steps", -1)
COSINE = needs("lr_scheduler_type", "cosine")
ADAPTIVE = needs("type", "adaptive")
NO_ADAPTERS = needs(f"{MODEL}.lora_rank", 0)
AGGREGATES = Condition(
    lambda c, section: section.policy_loss.entry.aggregation is None,
    "the policy loss is defined with an aggregation of its own",
)
ONE_BOUND = Condition(
    lambda c, section: section.clip_ratio in (section.clip_ratio_low, section.clip_ratio_high),
    "clip_ratio_low and clip_ratio_high are both given",
)
HAS_RATIO = Condition(
    lambda c, section: c.actor_rollout_ref.actor.policy_loss.entry.has_ratio,
    "the policy loss has no ratio",
)
SAMPLED_BY_THE_LEARNER = needs("bypass_mode", False)
WEIGHED = Condition(
    lambda c, section: section.rollout_is is not None and not section.bypass_mode,
    "needs {section}.rollout_is and bypass_mode=False",
)
REJECTED = needs("rollout_rs")


class DataConfig(Section):
    train_files: Paths = files((f"{GSM8K}/train.parquet",), "training examples, parquet or .jsonl")
    val_files: PathsMaybeEmpty = files((f"{GSM8K}/test.parquet",), "validation questions; []: none")
    prompt_key: str = key("prompt", "column that holds the prompt, a list of chat messages")
    image_key: str = key("images", "column that holds a prompt's pictures, one for each <image>")
    reward_fn_key: str = key("data_source", "column of the data source, which chooses the scorer")
    max_prompt_length: Count = key(512, "tokens of the prompt")
    max_response_length: Count = key(512, "tokens of the answer with tools'")
    train_batch_size: Count = key(1024, "prompts a step")
    gen_batch_size: Count | None = key(None, "most prompts in flight", follows=PROMPTS)
    train_max_samples: OffOrCount = key(-1, "examples of all training files together; -1: all")
    val_max_samples: OffOrCount = key(-1, "examples of each validation file; -1: all", ANSWERS)
    shuffle: bool = key(True, "training examples in a random order, another one in each epoch")
    seed: Size | None = key(None, "decides the order of training examples; null: trainer.seed")
    filter_overlong_prompts: bool = key(False, "leave out prompts longer than max_prompt_length")
    truncation: Truncation = key("error", "of a longer prompt: the end that is cut")
    apply_chat_template_kwargs: Open = key({}, "arguments of apply_chat_template")
    chat_template_date: Day | None = key(
        None, "today's date for chat templates that write one; null: that of the first start"
    )


# --- models and their updates ---


class OptimConfig(Section):
    lr: NonNegative = key(1e-6, "learning rate after the warm-up")
    weight_decay: NonNegative = key(0.01, "of AdamW")
    betas: Betas = key((0.9, 0.999), "of AdamW")
    lr_warmup_steps: OffOrSize = key(-1, "RL steps of warm-up; -1: lr_warmup_steps_ratio decides")
    lr_warmup_steps_ratio: Share = key(0.0, "warm-up as a share of the RL steps", BY_RATIO)
    lr_scheduler_type: Literal["constant", "cosine"] = key("constant", "learning rate after that")
    min_lr_ratio: Share | None = key(0.0, "cosine's end, as a share of lr; null: 0", COSINE)


class AdaptedModel(Section):
    """A model that trains, as a whole or by adapters."""

    override_config: Open | None = key({}, "fields of the model's own configuration")
    enable_gradient_checkpointing: bool = execution(True, "recompute activations: less memory")
    lora_rank: Size = key(0, "rank of the adapters that train; 0: all weights train instead")
    lora_alpha: Count = key(16, "adapters' output is scaled by lora_alpha / lora_rank", ADAPTERS)
    target_modules: ModuleNames = key(
        ("all-linear",), "all-linear, ends of layers' names, or one pattern", ADAPTERS
    )
    exclude_modules: ModuleNames | None = key(None, "layers without adapters; null: none", ADAPTERS)


class ModelConfig(AdaptedModel):
    path: str = files("~/models/deepseek-llm-7b-chat", "hub id (org/name), folder (/, ./) or URL")
    tokenizer_path: str | None = key(None, "hub id or folder of the tokenizer; null: path")
    custom_chat_template: str | None = key(None, "chat template, as Jinja text; null: tokenizer's")
    trust_remote_code: bool = execution(False, "run Python code that comes with the model")


class FSDPConfig(Section):
    dtype: DType | None = key(None, "number format of passes", follows=f"{ACTOR}.fsdp_config.dtype")
    param_offload: bool = execution(False, "keep weights on the host between phases", OVER_RAY)
    optimizer_offload: bool = execution(False, "optimizer's state in host memory", OVER_RAY)
    offload_policy: bool = execution(False, "all in host memory; the CPU steps", OVER_RAY)
    fsdp_size: OffOrCount = execution(-1, "ranks that share a copy of the state; -1: all", OVER_RAY)


class PolicyLossConfig(Section):
    loss_mode: LossMode = key("vanilla", "policy loss; vanilla is PPO's, geo_mean GMPO's")
    clip_cov_ratio: PositiveShare = key(0.0002, "Clip-Cov: share of a step's tokens to drop")
    clip_cov_lb: float = key(1.0, "lower covariance bound of Clip-Cov candidates")
    clip_cov_ub: float = key(5.0, "upper covariance bound of Clip-Cov candidates")
    kl_cov_ratio: PositiveShare = key(0.0002, "KL-Cov: share of a step's tokens with a KL penalty")
    ppo_kl_coef: NonNegative = key(0.1, "KL-Cov: coefficient of the KL penalty to the old policy")

    @property
    def entry(self) -> registry.Entry:
        """Return what the repository knows about the chosen loss."""
        return registry.policy_loss(self.loss_mode)


class Sharing(Section):
    """How the ranks of a learner share what they compute."""

    ulysses_sequence_parallel_size: Count = execution(1, "ranks that share a sequence", OVER_RAY)
    tensor_model_parallel_size: Count = execution(1, "ranks that share each layer", OVER_RAY)

    @property
    def together(self) -> int:
        """Return how many ranks get the same sequences, to share each sequence or each layer."""
        return self.ulysses_sequence_parallel_size * self.tensor_model_parallel_size


class LearnerConfig(Sharing):
    """What actor and critic have in common."""

    strategy: Literal["fsdp", "fsdp2"] = execution("fsdp", "both mean PyTorch's FSDP2", OVER_RAY)
    ppo_mini_batch_size: Count = key(256, "prompts an optimizer step")
    ppo_micro_batch_size_per_gpu: Count | None = execution(None, "trajectories a pass", BY_NUMBER)
    use_dynamic_bsz: bool | None = execution(
        None, "fill passes by tokens; null: where no micro-batch size is given"
    )
    ppo_max_token_len_per_gpu: Count = execution(16384, "tokens in one pass", BY_TOKENS)
    ppo_epochs: Count = key(1, "times that a step's trajectories are trained on")
    shuffle: bool = key(False, "trajectories in a random order in each epoch of updates")
    loss_agg_mode: LossAggMode = key("token-mean", "how the losses of tokens become one number")
    loss_scale_factor: Positive | None = key(None, "divisor; null: max_response_length", DIVIDED)
    grad_clip: Positive = key(1.0, "largest norm of the gradient of an update")
    optim: OptimConfig = OptimConfig()


class ActorConfig(LearnerConfig):
    loss_agg_mode: LossAggMode = key("token-mean", "how losses become one number", AGGREGATES)
    clip_ratio: ClipLow = key(0.2, "distance from 1 at which the ratio is clipped", ONE_BOUND)
    clip_ratio_low: NonNegative | None = key(None, "distance below", follows=f"{ACTOR}.clip_ratio")
    clip_ratio_high: NonNegative | None = key(None, "distance above", follows=f"{ACTOR}.clip_ratio")
    clip_ratio_c: AboveOne = key(3.0, "bound of the ratio at a negative advantage (dual clip)")
    entropy_coeff: float = key(0.0, "coefficient of the entropy, which the loss rewards")
    use_kl_loss: bool = key(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: NonNegative = key(0.001, "coefficient of that KL", needs("use_kl_loss"))
    kl_loss_type: KLKind = key("low_var_kl", "estimator of that KL", needs("use_kl_loss"))
    tau_pos: Positive = key(1.0, "SAPO: temperature for positive advantages")
    tau_neg: Positive = key(1.05, "SAPO: temperature for negative advantages")
    freeze_vision_tower: bool = key(False, "the part that reads pictures does not train")
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


class RefConfig(Sharing):
    ulysses_sequence_parallel_size: Count | None = execution(
        used_if=OVER_RAY, follows=f"{ACTOR}.{ULYSSES}"
    )
    tensor_model_parallel_size: Count | None = execution(
        used_if=OVER_RAY, follows=f"{ACTOR}.{LAYERS}"
    )
    fsdp_config: FSDPConfig = key(FSDPConfig(), used_if=NO_ADAPTERS)


class CriticModelConfig(AdaptedModel):
    path: str | None = files(follows=f"{MODEL}.path")
    trust_remote_code: bool | None = execution(follows=f"{MODEL}.trust_remote_code")
    override_config: Open | None = key(follows=f"{MODEL}.override_config")
    fsdp_config: FSDPConfig = FSDPConfig()


class CriticConfig(LearnerConfig):
    enable: bool | None = key(None, "train a critic; null: where the estimator reads values")
    ppo_mini_batch_size: Count | None = key(follows=f"{ACTOR}.ppo_mini_batch_size")
    ppo_micro_batch_size_per_gpu: Count | None = execution(used_if=BY_NUMBER, follows=MICRO)
    ppo_max_token_len_per_gpu: Count = execution(32768, "tokens in one pass", BY_TOKENS)
    ppo_epochs: Count | None = key(follows=f"{ACTOR}.ppo_epochs")
    shuffle: bool | None = key(follows=f"{ACTOR}.shuffle")
    cliprange_value: Positive = key(0.5, "change of a value beyond which its loss is clipped")
    loss_agg_mode: LossAggMode | None = key(follows=f"{ACTOR}.loss_agg_mode")
    loss_scale_factor: Positive | None = key(used_if=DIVIDED, follows=f"{ACTOR}.loss_scale_factor")
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)


# --- the objective ---


class RolloutCorrectionConfig(Section):
    """Weights and rejection of another policy's samples (core/algorithm/rollout_correction.py)."""

    bypass_mode: bool = key(False, "the engine's log-probs are the old ones: one ratio", HAS_RATIO)
    rollout_is: Level | None = key(None, "importance weights; null: none", SAMPLED_BY_THE_LEARNER)
    rollout_is_threshold: float | str = key(2.0, 'bound; "lower_upper" drops outside', WEIGHED)
    rollout_is_batch_normalize: bool = key(False, "scale the weights to a mean of one", WEIGHED)
    rollout_rs: str | None = key(None, "rejection, by one or several statistics; null: none")
    rollout_rs_threshold: float | str | None = key(None, "bounds, one or one a statistic", REJECTED)
    rollout_rs_threshold_lower: NonNegative | None = key(None, "null: 1 / threshold", REJECTED)
    rollout_token_veto_threshold: PositiveShare | None = key(
        None, "a ratio of one token below it drops the sequence; null: off"
    )

    @property
    def weighs(self) -> bool:
        """Return whether the loss of a token is multiplied by an importance weight."""
        return self.rollout_is is not None

    @property
    def uses_old_log_probs(self) -> bool:
        """Return whether the learner's log-probs before the update meet the engine's."""
        rejects = self.rollout_rs is not None or self.rollout_token_veto_threshold is not None
        return not self.bypass_mode and (self.weighs or rejects)


class KLCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "the coefficient stays, or follows target_kl")
    kl_coef: NonNegative = key(0.001, "coefficient of the KL in the reward")
    horizon: Positive = key(10000, "sequences over which the coefficient adapts", ADAPTIVE)
    target_kl: Positive = key(0.1, "KL that adaptive aims at", ADAPTIVE)


class AlgorithmConfig(Section):
    adv_estimator: AdvEstimator = key("gae", "advantage estimator")
    gamma: Share = key(1.0, "discount a token")
    lam: Share = key(1.0, "lambda of generalised advantage estimation")
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's deviation; False: Dr. GRPO")
    use_kl_in_reward: bool = key(False, "take the KL to the reference policy off the reward")
    kl_penalty: KLKind = key("kl", "estimator of the KL in the reward", needs("use_kl_in_reward"))
    kl_ctrl: KLCtrlConfig = key(KLCtrlConfig(), used_if=needs("use_kl_in_reward"))
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()

    @property
    def estimator(self) -> registry.Entry:
        """Return what the repository knows about the chosen estimator."""
        return registry.estimator(self.adv_estimator)
