"""Keys and values of the rows that decode: each row has a place, whose column ``t`` is the token at position ``t``.

All is written in place, nothing is padded on the left, and a row that ends is replaced by copying the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from core.errors import InputError

ATTENTION = "rows_in_places"  # the name under which transformers finds attend


class RowCache(Cache):
    """``past_key_values`` of a transformers model: a layer has keys and values ``[places, heads, columns, dim]``.

    Raises InputError for a model that stores something other than keys and values of all its tokens.
    """

    def __init__(self, model: Any):
        seen = DynamicCache(config=model.config)  # one token through the model shows what it stores
        with torch.inference_mode():
            one = torch.ones(1, 1, dtype=torch.long, device=model.device)
            model.base_model(input_ids=one, attention_mask=one, past_key_values=seen, use_cache=True)
        super().__init__(layers=[])
        for layer in seen.layers:
            if getattr(layer, "keys", None) is None or getattr(layer, "is_sliding", False):
                rule = f"cannot run {type(model).__name__}, whose {type(layer).__name__} forgets or mixes tokens"
                raise InputError(f"actor_rollout_ref.rollout.name=hf: {rule}; use vllm")
        self.empty = [(layer.keys[:0], layer.values[:0]) for layer in seen.layers]
        self.bytes_per_token = sum(tensor.nbytes for layer in seen.layers for tensor in (layer.keys, layer.values))
        self.free()

    def free(self) -> None:
        """Hold nothing."""
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
        """Let the next pass, over whole prompts, fill the places from ``begin`` on."""
        self.begin, self.position_N, self.seen = begin, None, 0
        return self

    def decode(self, position_N: Tensor) -> RowCache:
        """Let the next pass, over one token of each row, write it at its position and read what stands up to there."""
        self.position_N, self.seen = position_N, int(position_N.max()) + 1
        self.place_N = torch.arange(len(position_N), device=position_N.device)
        return self

    @property
    def mask(self) -> Tensor:
        """Return the columns that each row may read, [N, 1, 1, columns] bool."""
        column = torch.arange(self.seen, device=self.position_N.device)
        return (column <= self.position_N[:, None])[:, None, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
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


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any):
    """Attend as transformers' ``sdpa``, but with one new token a row read each head of keys once: the query heads that
    share it go as several tokens, and it is not repeated.

    Shapes:
        query       [N, heads, 1, dim]
        key, value  [N, kv_heads, columns, dim]
        returns     [N, 1, heads, dim], and no weights
    """
    rows, heads, tokens, _ = query.shape
    if tokens > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    query = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return output.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
