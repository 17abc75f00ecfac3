"""What a pass over sequences computes: log-probs and entropies of a policy, in micro-batches that
fit into memory.

A model whose head, packed attention or engine computes anything else is refused before it trains on
wrong numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from core.data.vocabulary import unknown_among
from core.errors import InputError, UnhealthyRun
from core.learner.batching import micro_batches
from core.learner.log_probs import token_log_probs_and_entropy
from core.learner.lora import base_only
from core.learner.models import same_positions
from core.learner.packing import (
    ForwardInputs,
    can_share,
    forward_inputs,
    places,
    predicting_tokens,
    use_packed_attention,
)
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch, pad
from core.vision.learner_pictures import PictureInputs, picture_inputs, run_body
from core.vision.pictures import modality_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from core.config.training_keys import ActorConfig, CriticConfig

# As a logit: no probability, and 0 * log 0 is 0 in an entropy, as it would not be with an infinity
NEVER = -1e9


class MicroBatchSize(NamedTuple):
    """A memory setting: the most sequences, or tokens, of one pass."""

    max_sequences: int | None = None
    max_tokens: int | None = None


def training_size(part: ActorConfig | CriticConfig) -> MicroBatchSize:
    """Return the micro-batch size of passes. ``part`` is the actor section, also for log-probs, or
    the critic's."""
    if part.use_dynamic_bsz:
        return MicroBatchSize(max_tokens=part.ppo_max_token_len_per_gpu)
    return MicroBatchSize(max_sequences=part.ppo_micro_batch_size_per_gpu)


class Ranks:
    """Collectives of a learner's ranks, which all must call: here of one, in
    :mod:`core.cluster.fsdp` of several."""

    is_rank_zero = True  # the one rank that counts what all of them have

    def all_reduce_max(self, count: int) -> int:
        """Return the largest ``count`` of all ranks."""
        return count

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value; of ranks with the same sequences the first one's alone."""
        return [value]

    def gather_metrics(self, metrics: MetricSums) -> MetricSums:
        """Return the metrics of what all ranks saw."""
        whole = MetricSums()
        for part in self.gather(metrics):
            whole.merge(part)
        return whole

    def with_gathered_params(
        self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that reads parameters of ``module``, which a sharded one gathers
        first."""
        return function(module, *args, **kwargs)

    def reshard(self, module: nn.Module) -> None:
        """Drop weights that passes gathered and left: an optimizer that is made then would have
        them for its own."""


ALONE = Ranks()


def _in_precision_of_passes(_: nn.Module, __: Any, states: Tensor) -> Tensor:
    """Return the embeddings of a pass in autocast's precision, and with them the sums between
    layers.

    Engines and sharded learners compute so. Autocast alone leaves these sums in float32: slower,
    further from engines.
    """
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def token_log_probs(
    module: nn.Module,
    inputs: ForwardInputs,
    *,
    temperature: float,
    unknown: Tensor | None = None,
    every_part: bool = False,
    **options: bool,
) -> tuple[Tensor, ...]:
    """Return [M] each: log-prob and entropy of each token that ``inputs`` predict, by a causal
    language model.

    ``unknown`` ids, which the tokenizer does not know, have no probability: no engine samples them.
    """
    out = run_body(
        module,
        inputs.input_ids,
        inputs.media,
        every_part=every_part,
        use_cache=False,
        **inputs.inputs,
    )
    # The last norm's weights are float32
    hidden_MH = _in_precision_of_passes(module, (), out.last_hidden_state[inputs.predicts])
    head = module.get_output_embeddings()
    # Where ranks share layers it is a DTensor, and each of them reads all of it.
    weight, bias = (
        one.full_tensor() if hasattr(one, "full_tensor") else one
        for one in (head.weight, head.bias)
    )
    if unknown is not None:
        zeros = weight.new_zeros(len(weight), dtype=torch.float32) if bias is None else bias
        bias = zeros.index_fill(0, unknown, NEVER)
    return token_log_probs_and_entropy(
        hidden_MH, weight, inputs.labels, temperature=temperature, bias=bias, **options
    )


class LearnerModel:
    """A model and what its forward passes need: precision, the ranks, and the ``mesh`` of those
    that split a pass."""

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,  # None: where the parameters are
        mesh: DeviceMesh | None = None,
    ):
        self.module, self.compute_dtype, self.computes_on = module, compute_dtype, device
        self.ranks, self.mesh = ranks, mesh
        if compute_dtype is not None:
            module.get_input_embeddings().register_forward_hook(_in_precision_of_passes)
        self.longest = same_positions(module.config)
        self.split = 1 if mesh is None else mesh.size()  # ranks that split each pass between them
        use_packed_attention(module, self.split)
        # Whose positions are not places
        self.shares = can_share(module) and not modality_of(module.config).reads_media
        check_packing(self)
        ranks.reshard(module)

    @property
    def device(self) -> torch.device:
        return self.computes_on or next(self.module.parameters()).device

    def precision(self) -> contextlib.AbstractContextManager:
        return torch.autocast(
            self.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not None
        )

    def micro_batches_of_rank(
        self, size: MicroBatchSize, batch: TrainBatch
    ) -> list[tuple[Tensor, TrainBatch]]:
        """Return the rank's micro-batches with the indices of their sequences, as many on every
        rank.

        A sharded model needs all ranks in every pass, so a rank with fewer adds empty ones.
        """
        tokens = size.max_tokens and size.max_tokens * self.split
        pieces = list(micro_batches(batch, max_sequences=size.max_sequences, max_tokens=tokens))
        missing = self.ranks.all_reduce_max(len(pieces)) - len(pieces)
        return pieces + missing * [(torch.empty(0, dtype=torch.int64), batch.blank_row())]

    def pass_over(self, batch: TrainBatch, media: PictureInputs | None = None) -> ForwardInputs:
        """Return the inputs of a pass over the micro-batch, which reads the prompts of its groups
        once.

        Raises InputError for a sequence that would change the positions of the others.
        """
        if self.longest is not None and (length := int(batch.lengths.max())) > self.longest:
            kind = (
                f"{type(self.module).__name__} computes positions by the longest sequence of a pass"
            )
            rule = f"a sequence has {length} tokens, and {kind} beyond {self.longest}"
            raise InputError(
                f"model.path: {rule}; lower data.max_prompt_length or max_response_length"
            )
        ids, group = batch.input_ids.long(), batch.group if self.shares else None
        return forward_inputs(
            ids, batch.response_mask, batch.lengths, group_B=group, media=media, mesh=self.mesh
        )


class Policy(LearnerModel):
    """A causal language model that is read through its log-probs. ``options`` are those of
    :class:`LearnerModel`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        temperature: float,
        known: np.ndarray | None = None,
        **options: Any,
    ):
        super().__init__(module, **options)
        self.temperature = temperature
        check_head(self)
        unknown = unknown_among(known, module.get_output_embeddings().weight.shape[0])
        self.unknown = torch.from_numpy(unknown).to(self.device) if len(unknown) else None
        self.ranks.reshard(module)

    def token_stats(self, batch: TrainBatch, **options: bool) -> tuple[Tensor, ...]:
        """Return log-prob of each policy token and entropy of its distribution, [N] each and 0
        elsewhere."""
        media = None
        if batch.media:
            media_B = [batch.media.get(group) for group in batch.group.tolist()]
            media = picture_inputs(self.module, batch.padded("input_ids").long(), media_B)
        inputs = self.pass_over(batch, media)
        return tuple(map(inputs.at_tokens, self.forward(inputs, **options)))

    def forward(self, inputs: ForwardInputs, **options: Any) -> tuple[Tensor, ...]:
        """Return :func:`token_log_probs` of this policy; ``options`` are the rest of its
        arguments."""
        options |= {
            "temperature": self.temperature,
            "unknown": self.unknown,
            "every_part": self.ranks is not ALONE,
        }
        with self.precision():
            return self.ranks.with_gathered_params(self.module, token_log_probs, inputs, **options)

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, size: MicroBatchSize) -> tuple[Tensor, Tensor]:
        """Return :meth:`token_stats` of the whole batch, [N] on the batch's device, without
        gradients."""
        dtype = torch.promote_types(next(self.module.parameters()).dtype, torch.float32)
        stats = torch.zeros(batch.tokens, dtype=dtype), torch.zeros(batch.tokens, dtype=dtype)
        for index, micro in self.micro_batches_of_rank(size, batch):
            values = self.token_stats(micro.to(self.device))
            if len(index):
                for whole, value in zip(stats, values, strict=True):
                    batch.put(whole, index, value.cpu().to(dtype))
        return stats


class BasePolicy(Policy):
    """The policy as it was before training: the reference where adapters train and the base
    stays."""

    def token_stats(self, batch: TrainBatch, **options: bool) -> tuple[Tensor, ...]:
        with base_only(self.module):
            return super().token_stats(batch, **options)


# -- what is checked when a model is loaded --------------------------------------------------------

# In shares of hidden states: of bfloat16 (30 layers of SmolLM2's width differ by 0.03, a wrong
# kernel by 0.3 and more), and of float32, which a GPU may multiply in TF32
MOST_APART, MOST_APART_FLOAT32 = 0.1, 1e-3
LARGE_LOGIT = 1e3  # beyond any soft cap (Gemma 2 has 30)


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Check that the chunked head computes what the model does: some scale or cap their logits.
    Raises InputError."""
    module = policy.module
    ids = torch.arange(4, device=policy.device)[None] % module.config.get_text_config().vocab_size

    def logits(module: nn.Module) -> Tensor:
        return module.get_output_embeddings()(
            module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        )

    with policy.precision():
        ours = policy.ranks.with_gathered_params(module, logits).float()
        # A cap changes large logits alone: the head's output is enlarged before the model goes on
        # with it
        factor = LARGE_LOGIT / float(ours.abs().max().clamp(min=1e-6))
        hook = module.get_output_embeddings().register_forward_hook(
            lambda _, __, output: output * factor
        )
        try:
            theirs = module(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
    if not torch.allclose(ours * factor, theirs.float(), atol=1e-3 * LARGE_LOGIT, rtol=1e-2):
        rule = (
            "changes its logits after the head, by a cap or a scale (final_logit_softcapping, "
            "logit_scale)"
        )
        raise InputError(f"model.path: {type(module).__name__} {rule}; use another model")


@torch.no_grad()
def check_packing(model: LearnerModel) -> None:
    """Check that two answers to one prompt are read packed, and behind their shared prompt, as each
    alone.

    Differences are norms of the hidden states of all tokens, in shares of those states' norm.
    Raises InputError.
    """
    lengths = torch.tensor([6, 5], device=model.device)
    place = places(lengths)
    # Of each other's only the prompts
    ids = torch.where(place < 4, place, torch.arange(11, device=place.device))
    ids, wrote = ids % model.module.config.get_text_config().vocab_size, place > 3

    def states(module: nn.Module, inputs: ForwardInputs) -> Tensor:
        out = module.base_model(input_ids=inputs.input_ids, use_cache=False, **inputs.inputs)
        return out.last_hidden_state[inputs.predicts]

    def read(inputs: ForwardInputs) -> Tensor:
        with model.precision():
            return model.ranks.with_gathered_params(model.module, states, inputs)

    predicts = pad(predicting_tokens(wrote, lengths), lengths)
    # causal: padding behind the ends is not seen
    alone = ForwardInputs(pad(ids, lengths), predicts, ids[wrote], wrote)
    plain = read(alone)
    if not plain.isfinite().all():
        rule = "its states of a few tokens are not finite: the weights hold NaN or are out of range"
        raise InputError(f"model.path: {type(model.module).__name__}: {rule}; use another file")
    full = model.compute_dtype is None and plain.dtype in (torch.float32, torch.float64)
    for group in (None, lengths * 0) if model.shares else (None,):
        found = read(forward_inputs(ids, wrote, lengths, group_B=group))
        apart = float((found.float() - plain.float()).norm() / plain.float().norm())
        if not apart <= (MOST_APART_FLOAT32 if full else MOST_APART):  # NaN too
            what = "packed sequences" if group is None else "answers behind a shared prompt"
            rule = f"reads {what} otherwise than each alone (by {apart:.2g} of a state)"
            raise InputError(f"model.path: {type(model.module).__name__} {rule}; use another model")


# -- what is checked after every sync of weights: engine and learner give a fixed text the same
# log-probs ---


class WeightSyncError(RuntimeError):
    """The engine does not compute with the learner's weights."""


def probe_ids(vocab_size: int) -> tuple[int, ...]:
    """Return a fixed text of random ids: it touches the embedding, every layer and the head."""
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab_size, 24))


@torch.no_grad()
def probe_log_probs(policy: Policy) -> np.ndarray:
    """Return the learner's log-probs of the fixed text, [n - 1] float32, as
    :meth:`RolloutEngine.probe` gives them.

    Raises UnhealthyRun where they are not finite.
    """
    ids = probe_ids(policy.module.config.get_text_config().vocab_size)
    with policy.precision():
        logits = policy.module(
            input_ids=torch.tensor([ids], device=policy.device), use_cache=False
        ).logits
    log_probs = logits[0, :-1].float().log_softmax(-1).cpu()
    found = log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    if not np.isfinite(found).all():
        raise UnhealthyRun(
            "actor_rollout_ref.actor.optim.lr: the policy's log-probs of a fixed text are not "
            "finite, its weights are "
            "out of range; lower it or actor_rollout_ref.actor.grad_clip"
        )
    return found


def compare_weights(sent: Mapping[str, int], held: Mapping[str, int]) -> None:
    """Compare checksums of an engine's weights, by name, with those that the learner sent. Raises
    WeightSyncError."""
    if wrong := [name for name, value in held.items() if sent.get(name) != value]:
        found = (
            f"{len(wrong)} of {len(held)} weights of the engine are not those that the learner sent"
        )
        raise WeightSyncError(
            f"after the weight sync {found} ({', '.join(wrong[:3])}): some are "
            f"stale or were rounded"
        )


def compare_probe(learner: np.ndarray, engine: np.ndarray, *, bf16: bool) -> float:
    """Return the largest difference of the two, [N] each. Raises WeightSyncError where too many are
    beyond the bound.

    A wrong weight moves nearly all tokens; in bf16 rounding has moved 3 of 23 by up to 3, in a
    trained model.
    """
    difference = np.abs(learner - engine)
    bound, most = (
        (0.25 + np.abs(learner) / 64, 0.5) if bf16 else (1e-3 + np.abs(learner) * 1e-5, 0.1)
    )
    beyond = ~(difference <= bound)  # NaN too
    if beyond.mean() > most or not np.isfinite(difference).all():
        found = (
            f"the engine's log-prob of {beyond.sum()} of {len(beyond)} tokens is not the learner's"
        )
        raise WeightSyncError(
            f"after the weight sync {found}, at worst by {difference.max():.4g}: weights are stale"
        )
    return float(difference.max())
