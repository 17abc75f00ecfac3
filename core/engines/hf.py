"""The in-process engine: a transformers model, decoded by our own loop.

Every sequence that is computed is one that still grows. A prompt is prefilled but for its last token, which is the
first input of each of its sequences, so that the first token is drawn like every other one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from core.algorithm import checks
from core.config.section import FULL_PRECISION
from core.engines import SampleRequest
from core.engines.in_process_engine import InProcessEngine, Row
from core.engines.kv_cache import ATTENTION, PROMPTS, RESPONSES, Decode, Prefill, SharedPromptCache
from core.engines.sampling import RowSettings, draw, uniforms
from core.engines.weight_buckets import Proof, Weight, weights_checksum
from core.errors import InputError
from core.vision.learner_pictures import picture_inputs, run_body
from core.vision.pictures import Pictures

if TYPE_CHECKING:
    from core.config.schema import Config

LEAST_COLUMNS = 64  # of the first store of responses; more are allocated as they grow


@dataclass(eq=False)
class StoredPrompt:
    """A prompt that rows continue. Equal ids with other media are another prompt.

    ``stored`` of its tokens are in the cache: all but the last, which is the first input of each of its rows.
    ``offset`` is added to the count of tokens before one for its position: below zero where there are media, because a
    picture takes fewer positions than tokens.
    """

    ids: tuple[int, ...]
    media: Pictures | None
    offset: int = 0
    rows: int = 0

    @property
    def stored(self) -> int:
        return len(self.ids) - 1


class DecodeBatch:
    """The rows that decode. Place ``i`` of the response store is ``rows[i]``'s, which continues ``prompt_of[i]``; place
    ``j`` of the prompt store is ``prompts[j]``'s. At most ``max_rows`` decode at once, several prompts are prefilled by
    passes of at most ``max_prefill_tokens``, and both stores together hold at most ``cache_tokens``.
    """

    def __init__(self, model: Any, unknown: np.ndarray, *, max_rows: int, max_prefill_tokens: int, cache_gib: float):
        self.model, self.device = model, model.device
        self.cache = SharedPromptCache(model)
        self.max_rows, self.max_prefill_tokens = max_rows, max_prefill_tokens
        self.cache_tokens = int(cache_gib * 2**30 / self.cache.bytes_per_token)
        self.unknown = torch.from_numpy(unknown).to(self.device)  # ids that are never drawn
        # What was computed in all: prompt tokens ahead of decoding (without padding), and the rows of all steps.
        self.prefill_tokens = self.row_steps = 0
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self.prompt_of: list[StoredPrompt] = []
        self.prompts: list[StoredPrompt] = []
        self.settings: RowSettings | None = None
        self.cache.free()

    def room_for(self, waiting: Sequence[Row]) -> int:
        """Return how many of these, in their order, may join now without ever exceeding the limits."""
        prompts = {(prompt.ids, prompt.media) for prompt in self.prompts}
        width = max((len(prompt.ids) for prompt in self.prompts), default=0)
        budget = max((row.request.sampling.max_tokens for row in self.rows), default=0)
        for joining, row in enumerate(waiting):
            request, count = row.request, len(self.rows) + joining + 1
            budget, width = max(budget, request.sampling.max_tokens), max(width, len(request.prompt_ids))
            prompts.add((request.prompt_ids, request.media))
            if count > self.max_rows or most_stored(count, budget, len(prompts), width) > self.cache_tokens:
                return joining
        return len(waiting)

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> None:
        """Add rows, with one prefill for all that share a prompt; a prompt that is decoding already needs none."""
        held = {(prompt.ids, prompt.media): prompt for prompt in self.prompts}
        fresh = []
        for row in rows:
            key = (row.request.prompt_ids, row.request.media)
            if key not in held:
                held[key] = StoredPrompt(*key)
                fresh.append(held[key])
            held[key].rows += 1
            self.rows.append(row)
            self.prompt_of.append(held[key])
        fresh.sort(key=lambda prompt: prompt.stored)  # prompts of one pass have about one length
        begin = len(self.prompts)
        self.prompts += fresh
        self.settings = None
        if fresh:
            self._make_room()
            self._prefill(begin)

    def _prefill(self, begin: int) -> None:
        """Fill the prompt store from place ``begin`` on; the prompts there are sorted by length."""
        while begin < len(self.prompts):
            end, width = begin + 1, self.prompts[begin].stored
            while end < len(self.prompts) and (end + 1 - begin) * self.prompts[end].stored <= self.max_prefill_tokens:
                end, width = end + 1, self.prompts[end].stored
            if width:
                self._prefill_pass(begin, self.prompts[begin:end], width)
            begin = end

    def _prefill_pass(self, begin: int, prompts: Sequence[StoredPrompt], width: int) -> None:
        # Padding stands on the right, behind the tokens that a causal model lets see it: no mask is needed.
        padded = [prompt.ids[:-1] + prompt.ids[:1] * (width - prompt.stored) for prompt in prompts]
        input_ids = torch.tensor(padded, device=self.device)
        media = picture_inputs(self.model, input_ids, [prompt.media for prompt in prompts])
        if media is not None:
            last_P = torch.tensor([prompt.stored - 1 for prompt in prompts], device=self.device)
            for prompt, offset in zip(prompts, media.position_offset(last_P).tolist(), strict=True):
                prompt.offset = offset
        run_body(
            self.model,
            input_ids,
            media,
            position_ids=torch.arange(width, device=self.device)[None],
            past_key_values=self.cache.begin(Prefill(begin)),
            use_cache=True,
        )
        self.prefill_tokens += sum(prompt.stored for prompt in prompts)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Write a token of every row; return the rows that ended with it, which have left the batch."""
        logits_NV = self._forward()
        if self.settings is None:
            sampling = [row.request.sampling for row in self.rows]
            self.settings = RowSettings.of(sampling, logits_NV.shape[1], self.device)
        if len(self.unknown):
            logits_NV = logits_NV.index_fill(1, self.unknown, -math.inf)
        seed_N = np.array([row.request.seed % 2**64 for row in self.rows], np.uint64)
        position_N = np.array([len(row.ids) for row in self.rows], np.uint64)
        uniform_N = torch.from_numpy(uniforms(seed_N, position_N)).to(self.device)
        token_N, logprob_N = draw(logits_NV, self.settings, uniform_N)
        self.row_steps += len(self.rows)
        written = zip(self.rows, token_N.tolist(), logprob_N.tolist(), strict=True)
        finished = [row for row, token, logprob in written if row.write(token, logprob)]
        self.remove(finished)
        return finished

    def _forward(self) -> Tensor:
        self._make_room()
        place = {id(prompt): number for number, prompt in enumerate(self.prompts)}
        prompt_N = np.array([place[id(prompt)] for prompt in self.prompt_of])
        length_N = np.array([len(row.ids) for row in self.rows])
        position_N = length_N + np.array([prompt.stored + prompt.offset for prompt in self.prompt_of])
        plan = Decode(prompt_N, np.array([prompt.stored for prompt in self.prompts]), length_N, self.device)
        tokens = [row.ids[-1] if row.ids else row.request.prompt_ids[-1] for row in self.rows]
        output = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            position_ids=torch.from_numpy(position_N).to(self.device)[:, None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device),  # a stand-in: used unchanged
            past_key_values=self.cache.begin(plan),
            use_cache=True,
        )
        return output.logits[:, -1]

    def _make_room(self) -> None:
        """Allocate both stores anew where one is too small, with room to spare, because growing copies all of it."""
        width = max(prompt.stored for prompt in self.prompts)
        longest = max(len(row.ids) for row in self.rows) + 1
        most = max(row.request.sampling.max_tokens for row in self.rows)
        needs = {PROMPTS: (len(self.prompts), width), RESPONSES: (len(self.rows), longest)}
        columns = {PROMPTS: width, RESPONSES: min(most, max(longest + longest // 2, LEAST_COLUMNS))}
        has = self.cache.allocated
        if any(needs[kind][0] > has[kind][0] or needs[kind][1] > has[kind][1] for kind in has):
            sizes = {kind: (with_spare(needs[kind][0]), columns[kind]) for kind in has}
            for kind in sorted(
                has, key=lambda kind: math.prod(sizes[kind]) - math.prod(has[kind])
            ):  # what shrinks, first
                self.cache.reserve(kind, *sizes[kind])

    @torch.inference_mode()
    def remove(self, rows: Sequence[Row]) -> None:
        """Remove these rows, and the prompts that no row continues; the last ones move into their places."""
        gone = set(map(id, rows))
        places = [place for place, row in enumerate(self.rows) if id(row) in gone]
        if not places:
            return
        for place in places:
            self.prompt_of[place].rows -= 1
        for to, origin in self._close_gaps(RESPONSES, self.rows, places, [len(row.ids) for row in self.rows]):
            self.prompt_of[to] = self.prompt_of[origin]
        del self.prompt_of[len(self.rows) :]
        self.settings = None
        unused = [place for place, prompt in enumerate(self.prompts) if not prompt.rows]
        self._close_gaps(PROMPTS, self.prompts, unused, [prompt.stored for prompt in self.prompts])

    def _close_gaps(self, kind: str, held: list, gone: list[int], stored: list[int]) -> list[tuple[int, int]]:
        """Move the last places into those that are ``gone`` (ascending), in the list and in the store; return the moves
        (to, from). ``stored`` has the tokens of each place."""
        left, leaving = len(held) - len(gone), set(gone)
        holes, movers = [i for i in gone if i < left], [i for i in range(left, len(held)) if i not in leaving]
        if columns := max((stored[mover] for mover in movers), default=0):
            self.cache.copy(kind, holes, movers, columns)
        moves = list(zip(holes, movers, strict=True))
        for to, origin in moves:
            held[to] = held[origin]
        del held[left:]
        return moves


def most_stored(rows: int, budget: int, prompts: int, width: int) -> int:
    """Return the most tokens allocated for this number of rows of ``budget`` tokens and prompts of ``width``."""
    return with_spare(rows) * budget + with_spare(prompts) * width


def with_spare(places: int) -> int:
    """Return how many places are allocated, because more come one by one."""
    return places + places // 4


class HFEngine(InProcessEngine):
    """Satisfies :class:`core.engines.RolloutEngine` for causal language models of transformers that attend to all
    former tokens.

    ``model`` is copied, unless ``adopt`` hands it over. ``dtype`` of the weights is the model's by default. At most
    ``max_batch_rows`` samples decode at once, their keys and values fill at most ``cache_gib`` GiB, and a prefill sends
    about ``max_prefill_tokens`` through the model at once; what does not fit waits in the order of arrival. Raises
    InputError for a model that it cannot run.
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
        adopt: bool = False,
    ):
        model = _prepared(model if adopt else copy.deepcopy(model), dtype)
        super().__init__(tokenizer, model, model.device)
        limits = {"max_rows": max_batch_rows, "max_prefill_tokens": max_prefill_tokens, "cache_gib": cache_gib}
        self.batch = DecodeBatch(model, self.unknown, **limits)

    def _check(self, request: SampleRequest) -> None:
        super()._check(request)
        prompt, budget = request.prompt_ids, request.sampling.max_tokens
        if most_stored(1, budget, 1, len(prompt)) > self.batch.cache_tokens:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_tokens={budget} is more than the cache holds "
                f"({self.batch.cache_tokens} tokens): raise the engine's cache_gib"
            )

    def _running(self) -> list[Row]:
        return self.batch.rows

    def _admit(self) -> None:
        if count := self.batch.room_for(self._waiting):
            joining, self._waiting = self._waiting[:count], self._waiting[count:]
            self.batch.admit(joining)

    def _advance(self) -> list[Row]:
        return self.batch.step()

    def _drop(self, rows: list[Row]) -> None:
        if len(rows) == len(self.batch.rows):
            self.batch.clear()
        else:
            self.batch.remove(rows)

    @torch.no_grad()
    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        own = self.model.state_dict(keep_vars=True)
        for weight, value in zip(weights, values, strict=True):
            own[weight.names[0]].copy_(value)

    def _finish(self) -> list[Proof]:
        named = list(self.model.named_parameters())
        return [Proof(tuple(self._received), weights_checksum(named), checks.weight_sums(named))]

    @property
    def weights_dtype(self) -> torch.dtype:
        """Return the number format of its weights."""
        return self.model.dtype

    @torch.inference_mode()
    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of the tokens after the first, [len(token_ids) - 1] float32."""
        ids = torch.tensor([token_ids], device=self.device)
        logprob_TV = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprob_TV.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _free(self) -> None:
        self.model = self.batch.model = None


def _prepared(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Prepare for inference: eval mode, no gradients, our attention. Raises InputError for a model without it, and for
    one that was loaded with eager attention, which it may need (soft-capped scores, sinks)."""
    model = model.eval().requires_grad_(False)
    if dtype is not None:
        for parameter in model.parameters():  # not the buffers: rotary frequencies lose their precision in bf16
            parameter.data = parameter.data.to(dtype)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation(ATTENTION)
    if (found := model.config._attn_implementation) != ATTENTION:
        name = type(model).__name__
        raise InputError(f"actor_rollout_ref.rollout.name=hf: cannot run {name} with {found} attention; use vllm")
    return model


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> HFEngine:
    """Make the engine; ``rollout.engine_kwargs.hf.*`` are keyword arguments of :class:`HFEngine`."""
    from core.learner.models import load_policy

    rollout = config.actor_rollout_ref.rollout
    options = {"max_batch_rows": rollout.max_num_seqs, "max_prefill_tokens": rollout.max_num_batched_tokens}
    options |= rollout.engine_kwargs.get("hf", {})
    dtype = torch.float32 if rollout.dtype in FULL_PRECISION else torch.bfloat16
    policy = model() if model is not None else load_policy(config.actor_rollout_ref.model, dtype).to(device)
    return HFEngine(policy, tokenizer, dtype=dtype, adopt=True, **options)
