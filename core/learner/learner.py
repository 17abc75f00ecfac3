"""One rank of the learner: the policy (and reference) and the critic, their passes and their updates.

Everything is computed on the positions that the policy wrote and nowhere else. A batch that reaches
``update`` is one optimizer step with its ``loss_weight``; what this file does with memory (micro-batches,
chunks of the head) adds up partial sums and cannot change the objective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from core.algorithm.kl import kl_penalty
from core.algorithm.losses import LossInputs, MetricSums, policy_loss, value_loss
from core.algorithm.rollout_correction import add_mismatch
from core.config import registry
from core.data.vocabulary import unknown_among
from core.learner.attention import use_packed_attention
from core.learner.batching import micro_batches, split_zero_gradient
from core.learner.log_probs import FP32Head, token_log_probs_and_entropy
from core.learner.lora import base_only
from core.learner.model_checks import check_head, check_packing, check_speed, shares_alike
from core.learner.packing import ForwardInputs, SharedPrompts, can_share, forward_inputs
from core.learner.traced_tokens import TracedTokens, clipped_how
from core.types import TrainBatch
from core.vision.learner_pictures import PictureInputs
from core.vision.modality import TEXT, Modality, modality_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from core.config.sections.actor import ActorConfig, RefConfig
    from core.config.sections.critic import CriticConfig
    from core.config.sections.rollout import RolloutConfig


@dataclass(frozen=True)
class MicroBatchSize:
    """A memory setting: the most sequences, or tokens, of one pass."""

    max_sequences: int | None = None
    max_tokens: int | None = None


def training_size(part: ActorConfig | CriticConfig) -> MicroBatchSize:
    """Return the micro-batch size of the passes that train. ``part`` is the actor or critic section."""
    if part.use_dynamic_bsz:
        return MicroBatchSize(max_tokens=part.ppo_max_token_len_per_gpu)
    return MicroBatchSize(max_sequences=part.ppo_micro_batch_size_per_gpu)


def pass_size(part: RolloutConfig | RefConfig) -> MicroBatchSize:
    """Return the micro-batch size of log-prob passes. ``part`` is the rollout or ref section."""
    if part.log_prob_use_dynamic_bsz:
        return MicroBatchSize(max_tokens=part.log_prob_max_token_len_per_gpu)
    return MicroBatchSize(max_sequences=part.log_prob_micro_batch_size_per_gpu)


class Ranks:
    """Collectives of a learner's ranks: all must call them, in the same order.

    This is a learner alone, for which they do nothing; :mod:`core.cluster.fsdp` has several ranks.
    """

    is_rank_zero = True  # the one rank that counts what all of them have

    def all_reduce_max(self, count: int) -> int:
        """Return the largest ``count`` of all ranks."""
        return count

    def gather_metrics(self, metrics: MetricSums) -> MetricSums:
        """Return the metrics of what all ranks saw."""
        return metrics

    def with_gathered_params(self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that reads parameters of ``module``, which a sharded one gathers first."""
        return function(module, *args, **kwargs)

    def reshard(self, module: nn.Module) -> None:
        """Drop weights that passes gathered and left: an optimizer that is made then would have them for its own."""


ALONE = Ranks()
NEVER = -1e9  # as a logit: no probability, and 0 * log 0 is 0 in an entropy, as it would not be with an infinity
PASS_READS = ("input_ids", "response_mask", "group")  # what a pass for log-probs or values reads of a batch
CRITIC_READS = (*PASS_READS, "loss_weight", "returns", "values")


def actor_reads(config: ActorConfig, batch: TrainBatch) -> tuple[str, ...]:
    """Return the fields that the policy's update reads of a batch; no others are sent to a learner rank."""
    fields = (*PASS_READS, "loss_weight", "advantages", "rollout_is_weights", "selected", "trace_row")
    if config.use_kl_loss:
        fields += ("ref_log_prob",)
    if batch.old_log_probs is None:  # the update then measures the distance to the engine, or trains on its log-probs
        return (*fields, "rollout_log_probs", "sampled_mask")
    return (*fields, "old_log_probs")


def only_advantages_train(config: ActorConfig) -> bool:
    """Return whether a sequence whose advantages are all 0 moves no weight."""
    moves = registry.policy_loss(config.policy_loss.loss_mode).moves_without_advantage
    return not config.use_kl_loss and config.entropy_coeff == 0 and not moves


def _in_precision_of_passes(_: nn.Module, __: Any, states: Tensor) -> Tensor:
    """Return the embeddings of a pass in autocast's precision, so that the sums between layers have it too.

    Engines and sharded learners compute so. Autocast alone leaves these sums in the weights' float32, which a
    third of the work then goes through, and differs more from the engine's log-probs.
    """
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def token_log_probs(
    module: nn.Module,
    inputs: ForwardInputs,
    *,
    temperature: float,
    unknown: Tensor | None = None,
    modality: Modality = TEXT,
    every_part: bool = False,
    **options: bool,
) -> tuple[Tensor, ...]:
    """Return [M] each: log-prob and entropy of each token that ``inputs`` predict, by a causal language model.

    ``unknown`` ids, which the tokenizer does not know, have no probability: no engine samples them.
    ``every_part`` is :meth:`Modality.run_body`'s, ``options`` are those of :func:`token_log_probs_and_entropy`.
    """
    more = {"use_cache": False, **inputs.inputs}
    out = modality.run_body(module, inputs.input_ids, inputs.media, every_part=every_part, **more)
    # The last norm's weights are float32
    hidden_MH = _in_precision_of_passes(module, (), out.last_hidden_state[inputs.predicts])
    head = module.get_output_embeddings()
    # Where ranks share layers it is a DTensor, and each of them reads all of it.
    weight, bias = (one.full_tensor() if hasattr(one, "full_tensor") else one for one in (head.weight, head.bias))
    if unknown is not None:
        zeros = weight.new_zeros(len(weight), dtype=torch.float32) if bias is None else bias
        bias = zeros.index_fill(0, unknown, NEVER)
    return token_log_probs_and_entropy(
        hidden_MH,
        weight,
        inputs.labels,
        temperature=temperature,
        bias=bias,
        fp32=isinstance(head, FP32Head),
        **options,
    )


class LearnerModel:
    """A model and what its forward passes need: precision, the ranks, and the ``mesh`` of those that split a pass."""

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,
        mesh: DeviceMesh | None = None,
        compiled: bool = False,
    ):
        self.module, self.compute_dtype = module, compute_dtype
        self.ranks, self.mesh, self.modality = ranks, mesh, modality_of(module.config)
        self.computes_on = device  # None: where the parameters are
        if compute_dtype is not None:
            check_speed(compute_dtype, self.device.type)
            module.get_input_embeddings().register_forward_hook(_in_precision_of_passes)
        use_packed_attention(module, self.splitting)
        if compiled:
            from core.learner.models import compile_parts  # it knows the whole schema, which a rank need not load

            compile_parts(module, self.device)
        self.shares = can_share(module) and shares_alike(self)
        ranks.reshard(module)

    @property
    def splitting(self) -> int:
        """Return how many ranks split each pass between them."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def device(self) -> torch.device:
        return self.computes_on or next(self.module.parameters()).device

    def precision(self) -> contextlib.AbstractContextManager:
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def micro_batches_of_rank(self, size: MicroBatchSize, batch: TrainBatch) -> list[tuple[Tensor, TrainBatch]]:
        """Return the rank's micro-batches with the indices of their sequences, as many on every rank.

        A sharded model needs all ranks in every pass, so a rank with fewer adds empty ones.
        """
        tokens = size.max_tokens and size.max_tokens * self.splitting
        pieces = list(micro_batches(batch, max_sequences=size.max_sequences, max_tokens=tokens))
        missing = self.ranks.all_reduce_max(len(pieces)) - len(pieces)
        return pieces + missing * [(torch.empty(0, dtype=torch.int64), batch.blank_row())]

    def pass_over(self, batch: TrainBatch, media: PictureInputs | None = None) -> ForwardInputs:
        """Return the inputs of a pass over the micro-batch, which reads the prompts of its groups once."""
        ids, mask, lengths, shared = batch.input_ids.long(), batch.response_mask, batch.lengths, None
        if self.shares and not batch.media:
            shared = SharedPrompts.of(ids, mask, lengths, batch.group)
        return forward_inputs(ids, mask, lengths, media=media, shared=shared, mesh=self.mesh)


class Policy(LearnerModel):
    """A causal language model that is read through its log-probs. ``options`` are those of :class:`LearnerModel`."""

    def __init__(self, module: nn.Module, *, temperature: float, known: np.ndarray | None = None, **options: Any):
        super().__init__(module, **options)
        self.temperature = temperature
        head = module.get_output_embeddings()
        unknown = unknown_among(known, head.weight.shape[0] if head is not None else 0)
        self.unknown = torch.from_numpy(unknown).to(self.device) if len(unknown) else None
        check_head(self)
        check_packing(self)
        self.ranks.reshard(module)

    def token_stats(self, batch: TrainBatch, **options: bool) -> tuple[Tensor, ...]:
        """Return log-prob of each policy token and entropy of its distribution, [N] each and 0 elsewhere.

        ``options`` are those of :func:`token_log_probs_and_entropy`: ``squares`` adds a third result.
        """
        media = None
        if media_B := batch.media_of_rows():
            media = self.modality.inputs(self.module, batch.padded("input_ids").long(), media_B)
        inputs = self.pass_over(batch, media)
        return tuple(map(inputs.at_tokens, self.forward(inputs, **options)))

    def forward(self, inputs: ForwardInputs, **options: Any) -> tuple[Tensor, ...]:
        """Return :func:`token_log_probs` of this policy; ``options`` are the rest of its arguments."""
        options |= {"temperature": self.temperature, "unknown": self.unknown}
        options |= {"modality": self.modality, "every_part": self.ranks is not ALONE}
        with self.precision():
            return self.ranks.with_gathered_params(self.module, token_log_probs, inputs, **options)

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, size: MicroBatchSize, *, squares: bool = False) -> tuple[Tensor, ...]:
        """Return :meth:`token_stats` of the whole batch, [N] on the batch's device, without gradients."""
        dtype = torch.promote_types(next(self.module.parameters()).dtype, torch.float32)
        stats = tuple(torch.zeros(batch.tokens, dtype=dtype) for _ in range(3 if squares else 2))
        for index, micro in self.micro_batches_of_rank(size, batch):
            values = self.token_stats(micro.to(self.device), squares=squares)
            if len(index):
                for whole, value in zip(stats, values, strict=True):
                    batch.put(whole, index, value.cpu().to(dtype))
        return stats


class BasePolicy(Policy):
    """The policy as it was before training: the reference where adapters train and the base stays."""

    def token_stats(self, batch: TrainBatch, **options: bool) -> tuple[Tensor, ...]:
        with base_only(self.module):
            return super().token_stats(batch, **options)


class Stepper:
    """AdamW with clipping; a non-finite gradient norm skips the step and is counted."""

    def __init__(self, trained: LearnerModel, config: ActorConfig | CriticConfig):
        self.module, self.ranks = trained.module, trained.ranks
        self.base_lr, self.grad_clip = config.optim.lr, config.grad_clip
        self.number = 0  # of the step under way, in its update
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad],
            lr=self.base_lr,
            betas=tuple(config.optim.betas),
            weight_decay=config.optim.weight_decay,
            fused=True,
        )

    def step(self, lr_multiplier: float) -> tuple[float, bool]:
        """Clip, step and clear the gradients. Return the norm before clipping and whether it stepped."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.grad_clip)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # sharded: of all ranks
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
        """Take one step for each batch of ``steps``, with the gradients that ``accumulate`` adds. Return the metrics.

        ``losses`` are partial sums of ``accumulate``: each counts once a step, however many parts and ranks add to it.
        """
        means, skipped, learning_rate = MetricSums(), 0, self.base_lr * lr_multiplier
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
        metrics = self.ranks.gather_metrics(means).result(name)
        if means.counts.get("grad_norm"):
            learning_rate = self.optimizer.param_groups[0]["lr"]  # what was used, not what was asked for
        return {**metrics, f"{name}/lr": learning_rate, f"{name}/skipped_updates": skipped}


class Actor(Policy):
    """The policy that is trained. ``bypass``: the engine's log-probs stand for the old ones, as bypass_mode has it."""

    def __init__(self, module: nn.Module, config: ActorConfig, *, bypass: bool = False, **policy: Any):
        super().__init__(module, **policy)
        self.config, self.bypass = config, bypass
        self.policy_loss = policy_loss(config.policy_loss.loss_mode)
        self.stepper = Stepper(self, config)
        self.size = training_size(config)
        self.mismatch = MetricSums()  # between engine and learner, before the update's first step
        self.traced = TracedTokens()  # of the last update

    def update(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take one AdamW step for each batch of ``steps``. Return ``actor/...`` and ``rollout_corr/...`` metrics.

        Where ``old_log_probs`` is not set the batch is the only optimizer step of its rollout, the
        ratio is one by definition and the pass's own log-probs, detached, stand for the old ones. With ``bypass``
        there may be several steps; the mismatch is then that of the first, before any weight has moved.
        """
        self.mismatch, self.traced = MetricSums(), TracedTokens()
        losses = ("pg_loss", "kl_loss") if self.config.use_kl_loss else ("pg_loss",)
        metrics = self.stepper.update(steps, lr_multiplier, self.accumulate, name="actor", losses=losses)
        metrics |= self.ranks.gather_metrics(self.mismatch).result("rollout_corr")
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def accumulate(self, batch: TrainBatch, means: MetricSums) -> None:
        """Add the gradients of one optimizer step, micro-batch by micro-batch."""
        contributing, zero_gradient = split_zero_gradient(
            batch, only_advantages_train=only_advantages_train(self.config)
        )
        for _, micro in self.micro_batches_of_rank(self.size, contributing):
            self.micro_batch_loss(micro.to(self.device), means).backward()
        if batch.old_log_probs is None and self.ranks.all_reduce_max(len(zero_gradient)):
            # Nothing trains on them, but the metrics are of every sequence.
            log_prob, entropy = self.log_probs(zero_gradient, self.size)
            self.traced.keep(zero_gradient, log_prob, entropy=entropy, loss_weight=zero_gradient.loss_weight)
            if len(zero_gradient):
                means.tokens({"entropy": entropy}, zero_gradient.response_mask)
                self.measure(log_prob, entropy, zero_gradient)

    def measure(self, log_prob_N: Tensor, entropy_N: Tensor, batch: TrainBatch) -> None:
        """Add the difference between engine and learner, which means something only before a weight has moved.

        What no engine wrote (demonstrations) has no log-probs to compare with.
        """
        if self.stepper.number == 0 and "rollout_log_probs" in batch.stored:
            add_mismatch(self.mismatch, log_prob_N, batch, entropy_N)

    def micro_batch_loss(self, micro: TrainBatch, means: MetricSums) -> Tensor:
        """Return the micro-batch's partial sum of the loss: policy gradient - entropy bonus + KL."""
        config, mask, weight = self.config, micro.response_mask, micro.require("loss_weight")
        log_prob, entropy = self.token_stats(micro, entropy_grad=config.entropy_coeff != 0)
        old = micro.old_log_probs
        if old is None:
            old = micro.rollout_log_probs if self.bypass else log_prob.detach()
        inputs = log_prob, old, micro.require("advantages"), mask, config, micro.lengths, micro.selected
        loss_N, stats = self.policy_loss(LossInputs(*inputs))
        clip = clipped_how(stats)
        self.traced.keep(micro, log_prob, old=old, entropy=entropy, clip=clip, loss=loss_N, loss_weight=weight)
        if micro.rollout_is_weights is not None:
            loss_N = loss_N * micro.rollout_is_weights
        loss = pg_loss = (weight * loss_N).sum()
        means.value("pg_loss", float(pg_loss.detach()), counts=False)
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * (weight * entropy).sum()
        if config.use_kl_loss:
            kl_loss = (weight * kl_penalty(log_prob, micro.require("ref_log_prob"), config.kl_loss_type, mask)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            means.value("kl_loss", float(kl_loss.detach()), counts=False)
        if micro.old_log_probs is None:  # the pass that would have measured these was skipped
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
            logits = self.module(input_ids=inputs.input_ids, use_cache=False, **inputs.inputs).logits
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
        return self.stepper.update(steps, lr_multiplier, self.accumulate, name="critic", losses=("vf_loss",))

    def accumulate(self, batch: TrainBatch, means: MetricSums) -> None:
        """Add the gradients of one optimizer step, micro-batch by micro-batch."""
        contributing, _ = split_zero_gradient(batch, only_advantages_train=False)
        for _, micro in self.micro_batches_of_rank(self.size, contributing):
            self.micro_batch_loss(micro.to(self.device), means).backward()

    def micro_batch_loss(self, micro: TrainBatch, means: MetricSums) -> Tensor:
        """Return the micro-batch's partial sum of the clipped value loss."""
        values = self.token_values(micro)
        loss_N, stats = value_loss(
            values, micro.require("returns"), micro.require("values"), self.config.cliprange_value, micro.response_mask
        )
        loss = (micro.require("loss_weight") * loss_N).sum()
        means.value("vf_loss", float(loss.detach()), counts=False)
        means.tokens({**stats, "vpred_mean": values}, micro.response_mask)
        return loss
