"""The rows that decode together: who joins, who leaves, and one step for all of them.

Every row that is computed is a row that still writes. A row enters with all but the last token of its prompt
stored; the last one is its first input, so that the first token is drawn like every other one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from core.engines import SampleRequest
from core.engines.kv_cache import ATTENTION, COLUMN_BLOCK, Decode, Prefill, SlotCache, length_mask
from core.engines.sampling import RowSettings, draw, uniforms
from core.engines.stopping import StopRule
from core.types import Stop


@dataclass
class DecodeStats:
    """What was computed, in all. ``row_steps`` is the sum of the batch sizes of the decode steps."""

    requests: int = 0
    aborted: int = 0
    prefill_passes: int = 0
    prefill_tokens: int = 0  # prompt tokens sent through the model ahead of decoding, padding not counted
    steps: int = 0
    row_steps: int = 0
    copied_rows: int = 0


@dataclass(eq=False)
class Row:
    """A request in flight and what it has written so far."""

    request: SampleRequest
    future: asyncio.Future
    rule: StopRule
    version: int
    key: int  # hash of the prompt: rows are compared by it often
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None

    @property
    def columns(self) -> int:
        """The most columns that it can come to need."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    def write(self, token: int, logprob: float) -> bool:
        """Takes the next token; says whether it was the last and sets ``stop``."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.stop = self.rule.ended(self.ids)
        return self.stop is not None


@dataclass(frozen=True)
class BatchLimits:
    """``rows`` decode at once; ``prefill_tokens`` of several prompts a forward pass; ``cache_tokens`` are stored."""

    rows: int
    prefill_tokens: int
    cache_tokens: int


class DecodeBatch:
    """Slot ``i`` of the cache belongs to ``rows[i]``; the arrays run along with it.

    ``length`` counts a row's stored tokens, ``token`` is its next input, ``seed`` its sampling seed.
    """

    def __init__(self, model: Any, limits: BatchLimits, cache: SlotCache):
        self.model, self.limits, self.cache = model, limits, cache
        self.device = cache.device
        self.additive_mask = model.config._attn_implementation != ATTENTION
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.stats = DecodeStats()
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self.length, self.token = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.seed = np.zeros(0, np.uint64)
        self.settings: RowSettings | None = None
        self.cache.free()

    def room_for(self, rows: list[Row]) -> int:
        """How many of these, in their order, may join now without ever exceeding the limits."""
        columns = max((row.columns for row in self.rows), default=0)
        for joining, row in enumerate(rows):
            columns = max(columns, row.columns)
            slots = len(self.rows) + joining + 1
            if slots > self.limits.rows or slots * whole_blocks(columns) > self.limits.cache_tokens:
                return joining
        return len(rows)

    @torch.inference_mode()
    def admit(self, rows: list[Row]) -> None:
        """Adds rows, with one prefill for all that share a prompt; a prompt that is decoding already needs none."""
        begin = len(self.rows)
        donors = {row.key: slot for slot, row in enumerate(self.rows)}
        self.rows += rows
        stored = np.array([len(row.request.prompt_ids) - 1 for row in rows], np.int64)
        self._reserve(self.rows, begin, int(max(self.length.max(initial=0), stored.max())) + 1)
        self.length = np.concatenate([self.length, stored])
        self.token = np.concatenate([self.token, [row.request.prompt_ids[-1] for row in rows]])
        seeds = [row.request.seed % 2**64 for row in rows]
        self.seed = np.concatenate([self.seed, np.array(seeds, np.uint64)])
        self.settings = None
        fresh: dict[tuple[int, ...], list[int]] = {}
        copies: list[tuple[int, int]] = []
        for slot, row in enumerate(rows, start=begin):
            prompt, donor = row.request.prompt_ids, donors.get(row.key)
            if donor is not None and self.rows[donor].request.prompt_ids == prompt:
                copies.append((slot, donor))
            elif len(prompt) > 1:
                fresh.setdefault(prompt, []).append(slot)
        if copies:
            to, origin = (list(slots) for slots in zip(*copies, strict=True))
            self.cache.copy(to, origin, int(self.length[to].max()))
            self.stats.copied_rows += len(copies)
        for prompts in self._chunks(sorted(fresh, key=len)):
            self._prefill({prompt: fresh[prompt] for prompt in prompts})

    def _chunks(self, prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Prompts of increasing length in batches of at most ``prefill_tokens``, padding included."""
        chunks: list[list[tuple[int, ...]]] = []
        for prompt in prompts:
            if chunks and (len(chunks[-1]) + 1) * len(prompt) <= self.limits.prefill_tokens:
                chunks[-1].append(prompt)
            else:
                chunks.append([prompt])
        return chunks

    def _prefill(self, slots_of: dict[tuple[int, ...], list[int]]) -> None:
        # Padding stands on the right, behind the tokens that a causal model lets see it: no mask is needed.
        width = max(len(prompt) for prompt in slots_of) - 1
        ids = np.array([prompt[:-1] + prompt[:1] * (width + 1 - len(prompt)) for prompt in slots_of], np.int64)
        slots = [slot for group in slots_of.values() for slot in group]
        source = [line for line, group in enumerate(slots_of.values()) for _ in group]
        self.cache.plan(Prefill(torch.tensor(slots, device=self.device), torch.tensor(source, device=self.device)))
        self.model.base_model(
            input_ids=torch.from_numpy(ids).to(self.device),
            position_ids=torch.arange(width, device=self.device)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.stats.prefill_passes += 1
        self.stats.prefill_tokens += sum(len(prompt) - 1 for prompt in slots_of)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """One more token for every row; returns the rows that ended with it, which have left the batch."""
        logits_NV = self._forward()
        if self.settings is None:
            sampling = [row.request.sampling for row in self.rows]
            self.settings = RowSettings.of(sampling, logits_NV.shape[1], self.device)
        drawn = np.array([len(row.ids) for row in self.rows], np.uint64)
        uniform_N = torch.from_numpy(uniforms(self.seed, drawn)).to(self.device)
        token_N, logprob_N = draw(logits_NV, self.settings, uniform_N)
        self.token = token_N.cpu().numpy()
        self.length += 1
        self.stats.steps += 1
        self.stats.row_steps += len(self.rows)
        written = zip(self.rows, self.token.tolist(), logprob_N.tolist(), strict=True)
        ended = [slot for slot, (row, token, logprob) in enumerate(written) if row.write(token, logprob)]
        finished = [self.rows[slot] for slot in ended]
        self.remove(ended)
        return finished

    def _forward(self) -> Tensor:
        count, columns = len(self.rows), int(self.length.max()) + 1
        self._reserve(self.rows, count, columns)
        mask = None
        if int(self.length.min()) + 1 == columns:
            length, positions = columns - 1, torch.full((1, 1), columns - 1, device=self.device)
        else:
            length = torch.from_numpy(self.length).to(self.device)
            positions = length[:, None]
            mask = length_mask(self.length, columns, self.device)
            if self.additive_mask:
                lowest = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device).masked_fill_(~mask, lowest)
        self.cache.plan(Decode(count, length, columns))
        output = self.model(
            input_ids=torch.from_numpy(self.token).to(self.device)[:, None],
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def remove(self, slots: list[int]) -> None:
        """Takes these rows out; the last rows move into the places that they leave."""
        if not slots:
            return
        gone, left = set(slots), len(self.rows) - len(slots)
        holes = [slot for slot in slots if slot < left]
        movers = [slot for slot in range(left, len(self.rows)) if slot not in gone]
        if holes:
            self.cache.copy(holes, movers, int(self.length[movers].max()))
            self.stats.copied_rows += len(holes)
            for hole, mover in zip(holes, movers, strict=True):
                self.rows[hole] = self.rows[mover]
            for values in (self.length, self.token, self.seed):
                values[holes] = values[movers]
        del self.rows[left:]
        self.length, self.token, self.seed = self.length[:left], self.token[:left], self.seed[:left]
        self.settings = None

    def _reserve(self, rows: list[Row], used: int, columns: int) -> None:
        """Room for the rows, the first ``used`` of which hold something, and for ``columns`` and some more.

        Slots and columns grow in strides, because growing copies all that is stored; neither passes the limits.
        """
        if len(rows) <= self.cache.slots and columns <= self.cache.columns:
            return
        most = max(row.columns for row in rows)
        columns = whole_blocks(min(most, columns + max(COLUMN_BLOCK, columns // 2)))
        slots = min(self.limits.rows, self.limits.cache_tokens // columns, len(rows) + len(rows) // 4)
        self.cache.reserve(max(slots, len(rows)), columns, used, int(self.length.max(initial=0)))


def whole_blocks(columns: int) -> int:
    """Columns as they are allocated."""
    return -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK


def cache_for(model: Any, device: torch.device) -> SlotCache:
    """An empty cache of the model's shapes, found by sending one token through it.

    Raises ValueError for a model that keeps something else than keys and values of its tokens.
    """
    seen = DynamicCache(config=model.config)
    with torch.inference_mode():
        one = torch.ones(1, 1, dtype=torch.long, device=device)
        model.base_model(input_ids=one, attention_mask=one, past_key_values=seen, use_cache=True)
    if any(getattr(layer, "keys", None) is None for layer in seen.layers):
        kinds = sorted({type(layer).__name__ for layer in seen.layers})
        raise ValueError(
            f"rollout.name=hf cannot run {type(model).__name__}: its cache ({', '.join(kinds)}) is not plain keys "
            "and values; use another engine"
        )
    shapes = [tuple((t.shape[1], t.shape[3]) for t in (layer.keys, layer.values)) for layer in seen.layers]
    return SlotCache(shapes, seen.layers[0].keys.dtype, device)
