"""The in-process engine: a transformers model, decoded by our own loop.

Every sequence that is computed is one that still grows. A prompt is prefilled but for its last token, which is the
first input of each of its sequences, so that the first token is drawn like every other one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from core.algorithm import checks
from core.config.limits import FULL_PRECISION
from core.engines import SampleRequest
from core.engines.in_process_engine import InProcessEngine, Row
from core.engines.kv_cache import ATTENTION, Decode, Prefill, SharedPromptCache
from core.engines.sampling import RowSettings, draw, uniforms
from core.engines.weight_buckets import Proof, Weight, weights_checksum
from core.vision.modality import modality_of
from core.vision.pictures import Pictures

if TYPE_CHECKING:
    from core.config.schema import Config

LEAST_COLUMNS = 64  # of the first store of responses; more are allocated as they grow
Prompt = tuple[
    tuple[int, ...], Pictures | None
]  # what a response follows: equal ids with other media are another prompt


def prompt_of(row: Row) -> Prompt:
    return row.request.prompt_ids, row.request.media


class DecodeBatch:
    """The rows that decode. Place ``i`` of the response store is ``rows[i]``'s, place ``j`` of the prompt store
    ``prompts[j]``'s. At most ``max_rows`` decode at once, several prompts are prefilled by passes of at most
    ``max_prefill_tokens``, and both stores together hold at most ``cache_tokens``.

    ``prompt_N`` is the place of each row's prompt. ``offset_P`` is added to the count of tokens behind a prompt for
    their positions: less than nothing where it has media, because a picture takes fewer positions than tokens.
    """

    def __init__(
        self,
        model: Any,
        unknown: np.ndarray,
        *,
        max_rows: int,
        max_prefill_tokens: int,
        cache_tokens: int,
        cache: SharedPromptCache,
    ):
        self.model, self.cache = model, cache
        self.max_rows, self.max_prefill_tokens, self.cache_tokens = max_rows, max_prefill_tokens, cache_tokens
        self.modality, self.device = modality_of(model.config), cache.device
        self.unknown = torch.from_numpy(unknown).to(self.device)  # ids that are never drawn
        # What was computed in all: prompt tokens ahead of decoding (without padding), and the rows of all steps.
        self.prefill_tokens = self.row_steps = 0
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self.prompts: list[Prompt] = []
        self.prompt_N, self.offset_P = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.settings: RowSettings | None = None
        self.cache.free()

    def room_for(self, rows: list[Row]) -> int:
        """Return how many of these, in their order, may join now without ever exceeding the limits."""
        if not rows:
            return 0
        prompts = set(self.prompts)
        width = max((len(ids) for ids, _ in prompts), default=0)
        budget = max((row.request.sampling.max_tokens for row in self.rows), default=0)
        for joining, row in enumerate(rows):
            budget = max(budget, row.request.sampling.max_tokens)
            width = max(width, len(row.request.prompt_ids))
            prompts.add(prompt_of(row))
            count = len(self.rows) + joining + 1
            if count > self.max_rows or most_stored(count, budget, len(prompts), width) > self.cache_tokens:
                return joining
        return len(rows)

    @torch.inference_mode()
    def admit(self, rows: list[Row]) -> None:
        """Add rows, with one prefill for all that share a prompt; a prompt that is decoding already needs none."""
        held, begin = set(self.prompts), len(self.prompts)
        # Shortest first, else in the order of the rows: prompts of one pass have about one length.
        fresh = sorted(
            {prompt_of(row): None for row in rows if prompt_of(row) not in held}, key=lambda one: len(one[0])
        )
        self.prompts += sorted(fresh, key=_stored)
        places = {prompt: place for place, prompt in enumerate(self.prompts)}
        self.rows += rows
        self.prompt_N = np.append(self.prompt_N, [places[prompt_of(row)] for row in rows])
        self.offset_P = np.append(self.offset_P, np.zeros(len(fresh), np.int64))
        self.settings = None
        if fresh:
            width = max(map(_stored, self.prompts))
            self._reserve("prompts", len(self.prompts), width, width)
            self._prefill(begin)

    def _prefill(self, begin: int) -> None:
        """Fill the prompt store from place ``begin`` on; the prompts there are sorted by length."""
        while begin < len(self.prompts) and _stored(self.prompts[begin]) == 0:
            begin += 1
        while begin < len(self.prompts):
            end = begin + 1
            while end < len(self.prompts) and (end + 1 - begin) * _stored(self.prompts[end]) <= self.max_prefill_tokens:
                end += 1
            # Padding stands on the right, behind the tokens that a causal model lets see it: no mask is needed.
            prompts, width = self.prompts[begin:end], _stored(self.prompts[end - 1])
            padded = [ids[:-1] + ids[:1] * (width + 1 - len(ids)) for ids, _ in prompts]
            input_ids = torch.tensor(padded, device=self.device)
            media = self.modality.inputs(self.model, input_ids, [media for _, media in prompts])
            if media is not None:
                last_P = torch.tensor([_stored(prompt) - 1 for prompt in prompts], device=self.device)
                self.offset_P[begin:end] = media.position_offset(last_P).cpu().numpy()
            self.modality.run_body(
                self.model,
                input_ids,
                media,
                position_ids=torch.arange(width, device=self.device)[None],
                past_key_values=self.cache.begin(Prefill(begin)),
                use_cache=True,
            )
            self.prefill_tokens += sum(map(_stored, prompts))
            begin = end

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
        ended = [place for place, (row, token, logprob) in enumerate(written) if row.write(token, logprob)]
        finished = [self.rows[place] for place in ended]
        self.remove(ended)
        return finished

    def _forward(self) -> Tensor:
        prefix_P = np.array(list(map(_stored, self.prompts)))
        plan = Decode(self.prompt_N, prefix_P, np.array([len(row.ids) for row in self.rows]), self.device)
        most = max(row.request.sampling.max_tokens for row in self.rows)
        self._reserve("responses", plan.rows, plan.columns, most)
        tokens = [row.ids[-1] if row.ids else row.request.prompt_ids[-1] for row in self.rows]
        position_N = plan.prefix_N + plan.length_N + self.offset_P[self.prompt_N]
        output = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            position_ids=torch.from_numpy(position_N).to(self.device)[:, None],
            attention_mask=self._mask(plan),
            past_key_values=self.cache.begin(plan),
            use_cache=True,
        )
        return output.logits[:, -1]

    def _mask(self, plan: Decode) -> Tensor:
        """Return a stand-in, or what eager attention adds to its scores; transformers uses four axes unchanged."""
        if self.model.config._attn_implementation == ATTENTION:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        shape = (plan.rows, 1, 1, plan.prefix_columns + plan.columns)
        mask = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        seen = plan.mask()
        return mask if seen is None else mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)

    def _reserve(self, kind: str, places: int, columns: int, most: int) -> None:
        """Reserve room for so much, with spare places and columns (at most ``most``), because growing copies all that
        is stored. Where both stores together would pass the limit, the other one shrinks to its need."""
        has_places, has_columns = self.cache.allocated[kind]
        if places <= has_places and columns <= has_columns:
            return
        if columns > has_columns:
            has_columns = max(columns + columns // 2, LEAST_COLUMNS)
        if places > has_places:
            has_places = with_spare(places) if has_places else places
        size = (has_places, min(has_columns, most))
        needs = {
            "prompts": (len(self.prompts), max(map(_stored, self.prompts))),
            "responses": (len(self.rows), max(len(row.ids) for row in self.rows) + 1),
        }
        for other, needed in needs.items():
            held = self.cache.allocated[other]
            if other != kind and math.prod(size) + math.prod(held) > self.cache_tokens:
                self.cache.reserve(other, min(held[0], needed[0]), min(held[1], needed[1]))
        self.cache.reserve(kind, *size)

    @torch.inference_mode()
    def remove(self, places: list[int]) -> None:
        """Remove these rows, and the prompts that no row continues; the last ones move into their places."""
        if not places:
            return
        holes, movers, left = _moves(places, len(self.rows))
        self._copy("responses", holes, movers, [len(self.rows[mover].ids) for mover in movers])
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        self.prompt_N[holes] = self.prompt_N[movers]
        del self.rows[left:]
        self.prompt_N, self.settings = self.prompt_N[:left], None
        unused = np.flatnonzero(np.bincount(self.prompt_N, minlength=len(self.prompts)) == 0).tolist()
        holes, movers, left = _moves(unused, len(self.prompts))
        self._copy("prompts", holes, movers, [_stored(self.prompts[mover]) for mover in movers])
        for hole, mover in zip(holes, movers, strict=True):
            self.prompts[hole] = self.prompts[mover]
            self.prompt_N[self.prompt_N == mover] = hole
        self.offset_P[holes] = self.offset_P[movers]
        del self.prompts[left:]
        self.offset_P = self.offset_P[:left]

    def _copy(self, kind: str, holes: list[int], movers: list[int], stored: list[int]) -> None:
        if max(stored, default=0):
            self.cache.copy(kind, holes, movers, max(stored))


def _stored(prompt: Prompt) -> int:
    """Return the tokens of a prompt that are stored: all but the last, the first input of each of its rows."""
    return len(prompt[0]) - 1


def _moves(gone: list[int], count: int) -> tuple[list[int], list[int], int]:
    """Return the places that ``gone`` (ascending) leave, the last places that move there, and how many stay."""
    left, leaving = count - len(gone), set(gone)
    return [i for i in gone if i < left], [i for i in range(left, count) if i not in leaving], left


def most_stored(rows: int, budget: int, prompts: int, width: int) -> int:
    """Return the most tokens allocated for this number of rows of ``budget`` tokens and prompts of ``width``."""
    return with_spare(rows) * budget + with_spare(prompts) * width


def with_spare(places: int) -> int:
    """Return how many places are allocated where more come one by one."""
    return places + places // 4


class HFEngine(InProcessEngine):
    """Satisfies :class:`core.engines.RolloutEngine` for any causal language model of transformers.

    ``model`` is copied, unless ``adopt`` hands it over. ``dtype`` (of the weights) and ``device`` default to the
    model's. At most ``max_batch_rows`` samples decode at once, their keys and values fill at most ``cache_gib``
    GiB, and a prefill sends about ``max_prefill_tokens`` through the model at once; what does not fit waits in
    the order of arrival. Raises ValueError for a model that it cannot run.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_batch_rows: int = 1024,
        max_prefill_tokens: int = 8192,
        cache_gib: float = 4.0,
        adopt: bool = False,
    ):
        model = _prepared(model if adopt else copy.deepcopy(model), device, dtype)
        super().__init__(tokenizer, model, model.device)
        cache = SharedPromptCache(model)
        self.batch = DecodeBatch(
            model,
            self.unknown,
            max_rows=max_batch_rows,
            max_prefill_tokens=max_prefill_tokens,
            cache_tokens=int(cache_gib * 2**30 / cache.bytes_per_token),
            cache=cache,
        )

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
            gone = set(map(id, rows))
            self.batch.remove([place for place, row in enumerate(self.batch.rows) if id(row) in gone])

    @torch.no_grad()
    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        own = self.model.state_dict(keep_vars=True)
        for weight, value in zip(weights, values, strict=True):
            own[weight.names[0]].copy_(value)

    def _finish(self) -> list[Proof]:
        return [Proof(tuple(self._received), weights_checksum(self.model.named_parameters()), self.weight_sums())]

    @property
    def weights_dtype(self) -> torch.dtype:
        """Return the number format of its weights."""
        return self.model.dtype

    def weight_sums(self) -> dict[str, int]:
        """Return checksums of the weights that it computes with, by name."""
        return checks.weight_sums(self.model.named_parameters())

    @torch.inference_mode()
    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of the tokens after the first, [len(token_ids) - 1] float32."""
        ids = torch.tensor([token_ids], device=self.device)
        logprob_TV = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprob_TV.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _free(self) -> None:
        self.model = self.batch.model = None


def _prepared(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """Prepare for inference: eval mode, no gradients, our attention where transformers lets a model choose."""
    model = model.eval().requires_grad_(False)
    if device is not None:
        model = model.to(device)
    if dtype is not None:
        for parameter in model.parameters():  # not the buffers: rotary frequencies lose their precision in bf16
            parameter.data = parameter.data.to(dtype)
    # A model that asks for eager attention may need it (soft-capped scores, sinks): it keeps it.
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise ValueError(
                f"rollout.name=hf cannot run {type(model).__name__} with {model.config._attn_implementation} "
                "attention: load it with attn_implementation=eager"
            )
    elif getattr(model.config, "sliding_window", None) and "sliding_attention" in (
        getattr(model.config, "layer_types", None) or ("sliding_attention",)
    ):
        raise ValueError(
            f"rollout.name=hf cannot run {type(model).__name__}: eager attention with a sliding window; load it "
            "with attn_implementation=sdpa or use another engine"
        )
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
