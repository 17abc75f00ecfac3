"""Keys and values of the rows that decode, one slot a row, written in place.

A slot is a row of one tensor a layer, ``[slots, heads, columns, dim]``. Column ``t`` of a slot is the token at
position ``t``: rows of different lengths start at column 0 alike, so that nothing is padded on the left, a
finished row's place is taken by copying one row, and a new row joins without moving the others.
Rows of equal length need no attention mask; otherwise a row does not see the columns behind its own end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

ATTENTION = "slots"  # the name under which transformers finds slot_attention
COLUMN_BLOCK = 64  # columns are allocated in multiples of this


@dataclass(frozen=True)
class Prefill:
    """A forward pass over prompts. Slot ``slots[i]`` receives the keys and values of batch row ``source[i]``."""

    slots: Tensor
    source: Tensor


@dataclass(frozen=True)
class Decode:
    """A forward pass over one new token in each of the first ``rows`` slots; ``length`` of them are stored already.

    ``length`` is a number where all rows agree, otherwise a tensor [rows].
    """

    rows: int
    length: int | Tensor
    columns: int  # the longest row, its new token included


class SlotLayer(CacheLayerMixin):
    """The slots of one layer. ``plan`` says what the forward pass under way writes and reads."""

    is_sliding = False

    def __init__(self, key_shape: tuple[int, int], value_shape: tuple[int, int], dtype: torch.dtype, device):
        super().__init__()
        self.shapes = (key_shape, value_shape)
        self.dtype, self.device = dtype, device
        self.plan: Prefill | Decode | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("SlotCache.reserve allocates the slots")

    def reserve(self, slots: int, columns: int, used_slots: int, used_columns: int) -> None:
        """Allocates, and keeps the used part. Zeros: a masked column's weight is 0, and 0 * NaN would be NaN."""
        for name, (heads, dim) in zip(("keys", "values"), self.shapes, strict=True):
            old = getattr(self, name)
            new = torch.zeros(slots, heads, columns, dim, dtype=self.dtype, device=self.device)
            if old is not None and used_slots:
                new[:used_slots, :, :used_columns] = old[:used_slots, :, :used_columns]
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        plan = self.plan
        if isinstance(plan, Prefill):
            width = key_states.shape[2]
            for store, new in ((self.keys, key_states), (self.values, value_states)):
                store[plan.slots, :, :width] = new[plan.source]
            return key_states, value_states
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(plan.length, int):
                store[: plan.rows, :, plan.length] = new[:, :, 0]
            else:
                store[torch.arange(plan.rows, device=self.device), :, plan.length] = new[:, :, 0]
        return self.keys[: plan.rows, :, : plan.columns], self.values[: plan.rows, :, : plan.columns]

    def copy(self, to: Tensor, origin: Tensor, columns: int) -> None:
        for store in (self.keys, self.values):
            store[to, :, :columns] = store[origin, :, :columns]

    def get_seq_length(self) -> int:
        return self.plan.columns - 1 if isinstance(self.plan, Decode) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The slots of all layers, as the ``past_key_values`` of a transformers model.

    ``shapes`` are the (heads, dim) of keys and values, layer by layer. ``columns`` and ``slots`` grow on demand.
    """

    def __init__(self, shapes: list[tuple[tuple[int, int], tuple[int, int]]], dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[SlotLayer(key, value, dtype, device) for key, value in shapes])
        numbers = sum(math.prod(shape) for pair in shapes for shape in pair)
        self.bytes_per_token = numbers * torch.empty((), dtype=dtype).element_size()
        self.slots = self.columns = 0
        self.device = device

    def plan(self, plan: Prefill | Decode | None) -> None:
        for layer in self.layers:
            layer.plan = plan

    def reserve(self, slots: int, columns: int, used_slots: int, used_columns: int) -> None:
        """Room for this many slots and columns at least; layer after layer, so that only one is held twice."""
        if slots <= self.slots and columns <= self.columns:
            return
        self.slots = max(slots, self.slots)
        self.columns = max(-(-columns // COLUMN_BLOCK) * COLUMN_BLOCK, self.columns)
        for layer in self.layers:
            layer.reserve(self.slots, self.columns, used_slots, used_columns)

    def copy(self, to: list[int], origin: list[int], columns: int) -> None:
        """Copies the first ``columns`` columns of the slots ``origin`` into the slots ``to``."""
        target, source = (torch.tensor(slots, device=self.device) for slots in (to, origin))
        for layer in self.layers:
            layer.copy(target, source, columns)

    def free(self) -> None:
        for layer in self.layers:
            layer.keys = layer.values = layer.plan = None
        self.slots = self.columns = 0


def length_mask(lengths: np.ndarray, columns: int, device: torch.device) -> Tensor:
    """True on the columns that a row may see, its new token included: [rows, 1, 1, columns]."""
    return torch.from_numpy(np.arange(columns) <= lengths[:, None]).to(device)[:, None, None, :]


def slot_attention(
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
    """Attention of one new token a row; everything longer is transformers' own ``sdpa``.

    The query heads that share a head of keys become the rows of one small matrix product, so that keys and values
    are read once and never repeated; a mask does not change that.

    Shapes:
        query           [N, heads, 1, dim]
        key, value      [N, kv_heads, columns, dim]
        attention_mask  [N, 1, 1, columns] bool, or None
        returns         [N, 1, heads, dim]
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, _, dim = query.shape
    if sliding_window is not None and key.shape[2] > sliding_window:
        attention_mask = _narrowed(attention_mask, key, sliding_window)
    query = query.view(rows, key.shape[1], heads // key.shape[1], dim)
    if query.device.type == "cpu":
        scores = query * (dim**-0.5 if scaling is None else scaling) @ key.transpose(2, 3)
        if attention_mask is not None:
            scores = scores.masked_fill_(~attention_mask, -torch.inf)
        output = scores.softmax(-1) @ value
    else:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def _narrowed(mask: Tensor | None, key: Tensor, window: int) -> Tensor:
    """The mask without the columns that lie ``window`` or more before the row's last one."""
    column = torch.arange(key.shape[2], device=key.device)
    if mask is None:
        return (column >= key.shape[2] - window).expand(key.shape[0], 1, 1, -1)
    return mask & (column >= mask.sum(-1, keepdim=True) - window)


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
