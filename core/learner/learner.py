"""The models that a step reads and trains: the policy, the critic, and frozen ones such as the
reference.

A batch that reaches ``update`` is one optimizer step with its ``loss_weight``; micro-batches add up
partial sums.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
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
from core.learner.models import compute_dtype, freeze_parts, load_critic, load_policy
from core.learner.passes import BasePolicy, LearnerModel, Policy, training_size
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.training_keys import ActorConfig, CriticConfig, Sharing

# What a pass for log-probs or values reads of a batch
PASS_READS = ("input_ids", "response_mask", "group")
CRITIC_READS = (*PASS_READS, "loss_weight", "returns", "values")


def actor_reads(config: ActorConfig, batch: TrainBatch) -> tuple[str, ...]:
    """Return the fields that the policy's update reads of a batch; no others are sent to a learner
    rank."""
    fields = (*PASS_READS, "loss_weight", "advantages", "rollout_is_weights", "selected")
    if config.use_kl_loss:
        fields += ("ref_log_prob",)
    if not batch.has("old_log_probs"):
        # The update measures the distance to the engine, or trains on its log-probs
        return (*fields, "rollout_log_probs", "sampled_mask")
    return (*fields, "old_log_probs")


def only_advantages_train(config: ActorConfig) -> bool:
    """Return whether a sequence whose advantages are all 0 moves no weight."""
    moves = registry.policy_loss(config.policy_loss.loss_mode).moves_without_advantage
    return not config.use_kl_loss and config.entropy_coeff == 0 and not moves


class Stepper:
    """AdamW with clipping; a non-finite gradient norm skips the step and is counted.

    A step in which no sequence trains has gradients of zero, as in verl: momentum and weight decay
    move the weights.
    """

    def __init__(self, trained: LearnerModel, config: ActorConfig | CriticConfig):
        self.module, self.ranks = trained.module, trained.ranks
        self.base_lr, self.grad_clip = config.optim.lr, config.grad_clip
        self.number = 0  # of the step under way, in its update
        self.parameters = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.base_lr,
            betas=tuple(config.optim.betas),
            weight_decay=config.optim.weight_decay,
            fused=True,
        )

    def check_weights(self, name: str) -> None:
        """Raise UnhealthyRun where an update has left weights that are not finite. All ranks find
        the same."""
        norm = torch.nn.utils.get_total_norm([each.detach() for each in self.parameters])
        if not math.isfinite(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)):
            section = "actor_rollout_ref.actor" if name == "actor" else name
            raise UnhealthyRun(
                f"{section}.optim.lr={self.base_lr:g}: an update has left weights that are not "
                f"finite; lower it or "
                f"{section}.grad_clip={self.grad_clip:g}"
            )

    def step(self, lr_multiplier: float) -> tuple[float, bool]:
        """Clip, step and clear the gradients. Return the norm before clipping and whether it
        stepped."""
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.grad_clip)
        # sharded: of all ranks
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_lr * lr_multiplier
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, finite

    def update(
        self,
        steps: Iterable[TrainBatch],
        lr_multiplier: float,
        accumulate: Callable[[TrainBatch, MetricSums], None],
        *,
        name: str,
        losses: Sequence[str],
    ) -> dict[str, float]:
        """Take one step for each batch of ``steps``, with the gradients that ``accumulate`` adds.
        Return the metrics.

        ``losses`` are its partial sums: each counts once a step, however many parts and ranks add
        to it.
        """
        means, skipped = MetricSums(), 0
        for number, batch in enumerate(steps):
            self.number, one = number, MetricSums()
            for loss in losses:
                one.value(loss, 0.0, counts=self.ranks.is_rank_zero)
            accumulate(batch, one)
            norm, stepped = self.step(lr_multiplier)
            skipped += not stepped
            if stepped:  # the numbers of a skipped step are no numbers
                one.value("grad_norm", norm)
                means.merge(one)
        self.check_weights(name)
        metrics = self.ranks.gather_metrics(means).result(name)
        return {
            **metrics,
            f"{name}/lr": self.base_lr * lr_multiplier,
            f"{name}/skipped_updates": skipped,
        }


class Actor(Policy):
    """The policy that is trained. ``bypass``: the engine's log-probs stand for the old ones, as
    bypass_mode has it."""

    def __init__(
        self, module: nn.Module, config: ActorConfig, *, bypass: bool = False, **policy: Any
    ):
        super().__init__(module, **policy)
        self.config, self.bypass = config, bypass
        self.policy_loss = policy_loss(config.policy_loss.loss_mode)
        self.replaces_clipped = registry.policy_loss(config.policy_loss.loss_mode).replaces_clipped
        self.stepper, self.size = Stepper(self, config), training_size(config)
        self.mismatch = MetricSums()  # between engine and learner, before the update's first step

    def update(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take one AdamW step for each batch of ``steps``. Return ``actor/...`` and
        ``rollout_corr/...`` metrics.

        Without ``old_log_probs`` the batch is the only step of its rollout, and the pass's own
        log-probs stand for them: the ratio is one. With ``bypass`` there may be several; the
        mismatch is that of the first.
        """
        self.mismatch = MetricSums()
        losses = ("pg_loss", "kl_loss") if self.config.use_kl_loss else ("pg_loss",)
        metrics = self.stepper.update(
            steps, lr_multiplier, self.accumulate, name="actor", losses=losses
        )
        metrics |= self.ranks.gather_metrics(self.mismatch).result("rollout_corr")
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def accumulate(self, batch: TrainBatch, means: MetricSums) -> None:
        """Add the gradients of one optimizer step, micro-batch by micro-batch."""
        if batch.has("selected"):
            batch = batch.adding(selected=self.selected(batch))
        contributing, idle = split_zero_gradient(
            batch, only_advantages_train=only_advantages_train(self.config)
        )
        for _, micro in self.micro_batches_of_rank(self.size, contributing):
            self.micro_batch_loss(micro.to(self.device), means).backward()
        if not batch.has("old_log_probs") and self.ranks.all_reduce_max(len(idle)):
            # Nothing trains on them, but the metrics are of every sequence.
            log_prob, entropy = self.log_probs(idle, self.size)
            if len(idle):
                means.tokens({"entropy": entropy}, idle.response_mask)
                self.measure(log_prob, entropy, idle)

    def selected(self, batch: TrainBatch) -> Tensor:
        """Return the tokens of an optimizer step that the policy loss treats apart, [N] bool.

        Where clipped tokens give way, as many as were selected are taken over all ranks, in the
        order of the batch's ``selected``.
        """
        order_N = batch.selected
        if not self.replaces_clipped or not (self.bypass or self.stepper.number):
            return order_N > 0  # before the first step every ratio is one, and nothing is clipped
        count = sum(self.ranks.gather(int((order_N > 0).sum())))
        free = order_N[(order_N != 0) & ~self.clipped(batch)].sort(descending=True).values
        taken = torch.cat(self.ranks.gather(free[:count])).sort(descending=True).values[:count]
        return torch.isin(order_N, taken)

    def clipped(self, batch: TrainBatch) -> Tensor:
        """Return the tokens, of those that may be selected, that are clipped by now, [N] bool."""
        may_be = (batch.selected != 0) & (batch.advantages != 0)
        rows = count_by_sequence(may_be, batch.lengths).nonzero()[:, 0]
        part, clipped = batch.rows(rows), torch.zeros(batch.tokens, dtype=torch.bool)
        inputs = self.loss_inputs(part, self.log_probs(part, self.size)[0])
        batch.put(clipped, rows, inputs.surrogate(inputs.log_ratio.exp())[1])
        return clipped

    def loss_inputs(self, batch: TrainBatch, log_prob_N: Tensor) -> LossInputs:
        """Return what the policy loss reads."""
        if batch.has("old_log_probs"):
            old_N = batch.old_log_probs
        else:
            old_N = batch.rollout_log_probs if self.bypass else log_prob_N.detach()
        tensors = log_prob_N, old_N, batch.advantages, batch.response_mask
        return LossInputs(*tensors, self.config, batch.lengths, batch.optional("selected"))

    def measure(self, log_prob_N: Tensor, entropy_N: Tensor, batch: TrainBatch) -> None:
        """Add the difference to an engine that wrote the tokens, which means something before a
        weight has moved."""
        if self.stepper.number == 0 and batch.has("rollout_log_probs"):
            add_mismatch(self.mismatch, log_prob_N, batch, entropy_N)

    def micro_batch_loss(self, micro: TrainBatch, means: MetricSums) -> Tensor:
        """Return the micro-batch's partial sum of the loss: policy gradient - entropy bonus +
        KL."""
        config, mask, weight = self.config, micro.response_mask, micro.loss_weight
        log_prob, entropy = self.token_stats(micro, entropy_grad=config.entropy_coeff != 0)
        inputs = self.loss_inputs(micro, log_prob)
        loss_N, stats = of_tokens(self.policy_loss, inputs, log_prob.shape, dict)
        if micro.has("rollout_is_weights"):
            loss_N = loss_N * micro.rollout_is_weights
        loss = pg_loss = (weight * loss_N).sum()
        means.value("pg_loss", float(pg_loss.detach()), counts=False)
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * (weight * entropy).sum()
        if config.use_kl_loss:
            kl_loss = (
                weight * kl_penalty(log_prob, micro.ref_log_prob, config.kl_loss_type, mask)
            ).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            means.value("kl_loss", float(kl_loss.detach()), counts=False)
        if not micro.has("old_log_probs"):  # the pass that would have measured these was skipped
            stats = {**stats, "entropy": entropy}
            self.measure(log_prob, entropy, micro)
        means.tokens(stats, mask)
        return loss


class Critic(LearnerModel):
    """The value function: one number a state. ``options`` are those of :class:`LearnerModel`."""

    def __init__(self, module: nn.Module, config: CriticConfig, **options: Any):
        super().__init__(module, **options)
        self.config, self.size = config, training_size(config)
        self.stepper = Stepper(self, config)

    def token_values(self, batch: TrainBatch) -> Tensor:
        """Return [N]: the value of the state in which each policy token is chosen, 0 elsewhere."""
        inputs = self.pass_over(batch)
        with self.precision():
            logits = self.module(
                input_ids=inputs.input_ids, use_cache=False, **inputs.inputs
            ).logits
        values_M = logits[inputs.predicts][:, 0]
        return inputs.at_tokens(values_M.to(torch.promote_types(values_M.dtype, torch.float32)))

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Tensor:
        """Return :meth:`token_values` of the whole batch, [N], without gradients."""
        out = torch.zeros(batch.tokens)
        for index, micro in self.micro_batches_of_rank(self.size, batch):
            values = self.token_values(micro.to(self.device))
            if len(index):
                batch.put(out, index, values.cpu().float())
        return out

    def update(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take one AdamW step for each batch of ``steps``. Return ``critic/...`` metrics."""
        return self.stepper.update(
            steps, lr_multiplier, self.accumulate, name="critic", losses=("vf_loss",)
        )

    def accumulate(self, batch: TrainBatch, means: MetricSums) -> None:
        """Add the gradients of one optimizer step, micro-batch by micro-batch."""
        contributing, _ = split_zero_gradient(batch, only_advantages_train=False)
        for _, micro in self.micro_batches_of_rank(self.size, contributing):
            self.micro_batch_loss(micro.to(self.device), means).backward()

    def micro_batch_loss(self, micro: TrainBatch, means: MetricSums) -> Tensor:
        """Return the micro-batch's partial sum of the clipped value loss."""
        values, mask = self.token_values(micro), micro.response_mask
        returns, old = micro.returns, micro.values
        loss_N, stats = value_loss(values, returns, old, self.config.cliprange_value, mask)
        loss = (micro.loss_weight * loss_N).sum()
        means.value("vf_loss", float(loss.detach()), counts=False)
        means.tokens({**stats, "vpred_mean": values}, mask)
        return loss


class Models:
    """Policy, critic and frozen models, whole in this process, for the phases of a step.

    ``known`` are the ids of the tokenizer (:func:`core.data.vocabulary.known_ids`).
    ``master_dtype`` is float32 except in tests.
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
        # Names and shapes of each model; if it is whole, the model
        self.skeletons: dict[str, nn.Module] = {}
        part = config.actor_rollout_ref
        critic = config.critic
        seed = config.trainer.seed
        # With adapters: the policy without them
        ref = part.actor if part.model.lora_rank else part.ref
        self.fsdp = {
            "actor": part.actor.fsdp_config,
            "critic": critic.model.fsdp_config,
            "ref": ref.fsdp_config,
        }

        def make_policy(on_meta: bool) -> nn.Module:
            module = freeze_parts(load_policy(part.model, master_dtype, on_meta=on_meta), config)
            return add_adapters(module, part.model, seed)

        def make_critic(on_meta: bool) -> nn.Module:
            module = load_critic(critic.model, seed, master_dtype, on_meta=on_meta)
            return add_adapters(module, critic.model, seed)

        reading = {"temperature": part.rollout.temperature or 1.0, "known": known}
        policy = self.place("actor", make_policy, part.actor)
        bypass = config.algorithm.rollout_correction.bypass_mode
        self.actor = Actor(
            policy, part.actor, bypass=bypass, **reading, **self.computing("actor", part.actor)
        )
        self.critic: Critic | None = None
        self.trained: dict[str, Actor | Critic] = {"actor": self.actor}
        self.frozen: dict[str, Policy | BasePolicy] = {}
        if needs_ref and part.model.lora_rank:
            self.frozen["ref"] = BasePolicy(policy, **reading, **self.computing("ref", part.ref))
        elif needs_ref:
            module = self.place("ref", make_policy, part.ref).requires_grad_(False)
            self.frozen["ref"] = Policy(module, **reading, **self.computing("ref", part.ref))
        for role, (_, model, dtype, temperature) in config.frozen_models.items():
            self.fsdp[role] = part.ref.fsdp_config.replace(dtype=dtype)
            load = functools.partial(load_policy, model, master_dtype)
            module = self.place(role, lambda on_meta, load=load: load(on_meta=on_meta), part.ref)
            scores = {"temperature": temperature, "known": known}
            self.frozen[role] = Policy(
                module.requires_grad_(False), **scores, **self.computing(role, part.ref)
            )
        if needs_critic:
            module = self.place("critic", make_critic, critic)
            self.critic = Critic(module, critic, **self.computing("critic", critic))
            self.trained["critic"] = self.critic

    def place(self, name: str, make: Callable[[bool], nn.Module], sharing: Sharing) -> nn.Module:
        """Make a model where it computes. ``make(True)`` returns it on the meta device, without
        weights."""
        self.skeletons[name] = make(False).to(self.device)
        return self.skeletons[name]

    def computing(self, name: str, sharing: Sharing) -> dict[str, Any]:
        """Return how a model's passes are computed. A whole reference has the policy's number
        format."""
        return {"compute_dtype": compute_dtype(self.fsdp["actor" if name == "ref" else name].dtype)}

    def at_work(self, name: str, *, updates: bool = False) -> AbstractContextManager[None]:
        """Have a model ready for the time of a phase."""
        return contextlib.nullcontext()

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the policy tokens at the rollout temperature, [N]
        each."""
        with self.at_work("actor"):
            return self.actor.log_probs(batch, training_size(self.config.actor_rollout_ref.actor))

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        """Return the log-probs of the reference policy, or of the recipe's frozen model of this
        role, [N]."""
        with self.at_work(role):
            size = training_size(self.config.actor_rollout_ref.actor)
            return self.frozen[role].log_probs(batch, size)[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values, [N]."""
        with self.at_work("critic"):
            return self.critic.values(batch)

    def update_actor(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step of the policy for each batch. Return ``actor/...`` metrics."""
        with self.at_work("actor", updates=True):
            return self.actor.update(steps, lr_multiplier)

    def update_critic(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step of the critic for each batch. Return ``critic/...`` metrics."""
        with self.at_work("critic", updates=True):
            return self.critic.update(steps, lr_multiplier)
