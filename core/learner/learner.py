"""The models that a step reads and trains: policy, critic, and frozen ones such as the reference.

:class:`Actor` and :class:`Critic` take an optimizer step for each mini-batch. Memory may allow only
micro-batches at a time. The ``loss_weight`` of a token was computed over its whole mini-batch, so
the losses of micro-batches add up to the loss of the mini-batch, and their gradients to its
gradient.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from core.algorithm.checks import of_tokens
from core.algorithm.kl import kl_penalty
from core.algorithm.losses import LossInputs, policy_loss, value_loss
from core.algorithm.rollout_correction import add_mismatch
from core.algorithm.sequences import count_by_sequence
from core.config import registry
from core.errors import UnhealthyRun
from core.learner.batching import split_zero_gradient
from core.learner.lora import add_adapters
from core.learner.models import compute_dtype, load_critic, load_policy
from core.learner.passes import BasePolicy, LearnerModel, Policy, training_size, whole_tensor
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.training_keys import ActorConfig, CriticConfig, ModelConfig, Sharing

# Fields of a batch that a pass for log-probs or values reads, and that the critic's update reads
PASS_READS = ("input_ids", "response_mask", "group")
CRITIC_READS = (*PASS_READS, "loss_weight", "returns", "values")


def actor_reads(config: ActorConfig, batch: TrainBatch) -> tuple[str, ...]:
    """Return the fields that the policy's update reads; a learner rank is sent no others."""
    fields = (*PASS_READS, "loss_weight", "advantages", "rollout_is_weights", "selected")
    if config.use_kl_loss:
        fields += ("ref_log_prob",)
    if batch.has("old_log_probs"):
        return (*fields, "old_log_probs")
    # The update compares its own log-probs with the engine's, or trains on the engine's
    return (*fields, "rollout_log_probs", "sampled_mask")


def only_advantages_train(config: ActorConfig) -> bool:
    """Return whether a sequence whose advantages are all 0 moves no weight."""
    loss = registry.policy_loss(config.policy_loss.loss_mode)
    other_terms = config.use_kl_loss or config.entropy_coeff != 0
    return not other_terms and not loss.moves_without_advantage


class Stepper:
    """AdamW with gradient clipping, and the metrics of an update.

    An update calls :meth:`begin_update`, :meth:`step` once the gradients of a mini-batch are there,
    and :meth:`end_update`. A step whose gradient norm is not finite leaves the weights as they are:
    it is counted, and its metrics are dropped.
    """

    def __init__(self, model: LearnerModel, config: ActorConfig | CriticConfig, name: str):
        self.name = name  # actor or critic
        self.ranks = model.ranks
        self.base_lr = config.optim.lr
        self.grad_clip = config.grad_clip
        self.parameters = [each for each in model.module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.base_lr,
            betas=tuple(config.optim.betas),
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        # Of the update under way:
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

    def step(self, step_sums: MetricSums) -> None:
        """Clip the gradients, move the weights and clear the gradients.

        If no sequence of the mini-batch trains, the gradients are zeros, as in verl: momentum and
        weight decay still move the weights.
        """
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        norm = float(whole_tensor(norm))
        if math.isfinite(norm):
            self.optimizer.step()
            step_sums.value("grad_norm", norm)
            self.update_sums.merge(step_sums)
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step_index += 1

    def end_update(self) -> dict[str, float]:
        """Return the update's metrics. Raises UnhealthyRun if a weight is not finite."""
        self.check_weights()
        metrics = self.ranks.gather_metrics(self.update_sums).result(self.name)
        metrics[f"{self.name}/lr"] = self.lr
        metrics[f"{self.name}/skipped_updates"] = self.skipped_steps
        return metrics

    def check_weights(self) -> None:
        """Raise UnhealthyRun if a weight is not finite. All ranks come to the same result."""
        norm = torch.nn.utils.get_total_norm([each.detach() for each in self.parameters])
        if not math.isfinite(float(whole_tensor(norm))):
            section = "actor_rollout_ref.actor" if self.name == "actor" else self.name
            raise UnhealthyRun(
                f"{section}.optim.lr={self.base_lr:g}: an update has left weights that are not "
                f"finite; lower it or {section}.grad_clip={self.grad_clip:g}"
            )


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
        self.size = training_size(config)
        self.policy_loss = policy_loss(config.policy_loss.loss_mode)
        self.replaces_clipped = registry.policy_loss(config.policy_loss.loss_mode).replaces_clipped
        self.stepper = Stepper(self, config, "actor")
        # Differences between engine and learner, measured before an update's first step
        self.mismatch = MetricSums()

    def update(self, mini_batches: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step for each mini-batch. Return metrics.

        Without ``old_log_probs`` and without ``bypass`` there is one mini-batch. The log-probs of
        its own pass then serve as the old ones, so the ratio is 1.
        """
        self.mismatch = MetricSums()
        self.stepper.begin_update(lr_multiplier)
        for mini_batch in mini_batches:
            step_sums = MetricSums()
            self.accumulate(mini_batch, step_sums)
            self.stepper.step(step_sums)
        metrics = self.stepper.end_update()
        metrics |= self.ranks.gather_metrics(self.mismatch).result("rollout_corr")
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def accumulate(self, mini_batch: TrainBatch, step_sums: MetricSums) -> None:
        """Add up the gradients of a mini-batch, one micro-batch after another."""
        # Micro-batches and ranks add parts of a loss; the optimizer step counts once
        step_sums.value("pg_loss", 0.0, counts=self.ranks.is_rank_zero)
        if self.config.use_kl_loss:
            step_sums.value("kl_loss", 0.0, counts=self.ranks.is_rank_zero)
        if mini_batch.has("selected"):
            mini_batch = mini_batch.adding(selected=self.selected(mini_batch))
        only_advantages = only_advantages_train(self.config)
        contributing, idle = split_zero_gradient(mini_batch, only_advantages_train=only_advantages)
        for _, micro_batch in self.micro_batches_of_rank(self.size, contributing):
            self.micro_batch_loss(micro_batch.to(self.device), step_sums).backward()
        if not mini_batch.has("old_log_probs") and self.ranks.all_reduce_max(len(idle)):
            # Idle sequences train nothing, but entropy and mismatch are those of every sequence
            log_prob_N, entropy_N = self.log_probs(idle, self.size)
            if len(idle):
                step_sums.tokens({"entropy": entropy_N}, idle.response_mask)
                self.measure_mismatch(log_prob_N, entropy_N, idle)

    def micro_batch_loss(self, micro_batch: TrainBatch, step_sums: MetricSums) -> Tensor:
        """Return the micro-batch's part of the loss: policy gradient - entropy bonus + KL."""
        config = self.config
        mask_N = micro_batch.response_mask
        weight_N = micro_batch.loss_weight
        with_entropy = config.entropy_coeff != 0
        log_prob_N, entropy_N = self.token_stats(micro_batch, entropy_grad=with_entropy)
        inputs = self.loss_inputs(micro_batch, log_prob_N)
        loss_N, stats = of_tokens(self.policy_loss, inputs, log_prob_N.shape, dict)
        if micro_batch.has("rollout_is_weights"):
            loss_N = loss_N * micro_batch.rollout_is_weights
        loss = (weight_N * loss_N).sum()
        step_sums.value("pg_loss", float(loss.detach()), counts=False)
        if with_entropy:
            loss = loss - config.entropy_coeff * (weight_N * entropy_N).sum()
        if config.use_kl_loss:
            kl_N = kl_penalty(log_prob_N, micro_batch.ref_log_prob, config.kl_loss_type, mask_N)
            kl_loss = (weight_N * kl_N).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            step_sums.value("kl_loss", float(kl_loss.detach()), counts=False)
        if not micro_batch.has("old_log_probs"):
            # No pass before the update has measured these
            stats = {**stats, "entropy": entropy_N}
            self.measure_mismatch(log_prob_N, entropy_N, micro_batch)
        step_sums.tokens(stats, mask_N)
        return loss

    def loss_inputs(self, batch: TrainBatch, log_prob_N: Tensor) -> LossInputs:
        """Return what the policy loss reads of a batch whose current log-probs are given."""
        if batch.has("old_log_probs"):
            old_log_prob_N = batch.old_log_probs
        elif self.bypass:
            old_log_prob_N = batch.rollout_log_probs
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

    def measure_mismatch(self, log_prob_N: Tensor, entropy_N: Tensor, batch: TrainBatch) -> None:
        """Add the difference to the engine's log-probs, if no step has moved the weights since."""
        if self.stepper.step_index == 0 and batch.has("rollout_log_probs"):
            add_mismatch(self.mismatch, log_prob_N, batch, entropy_N)

    # -- losses that treat selected tokens apart -------------------------------------------------

    def selected(self, mini_batch: TrainBatch) -> Tensor:
        """Return the tokens of a mini-batch that the policy loss treats apart, [N] bool.

        ``mini_batch.selected`` is positive at tokens that were drawn and negative at reserves; the
        higher number goes first. If the loss replaces clipped tokens, reserves stand in for drawn
        tokens that are clipped by now, so that over all ranks as many are taken as were drawn.
        """
        order_N = mini_batch.selected
        drawn_N = order_N > 0
        # Before the first step the ratio is 1, unless the old log-probs are the engine's
        nothing_is_clipped = self.stepper.step_index == 0 and not self.bypass
        if not self.replaces_clipped or nothing_is_clipped:
            return drawn_N
        count = sum(self.ranks.gather(int(drawn_N.sum())))
        free_N = (order_N != 0) & ~self.clipped(mini_batch)
        of_rank = order_N[free_N].sort(descending=True).values[:count]
        of_all_ranks = torch.cat(self.ranks.gather(of_rank))
        taken = of_all_ranks.sort(descending=True).values[:count]
        return torch.isin(order_N, taken)

    def clipped(self, mini_batch: TrainBatch) -> Tensor:
        """Return which candidates for the selection the current weights clip, [N] bool."""
        may_be_clipped_N = (mini_batch.selected != 0) & (mini_batch.advantages != 0)
        rows = count_by_sequence(may_be_clipped_N, mini_batch.lengths).nonzero()[:, 0]
        candidates = mini_batch.rows(rows)
        log_prob, _ = self.log_probs(candidates, self.size)
        inputs = self.loss_inputs(candidates, log_prob)
        _, clips = inputs.surrogate(inputs.log_ratio.exp())
        clipped_N = torch.zeros(mini_batch.tokens, dtype=torch.bool)
        mini_batch.put(clipped_N, rows, clips)
        return clipped_N


class Critic(LearnerModel):
    """The value function, one number a state. ``options`` are those of :class:`LearnerModel`."""

    def __init__(self, module: nn.Module, config: CriticConfig, **options: Any):
        super().__init__(module, **options)
        self.config = config
        self.size = training_size(config)
        self.stepper = Stepper(self, config, "critic")

    def token_values(self, batch: TrainBatch) -> Tensor:
        """Return [N]: the value of the state in which each policy token is chosen, 0 elsewhere."""
        inputs = self.pass_over(batch)
        with self.precision():
            output = self.module(input_ids=inputs.input_ids, use_cache=False, **inputs.inputs)
        values_M = output.logits[inputs.predicts][:, 0]
        at_least_float32 = torch.promote_types(values_M.dtype, torch.float32)
        return inputs.at_tokens(values_M.to(at_least_float32))

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Tensor:
        """Return :meth:`token_values` of the whole batch, [N], without gradients."""
        values_N = torch.zeros(batch.tokens)
        for index, micro_batch in self.micro_batches_of_rank(self.size, batch):
            values = self.token_values(micro_batch.to(self.device))
            if len(index):
                batch.put(values_N, index, values.cpu().float())
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
        # Micro-batches and ranks add parts of the loss; the optimizer step counts once
        step_sums.value("vf_loss", 0.0, counts=self.ranks.is_rank_zero)
        contributing, _ = split_zero_gradient(mini_batch, only_advantages_train=False)
        for _, micro_batch in self.micro_batches_of_rank(self.size, contributing):
            self.micro_batch_loss(micro_batch.to(self.device), step_sums).backward()

    def micro_batch_loss(self, micro_batch: TrainBatch, step_sums: MetricSums) -> Tensor:
        """Return the micro-batch's part of the clipped value loss."""
        mask_N = micro_batch.response_mask
        values_N = self.token_values(micro_batch)
        loss_N, stats = value_loss(
            values_N,
            micro_batch.returns,
            micro_batch.values,
            self.config.cliprange_value,
            mask_N,
        )
        loss = (micro_batch.loss_weight * loss_N).sum()
        step_sums.value("vf_loss", float(loss.detach()), counts=False)
        step_sums.tokens({**stats, "vpred_mean": values_N}, mask_N)
        return loss


class Models:
    """Policy, critic and frozen models, whole in this process, for the phases of a step.

    ``known`` are the tokenizer's ids (:func:`core.data.vocabulary.known_ids`). ``master_dtype`` is
    float32 except in tests.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        *,
        needs_ref: bool,
        needs_critic: bool,
        known: np.ndarray | None = None,
        master_dtype: torch.dtype = torch.float32,
    ):
        self.config = config
        self.device = device
        self.master_dtype = master_dtype
        # Names and shapes of each model; in this process the models themselves
        self.skeletons: dict[str, nn.Module] = {}
        roles = config.actor_rollout_ref
        # With adapters the reference is the policy without them
        ref = roles.actor if roles.model.lora_rank else roles.ref
        self.fsdp = {
            "actor": roles.actor.fsdp_config,
            "critic": config.critic.model.fsdp_config,
            "ref": ref.fsdp_config,
        }
        policy = self.place("actor", self.new_policy, roles.actor)
        self.actor = Actor(
            policy,
            roles.actor,
            bypass=config.algorithm.rollout_correction.bypass_mode,
            temperature=roles.rollout.temperature or 1.0,
            known=known,
            **self.computing("actor", roles.actor),
        )
        self.trained: dict[str, Actor | Critic] = {"actor": self.actor}
        self.frozen: dict[str, Policy] = {}
        if needs_ref:
            self.frozen["ref"] = self.make_reference(policy, known)
        for role, frozen in config.frozen_models.items():
            self.fsdp[role] = roles.ref.fsdp_config.replace(dtype=frozen.dtype)

            def load(on_meta: bool, model: ModelConfig = frozen.model) -> nn.Module:
                return load_policy(model, master_dtype, on_meta=on_meta)

            self.frozen[role] = Policy(
                self.place(role, load, roles.ref).requires_grad_(False),
                temperature=frozen.temperature,
                known=known,
                **self.computing(role, roles.ref),
            )
        self.critic: Critic | None = None
        if needs_critic:
            module = self.place("critic", self.new_critic, config.critic)
            self.critic = Critic(module, config.critic, **self.computing("critic", config.critic))
            self.trained["critic"] = self.critic

    def make_reference(self, policy: nn.Module, known: np.ndarray | None) -> Policy:
        """Return the reference policy, which shares the policy's base if adapters train."""
        roles = self.config.actor_rollout_ref
        options = {
            "temperature": roles.rollout.temperature or 1.0,
            "known": known,
            **self.computing("ref", roles.ref),
        }
        if roles.model.lora_rank:
            return BasePolicy(policy, **options)
        module = self.place("ref", self.new_policy, roles.ref).requires_grad_(False)
        return Policy(module, **options)

    def new_policy(self, on_meta: bool) -> nn.Module:
        """Load the policy as it is before training; on the meta device without weights."""
        model = self.config.actor_rollout_ref.model
        module = load_policy(model, self.master_dtype, on_meta=on_meta)
        if self.config.actor_rollout_ref.actor.freeze_vision_tower:
            from core.vision.learner_pictures import freeze_vision_tower

            freeze_vision_tower(module)
        return add_adapters(module, model, self.config.trainer.seed)

    def new_critic(self, on_meta: bool) -> nn.Module:
        """Load the critic as it is before training; on the meta device without weights."""
        model = self.config.critic.model
        seed = self.config.trainer.seed
        module = load_critic(model, seed, self.master_dtype, on_meta=on_meta)
        return add_adapters(module, model, seed)

    def place(self, name: str, load: Callable[[bool], nn.Module], sharing: Sharing) -> nn.Module:
        """Return the model ``load(on_meta)`` where it computes."""
        self.skeletons[name] = load(False).to(self.device)
        return self.skeletons[name]

    def computing(self, name: str, sharing: Sharing) -> dict[str, Any]:
        """Return the options of :class:`LearnerModel`: how the passes of a model are computed.

        A reference in this process has the number format of the policy.
        """
        section = self.fsdp["actor" if name == "ref" else name]
        return {"compute_dtype": compute_dtype(section.dtype)}

    # -- phases ----------------------------------------------------------------------------------

    def at_work(self, name: str, *, updates: bool = False) -> AbstractContextManager[None]:
        """Have a model ready for the time of a phase."""
        return contextlib.nullcontext()

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each policy token at the rollout temperature, [N] each."""
        with self.at_work("actor"):
            return self.actor.log_probs(batch, self.actor.size)

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        """Return the log-probs of the reference policy, or of a recipe's frozen model, [N]."""
        with self.at_work(role):
            log_prob_N, _ = self.frozen[role].log_probs(batch, self.actor.size)
        return log_prob_N

    def compute_values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values, [N]."""
        with self.at_work("critic"):
            return self.critic.values(batch)

    def update_actor(
        self, mini_batches: Iterable[TrainBatch], lr_multiplier: float
    ) -> dict[str, float]:
        """Take an optimizer step of the policy for each mini-batch. Return metrics."""
        with self.at_work("actor", updates=True):
            return self.actor.update(mini_batches, lr_multiplier)

    def update_critic(
        self, mini_batches: Iterable[TrainBatch], lr_multiplier: float
    ) -> dict[str, float]:
        """Take an optimizer step of the critic for each mini-batch. Return metrics."""
        with self.at_work("critic", updates=True):
            return self.critic.update(mini_batches, lr_multiplier)
