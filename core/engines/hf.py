"""The in-process engine: a transformers model, decoded by our own loop.

Every sequence that is computed is one that still grows. A prompt is prefilled once for all its
rows, but for its last token, which is the first input of each of them, so that the first token is
drawn like every other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from core.config.section import FULL_PRECISION
from core.engines import SampleRequest
from core.engines.in_process_engine import InProcessEngine, Row
from core.engines.sampling import draw, uniforms
from core.engines.weight_buckets import Proof, Weight, checksum
from core.errors import InputError
from core.learner.models import load_policy
from core.vision.learner_pictures import picture_inputs, run_body

if TYPE_CHECKING:
    from core.config.schema import Config

ATTENTION = "rows_in_places"  # the name under which transformers finds attend


class HFEngine(InProcessEngine):
    """Satisfies :class:`core.engines.RolloutEngine` for causal language models that attend to all
    former tokens.

    ``model`` becomes the engine's own; ``dtype`` of the weights is the model's by default. At most
    ``max_batch_rows`` samples decode at once, their keys and values fill at most ``cache_gib`` GiB,
    and a prefill sends about ``max_prefill_tokens`` through the model at once; the rest waits in
    the order of arrival. Place ``i`` of the cache is ``rows[i]``'s. Raises InputError for a model
    that it cannot run.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        dtype: torch.dtype | None = None,
        max_batch_rows: int = 1024,
        max_prefill_tokens: int = 8192,
        cache_gib: float = 4.0,
    ):
        super().__init__(tokenizer, _prepared(model, dtype), model.device)
        self.max_rows, self.max_prefill_tokens = max_batch_rows, max_prefill_tokens
        self.cache, self.weights_dtype = RowCache(model), model.dtype
        self.cache_tokens = int(cache_gib * 2**30 / self.cache.bytes_per_token)
        self.rows: list[Row] = []
        self.never_drawn = torch.from_numpy(self.unknown).to(self.device)
        # What was computed in all: prompt tokens ahead of decoding (without padding), and the rows
        # of all steps
        self.prefill_tokens = self.row_steps = 0

    def _begin(self, request: SampleRequest) -> Row:
        row = super()._begin(request)
        if _columns(request) > self.cache_tokens:
            rule = f"prompt and max_tokens are beyond the {self.cache_tokens} tokens of the cache"
            raise ValueError(f"{rule}: raise actor_rollout_ref.rollout.engine_kwargs.hf.cache_gib")
        return row

    def _running(self) -> list[Row]:
        return self.rows

    def _room(self) -> int:
        """Return how many of those that wait, in their order, may join now without ever exceeding
        the limits."""
        columns = max((_columns(row.request) for row in self.rows), default=0)
        for joining, row in enumerate(self._waiting):
            count, columns = len(self.rows) + joining + 1, max(columns, _columns(row.request))
            if count > self.max_rows or _with_spare(count) * columns > self.cache_tokens:
                return joining
        return len(self._waiting)

    @torch.inference_mode()
    def _admit(self) -> None:
        """Add the rows that have room, with one prefill for all that share a prompt; none for one
        in decoding."""
        if not (count := self._room()):
            return
        joining, self._waiting = self._waiting[:count], self._waiting[count:]
        place = {_prompt(row): number for number, row in enumerate(self.rows)}
        first = {_prompt(row): row for row in reversed(joining) if _prompt(row) not in place}
        fresh = sorted(first.values(), key=_stored)  # prompts of one pass have about one length
        begin = len(self.rows)
        self.rows += fresh
        place |= {_prompt(row): begin + number for number, row in enumerate(fresh)}
        sharing = [row for row in joining if first.get(_prompt(row)) is not row]
        to = list(range(len(self.rows), len(self.rows) + len(sharing)))
        self.rows += sharing
        columns = max(_columns(row.request) for row in self.rows)
        if len(self.rows) > self.cache.places or columns > self.cache.columns:
            self.cache.reserve(_with_spare(len(self.rows)), columns)
        # Prompts in a pass
        each = max(1, self.max_prefill_tokens // max(1, *map(_stored, self.rows)))
        for at in range(0, len(fresh), each):
            self._prefill(begin + at, fresh[at : at + each])
        origin = [place[_prompt(row)] for row in sharing]
        self.cache.copy(to, origin, max(map(_stored, sharing), default=0))
        for row, number in zip(sharing, origin, strict=True):
            row.offset = self.rows[number].offset

    def _prefill(self, begin: int, rows: Sequence[Row]) -> None:
        """Compute the prompts of these rows, but for their last tokens, in the places from
        ``begin`` on."""
        if not (width := max(map(_stored, rows))):
            return
        # Padding stands on the right, behind the tokens that a causal model lets see it: no mask is
        # needed.
        prompts = [row.request.prompt_ids for row in rows]
        padded = [(*prompt[:-1], *prompt[:1] * (width - len(prompt) + 1)) for prompt in prompts]
        input_ids = torch.tensor(padded, device=self.device)
        media = picture_inputs(self.model, input_ids, [row.request.media for row in rows])
        if media is not None:
            last_N = torch.tensor([_stored(row) - 1 for row in rows], device=self.device)
            for row, offset in zip(rows, media.position_offset(last_N).tolist(), strict=True):
                row.offset = offset
        position_ids, cache = (
            torch.arange(width, device=self.device)[None],
            self.cache.prefill(begin),
        )
        run_body(
            self.model,
            input_ids,
            media,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        self.prefill_tokens += sum(map(_stored, rows))

    @torch.inference_mode()
    def _advance(self) -> list[Row]:
        """Write a token of every row; return the rows that ended with it, which have left."""
        logits_NV = self._forward()
        if len(self.never_drawn):
            logits_NV = logits_NV.index_fill(1, self.never_drawn, -math.inf)
        seed_N = np.array([row.request.seed % 2**64 for row in self.rows], np.uint64)
        written_N = np.array([len(row.ids) for row in self.rows], np.uint64)
        uniform_N = torch.from_numpy(uniforms(seed_N, written_N)).to(self.device)
        token_N, logprob_N = draw(logits_NV, [row.request.sampling for row in self.rows], uniform_N)
        self.row_steps += len(self.rows)
        written = zip(self.rows, token_N.tolist(), logprob_N.tolist(), strict=True)
        finished = [row for row, token, logprob in written if row.write(token, logprob)]
        self._remove(finished)
        return finished

    def _forward(self) -> Tensor:
        """Return the logits of each row's next token, [N, V]."""
        tokens = [(row.ids or row.request.prompt_ids)[-1] for row in self.rows]
        column_N = torch.tensor(
            [_stored(row) + len(row.ids) for row in self.rows], device=self.device
        )
        offset_N = torch.tensor([row.offset for row in self.rows], device=self.device)
        cache = self.cache.decode(column_N)
        return self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            position_ids=(column_N + offset_N)[:, None],
            attention_mask=cache.mask,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]

    @torch.inference_mode()
    def _remove(self, rows: Sequence[Row]) -> None:
        """Remove these rows; the last ones move into their places."""
        if not rows:
            return
        gone = set(map(id, rows))
        left = len(self.rows) - len(gone)
        holes = [place for place, row in enumerate(self.rows[:left]) if id(row) in gone]
        movers = [place for place, row in enumerate(self.rows[left:], left) if id(row) not in gone]
        columns = [_stored(self.rows[place]) + len(self.rows[place].ids) for place in movers]
        self.cache.copy(holes, movers, max(columns, default=0))
        for to, origin in zip(holes, movers, strict=True):
            self.rows[to] = self.rows[origin]
        del self.rows[left:]

    def _drop(self, rows: list[Row]) -> None:
        if len(rows) == len(self.rows):
            self.rows = []
            self.cache.free()
        else:
            self._remove(rows)

    @torch.no_grad()
    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        own = self.model.state_dict(keep_vars=True)
        for weight, value in zip(weights, values, strict=True):
            own[weight.names[0]].copy_(value)

    def _finish(self) -> list[Proof]:
        return [
            Proof(
                tuple(self._received),
                {name: checksum(one) for name, one in self.model.named_parameters()},
            )
        ]

    @torch.inference_mode()
    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of the tokens after the first, [len(token_ids) - 1] float32."""
        ids = torch.tensor([token_ids], device=self.device)
        logprob_TV = (
            self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        )
        return logprob_TV.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _free(self) -> None:
        self.model = None


def _prompt(row: Row) -> tuple[Any, ...]:
    """Return what a row continues: equal ids with other media are another prompt."""
    return row.request.prompt_ids, row.request.media


def _stored(row: Row) -> int:
    """Return how many tokens of its prompt are computed ahead: all but the last."""
    return len(row.request.prompt_ids) - 1


def _columns(request: SampleRequest) -> int:
    return len(request.prompt_ids) - 1 + request.sampling.max_tokens


def _with_spare(rows: int) -> int:
    """Return how many places are allocated, because more come one by one."""
    return rows + rows // 4


def _prepared(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Prepare for inference: no dropout, no gradients, our attention. Raises InputError for a model
    without it, and for one with eager attention, which it may need (soft-capped scores, sinks)."""
    model = model.eval().requires_grad_(False)
    if dtype is not None:
        # Not the buffers: rotary frequencies lose their precision in bf16
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation(ATTENTION)
    if (found := model.config._attn_implementation) != ATTENTION:
        rule = f"cannot run {type(model).__name__} with {found} attention"
        raise InputError(f"actor_rollout_ref.rollout.name=hf: {rule}; use vllm")
    return model


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> HFEngine:
    """Make the engine; ``rollout.engine_kwargs.hf.*`` are keyword arguments of
    :class:`HFEngine`."""
    rollout = config.actor_rollout_ref.rollout
    options = {
        "max_batch_rows": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
    }
    options |= rollout.engine_kwargs.get("hf") or {}
    dtype = torch.float32 if rollout.dtype in FULL_PRECISION else torch.bfloat16
    policy = (
        model()
        if model is not None
        else load_policy(config.actor_rollout_ref.model, dtype).to(device)
    )
    return HFEngine(policy, tokenizer, dtype=dtype, **options)


# -- keys and values -------------------------------------------------------------------------------


class RowCache(Cache):
    """``past_key_values`` of a transformers model: a layer has keys and values ``[places, heads,
    columns, dim]``.

    A row has a place, whose column ``t`` is the token at position ``t``. All is written in place,
    nothing is padded on the left, and a row that ends is replaced by copying the last one. Raises
    InputError for a model that stores something other than keys and values of all its tokens.
    """

    def __init__(self, model: Any):
        seen = DynamicCache(config=model.config)  # one token through the model shows what it stores
        with torch.inference_mode():
            one = torch.ones(1, 1, dtype=torch.long, device=model.device)
            model.base_model(
                input_ids=one, attention_mask=one, past_key_values=seen, use_cache=True
            )
        super().__init__(layers=[])
        for layer in seen.layers:
            if getattr(layer, "keys", None) is None or getattr(layer, "is_sliding", False):
                rule = (
                    f"cannot run {type(model).__name__}, whose {type(layer).__name__} forgets "
                    f"or mixes tokens"
                )
                raise InputError(f"actor_rollout_ref.rollout.name=hf: {rule}; use vllm")
        self.empty = [(layer.keys[:0], layer.values[:0]) for layer in seen.layers]
        self.bytes_per_token = sum(
            tensor.nbytes for layer in seen.layers for tensor in (layer.keys, layer.values)
        )
        self.free()

    def free(self) -> None:
        self.stores: list[list[Tensor]] = [list(pair) for pair in self.empty]
        self.places = self.columns = 0

    def reserve(self, places: int, columns: int) -> None:
        """Allocate so much, and keep what fits into it."""
        for layer in self.stores:
            for number, old in enumerate(layer):
                # Zeros: a masked column has weight 0, and 0 * NaN would be NaN.
                layer[number] = old.new_zeros(places, old.shape[1], columns, old.shape[3])
                kept = old[:places, :, :columns]
                layer[number][: kept.shape[0], :, : kept.shape[2]] = kept
        self.places, self.columns = places, columns

    def copy(self, to: list[int], origin: list[int], columns: int) -> None:
        """Copy the first ``columns`` columns of the places ``origin`` into the places ``to``."""
        for tensor in (tensor for layer in self.stores for tensor in layer if columns):
            tensor[to, :, :columns] = tensor[origin, :, :columns]

    def prefill(self, begin: int) -> RowCache:
        """Let the next pass, over prompts, fill the places from ``begin`` on."""
        self.begin, self.position_N, self.seen = begin, None, 0
        return self

    def decode(self, position_N: Tensor) -> RowCache:
        """Let the next pass, over one token of each row, write it at its position and read what
        stands up to there."""
        self.position_N, self.seen = position_N, int(position_N.max()) + 1
        self.place_N = torch.arange(len(position_N), device=position_N.device)
        return self

    @property
    def mask(self) -> Tensor:
        """Return the columns that each row may read, [N, 1, 1, columns] bool."""
        column = torch.arange(self.seen, device=self.position_N.device)
        return (column <= self.position_N[:, None])[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ):
        """Store new keys and values, and return those that the pass attends to."""
        new, stores = (key_states, value_states), self.stores[layer_idx]
        if self.position_N is None:
            for tensor, states in zip(stores, new, strict=True):
                tensor[self.begin : self.begin + len(states), :, : states.shape[2]] = states
            return new
        for tensor, states in zip(stores, new, strict=True):
            tensor[self.place_N, :, self.position_N] = states[:, :, 0]
        return tuple(tensor[: len(self.place_N), :, : self.seen] for tensor in stores)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen and self.seen - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
):
    """Attend as transformers' ``sdpa``; with one new token a row the query heads that share a head
    of keys go as several tokens, and it is read once.

    Shapes:
        query       [N, heads, 1, dim]
        key, value  [N, kv_heads, columns, dim]
        returns     [N, 1, heads, dim], and no weights
    """
    rows, heads, tokens, _ = query.shape
    if tokens > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    query = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    # Where nothing is rounded, two products are up to three times as fast on a CPU
    if query.dtype == torch.float32:
        scores = (query * kwargs["scaling"] @ key.mT).masked_fill_(~attention_mask, -math.inf)
        return (scores.softmax(-1) @ value).reshape(rows, 1, heads, -1), None
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=kwargs["scaling"]
    )
    return output.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
