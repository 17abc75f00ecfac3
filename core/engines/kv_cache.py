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
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from core.errors import InputError

ATTENTION = "shared_prompts"  # the name under which transformers finds attend_to_stores
PROMPTS, RESPONSES = "prompts", "responses"  # the stores


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
        self.device, self.prompt_N = device, prompt_N
        self.rows, self.prompts = len(prompt_N), len(prefix_P)
        self.prefix_columns, self.columns = int(prefix_P.max()), int(length_N.max()) + 1
        even = int(length_N.min()) + 1 == self.columns  # the new tokens share a column
        self.length = None if even else torch.from_numpy(length_N).to(device)
        prefix, column = np.arange(self.prefix_columns), np.arange(self.columns)
        seen = np.concatenate([prefix < prefix_P[prompt_N][:, None], column <= length_N[:, None]], 1)
        # The columns that a row may see, prompt then response; None for all of them.
        self.mask = None if seen.all() else torch.from_numpy(seen).to(device)[:, None, None]
        self._lines: dict[int, tuple[Tensor, Tensor]] = {}

    def lines(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the map from row and head ``[N * heads]`` to prompt, head and slot ``[P * heads * slots]``, and back.

        Slots number the rows of a prompt. An empty one reads row 0; nothing is read back from it.
        """
        if heads not in self._lines:
            count_P = np.bincount(self.prompt_N, minlength=self.prompts)
            slots, slot_N = int(count_P.max()), np.empty(self.rows, np.int64)
            in_order = np.arange(self.rows) - np.repeat(np.cumsum(count_P) - count_P, count_P)
            slot_N[np.argsort(self.prompt_N, kind="stable")] = in_order
            head = np.arange(heads)
            back = (self.prompt_N[:, None] * heads + head) * slots + slot_N[:, None]
            there = np.zeros(self.prompts * heads * slots, np.int64)
            there[back] = np.arange(self.rows)[:, None] * heads + head
            self._lines[heads] = tuple(torch.from_numpy(x.reshape(-1)).to(self.device) for x in (there, back))
        return self._lines[heads]


@dataclass(frozen=True)
class LayerView:
    """What one layer's attention reads in a decode step: keys and values of the prompts and of the responses."""

    plan: Decode
    prompts: list[Tensor]
    responses: list[Tensor]


class SharedPromptCache(Cache):
    """The stores of all layers, as the ``past_key_values`` of a transformers model.

    ``allocated`` has (places, columns) of each store. Raises InputError for a model that stores something other than
    keys and values of all its tokens.
    """

    def __init__(self, model: Any):
        seen = DynamicCache(config=model.config)  # one token through the model shows what it stores
        with torch.inference_mode():
            one = torch.ones(1, 1, dtype=torch.long, device=model.device)
            model.base_model(input_ids=one, attention_mask=one, past_key_values=seen, use_cache=True)
        super().__init__(layers=[])
        other = {type(layer).__name__ for layer in seen.layers if getattr(layer, "keys", None) is None}
        other |= {type(layer).__name__ for layer in seen.layers if getattr(layer, "is_sliding", False)}
        if other:
            name, kinds = type(model).__name__, ", ".join(sorted(other))
            rule = f"cannot run {name}, whose cache ({kinds}) is not keys and values of all tokens"
            raise InputError(f"actor_rollout_ref.rollout.name=hf: {rule}; use vllm")
        pairs = [(layer.keys, layer.values) for layer in seen.layers]
        self.shapes = [[(tensor.shape[1], tensor.shape[3]) for tensor in pair] for pair in pairs]
        self.bytes_per_token = sum(tensor.nbytes for pair in pairs for tensor in pair)
        self.dtype, self.device = pairs[0][0].dtype, model.device
        self.plan: Prefill | Decode | None = None
        self.free()

    def free(self) -> None:
        self.stores: dict[str, list[list[Tensor]]] = {kind: [[] for _ in self.shapes] for kind in (PROMPTS, RESPONSES)}
        self.allocated = dict.fromkeys(self.stores, (0, 0))

    def reserve(self, kind: str, places: int, columns: int) -> None:
        """Allocate a store anew and keep its contents; layer after layer, so that only one is held twice."""
        for layer, shapes in enumerate(self.shapes):
            old, self.stores[kind][layer] = self.stores[kind][layer], []
            for number, (heads, dim) in enumerate(shapes):
                # Zeros: a masked column has weight 0, and 0 * NaN would be NaN.
                new = torch.zeros(places, heads, columns, dim, dtype=self.dtype, device=self.device)
                if old:
                    entries = old[number][:places, :, :columns]
                    new[: entries.shape[0], :, : entries.shape[2]] = entries
                self.stores[kind][layer].append(new)
        self.allocated[kind] = (places, columns)

    def copy(self, kind: str, to: list[int], origin: list[int], columns: int) -> None:
        """Copy the first ``columns`` columns of the places ``origin`` into the places ``to``."""
        target, source = (torch.tensor(places, device=self.device) for places in (to, origin))
        for tensor in (tensor for layer in self.stores[kind] for tensor in layer):
            tensor[target, :, :columns] = tensor[source, :, :columns]

    def begin(self, plan: Prefill | Decode) -> SharedPromptCache:
        """Set what the next forward pass writes and reads."""
        self.plan = plan
        return self

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Store the new keys and values, and return them; in a decode step the layer's stores travel with the keys,
        because transformers hands an attention function no cache."""
        plan, new = self.plan, (key_states, value_states)
        prompts, responses = (self.stores[kind][layer_idx] for kind in (PROMPTS, RESPONSES))
        if isinstance(plan, Prefill):
            count, _, width, _ = key_states.shape
            for tensor, states in zip(prompts, new, strict=True):
                tensor[plan.begin : plan.begin + count, :, :width] = states
            return new
        for tensor, states in zip(responses, new, strict=True):
            if plan.length is None:
                tensor[: plan.rows, :, plan.columns - 1] = states[:, :, 0]
            else:
                tensor[torch.arange(plan.rows, device=tensor.device), :, plan.length] = states[:, :, 0]
        key_states.stores = LayerView(
            plan,
            [tensor[: plan.prompts, :, : plan.prefix_columns].flatten(0, 1) for tensor in prompts],
            [tensor[: plan.rows, :, : plan.columns].flatten(0, 1) for tensor in responses],
        )
        return new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.plan.prefix_columns + self.plan.columns - 1 if isinstance(self.plan, Decode) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def attend_to_stores(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with one new token a row to its prompt and its response; outside of a decode step use transformers'
    ``sdpa``. ``key``, ``value`` and ``attention_mask`` are not read in a decode step.

    Query heads that share a head of keys are the lines of one small matrix product, and so are, for the prompt's
    part, the rows that share the prompt: keys and values are read once and never repeated.

    Shapes:
        query    [N, heads, 1, dim]
        returns  [N, 1, heads, dim]
    """
    layer: LayerView | None = getattr(key, "stores", None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    plan, width = layer.plan, layer.plan.prefix_columns
    rows, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    scale = kwargs.get("scaling") or dim**-0.5
    query = query.reshape(rows * kv_heads, heads // kv_heads, dim)
    key, value = layer.responses
    scores = _scores(query, key, scale)
    if width:
        there, back = plan.lines(kv_heads)
        key_P, value_P = layer.prompts
        grouped = query.index_select(0, there).view(len(key_P), -1, dim)
        prompt_scores = _scores(grouped, key_P, scale).view(len(there), -1, width).index_select(0, back)
        scores = torch.cat([prompt_scores, scores], -1)
    if plan.mask is not None:
        scores.unflatten(0, (rows, kv_heads)).masked_fill_(~plan.mask, -torch.inf)
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
