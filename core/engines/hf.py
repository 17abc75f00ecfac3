"""The engine of transformers: a model in this process, decoded by our own loop.

Every sequence that is computed is one that still grows. A prompt is prefilled once for all of its
rows, except for its last token: that is the first input of each row, so that the first token is
drawn like every other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from core.config import registry
from core.config.schema import Config
from core.config.section import FULL_PRECISION
from core.engines.engine import Generation, SampleRequest
from core.engines.in_process_engine import InProcessEngine
from core.engines.sampling import draw, uniforms
from core.engines.weight_buckets import Proof, Weight, checksum
from core.errors import InputError
from core.learner.models import load_policy
from core.learner.passes import text_log_probs
from core.vision.learner_pictures import picture_inputs, run_with_pictures

ATTENTION = "rows_in_places"  # the name under which transformers finds attend


class HFEngine(InProcessEngine):
    """The engine of causal language models that attend to all former tokens.

    ``model`` becomes the engine's own; ``dtype`` of the weights is the model's by default. At most
    ``max_batch_rows`` generations decode at once, their keys and values fill at most ``cache_gib``
    GiB, and a prefill sends about ``max_prefill_tokens`` through the model at once. Others wait in
    the order of their arrival. Raises InputError for a model that it cannot run.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        dtype: torch.dtype | None = None,
        max_batch_rows: int = 1024,
        max_prefill_tokens: int = 8192,
        cache_gib: float = registry.HF_CACHE_GIB,
    ):
        super().__init__(tokenizer, _prepared(model, dtype), model.device)
        self.max_rows = max_batch_rows
        self.max_prefill_tokens = max_prefill_tokens
        self.cache = RowCache(model)
        self.cache_tokens = int(cache_gib * 2**30 / self.cache.bytes_per_token)
        self.rows: list[Generation] = []  # rows[i] has place i of the cache
        self.never_drawn = torch.from_numpy(self.unknown).to(self.device)
        # What was computed: prompt tokens ahead of decoding, without padding, and rows of all steps
        self.prefill_tokens = 0
        self.row_steps = 0

    def _begin(self, request: SampleRequest) -> Generation:
        row = super()._begin(request)
        if _columns(row) > self.cache_tokens:
            raise ValueError(
                f"prompt and max_tokens are beyond the {self.cache_tokens} tokens of the cache: "
                "raise actor_rollout_ref.rollout.engine_kwargs.hf.cache_gib"
            )
        return row

    def _running(self) -> list[Generation]:
        return self.rows

    def _room(self) -> int:
        """Return how many of the waiting may join now, in their order, within the limits."""
        columns = max(map(_columns, self.rows), default=0)
        for joining, row in enumerate(self._waiting):
            count = len(self.rows) + joining + 1
            columns = max(columns, _columns(row))
            if count > self.max_rows or _with_spare(count) * columns > self.cache_tokens:
                return joining
        return len(self._waiting)

    @torch.inference_mode()
    def _admit(self) -> None:
        """Add the rows that have room.

        Rows with one prompt share one prefill. A prompt of a row that decodes needs none.
        """
        count = self._room()
        if not count:
            return
        joining = self._waiting[:count]
        self._waiting = self._waiting[count:]
        place_of = {_prompt(row): place for place, row in enumerate(self.rows)}
        # The first row of each new prompt is prefilled; the others copy its keys and values
        new_prompts = {
            _prompt(row): row for row in reversed(joining) if _prompt(row) not in place_of
        }
        copying = [row for row in joining if new_prompts.get(_prompt(row)) is not row]
        prefilled = sorted(
            new_prompts.values(), key=_stored
        )  # a pass has prompts of similar lengths
        first_place = len(self.rows)
        self.rows += prefilled
        place_of |= {_prompt(row): first_place + i for i, row in enumerate(prefilled)}
        copies = list(range(len(self.rows), len(self.rows) + len(copying)))
        self.rows += copying
        columns = max(map(_columns, self.rows))
        if len(self.rows) > self.cache.places or columns > self.cache.columns:
            self.cache.reserve(_with_spare(len(self.rows)), columns)
        prompts_of_pass = max(1, self.max_prefill_tokens // max(1, *map(_stored, self.rows)))
        for start in range(0, len(prefilled), prompts_of_pass):
            self._prefill(first_place + start, prefilled[start : start + prompts_of_pass])
        origins = [place_of[_prompt(row)] for row in copying]
        self.cache.copy(copies, origins, max(map(_stored, copying), default=0))
        for row, origin in zip(copying, origins, strict=True):
            row.position_offset = self.rows[origin].position_offset

    def _prefill(self, first_place: int, rows: Sequence[Generation]) -> None:
        """Compute the prompts of rows without their last tokens, in the next places."""
        width = max(map(_stored, rows))
        if not width:
            return
        # Padding stands on the right, and a causal model does not let the tokens before see it
        prompts = [row.request.prompt_ids for row in rows]
        padded = [(*prompt[:-1], *prompt[:1] * (width - len(prompt) + 1)) for prompt in prompts]
        input_ids = torch.tensor(padded, device=self.device)
        options = {"past_key_values": self.cache.prefill(first_place), "use_cache": True}
        if any(row.request.media for row in rows):
            self._prefill_pictures(rows, input_ids, options)
        else:
            position_ids = torch.arange(width, device=self.device)[None]
            self.model.base_model(input_ids=input_ids, position_ids=position_ids, **options)
        self.prefill_tokens += sum(map(_stored, rows))

    def _prefill_pictures(
        self, rows: Sequence[Generation], input_ids: Tensor, options: dict[str, Any]
    ) -> None:
        """Compute prompts of which some have pictures."""
        media = picture_inputs(self.model, input_ids, [row.request.media for row in rows])
        run_with_pictures(self.model, input_ids, media, **options)
        last_N = torch.tensor([_stored(row) - 1 for row in rows], device=self.device)
        offsets = media.position_offset(last_N).tolist()
        for row, offset in zip(rows, offsets, strict=True):
            row.position_offset = offset if row.request.media else 0  # a text's is none

    @torch.inference_mode()
    def _advance(self) -> list[Generation]:
        """Sample a token for every row; return the rows that ended with it, which have left."""
        logits_NV = self._forward()
        if len(self.never_drawn):
            logits_NV = logits_NV.index_fill(1, self.never_drawn, -math.inf)
        seed_N = np.array([row.request.seed % 2**64 for row in self.rows], np.uint64)
        position_N = np.array([len(row.ids) for row in self.rows], np.uint64)
        uniform_N = torch.from_numpy(uniforms(seed_N, position_N)).to(self.device)
        sampling = [row.request.sampling for row in self.rows]
        token_N, logprob_N, kept = draw(logits_NV, sampling, uniform_N)
        self.row_steps += len(self.rows)
        sampled = zip(self.rows, token_N.tolist(), logprob_N.tolist(), kept, strict=True)
        finished = [row for row, *token in sampled if row.write(*token)]
        self._remove(finished)
        return finished

    def _forward(self) -> Tensor:
        """Return the logits of each row's next token, [N, V]."""
        last_tokens = [(row.ids or row.request.prompt_ids)[-1] for row in self.rows]
        columns = [_stored(row) + len(row.ids) for row in self.rows]
        offsets = [row.position_offset for row in self.rows]
        column_N = torch.tensor(columns, device=self.device)
        offset_N = torch.tensor(offsets, device=self.device)
        cache = self.cache.decode(column_N)
        output = self.model(
            input_ids=torch.tensor(last_tokens, device=self.device)[:, None],
            position_ids=(column_N + offset_N)[:, None],
            attention_mask=cache.mask,
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def _remove(self, rows: Sequence[Generation]) -> None:
        """Remove these rows; the last ones move into their places."""
        if not rows:
            return
        gone = set(map(id, rows))
        count = len(self.rows) - len(gone)
        holes = [place for place, row in enumerate(self.rows[:count]) if id(row) in gone]
        movers = [
            place for place in range(count, len(self.rows)) if id(self.rows[place]) not in gone
        ]
        columns = [_stored(self.rows[place]) + len(self.rows[place].ids) for place in movers]
        self.cache.copy(holes, movers, max(columns, default=0))
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[count:]

    def _drop(self, generations: list[Generation]) -> None:
        if len(generations) == len(self.rows):
            self.rows = []
            self.cache.free()
        else:
            self._remove(generations)

    @torch.no_grad()
    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        parameters = self.model.state_dict(keep_vars=True)
        for weight, value in zip(weights, values, strict=True):
            parameters[weight.names[0]].copy_(value)

    def _finish(self) -> list[Proof]:
        checksums = {}
        if any(received is not None for received in self._received):  # from another process
            checksums = {name: checksum(value) for name, value in self.weights.items()}
        return [Proof(tuple(self._received), checksums)]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights under the names of the learner, those of a tied one once."""
        return dict(self.model.named_parameters())

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return text_log_probs(self.model, token_ids, self.device)

    def _free(self) -> None:
        self.model = None


def _prompt(row: Generation) -> tuple[Any, ...]:
    """Return what a row continues: equal ids with other pictures are another prompt."""
    return row.request.prompt_ids, row.request.media


def _stored(row: Generation) -> int:
    """Return how many tokens of its prompt are computed ahead: all but the last."""
    return len(row.request.prompt_ids) - 1


def _columns(row: Generation) -> int:
    """Return how many columns of the cache a row needs at most."""
    return _stored(row) + row.request.sampling.max_tokens


def _with_spare(rows: int) -> int:
    """Return how many places are allocated, because more rows come one by one."""
    return rows + rows // 4


def _prepared(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Prepare a model for inference: no dropout, no gradients, the attention of this module.

    Raises InputError for a model that does not take it, and for one with eager attention, which it
    may need for soft-capped scores or sinks.
    """
    model = model.eval().requires_grad_(False)
    if dtype is not None:
        # Not the buffers: rotary frequencies would lose their precision in bf16
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation(ATTENTION)
    attention = model.config._attn_implementation
    if attention != ATTENTION:
        raise InputError(
            f"actor_rollout_ref.rollout.name=hf: cannot run {type(model).__name__} with "
            f"{attention} attention; use vllm"
        )
    return model


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> HFEngine:
    """Make the engine; ``rollout.engine_kwargs.hf.*`` are arguments of :class:`HFEngine`."""
    rollout = config.actor_rollout_ref.rollout
    options = {
        "max_batch_rows": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        **(rollout.engine_kwargs.get("hf") or {}),
    }
    dtype = torch.float32 if rollout.dtype in FULL_PRECISION else torch.bfloat16
    if model is not None:
        policy = model()
    else:
        policy = load_policy(config.actor_rollout_ref.model, dtype).to(device)
    return HFEngine(policy, tokenizer, dtype=dtype, **options)


# -- keys and values -------------------------------------------------------------------------------


class RowCache(Cache):
    """``past_key_values`` of a transformers model.

    Each layer has keys and values ``[places, heads, columns, dim]``. A row has a place, whose
    column ``t`` is the token at position ``t``. All is written in place, nothing is padded on the
    left, and a row that ends is replaced by copying the last one. Raises InputError for a model
    that stores something other than keys and values of all its tokens.
    """

    def __init__(self, model: Any):
        # One token through the model shows what it stores
        probe = DynamicCache(config=model.config)
        with torch.inference_mode():
            token = torch.ones(1, 1, dtype=torch.long, device=model.device)
            model.base_model(
                input_ids=token, attention_mask=token, past_key_values=probe, use_cache=True
            )
        super().__init__(layers=[])
        for layer in probe.layers:
            if getattr(layer, "keys", None) is None or getattr(layer, "is_sliding", False):
                raise InputError(
                    f"actor_rollout_ref.rollout.name=hf: cannot run {type(model).__name__}, whose "
                    f"{type(layer).__name__} forgets or mixes tokens; use vllm"
                )
        self.empty = [(layer.keys[:0], layer.values[:0]) for layer in probe.layers]
        stored = [tensor for layer in probe.layers for tensor in (layer.keys, layer.values)]
        self.bytes_per_token = sum(tensor.nbytes for tensor in stored)
        self.free()

    def free(self) -> None:
        """Let go of all keys and values."""
        self.stores: list[list[Tensor]] = [list(pair) for pair in self.empty]
        self.places = 0
        self.columns = 0

    def reserve(self, places: int, columns: int) -> None:
        """Allocate places and columns, and keep what fits into them."""
        for layer in self.stores:
            for index, old in enumerate(layer):
                # Zeros: a masked column has weight 0, and 0 * NaN would be NaN
                layer[index] = old.new_zeros(places, old.shape[1], columns, old.shape[3])
                kept = old[:places, :, :columns]
                layer[index][: kept.shape[0], :, : kept.shape[2]] = kept
        self.places = places
        self.columns = columns

    def copy(self, to: list[int], origin: list[int], columns: int) -> None:
        """Copy the first ``columns`` columns of the places ``origin`` into the places ``to``."""
        if not columns:
            return
        for layer in self.stores:
            for tensor in layer:
                tensor[to, :, :columns] = tensor[origin, :, :columns]

    def prefill(self, first_place: int) -> RowCache:
        """Let the next pass, over prompts, fill the places from ``first_place`` on."""
        self.first_place = first_place
        self.position_N = None
        self.seen = 0
        return self

    def decode(self, position_N: Tensor) -> RowCache:
        """Let the next pass write one token of each row at its position, and read up to there."""
        self.position_N = position_N
        self.place_N = torch.arange(len(position_N), device=position_N.device)
        self.seen = int(position_N.max()) + 1
        return self

    @property
    def mask(self) -> Tensor:
        """Return the columns that each row may read, [N, 1, 1, columns] bool."""
        column = torch.arange(self.seen, device=self.position_N.device)
        return (column <= self.position_N[:, None])[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Store new keys and values, and return those that the pass attends to."""
        new = (key_states, value_states)
        stores = self.stores[layer_idx]
        if self.position_N is None:
            for tensor, states in zip(stores, new, strict=True):
                places = slice(self.first_place, self.first_place + len(states))
                tensor[places, :, : states.shape[2]] = states
            return new
        for tensor, states in zip(stores, new, strict=True):
            tensor[self.place_N, :, self.position_N] = states[:, :, 0]
        return tuple(tensor[: len(self.place_N), :, : self.seen] for tensor in stores)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen and self.seen - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa``, and read keys once for all query heads that share them.

    With one new token a row these heads go through the kernel as if they were several tokens.

    Shapes:
        query       [N, heads, 1, dim]
        key, value  [N, kv_heads, columns, dim]
        returns     [N, 1, heads, dim], and no weights
    """
    rows, heads, tokens, _ = query.shape
    if tokens > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    query = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    scale = kwargs["scaling"]
    if query.dtype == torch.float32:
        # Where nothing is rounded, two products are up to three times as fast on a CPU
        scores = (query * scale @ key.mT).masked_fill_(~attention_mask, -math.inf)
        output = scores.softmax(-1) @ value
    else:
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scale
        )
    return output.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
