"""The updates of the policy and the critic.

:class:`Actor` and :class:`Critic` take an optimizer step for each mini-batch. Memory may allow only
micro-batches at a time. The ``loss_weight`` of a token was computed over its whole mini-batch, so
micro-batch losses and gradients sum to those of the mini-batch.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from core.algorithm.checks import call_and_check
from core.algorithm.kl import kl_penalty
from core.algorithm.losses import LossInputs, value_loss
from core.algorithm.losses import policy_loss as load_policy_loss
from core.algorithm.rollout_correction import add_mismatch
from core.algorithm.sequences import count_by_sequence
from core.config import registry
from core.config.training_keys import ActorConfig, CriticConfig
from core.errors import UnhealthyRun
from core.learner.batching import split_zero_gradient, training_size
from core.learner.passes import LearnerModel, Policy, whole_tensor
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch

# Fields of a batch that a pass for log-probs or values reads
PASS_READS = ("input_ids", "response_mask", "group", "kept_counts", "kept_ids")
# Fields of a batch that the critic's update reads
CRITIC_READS = ("input_ids", "response_mask", "group", "loss_weight", "returns", "values")


def actor_reads(config: ActorConfig, batch: TrainBatch) -> tuple[str, ...]:
    """Return the fields that the policy's update reads; a learner rank is sent no others."""
    fields = (*PASS_READS, "loss_weight", "advantages", "rollout_is_weights")
    fields += ("selected", "selection_order")  # of kl_cov and of clip_cov
    if config.use_kl_loss:
        fields += ("ref_log_prob",)
    if batch.has("old_log_probs"):
        return (*fields, "old_log_probs")
    # Rollout log-probs are needed for mismatch metrics or, with bypass, as the old log-probs
    return (*fields, "rollout_log_probs", "sampled_mask")


def zero_advantage_gives_no_gradient(config: ActorConfig) -> bool:
    """Return whether advantages are the only source of gradients.

    A sequence whose advantages are all 0 may then be left out of the update. A user's own policy
    loss may have further terms, unless its attribute ``moves_without_advantage`` is False.
    """
    loss_mode = config.policy_loss.loss_mode
    if loss_mode in registry.POLICY_LOSSES:
        moves_without_advantage = registry.POLICY_LOSSES[loss_mode].moves_without_advantage
    else:  # a user's own
        function = load_policy_loss(loss_mode)
        moves_without_advantage = getattr(function, "moves_without_advantage", True)
    return not (config.use_kl_loss or config.entropy_coeff != 0 or moves_without_advantage)


class Stepper:
    """AdamW with gradient clipping, and the metrics of an update.

    An update calls :meth:`begin_update`, :meth:`step` once the gradients of a mini-batch are there,
    and :meth:`end_update`. A step whose gradient norm is not finite leaves the weights as they are:
    it is counted, and its metrics are dropped.
    """

    def __init__(self, model: LearnerModel, config: ActorConfig | CriticConfig, name: str):
        self.name = name  # actor or critic
        self.ranks = model.ranks  # collectives of all learner ranks
        self.base_lr = config.optim.lr
        self.grad_clip = config.grad_clip
        self.parameters = [
            parameter for parameter in model.module.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.base_lr,
            betas=tuple(config.optim.betas),
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        # State of the current update
        self.lr = self.base_lr
        self.step_index = 0
        self.skipped_steps = 0
        self.update_sums = MetricSums()

    def begin_update(self, lr_multiplier: float) -> None:
        """Set the learning rate of the update's steps, and start its metrics."""
        self.lr = self.base_lr * lr_multiplier
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.step_index = 0
        self.skipped_steps = 0
        self.update_sums = MetricSums()

    def step(self, step_sums: MetricSums) -> bool:
        """Clip the gradients, move the weights and clear the gradients. Return whether they moved.

        If no sequence of the mini-batch trains, the gradients are zeros, as in verl: momentum and
        weight decay still move the weights.
        """
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        norm = float(whole_tensor(norm))
        is_finite = math.isfinite(norm)
        if is_finite:
            self.optimizer.step()
            step_sums.add_value("grad_norm", norm)
            self.update_sums.merge(step_sums)
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step_index += 1
        return is_finite

    def end_update(self) -> dict[str, float]:
        """Return the update's metrics. Raises UnhealthyRun if a weight is not finite."""
        weights = [parameter.detach() for parameter in self.parameters]
        weight_norm = whole_tensor(torch.nn.utils.get_total_norm(weights))
        # The norm is that of all ranks' shards, so either all ranks raise or none
        if not math.isfinite(float(weight_norm)):
            section = "actor_rollout_ref.actor" if self.name == "actor" else self.name
            raise UnhealthyRun(
                f"{section}.optim.lr={self.base_lr:g}: an update has left weights that are not "
                f"finite; lower it or {section}.grad_clip={self.grad_clip:g}"
            )
        metrics = self.ranks.gather_metrics(self.update_sums).result(self.name)
        metrics[f"{self.name}/lr"] = self.lr
        # The metric counts optimizer steps; its documented name says updates
        metrics[f"{self.name}/skipped_updates"] = self.skipped_steps
        return metrics


class Actor(Policy):
    """The policy that is trained.

    With ``bypass`` (``rollout_correction.bypass_mode``) the engine's log-probs serve as the old
    ones. ``options`` are those of :class:`Policy`.
    """

    def __init__(
        self, module: nn.Module, config: ActorConfig, *, bypass: bool = False, **options: Any
    ):
        super().__init__(module, **options)
        self.config = config
        self.bypass = bypass
        self.micro_batch_size = training_size(config)
        self.policy_loss = load_policy_loss(config.policy_loss.loss_mode)
        self.skips_zero_advantage = zero_advantage_gives_no_gradient(config)
        # A user's loss may have a function ``select``, called before each optimizer step on the
        # log-probs of the current weights
        self.user_select = getattr(self.policy_loss, "select", None)
        self.stepper = Stepper(self, config, "actor")
        # Differences between engine and learner, measured before an update's first step
        self.mismatch = MetricSums()

    def update(self, mini_batches: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step for each mini-batch. Return metrics.

        If the batch has no ``old_log_probs`` and ``bypass`` is off, the log-probs of the update's
        own pass serve as the old ones, so the ratio is 1. The caller then passes exactly one
        mini-batch.
        """
        self.mismatch = MetricSums()
        self.stepper.begin_update(lr_multiplier)
        for index, mini_batch in enumerate(mini_batches):
            step_sums = MetricSums()
            self.accumulate(mini_batch, step_sums)
            was_taken = self.stepper.step(step_sums)
            if index == 0 and not was_taken:
                self.mismatch = MetricSums()  # its log-probs may be what was not finite
        metrics = self.stepper.end_update()
        metrics |= self.ranks.gather_metrics(self.mismatch).result("rollout_corr")
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def accumulate(self, mini_batch: TrainBatch, step_sums: MetricSums) -> None:
        """Add up the gradients of this rank's part of a mini-batch, by micro-batches."""
        # All micro-batches of all ranks add parts of one loss, so rank 0 alone counts the step
        if self.ranks.is_rank_zero:
            step_sums.count_step("pg_loss")
            if self.config.use_kl_loss:
                step_sums.count_step("kl_loss")
        if self.user_select is not None:
            mini_batch = mini_batch.adding(selected=self.selected_by_user(mini_batch))
        elif mini_batch.has("selection_order"):
            mini_batch = mini_batch.adding(selected=self.selected_by_order(mini_batch))
        contributing, idle = split_zero_gradient(
            mini_batch,
            skip_zero_advantage=self.skips_zero_advantage,
        )
        for _, micro_batch in self.micro_batches_of_rank(self.micro_batch_size, contributing):
            self.micro_batch_loss(micro_batch.to(self.device), step_sums).backward()
        # The pass for old log-probs measures entropy and mismatch of all sequences. If none ran,
        # those that train were measured above.
        if not mini_batch.has("old_log_probs"):
            self.measure_idle(idle, step_sums)

    def measure_idle(self, idle: TrainBatch, step_sums: MetricSums) -> None:
        """Measure entropy and mismatch of sequences that do not train. All ranks call it."""
        any_rank_has_idle = self.ranks.all_reduce_max(len(idle)) > 0
        if any_rank_has_idle:
            log_prob_N, entropy_N = self.log_probs(idle, self.micro_batch_size)
            if len(idle):
                step_sums.add_tokens({"entropy": entropy_N}, idle.response_mask)
                self.measure_mismatch_at_first(log_prob_N, entropy_N, idle)

    def micro_batch_loss(self, micro_batch: TrainBatch, step_sums: MetricSums) -> Tensor:
        """Return the micro-batch's part of the loss: policy gradient - entropy bonus + KL."""
        config = self.config
        mask_N = micro_batch.response_mask
        weight_N = micro_batch.loss_weight
        with_entropy = config.entropy_coeff != 0
        log_prob_N, entropy_N = self.token_stats(micro_batch, entropy_grad=with_entropy)
        inputs = self.loss_inputs(micro_batch, log_prob_N)
        loss_N, stats = call_and_check(self.policy_loss, inputs, log_prob_N.shape, second_type=dict)
        if micro_batch.has("rollout_is_weights"):
            loss_N = loss_N * micro_batch.rollout_is_weights
        loss = (weight_N * loss_N).sum()
        step_sums.add_part("pg_loss", float(loss.detach()))
        if with_entropy:
            loss = loss - config.entropy_coeff * (weight_N * entropy_N).sum()
        if config.use_kl_loss:
            kl_N = kl_penalty(log_prob_N, micro_batch.ref_log_prob, config.kl_loss_type, mask_N)
            kl_loss = (weight_N * kl_N).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            step_sums.add_part("kl_loss", float(kl_loss.detach()))
        if not micro_batch.has("old_log_probs"):
            # No old-log-prob pass ran, so measure entropy and mismatch here
            stats = {**stats, "entropy": entropy_N}
            self.measure_mismatch_at_first(log_prob_N, entropy_N, micro_batch)
        step_sums.add_tokens(stats, mask_N)
        return loss

    def loss_inputs(self, batch: TrainBatch, log_prob_N: Tensor) -> LossInputs:
        """Return the policy loss's inputs for a batch with current log-probs ``log_prob_N``."""
        if batch.has("old_log_probs"):
            old_log_prob_N = batch.old_log_probs
        elif self.bypass:
            old_log_prob_N = batch.rollout_log_probs
            if batch.has("sampled_mask"):  # of a token that nobody sampled no engine has a log-prob
                own_N = log_prob_N.detach()
                old_log_prob_N = torch.where(batch.sampled_mask, old_log_prob_N, own_N)
        else:
            old_log_prob_N = log_prob_N.detach()
        return LossInputs(
            log_prob=log_prob_N,
            old_log_prob=old_log_prob_N,
            advantages=batch.advantages,
            mask=batch.response_mask,
            config=self.config,
            lengths=batch.lengths,
            selected=batch.optional("selected"),
        )

    def measure_mismatch_at_first(
        self, log_prob_N: Tensor, entropy_N: Tensor, batch: TrainBatch
    ) -> None:
        """Record the learner-engine log-prob difference, if no optimizer step was taken yet."""
        if self.stepper.step_index == 0 and batch.has("rollout_log_probs"):
            add_mismatch(self.mismatch, log_prob_N, batch, entropy_N)

    # -- losses that treat selected tokens apart -------------------------------------------------

    def selected_by_user(self, mini_batch: TrainBatch) -> Tensor:
        """Return the tokens that ``select`` chose among those with loss weight, [N] bool.

        The call is ``select(inputs, gather)``: ``gather`` returns a list of all ranks' values.
        """
        log_prob_N, _ = self.log_probs(mini_batch, self.micro_batch_size)
        inputs = self.loss_inputs(mini_batch, log_prob_N)
        inputs = dataclasses.replace(inputs, mask=inputs.mask & (mini_batch.loss_weight != 0))
        return self.user_select(inputs, self.ranks.gather)

    def selected_by_order(self, mini_batch: TrainBatch) -> Tensor:
        """Return the tokens of a mini-batch that clip_cov treats apart, [N] bool.

        ``selection_order`` is a place in a random order: D, ..., 1 for the D tokens drawn, -1, -2,
        ... for reserves, 0 for all others. The result is the D tokens of the highest places, of
        all ranks together, that are not clipped now.
        """
        order_N = mini_batch.selection_order
        drawn_N = order_N > 0
        # Before the first step the ratio is 1, unless the old log-probs are the engine's
        nothing_is_clipped = self.stepper.step_index == 0 and not self.bypass
        if nothing_is_clipped:
            return drawn_N
        drawn_on_all_ranks = sum(self.ranks.gather(int(drawn_N.sum())))
        unclipped_N = (order_N != 0) & ~self.clipped(mini_batch)
        # Each rank offers as many as all ranks together need: it may have all of them
        highest = order_N[unclipped_N].sort(descending=True).values[:drawn_on_all_ranks]
        highest_by_rank = torch.cat(self.ranks.gather(highest))
        chosen_numbers = highest_by_rank.sort(descending=True).values[:drawn_on_all_ranks]
        # No two tokens share a number
        return torch.isin(order_N, chosen_numbers)

    def clipped(self, mini_batch: TrainBatch) -> Tensor:
        """Return, per drawn or reserve token, whether its ratio is now clipped, [N] bool.

        At all other tokens the result means nothing.
        """
        # With an advantage of 0 the clip changes nothing
        may_be_clipped_N = (mini_batch.selection_order != 0) & (mini_batch.advantages != 0)
        count_B = count_by_sequence(may_be_clipped_N, mini_batch.lengths)
        rows = count_B.nonzero()[:, 0]  # sequences with at least one such token
        candidates = mini_batch.rows(rows)
        log_prob, _ = self.log_probs(candidates, self.micro_batch_size)
        inputs = self.loss_inputs(candidates, log_prob)
        _, clips = inputs.surrogate(inputs.log_ratio.exp())
        clipped_N = torch.zeros(mini_batch.tokens, dtype=torch.bool)
        mini_batch.put_into(clipped_N, rows, clips)
        return clipped_N


class Critic(LearnerModel):
    """The value function V(state). ``options`` are those of :class:`LearnerModel`."""

    def __init__(self, module: nn.Module, config: CriticConfig, **options: Any):
        super().__init__(module, **options)
        self.config = config
        self.micro_batch_size = training_size(config)
        self.stepper = Stepper(self, config, "critic")

    def token_values(self, batch: TrainBatch) -> Tensor:
        """Return V(state before each response token), shape [N]; 0 at other tokens."""
        inputs = self.inputs_of_pass(batch)
        with self.precision():
            output = self.module(
                input_ids=inputs.input_ids, use_cache=False, **inputs.model_arguments
            )
        # M: the positions whose next token is a response token
        values_M = output.logits[inputs.is_predicting][:, 0]
        dtype = torch.promote_types(values_M.dtype, torch.float32)  # float32 at least
        return inputs.at_tokens(values_M.to(dtype))

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Tensor:
        """Return :meth:`token_values` of the rank's batch, [N], without gradients."""
        values_N = torch.zeros(batch.tokens)
        for rows, micro_batch in self.micro_batches_of_rank(self.micro_batch_size, batch):
            values = self.token_values(micro_batch.to(self.device))
            # No rows: a blank micro-batch, which only keeps this rank in step with the others
            if len(rows):
                batch.put_into(values_N, rows, values.cpu().float())
        return values_N

    def update(self, mini_batches: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step for each mini-batch. Return ``critic/...`` metrics."""
        self.stepper.begin_update(lr_multiplier)
        for mini_batch in mini_batches:
            step_sums = MetricSums()
            self.accumulate(mini_batch, step_sums)
            self.stepper.step(step_sums)
        return self.stepper.end_update()

    def accumulate(self, mini_batch: TrainBatch, step_sums: MetricSums) -> None:
        """Add up the gradients of a mini-batch, one micro-batch after another."""
        # All micro-batches of all ranks add parts of one loss, so rank 0 alone counts the step
        if self.ranks.is_rank_zero:
            step_sums.count_step("vf_loss")
        contributing, _ = split_zero_gradient(mini_batch, skip_zero_advantage=False)
        for _, micro_batch in self.micro_batches_of_rank(self.micro_batch_size, contributing):
            self.micro_batch_loss(micro_batch.to(self.device), step_sums).backward()

    def micro_batch_loss(self, micro_batch: TrainBatch, step_sums: MetricSums) -> Tensor:
        """Return the micro-batch's part of the clipped value loss."""
        mask_N = micro_batch.response_mask
        values_N = self.token_values(micro_batch)
        clip = self.config.cliprange_value
        returns_N = micro_batch.returns
        loss_N, stats = value_loss(values_N, returns_N, micro_batch.values, clip, mask_N)
        loss = (micro_batch.loss_weight * loss_N).sum()
        step_sums.add_part("vf_loss", float(loss.detach()))
        step_sums.add_tokens({**stats, "vpred_mean": values_N}, mask_N)
        return loss
