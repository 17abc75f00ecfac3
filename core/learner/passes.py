"""Passes over sequences: log-probs and entropies of a policy, in micro-batches that memory allows.

A model is refused before it trains if the chunked head, packed attention or the engine would
compute other numbers than the model itself.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.data.vocabulary import unknown_among
from core.errors import InputError, UnhealthyRun
from core.learner.batching import MicroBatchSize, micro_batches
from core.learner.log_probs import NEVER, KeptIds, token_log_probs_and_entropy
from core.learner.lora import base_only
from core.learner.models import same_positions
from core.learner.packed_attention import (
    ForwardInputs,
    can_share,
    forward_inputs,
    places,
    predicting_tokens,
    use_packed_attention,
)
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch, pad
from core.vision.learner_pictures import (
    PictureInputs,
    picture_inputs,
    run_with_pictures,
    run_with_unused_tower,
)
from core.vision.pictures import modality_of


class Ranks:
    """Collectives that all ranks of a learner call: of one rank, or in :mod:`core.cluster.fsdp`."""

    is_rank_zero = True

    def all_reduce_max(self, count: int) -> int:
        """Return the largest ``count`` of all ranks."""
        return count

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value; of ranks with the same sequences only the first one's."""
        return [value]

    def gather_metrics(self, metrics: MetricSums) -> MetricSums:
        """Return the metrics of all ranks together."""
        of_all_ranks = MetricSums()
        for of_rank in self.gather(metrics):
            of_all_ranks.merge(of_rank)
        return of_all_ranks

    def with_gathered_params(
        self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``function(module, ...)``, which reads parameters; a sharded model gathers them."""
        return function(module, *args, **kwargs)

    def reshard(self, module: nn.Module) -> None:
        """Drop weights that passes have gathered, before an optimizer takes them for its own."""


ALONE = Ranks()


def whole_tensor(value: Tensor) -> Tensor:
    """Return a tensor that ranks may share (a DTensor) whole."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _in_precision_of_passes(_: nn.Module, __: Any, states: Tensor) -> Tensor:
    """Return states in autocast's precision, as a hook behind the embeddings.

    The sums between layers then have it too, as in engines and sharded learners. Autocast alone
    leaves them in float32, which is slower and further from engines.
    """
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def token_log_probs(
    module: nn.Module,
    inputs: ForwardInputs,
    *,
    temperature: float,
    unknown: Tensor | None = None,
    runs_unused_tower: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return [M] each: log-prob and entropy of the tokens that ``inputs`` predict.

    ``unknown`` ids, which the tokenizer does not know, have no probability: no engine samples them.
    """
    options = {"use_cache": False, **inputs.model_arguments}
    if inputs.media is not None:
        output = run_with_pictures(module, inputs.input_ids, inputs.media, **options)
    elif runs_unused_tower:
        output = run_with_unused_tower(module, inputs.input_ids, **options)
    else:
        output = module.base_model(input_ids=inputs.input_ids, **options)
    # The last norm has float32 weights, and so it returns float32
    hidden_MH = _in_precision_of_passes(module, (), output.last_hidden_state[inputs.is_predicting])
    head = module.get_output_embeddings()
    # Ranks that share layers each compute with the whole head
    weight = whole_tensor(head.weight)
    bias = head.bias if head.bias is None else whole_tensor(head.bias)
    if unknown is not None:
        if bias is None:
            bias = weight.new_zeros(len(weight), dtype=torch.float32)
        bias = bias.index_fill(0, unknown, NEVER)
    return token_log_probs_and_entropy(
        hidden_MH,
        weight,
        inputs.labels,
        temperature=temperature,
        bias=bias,
        kept=inputs.kept,
        entropy_grad=entropy_grad,
    )


class LearnerModel:
    """A model and what its passes need: precision, the ranks, and the ``mesh`` that splits a pass.

    ``device`` is where passes compute; None stands for where the parameters are.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,
        mesh: DeviceMesh | None = None,
    ):
        self.module = module
        self.compute_dtype = compute_dtype
        self.ranks = ranks
        self.device = device or next(module.parameters()).device
        self.mesh = mesh
        if compute_dtype is not None:
            module.get_input_embeddings().register_forward_hook(_in_precision_of_passes)
        self.longest = same_positions(module.config)
        self.ranks_of_pass = 1 if mesh is None else mesh.size()
        use_packed_attention(module, self.ranks_of_pass)
        self.reads_media = modality_of(module.config).reads_media
        # Positions of a model that reads pictures are not places in the sequence
        self.shares = can_share(module) and not self.reads_media
        check_packing(self)
        ranks.reshard(module)

    def precision(self) -> contextlib.AbstractContextManager:
        enabled = self.compute_dtype is not None
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=enabled)

    def micro_batches_of_rank(
        self, size: MicroBatchSize, batch: TrainBatch
    ) -> list[tuple[Tensor, TrainBatch]]:
        """Return the rank's micro-batches with the indices of their sequences.

        A sharded model needs all ranks in every pass, so a rank that has fewer adds empty ones.
        """
        max_tokens = size.max_tokens and size.max_tokens * self.ranks_of_pass
        pieces = list(micro_batches(batch, max_sequences=size.max_sequences, max_tokens=max_tokens))
        missing = self.ranks.all_reduce_max(len(pieces)) - len(pieces)
        empty = (torch.empty(0, dtype=torch.int64), batch.blank_row())
        return pieces + missing * [empty]

    def inputs_of_pass(
        self, batch: TrainBatch, media: PictureInputs | None = None
    ) -> ForwardInputs:
        """Return the inputs of a pass over the micro-batch, which reads the prompts of groups once.

        Raises InputError for a sequence that would change the positions of the others.
        """
        longest = int(batch.lengths.max())
        if self.longest is not None and longest > self.longest:
            raise InputError(
                f"model.path: a sequence has {longest} tokens, and beyond {self.longest} "
                f"{type(self.module).__name__} computes positions by the longest sequence of a "
                "pass; lower data.max_prompt_length or max_response_length"
            )
        kept = None
        if batch.has("kept_ids"):
            mask_N = batch.response_mask
            is_read_K = mask_N.repeat_interleave(batch.kept_counts)
            kept = KeptIds(batch.kept_ids[is_read_K].long(), batch.kept_counts[mask_N].long())
        return forward_inputs(
            batch.input_ids.long(),
            batch.response_mask,
            batch.lengths,
            group_B=batch.group if self.shares else None,
            kept=kept,
            media=media,
            mesh=self.mesh,
        )


class Policy(LearnerModel):
    """A causal language model that is read through its log-probs.

    ``options`` are those of :class:`LearnerModel`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        temperature: float,
        known_token_ids: np.ndarray | None = None,
        **options: Any,
    ):
        super().__init__(module, **options)
        self.temperature = temperature
        check_head(self)
        vocab_size = module.get_output_embeddings().weight.shape[0]
        unknown = unknown_among(known_token_ids, vocab_size)
        self.unknown = torch.from_numpy(unknown).to(self.device) if len(unknown) else None
        self.ranks.reshard(module)

    def token_stats(
        self, batch: TrainBatch, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each policy token, [N] each and 0 elsewhere."""
        media = None
        if batch.media:
            media_B = [batch.media.get(group) for group in batch.group.tolist()]
            media = picture_inputs(self.module, batch.padded("input_ids").long(), media_B)
        pass_inputs = self.inputs_of_pass(batch, media)
        with self.precision():
            log_prob_M, entropy_M = self.ranks.with_gathered_params(
                self.module,
                token_log_probs,
                pass_inputs,
                temperature=self.temperature,
                unknown=self.unknown,
                # Ranks that share weights gather them in one order, with pictures or without
                runs_unused_tower=self.reads_media and self.ranks is not ALONE,
                entropy_grad=entropy_grad,
            )
        return pass_inputs.at_tokens(log_prob_M), pass_inputs.at_tokens(entropy_M)

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, size: MicroBatchSize) -> tuple[Tensor, Tensor]:
        """Return :meth:`token_stats` of the whole batch, [N] on its device, without gradients."""
        dtype = torch.promote_types(next(self.module.parameters()).dtype, torch.float32)
        log_prob_N = torch.zeros(batch.tokens, dtype=dtype)
        entropy_N = torch.zeros(batch.tokens, dtype=dtype)
        for index, micro_batch in self.micro_batches_of_rank(size, batch):
            log_prob, entropy = self.token_stats(micro_batch.to(self.device))
            if len(index):
                batch.put_into(log_prob_N, index, log_prob.cpu().to(dtype))
                batch.put_into(entropy_N, index, entropy.cpu().to(dtype))
        return log_prob_N, entropy_N


class BasePolicy(Policy):
    """The policy as it was before training, which is the reference if adapters train."""

    def token_stats(
        self, batch: TrainBatch, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        with base_only(self.module):
            return super().token_stats(batch, entropy_grad=entropy_grad)


# -- what is checked when a model is loaded --------------------------------------------------------

# Bounds on a difference of hidden states, as a share of their norm. In bfloat16 30 layers of
# SmolLM2's width differ by 0.03, and with a wrong kernel by 0.3 or more. A GPU may multiply float32
# in TF32.
MOST_APART = 0.1
MOST_APART_FLOAT32 = 1e-3
LARGE_LOGIT = 1e3  # beyond any soft cap: Gemma 2 has 30


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Raise InputError if the model scales or caps its logits, which the chunked head does not."""
    module = policy.module
    ids = torch.arange(4, device=policy.device)[None] % module.config.get_text_config().vocab_size

    def logits_of_head(module: nn.Module) -> Tensor:
        states = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return module.get_output_embeddings()(states)

    with policy.precision():
        of_head = policy.ranks.with_gathered_params(module, logits_of_head).float()
        # A cap changes only large logits, so the hook enlarges what the head returns to the model
        factor = LARGE_LOGIT / float(of_head.abs().max().clamp(min=1e-6))
        head = module.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, __, output: output * factor)
        try:
            of_model = module(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
    expected = of_head * factor
    if not torch.allclose(expected, of_model.float(), atol=1e-3 * LARGE_LOGIT, rtol=1e-2):
        raise InputError(
            f"model.path: {type(module).__name__} changes its logits after the head, by a cap or a "
            "scale (final_logit_softcapping, logit_scale); use another model"
        )


@torch.no_grad()
def check_packing(model: LearnerModel) -> None:
    """Raise InputError if packed sequences have other hidden states than each sequence alone.

    Two answers to one prompt are read packed and, if the model shares prompts, behind their prompt.
    """
    kind = type(model.module).__name__
    lengths = torch.tensor([6, 5], device=model.device)
    place = places(lengths)
    written = place > 3
    # The first 4 tokens are the prompt; all tokens of the answers differ
    ids = torch.where(place < 4, place, torch.arange(11, device=place.device))
    ids = ids % model.module.config.get_text_config().vocab_size

    def predicting_states(module: nn.Module, inputs: ForwardInputs) -> Tensor:
        out = module.base_model(
            input_ids=inputs.input_ids, use_cache=False, **inputs.model_arguments
        )
        return out.last_hidden_state[inputs.is_predicting]

    def states_of_pass(inputs: ForwardInputs) -> Tensor:
        with model.precision():
            return model.ranks.with_gathered_params(model.module, predicting_states, inputs)

    # A causal model does not see the padding behind a sequence's end
    is_predicting = pad(predicting_tokens(written, lengths), lengths)
    alone = states_of_pass(ForwardInputs(pad(ids, lengths), is_predicting, ids[written], written))
    if not alone.isfinite().all():
        raise InputError(
            f"model.path: {kind}: its states of a few tokens are not finite: the weights hold NaN "
            "or are out of range; use another file"
        )
    full_precision = model.compute_dtype is None and alone.dtype in (torch.float32, torch.float64)
    bound = MOST_APART_FLOAT32 if full_precision else MOST_APART
    ways: dict[str, Tensor | None] = {"packed sequences": None}
    if model.shares:
        ways["answers behind a shared prompt"] = torch.zeros_like(lengths)
    for way, group in ways.items():
        states = states_of_pass(forward_inputs(ids, written, lengths, group_B=group))
        difference = (states.float() - alone.float()).norm() / alone.float().norm()
        if not float(difference) <= bound:  # also if it is NaN
            raise InputError(
                f"model.path: {kind} reads {way} otherwise than each alone (by "
                f"{float(difference):.2g} of a state); use another model"
            )


# -- what is checked after every sync of weights ---------------------------------------------------


class WeightSyncError(RuntimeError):
    """The engine does not compute with the learner's weights."""


def probe_ids(vocab_size: int) -> tuple[int, ...]:
    """Return a fixed text of random ids: it touches the embedding, every layer and the head."""
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab_size, 24))


@torch.no_grad()
def text_log_probs(
    module: nn.Module, token_ids: tuple[int, ...], device: torch.device
) -> np.ndarray:
    """Return ``log p(token t | tokens < t)`` for t = 1..len-1 by a plain pass, float32."""
    ids = torch.tensor([token_ids], device=device)
    logits_TV = module(input_ids=ids, use_cache=False).logits[0, :-1]
    log_probs_TV = logits_TV.float().log_softmax(-1)
    return log_probs_TV.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()


def probe_log_probs(policy: Policy) -> np.ndarray:
    """Return the learner's log-probs of the fixed text, [n - 1] float32, as an engine's probe does.

    Raises UnhealthyRun if they are not finite.
    """
    ids = probe_ids(policy.module.config.get_text_config().vocab_size)
    with policy.precision():
        log_probs = text_log_probs(policy.module, ids, policy.device)
    if not np.isfinite(log_probs).all():
        raise UnhealthyRun(
            "actor_rollout_ref.actor.optim.lr: the policy's log-probs of a fixed text are not "
            "finite, its weights are out of range; lower it or actor_rollout_ref.actor.grad_clip"
        )
    return log_probs


@torch.no_grad()
def compare_weights(sent: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Compare the weights that an engine holds with those that the learner sent, by name.

    Raises WeightSyncError unless each is the other one, rounded to the engine's precision.
    """
    wrong = []
    # One place for all rounded copies: new memory for each takes twice as long
    largest = max(held.values(), key=torch.numel, default=torch.empty(0))
    rounded = torch.empty_like(largest).flatten()
    for name, value in held.items():
        expected = rounded[: value.numel()]
        expected.copy_(sent[name].flatten())
        # Eight bytes at a time, three times as fast as numbers of two
        words = torch.int64 if value.nbytes % 8 == 0 else torch.uint8
        if not expected.view(words).equal(value.flatten().view(words)):
            wrong.append(name)
    if wrong:
        raise WeightSyncError(
            f"after the weight sync {len(wrong)} of {len(held)} weights of the engine are not "
            f"those that the learner sent ({', '.join(wrong[:3])}): some are stale or were rounded"
        )


def compare_probe(learner: np.ndarray, engine: np.ndarray, *, bf16: bool) -> float:
    """Return the largest difference of two probes.

    Raises WeightSyncError if too many tokens differ: a wrong weight moves nearly all of them. In
    bf16 rounding has moved 3 of 23 tokens of a trained model, by up to 3.
    """
    difference = np.abs(learner - engine)
    if bf16:
        bound = 0.25 + np.abs(learner) / 64
        largest_share = 0.5
    else:
        bound = 1e-3 + np.abs(learner) * 1e-5
        largest_share = 0.1
    beyond = ~(difference <= bound)  # also if it is NaN
    if beyond.mean() > largest_share or not np.isfinite(difference).all():
        raise WeightSyncError(
            f"after the weight sync the engine's log-prob of {beyond.sum()} of {len(beyond)} "
            f"tokens is not the learner's, at worst by {difference.max():.4g}: weights are stale"
        )
    return float(difference.max())
