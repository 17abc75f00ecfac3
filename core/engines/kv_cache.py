"""Keys and values of the rows that decode: those of a prompt once, those of its responses one place a row.

A layer holds two stores, ``[places, heads, columns, dim]`` each. A place of the *prompt* store is a prompt, its
column ``t`` the token at position ``t``; a place of the *response* store is a row, its column ``t`` the token at
``t`` behind the prompt. Both are written in place, nothing is padded on the left, a row that ends is replaced by
copying one row, and the samples of a prompt read its keys and values from memory once instead of once each, which
is what decoding spends its time on beside the matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

ATTENTION = "shared_prompts"  # the name under which transformers finds attend_to_stores


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
        self.position_N = self.prefix_N + length_N
        self._masks: dict[int | None, Tensor | None] = {}
        self._lines: dict[int, tuple[Tensor, Tensor]] = {}
        # slot_N numbers the rows of a prompt, slots is the most of one prompt.
        count_P = np.bincount(prompt_N, minlength=self.prompts)
        self.slots, self.slot_N = int(count_P.max()), np.empty(self.rows, np.int64)
        in_order = np.arange(self.rows) - np.repeat(np.cumsum(count_P) - count_P, count_P)
        self.slot_N[np.argsort(prompt_N, kind="stable")] = in_order

    def positions(self, ahead_P: np.ndarray) -> Tensor:
        """Return the new tokens' positions, [1, 1] where all rows agree, otherwise [N, 1].

        ``ahead_P``, [P], is added to the number of tokens before them.
        """
        position_N = self.position_N + ahead_P[self.prompt_N]
        if (position_N == position_N[0]).all():
            position_N = position_N[:1]
        return torch.from_numpy(position_N).to(self.device)[:, None]

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
        if window is not None and window > self.position_N.max():
            window = None
        if window not in self._masks:
            prefix, column = np.arange(self.prefix_columns), np.arange(self.columns)
            seen = np.concatenate([prefix < self.prefix_N[:, None], column <= self.length_N[:, None]], 1)
            if window is not None:
                prefix = np.broadcast_to(prefix, (self.rows, self.prefix_columns))
                position = np.concatenate([prefix, self.prefix_N[:, None] + column], 1)
                seen &= position > self.position_N[:, None] - window
            everything = bool(seen.all())
            self._masks[window] = None if everything else torch.from_numpy(seen).to(self.device)[:, None, None]
        return self._masks[window]


class SharedPromptLayer(CacheLayerMixin):
    """The two stores of one layer, of keys and values each. ``plan`` is what the forward pass under way writes and
    reads; ``shapes`` are (heads, dim) of the keys and of the values."""

    is_sliding = False

    def __init__(self, shapes: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.shapes, self.dtype, self.device = shapes, dtype, device
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

    def read(self, kind: str, places: int, columns: int) -> list[Tensor]:
        return [tensor[:places, :, :columns] for tensor in self.stores[kind]]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("SharedPromptCache.reserve allocates")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store the new keys and values. Return all of a decode step, [N, heads, columns, dim], for attention
        functions that do not read the stores; the new ones for our own, which does, and for a prefill."""
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
        if _under_way.get() is not None:
            return new
        places = torch.from_numpy(plan.prompt_N).to(key_states.device)
        prompts = self.read("prompts", plan.prompts, plan.prefix_columns)
        responses = self.read("responses", plan.rows, plan.columns)
        return tuple(torch.cat([p[places], r], 2) for p, r in zip(prompts, responses, strict=True))

    def get_seq_length(self) -> int:
        return self.plan.prefix_columns + self.plan.columns - 1 if isinstance(self.plan, Decode) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SharedPromptCache(Cache):
    """The stores of all layers, as the ``past_key_values`` of a transformers model.

    ``shapes`` are the (heads, dim) of keys and values, layer by layer. ``allocated`` has (places, columns) of the
    stores ``prompts`` and ``responses``.
    """

    def __init__(self, shapes: list[tuple[tuple[int, int], tuple[int, int]]], dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[SharedPromptLayer(pair, dtype, device) for pair in shapes])
        numbers = sum(math.prod(shape) for pair in shapes for shape in pair)
        self.bytes_per_token = numbers * torch.empty((), dtype=dtype).element_size()
        self.device = device
        self.allocated = {"prompts": (0, 0), "responses": (0, 0)}

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

    @contextmanager
    def forward(self, plan: Prefill | Decode, *, own_attention: bool) -> Iterator[None]:
        """Set, while the model runs, what the layers write and read, and whether our attention reads the stores."""
        for layer in self.layers:
            layer.plan = plan
        token = _under_way.set(self if own_attention and isinstance(plan, Decode) else None)
        try:
            yield
        finally:
            _under_way.reset(token)

    def free(self) -> None:
        for layer in self.layers:
            layer.stores, layer.plan = {"prompts": [], "responses": []}, None
        self.allocated = {"prompts": (0, 0), "responses": (0, 0)}


# transformers hands an attention function no cache: the decode step under way names it here.
_under_way: ContextVar[SharedPromptCache | None] = ContextVar("decode step under way", default=None)


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
    cache = _under_way.get()
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    layer = cache.layers[module.layer_idx]
    plan = layer.plan
    rows, heads, _, dim = query.shape
    kv_heads = layer.shapes[0][0]
    scale = dim**-0.5 if scaling is None else scaling
    query = query.reshape(rows * kv_heads, heads // kv_heads, dim)
    key, value = (store.flatten(0, 1) for store in layer.read("responses", rows, plan.columns))
    scores = _scores(query, key, scale)
    width = plan.prefix_columns
    if width:
        there, back = plan.lines(kv_heads)
        key_P, value_P = (store.flatten(0, 1) for store in layer.read("prompts", plan.prompts, width))
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
