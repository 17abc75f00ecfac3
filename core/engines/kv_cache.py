"""Keys and values of the rows that decode: those of a prompt once, those of its responses one place a row.

A layer holds two stores, ``[places, heads, columns, dim]`` each. A place of the *prompt* store is a prompt, its
column ``t`` the token at position ``t``; a place of the *response* store is a row, its column ``t`` the token at
``t`` behind the prompt. Both are written in place, nothing is padded on the left, a row that ends is replaced by
copying one row, and the samples of a prompt read its keys and values from memory once instead of once each, which
is what decoding spends its time on beside the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

ATTENTION = "shared_prompts"  # the name under which transformers finds attend_to_stores
Shapes = tuple[tuple[int, int], tuple[int, int]]  # (heads, dim) of keys and of values


@dataclass(frozen=True)
class Prefill:
    """A forward pass over prompts, which fills the prompt store from place ``begin`` on."""

    begin: int


class Decode:
    """A forward pass over one new token a row: who belongs to which prompt, and how much each has stored.

    Shapes (N rows, P prompts):
        prompt_N  [N] place of the row's prompt
        prefix_P  [P] tokens stored of each prompt
        length_N  [N] tokens stored of each response, the new one not counted
    """

    def __init__(self, prompt_N: np.ndarray, prefix_P: np.ndarray, length_N: np.ndarray, device: torch.device):
        self.device = device
        self.rows, self.prompts = len(prompt_N), len(prefix_P)
        self.prompt_N, self.prefix_N, self.length_N = prompt_N, prefix_P[prompt_N], length_N
        self.prefix_columns = int(prefix_P.max())
        self.columns = int(length_N.max()) + 1
        self.even = int(length_N.min()) + 1 == self.columns  # the new tokens share a column
        self.length = None if self.even else torch.from_numpy(length_N).to(device)
        self._masks: dict[int | None, Tensor | None] = {}
        self._lines: dict[int, tuple[Tensor, Tensor]] = {}
        # slot_N numbers the rows of a prompt, slots is the most of one prompt.
        count_P = np.bincount(prompt_N, minlength=self.prompts)
        self.slots, self.slot_N = int(count_P.max()), np.empty(self.rows, np.int64)
        in_order = np.arange(self.rows) - np.repeat(np.cumsum(count_P) - count_P, count_P)
        self.slot_N[np.argsort(prompt_N, kind="stable")] = in_order

    def lines(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the map from row and head ``[N * heads]`` to prompt, head and slot ``[P * heads * slots]``, and back.

        An empty slot reads row 0; nothing is read back from it.
        """
        if heads not in self._lines:
            head = np.arange(heads)
            back = (self.prompt_N[:, None] * heads + head) * self.slots + self.slot_N[:, None]
            there = np.zeros(self.prompts * heads * self.slots, np.int64)
            there[back] = np.arange(self.rows)[:, None] * heads + head
            self._lines[heads] = tuple(torch.from_numpy(x.reshape(-1)).to(self.device) for x in (there, back))
        return self._lines[heads]

    def mask(self, window: int | None = None) -> Tensor | None:
        """Return the columns that a row may see, prompt then response, [N, 1, 1, columns] bool; None for all of them.

        ``window``: only so many of the last positions, the new token's own included.
        """
        position_N = self.prefix_N + self.length_N
        if window is not None and window > position_N.max():
            window = None
        if window not in self._masks:
            prefix, column = np.arange(self.prefix_columns), np.arange(self.columns)
            seen = np.concatenate([prefix < self.prefix_N[:, None], column <= self.length_N[:, None]], 1)
            if window is not None:
                prefix = np.broadcast_to(prefix, (self.rows, self.prefix_columns))
                position = np.concatenate([prefix, self.prefix_N[:, None] + column], 1)
                seen &= position > position_N[:, None] - window
            everything = bool(seen.all())
            self._masks[window] = None if everything else torch.from_numpy(seen).to(self.device)[:, None, None]
        return self._masks[window]


class SharedPromptLayer(CacheLayerMixin):
    """The two stores of one layer, of keys and values each. ``plan`` is what the forward pass under way writes and
    reads. ``own_attention``: the model attends by :func:`attend_to_stores`."""

    is_sliding = False

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device, own_attention: bool):
        super().__init__()
        self.shapes, self.dtype, self.device, self.own_attention = shapes, dtype, device, own_attention
        self.stores: dict[str, list[Tensor]] = {"prompts": [], "responses": []}
        self.plan: Prefill | Decode | None = None
        self.is_initialized = True

    def reserve(self, kind: str, places: int, columns: int) -> None:
        """Allocate anew and keep the contents. Zeros: a masked column has weight 0, and 0 * NaN would be NaN."""
        old, self.stores[kind] = self.stores[kind], []
        for number, (heads, dim) in enumerate(self.shapes):
            new = torch.zeros(places, heads, columns, dim, dtype=self.dtype, device=self.device)
            if old:
                entries = old[number][:places, :, :columns]
                new[: entries.shape[0], :, : entries.shape[2]] = entries
            self.stores[kind].append(new)

    def prompts(self) -> list[Tensor]:
        return [tensor[: self.plan.prompts, :, : self.plan.prefix_columns] for tensor in self.stores["prompts"]]

    def responses(self) -> list[Tensor]:
        return [tensor[: self.plan.rows, :, : self.plan.columns] for tensor in self.stores["responses"]]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return them. For an attention function that does not read the stores
        return all keys and values of a decode step, [N, heads, columns, dim]."""
        plan, new = self.plan, (key_states, value_states)
        if isinstance(plan, Prefill):
            count, _, width, _ = key_states.shape
            for tensor, states in zip(self.stores["prompts"], new, strict=True):
                tensor[plan.begin : plan.begin + count, :, :width] = states
            return new
        for tensor, states in zip(self.stores["responses"], new, strict=True):
            if plan.even:
                tensor[: plan.rows, :, plan.columns - 1] = states[:, :, 0]
            else:
                tensor[torch.arange(plan.rows, device=tensor.device), :, plan.length] = states[:, :, 0]
        if self.own_attention:
            key_states.stores = self  # transformers hands an attention function no cache
            return new
        places = torch.from_numpy(plan.prompt_N).to(key_states.device)
        return tuple(torch.cat([p[places], r], 2) for p, r in zip(self.prompts(), self.responses(), strict=True))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("SharedPromptCache.reserve allocates")

    def get_seq_length(self) -> int:
        return self.plan.prefix_columns + self.plan.columns - 1 if isinstance(self.plan, Decode) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SharedPromptCache(Cache):
    """The stores of all layers, as the ``past_key_values`` of a transformers model.

    ``allocated`` has (places, columns) of the stores ``prompts`` and ``responses``. Raises ValueError for a model that
    stores something other than keys and values of its tokens.
    """

    def __init__(self, model: Any):
        seen = DynamicCache(config=model.config)  # one token through the model shows what it stores
        with torch.inference_mode():
            one = torch.ones(1, 1, dtype=torch.long, device=model.device)
            model.base_model(input_ids=one, attention_mask=one, past_key_values=seen, use_cache=True)
        if any(getattr(layer, "keys", None) is None for layer in seen.layers):
            kinds = sorted({type(layer).__name__ for layer in seen.layers})
            raise ValueError(
                f"rollout.name=hf cannot run {type(model).__name__}: its cache ({', '.join(kinds)}) is not plain keys "
                "and values; use another engine"
            )
        options = (seen.layers[0].keys.dtype, model.device, model.config._attn_implementation == ATTENTION)
        pairs = [(layer.keys, layer.values) for layer in seen.layers]
        shapes = [tuple((tensor.shape[1], tensor.shape[3]) for tensor in pair) for pair in pairs]
        super().__init__(layers=[SharedPromptLayer(pair, *options) for pair in shapes])
        self.bytes_per_token = sum(tensor.nbytes for pair in pairs for tensor in pair)
        self.device = model.device
        self.allocated = {"prompts": (0, 0), "responses": (0, 0)}

    def begin(self, plan: Prefill | Decode) -> SharedPromptCache:
        """Set what the next forward pass writes and reads."""
        for layer in self.layers:
            layer.plan = plan
        return self

    def reserve(self, kind: str, places: int, columns: int) -> None:
        """Allocate the store ``kind`` anew; layer after layer, so that only one is held twice."""
        self.allocated[kind] = (places, columns)
        for layer in self.layers:
            layer.reserve(kind, places, columns)

    def copy(self, kind: str, to: list[int], origin: list[int], columns: int) -> None:
        """Copy the first ``columns`` columns of the places ``origin`` into the places ``to``."""
        target, source = (torch.tensor(places, device=self.device) for places in (to, origin))
        for layer in self.layers:
            for tensor in layer.stores[kind]:
                tensor[target, :, :columns] = tensor[source, :, :columns]

    def free(self) -> None:
        for layer in self.layers:
            layer.stores, layer.plan = {"prompts": [], "responses": []}, None
        self.allocated = {"prompts": (0, 0), "responses": (0, 0)}


def attend_to_stores(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attend with one new token a row to its prompt and its response; outside of a decode step use transformers'
    ``sdpa``. ``key``, ``value`` and ``attention_mask`` are not read in a decode step.

    Query heads that share a head of keys are the lines of one small matrix product, and so are, for the prompt's
    part, the rows that share the prompt: keys and values are read once and never repeated.

    Shapes:
        query    [N, heads, 1, dim]
        returns  [N, 1, heads, dim]
    """
    layer: SharedPromptLayer | None = getattr(key, "stores", None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    plan = layer.plan
    rows, heads, _, dim = query.shape
    kv_heads = layer.shapes[0][0]
    scale = dim**-0.5 if scaling is None else scaling
    query = query.reshape(rows * kv_heads, heads // kv_heads, dim)
    key, value = (store.flatten(0, 1) for store in layer.responses())
    scores = _scores(query, key, scale)
    width = plan.prefix_columns
    if width:
        there, back = plan.lines(kv_heads)
        key_P, value_P = (store.flatten(0, 1) for store in layer.prompts())
        grouped = query.index_select(0, there).view(len(key_P), -1, dim)
        prompt_scores = _scores(grouped, key_P, scale).view(len(there), -1, width).index_select(0, back)
        scores = torch.cat([prompt_scores, scores], -1)
    mask = plan.mask(sliding_window)
    if mask is not None:
        scores.unflatten(0, (rows, kv_heads)).masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    output = weights[..., width:] @ value
    if width:
        grouped = weights[..., :width].index_select(0, there).view(len(key_P), -1, width)
        output += (grouped @ value_P).view(len(there), -1, output.shape[-1]).index_select(0, back)
    return output.view(rows, 1, heads, -1), None


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(query.new_empty(()), query, key.transpose(1, 2), beta=0, alpha=scale)


AttentionInterface.register(ATTENTION, attend_to_stores)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
