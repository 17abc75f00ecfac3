"""The sections ``actor_rollout_ref.actor`` and ``.ref`` with their rules."""

from __future__ import annotations

from typing import Literal

from core.config import when
from core.config.limits import AboveOne, ClipLow, Count, NonNegative, Positive, PositiveShare, Size
from core.config.registry import KLKind, LossAggMode, LossMode
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import Section, execution, key
from core.config.sections.model import FSDPConfig, OptimConfig


class PolicyLossConfig(Section):
    loss_mode: LossMode = key("vanilla", "policy loss")
    clip_cov_ratio: PositiveShare = key(0.0002, "Clip-Cov: share of a step's tokens that are dropped", when.CLIP_COV)
    clip_cov_lb: float = key(1.0, "lower covariance bound of Clip-Cov candidates", when.CLIP_COV)
    clip_cov_ub: float = key(5.0, "upper covariance bound of Clip-Cov candidates", when.CLIP_COV)
    kl_cov_ratio: PositiveShare = key(
        0.0002, "KL-Cov: share of an optimizer step's tokens with a KL penalty", when.KL_COV
    )
    ppo_kl_coef: NonNegative = key(0.1, "KL-Cov: coefficient of the KL penalty to the old policy", when.KL_COV)


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
    strategy: Literal["fsdp", "fsdp2"] = execution("fsdp", "both mean PyTorch's FSDP2", when.OVER_RAY)
    ppo_mini_batch_size: Count = key(256, "prompts an optimizer step")
    ppo_micro_batch_size_per_gpu: Count | None = execution(
        None, "trajectories of a rank's pass; null: filled by tokens", when.NOT_PACKED
    )
    use_dynamic_bsz: bool | None = execution(None, "fill passes by tokens; null: where no micro-batch size is given")
    ppo_max_token_len_per_gpu: Count = execution(16384, "tokens in one pass, with use_dynamic_bsz", when.PACKED)
    ppo_epochs: Count = key(1, "times that a step's trajectories are trained on")
    shuffle: bool = key(False, "trajectories in a random order in each epoch of updates")
    data_loader_seed: Size = key(42, "seed of shuffle", when.SHUFFLES)
    clip_ratio: ClipLow = key(
        0.2, "distance from 1 at which the ratio to old probabilities is clipped", when.ONE_BOUND + when.CLIPS
    )
    clip_ratio_low: NonNegative | None = key(
        None, "distance of the lower bound from 1", when.CLIPS, follows="actor_rollout_ref.actor.clip_ratio"
    )
    clip_ratio_high: NonNegative | None = key(
        None, "distance of the upper bound from 1", when.CLIPS, follows="actor_rollout_ref.actor.clip_ratio"
    )
    clip_ratio_c: AboveOne = key(3.0, "bound of the ratio where the advantage is negative (dual clip)", when.DUAL_CLIP)
    loss_agg_mode: LossAggMode = key("token-mean", "how the losses of tokens become one number", when.FREE_AGGREGATION)
    loss_scale_factor: Positive | None = key(
        None, "of seq-mean-token-sum-norm; null: data.max_response_length", when.SUM_NORM
    )
    entropy_coeff: float = key(0.0, "coefficient of the entropy, which the loss rewards")
    use_kl_loss: bool = key(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: NonNegative = key(0.001, "coefficient of the KL in the loss", when.KL_LOSS)
    kl_loss_type: KLKind = key("low_var_kl", "estimator of the KL in the loss", when.KL_LOSS)
    grad_clip: Positive = key(1.0, "largest norm of the gradient of an update")
    state_masking: bool = key(
        True, "tokens that tools wrote carry no loss; False is Search-R1's ablation", when.EPISODES
    )
    ulysses_sequence_parallel_size: Count = execution(1, "ranks that share each sequence", when.OVER_RAY)
    tensor_model_parallel_size: Count = execution(
        1, "ranks that share each layer; FSDP2 shards over the others", when.OVER_RAY
    )
    use_torch_compile: bool = execution(False, "compile the MLPs and norms of the policy and its reference")
    tau_pos: Positive = key(1.0, "SAPO: temperature for positive advantages", when.SAPO)
    tau_neg: Positive = key(1.05, "SAPO: temperature for negative advantages", when.SAPO)
    freeze_vision_tower: bool = key(False, "the part of the model that reads pictures does not train")
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


class RefConfig(Sharing, Section):
    log_prob_micro_batch_size_per_gpu: Count | None = execution(
        None, "trajectories of a log-prob pass; null: the actor's", when.NOT_PACKED
    )
    log_prob_use_dynamic_bsz: bool | None = execution(None, "fill log-prob passes by tokens; null: the actor's")
    log_prob_max_token_len_per_gpu: Count | None = execution(
        None, "tokens of a log-prob pass", when.PACKED, follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    ulysses_sequence_parallel_size: Count | None = execution(
        None,
        "ranks that share each sequence",
        when.OVER_RAY,
        follows="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )
    tensor_model_parallel_size: Count | None = execution(
        None, "ranks that share each layer", when.OVER_RAY, follows="actor_rollout_ref.actor.tensor_model_parallel_size"
    )
    fsdp_config: FSDPConfig = key(FSDPConfig(), used_if=when.NO_ADAPTERS + when.OVER_RAY)


rules = RuleBook()


@rules.warning
def the_kl_is_penalised_twice(c: View) -> Broken:
    if c.actor.use_kl_loss and c.algorithm.use_kl_in_reward:
        yield (
            "actor_rollout_ref.actor.use_kl_loss",
            "the KL to the reference is penalised twice, in the loss and in the reward; switch one off, unless "
            "that is meant",
        )


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
