"""The sections ``actor_rollout_ref.actor`` and ``.ref`` with their rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits, registry
from core.config.names import KLKind, LossAggMode, LossMode
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Section
from core.config.sections.model import FSDPConfig
from core.config.sections.optim import OptimConfig


class PolicyLossConfig(Section):
    loss_mode: LossMode = "vanilla"  # policy loss
    clip_cov_ratio: limits.PositiveShare = 0.0002  # Clip-Cov: share of an optimizer step's tokens that are dropped
    clip_cov_lb: float = 1.0  # lower covariance bound of Clip-Cov candidates
    clip_cov_ub: float = 5.0  # upper covariance bound of Clip-Cov candidates
    kl_cov_ratio: limits.PositiveShare = 0.0002  # KL-Cov: share of an optimizer step's tokens with a KL penalty
    ppo_kl_coef: limits.NonNegative = 0.1  # KL-Cov: coefficient of the KL penalty to the old policy


class Sharing:
    """How the ranks of a learner share what they compute."""

    @property
    def together(self) -> int:
        """Return the ranks that get the same sequences: they share each sequence, or each layer, or both."""
        return self.ulysses_sequence_parallel_size * self.layer_ranks

    @property
    def layer_ranks(self) -> int:
        """Return the ranks that share each layer."""
        return self.tensor_model_parallel_size


class ActorConfig(Sharing, Section):
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"  # both mean PyTorch's FSDP2
    ppo_mini_batch_size: limits.Count = 256  # prompts an optimizer step
    # trajectories in one pass of a rank; None: use_dynamic_bsz decides
    ppo_micro_batch_size_per_gpu: limits.Count | None = None
    # fill passes up to a number of tokens; None: where no micro-batch size is given
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: limits.Count = 16384  # tokens in one pass, with use_dynamic_bsz
    ppo_epochs: limits.Count = 1  # times that a step's trajectories are trained on
    shuffle: bool = False  # trajectories in a random order in each epoch of updates
    data_loader_seed: limits.Size = 42  # seed of shuffle
    clip_ratio: limits.ClipLow = 0.2  # distance from 1 at which the ratio of new to old probabilities is clipped
    clip_ratio_low: limits.NonNegative | None = None  # distance of the lower bound from 1; None: clip_ratio
    clip_ratio_high: limits.NonNegative | None = None  # distance of the upper bound from 1; None: clip_ratio
    clip_ratio_c: limits.AboveOne = 3.0  # bound of the ratio where the advantage is negative (dual clip)
    loss_agg_mode: LossAggMode = "token-mean"  # how the losses of tokens become one number
    # divisor of seq-mean-token-sum-norm; None: data.max_response_length
    loss_scale_factor: limits.Positive | None = None
    entropy_coeff: float = 0.0  # coefficient of the entropy, which the loss rewards
    use_kl_loss: bool = False  # add the KL to the reference policy to the loss
    kl_loss_coef: limits.NonNegative = 0.001  # coefficient of the KL in the loss
    kl_loss_type: KLKind = "low_var_kl"  # estimator of the KL in the loss
    grad_clip: limits.Positive = 1.0  # largest norm of the gradient of an update
    state_masking: bool = True  # tokens that tools wrote carry no loss; False is Search-R1's ablation
    ulysses_sequence_parallel_size: limits.Count = 1  # ranks that share each sequence; use_remove_padding is needed
    tensor_model_parallel_size: limits.Count = 1  # ranks that share each layer's matrices; FSDP2 shards over the others
    use_torch_compile: bool = False  # compile the MLPs and norms of the policy and its reference
    tau_pos: limits.Positive = 1.0  # SAPO: temperature for positive advantages
    tau_neg: limits.Positive = 1.05  # SAPO: temperature for negative advantages
    freeze_vision_tower: bool = False  # the part of the model that reads pictures does not train
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


class RefConfig(Sharing, Section):
    # trajectories in one log-prob pass of a rank; None: the actor's
    log_prob_micro_batch_size_per_gpu: limits.Count | None = None
    log_prob_use_dynamic_bsz: bool | None = None  # fill log-prob passes up to a number of tokens; None: the actor's
    log_prob_max_token_len_per_gpu: limits.Count | None = None  # tokens in one log-prob pass; None: the actor's
    ulysses_sequence_parallel_size: limits.Count | None = None  # ranks that share each sequence; None: the actor's
    tensor_model_parallel_size: limits.Count | None = None  # ranks that share each layer; None: the actor's
    fsdp_config: FSDPConfig = FSDPConfig()


rules = RuleBook()


@rules.warning
def the_kl_is_penalised_twice(c: View) -> Broken:
    if c.actor.use_kl_loss and c.algorithm.use_kl_in_reward:
        yield (
            "actor_rollout_ref.actor.use_kl_loss",
            "the KL to the reference is penalised twice, in the loss and in the reward; switch one off, unless "
            "that is meant",
        )


@rules.unused
def the_reference(c: View) -> Unused:
    if not c.needs_ref:
        yield (
            ("actor_rollout_ref.ref.*",),
            "there is no reference policy: algorithm.use_kl_in_reward and actor_rollout_ref.actor.use_kl_loss are off",
        )
    if c.model.lora_rank:
        yield (
            ("actor_rollout_ref.ref.fsdp_config.*",),
            "actor_rollout_ref.model.lora_rank is set: the reference is the policy without its adapters",
        )


@rules.unused
def keys_of_other_losses(c: View) -> Unused:
    if not c.actor.use_kl_loss:
        yield (
            ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_type"),
            "actor_rollout_ref.actor.use_kl_loss is off",
        )
    if c.gives("actor_rollout_ref.actor.clip_ratio_low") and c.gives("actor_rollout_ref.actor.clip_ratio_high"):
        yield (("actor_rollout_ref.actor.clip_ratio",), "clip_ratio_low and clip_ratio_high are both given")
    if "clip_ratio_c" not in c.loss.reads:
        yield (("actor_rollout_ref.actor.clip_ratio_c",), f"{c.actor.policy_loss.loss_mode} has no dual clip")
    if "clip_ratio" not in c.loss.reads:
        yield (("actor_rollout_ref.actor.clip_ratio*",), f"{c.actor.policy_loss.loss_mode} does not clip")
    if c.loss.aggregation is not None:
        yield (
            ("actor_rollout_ref.actor.loss_agg_mode",),
            f"{c.actor.policy_loss.loss_mode} is defined with {c.loss.aggregation}",
        )
    if c.actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (("*.loss_scale_factor",), "only seq-mean-token-sum-norm has it")


@rules.problem
def covariance_bounds_leave_room(c: View) -> Broken:
    if c.actor.policy_loss.clip_cov_lb >= c.actor.policy_loss.clip_cov_ub:
        yield (
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb",
            f"leaves no covariance below clip_cov_ub={c.actor.policy_loss.clip_cov_ub}: clip_cov would drop no "
            "token; verl's are clip_cov_lb=1.0 and clip_cov_ub=5.0",
        )


@rules.warning
def bounds_and_baselines_of_losses(c: View) -> Broken:
    if c.actor.policy_loss.loss_mode == "gspo" and c.actor.clip_ratio_high > 0.05:
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"{c.actor.policy_loss.loss_mode} clips the ratio of a whole sequence, and "
            f"clip_ratio_high={c.actor.clip_ratio_high} is never reached; the paper's bounds are "
            "clip_ratio_low=3e-4, clip_ratio_high=4e-4",
        )
    if c.loss.divergence is not None and max(c.actor.clip_ratio_low, c.actor.clip_ratio_high) > 2 * c.loss.divergence:
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"the bounds of {c.actor.policy_loss.loss_mode} are divergences: "
            f"clip_ratio_low={c.actor.clip_ratio_low}, clip_ratio_high={c.actor.clip_ratio_high} drop few tokens; "
            f"the published bound is clip_ratio={c.loss.divergence}",
        )
    if (
        c.actor.policy_loss.loss_mode == "kl_cov"
        and c.actor.ppo_epochs == 1
        and c.actor.ppo_mini_batch_size == c.data.train_batch_size
    ):
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "with one optimizer step a rollout the policy is the old one, the distance of kl_cov has no "
            "gradient, and this is the plain policy gradient; a smaller "
            "actor_rollout_ref.actor.ppo_mini_batch_size, or ppo_epochs above 1",
        )
    if c.loss.divergence is not None and (not c.gives("actor_rollout_ref.actor.clip_ratio_c")):
        yield (
            "actor_rollout_ref.actor.clip_ratio_c",
            f"{c.actor.policy_loss.loss_mode} truncates importance weights at "
            f"clip_ratio_c={c.actor.clip_ratio_c}, which holds back the rare tokens that it is meant to free; the "
            "published runs have clip_ratio_c=10000",
        )


@rules.unused
def keys_of_variants(c: View) -> Unused:
    if "policy_loss.clip_cov_lb" not in c.loss.reads:
        yield (("actor_rollout_ref.actor.policy_loss.clip_cov_*",), "only clip_cov has it")
    if "policy_loss.ppo_kl_coef" not in c.loss.reads:
        yield (
            ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio", "actor_rollout_ref.actor.policy_loss.ppo_kl_coef"),
            "only kl_cov has it",
        )
    if "tau_pos" not in c.loss.reads:
        yield (("actor_rollout_ref.actor.tau_*",), f"only {registry.readers(registry.POLICY_LOSSES, 'tau_pos')} has it")
