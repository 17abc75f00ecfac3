"""The in-process engine: a transformers model, decoded by our own loop.

Every sequence that is computed is one that still grows. A prompt is prefilled but for its last token, which is the
first input of each of its sequences, so that the first token is drawn like every other one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from core.algorithm import use_checks
from core.data.vocabulary import known_ids, unknown_among
from core.engines import SampleRequest
from core.engines.in_process_engine import InProcessEngine, Row
from core.engines.kv_cache import ATTENTION, Decode, Prefill, SharedPromptCache
from core.engines.sampling import RowSettings, draw, eos_ids, perturbed, uniforms
from core.engines.weight_buckets import GROUP, Bucket, Checksum, Proof, Weight, release, weights_checksum
from core.modality import modality_of
from core.types import Media

COLUMN_BLOCK = 64  # columns of responses are allocated in multiples of this


@dataclass(frozen=True)
class BatchLimits:
    """``rows`` decode at once; ``prefill_tokens`` of several prompts a forward pass; ``cache_tokens`` are stored."""

    rows: int
    prefill_tokens: int
    cache_tokens: int


class SeenPrompt(NamedTuple):
    """What a response follows: equal ids with other media are another prompt."""

    ids: tuple[int, ...]
    media: Media | None

    @classmethod
    def of(cls, row: Row) -> SeenPrompt:
        return cls(row.request.prompt_ids, row.request.media)


class DecodeBatch:
    """The rows that decode. Place ``i`` of the response store is ``rows[i]``'s, place ``j`` of the prompt store
    ``prompts[j]``'s.

    Arrays run along with them. Of a row: ``prompt`` is the place of its prompt, ``length`` counts the stored tokens
    of its response, ``token`` is its next input, ``seed`` its sampling seed. Of a prompt: ``prefix`` counts its
    stored tokens, all but the last one; positions behind it are ``ahead`` of the count of tokens, by less than nothing
    where it has media: a picture takes fewer positions than tokens.
    """

    def __init__(
        self, model: Any, limits: BatchLimits, cache: SharedPromptCache, unknown: np.ndarray, logits_noise: float = 0.0
    ):
        self.model, self.limits, self.cache, self.logits_noise = model, limits, cache, logits_noise
        self.modality, self.device = modality_of(model.config), cache.device
        self.unknown = torch.from_numpy(unknown).to(self.device)  # ids that are never drawn
        self.own_attention = model.config._attn_implementation == ATTENTION
        # What was computed in all: prompt tokens ahead of decoding (without padding), and the rows of all steps.
        self.prefill_tokens = self.row_steps = 0
        self.version = self.checked = 0  # of the weights; of those whose prompt store was compared
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self.prompts: list[SeenPrompt] = []
        self.prompt, self.length = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.token, self.seed = np.zeros(0, np.int64), np.zeros(0, np.uint64)
        self.prefix, self.ahead = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.filled: list[
            tuple[SeenPrompt, int]
        ] = []  # what stands at each place of the prompt store, of which weights
        self.settings: RowSettings | None = None
        self.cache.free()

    def room_for(self, rows: list[Row]) -> int:
        """Return how many of these, in their order, may join now without ever exceeding the limits."""
        if not rows:
            return 0
        budget = max((row.request.sampling.max_tokens for row in self.rows), default=0)
        prompts = set(self.prompts)
        width = max((len(prompt.ids) for prompt in prompts), default=0)
        for joining, row in enumerate(rows):
            budget = max(budget, row.request.sampling.max_tokens)
            width = max(width, len(row.request.prompt_ids))
            prompts.add(SeenPrompt.of(row))
            count = len(self.rows) + joining + 1
            if count > self.limits.rows or most_stored(count, budget, len(prompts), width) > self.limits.cache_tokens:
                return joining
        return len(rows)

    @torch.inference_mode()
    def admit(self, rows: list[Row]) -> None:
        """Add rows, with one prefill for all that share a prompt; a prompt that is decoding already needs none."""
        places = {prompt: place for place, prompt in enumerate(self.prompts)}
        required = [SeenPrompt.of(row) for row in rows]
        fresh = sorted({one: None for one in required if one not in places}, key=lambda one: len(one.ids))
        used, self.prompts = len(self.prompts), self.prompts + fresh
        places |= {prompt: place for place, prompt in enumerate(fresh, start=used)}
        self.rows += rows
        self.prompt = np.concatenate([self.prompt, [places[one] for one in required]])
        self.length = np.concatenate([self.length, np.zeros(len(rows), np.int64)])
        self.token = np.concatenate([self.token, [row.request.prompt_ids[-1] for row in rows]])
        seeds = [row.request.seed % 2**64 for row in rows]
        self.seed = np.concatenate([self.seed, np.array(seeds, np.uint64)])
        self.settings = None
        if fresh:
            self.prefix = np.concatenate([self.prefix, [len(prompt.ids) - 1 for prompt in fresh]])
            self.ahead = np.concatenate([self.ahead, np.zeros(len(fresh), np.int64)])
            self._reserve("prompts", len(self.prompts), int(self.prefix.max()), int(self.prefix.max()))
            self._prefill(used)
            self.filled += [(prompt, self.version) for prompt in fresh]
        self._check_prompts()

    def _prefill(self, begin: int) -> None:
        """Fill the prompt store from place ``begin`` on; the prompts there are sorted by length."""
        while begin < len(self.prompts) and self.prefix[begin] == 0:
            begin += 1
        while begin < len(self.prompts):
            end = begin + 1
            while end < len(self.prompts) and (end + 1 - begin) * self.prefix[end] <= self.limits.prefill_tokens:
                end += 1
            # Padding stands on the right, behind the tokens that a causal model lets see it: no mask is needed.
            width = int(self.prefix[end - 1])
            prompts = self.prompts[begin:end]
            ids = [prompt.ids[:-1] + prompt.ids[:1] * (width + 1 - len(prompt.ids)) for prompt in prompts]
            input_ids = torch.tensor(ids, device=self.device)
            media = self.modality.inputs(self.model, input_ids, [prompt.media for prompt in prompts])
            if media is not None:
                last_P = torch.from_numpy(self.prefix[begin:end] - 1).to(self.device)
                self.ahead[begin:end] = media.position_offset(last_P).cpu().numpy()
            with self.cache.forward(Prefill(begin), own_attention=self.own_attention):
                self.modality.run_body(
                    self.model,
                    input_ids,
                    media,
                    position_ids=torch.arange(width, device=self.device)[None],
                    past_key_values=self.cache,
                    use_cache=True,
                )
            self.prefill_tokens += int(self.prefix[begin:end].sum())
            begin = end

    def _check_prompts(self) -> None:
        """Check that rows continue stored prompts that are theirs, computed by the weights of now.

        Once for each version of the weights the keys of a prompt are computed again and compared.
        """
        expected = [(SeenPrompt.of(row), self.version) for row in self.rows]
        use_checks.stored_prompts_are_current(expected, [self.filled[place] for place in self.prompt])
        if self.checked == self.version:
            return
        self.checked = self.version
        place = int(np.argmin(np.where(self.prefix > 0, self.prefix, np.iinfo(np.int64).max)))
        count, prompt = int(self.prefix[place]), self.prompts[place]
        if count == 0 or prompt.media:
            return
        again = DynamicCache(config=self.model.config)
        self.model.base_model(
            input_ids=torch.tensor([prompt.ids[:-1]], device=self.device), past_key_values=again, use_cache=True
        )
        for layer in (0, len(again.layers) - 1):
            stored = self.cache.layers[layer].stores["prompts"][0][place, :, :count]
            use_checks.stored_keys_are_current(stored, again.layers[layer].keys[0])

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Write a token of every row; return the rows that ended with it, which have left the batch."""
        logits_NV = self._forward()
        if self.settings is None:
            sampling = [row.request.sampling for row in self.rows]
            self.settings = RowSettings.of(sampling, logits_NV.shape[1], self.device)
        position_N = self.length.astype(np.uint64)
        if self.logits_noise:
            logits_NV = perturbed(logits_NV, self.settings, self.seed, position_N, self.logits_noise)
        if len(self.unknown):
            logits_NV = logits_NV.index_fill(1, self.unknown, -math.inf)
        uniform_N = torch.from_numpy(uniforms(self.seed, position_N)).to(self.device)
        token_N, logprob_N = draw(logits_NV, self.settings, uniform_N)
        self.token = token_N.cpu().numpy()
        self.length = self.length + 1
        self.row_steps += len(self.rows)
        written = zip(self.rows, self.token.tolist(), logprob_N.tolist(), strict=True)
        ended = [place for place, (row, token, logprob) in enumerate(written) if row.write(token, logprob)]
        finished = [self.rows[place] for place in ended]
        self.remove(ended)
        return finished

    def _forward(self) -> Tensor:
        plan = Decode(self.prompt, self.prefix, self.length, self.device)
        most = max(row.request.sampling.max_tokens for row in self.rows)
        self._reserve("responses", plan.rows, plan.columns, whole_blocks(most))
        with self.cache.forward(plan, own_attention=self.own_attention):
            output = self.model(
                input_ids=torch.from_numpy(self.token).to(self.device)[:, None],
                position_ids=plan.positions(self.ahead),
                attention_mask=self._mask(plan),
                past_key_values=self.cache,
                use_cache=True,
            )
        return output.logits[:, -1]

    def _mask(self, plan: Decode) -> Tensor:
        """Return a stand-in, or what eager attention adds to its scores; transformers uses four axes unchanged."""
        if self.own_attention:
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
            has_columns = whole_blocks(columns + columns // 2)
        if places > has_places:
            has_places = with_spare(places) if has_places else places
        size = (has_places, min(has_columns, most))
        for other, needed in (("prompts", self.prefix), ("responses", self.length)):
            held = self.cache.allocated[other]
            if other != kind and math.prod(size) + math.prod(held) > self.limits.cache_tokens:
                self.cache.reserve(other, min(held[0], len(needed)), min(held[1], int(needed.max()) + 1))
        self.cache.reserve(kind, *size)

    @torch.inference_mode()
    def remove(self, places: list[int]) -> None:
        """Remove these rows, and the prompts that no row continues; the last ones move into their places."""
        if not places:
            return
        holes, movers, left = _moves(places, len(self.rows))
        if holes and (columns := int(self.length[movers].max())):
            self.cache.copy("responses", holes, movers, columns)
        for values in (self.prompt, self.length, self.token, self.seed):
            values[holes] = values[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[left:]
        self.prompt, self.length = self.prompt[:left], self.length[:left]
        self.token, self.seed = self.token[:left], self.seed[:left]
        self.settings = None
        unused = np.flatnonzero(np.bincount(self.prompt, minlength=len(self.prompts)) == 0).tolist()
        holes, movers, left = _moves(unused, len(self.prompts))
        if holes and (columns := int(self.prefix[movers].max())):
            self.cache.copy("prompts", holes, movers, columns)
        self.prefix[holes], self.ahead[holes] = self.prefix[movers], self.ahead[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self.prompts[hole] = self.prompts[mover]
            self.filled[hole] = self.filled[mover]
            self.prompt[self.prompt == mover] = hole
        del self.prompts[left:], self.filled[left:]
        self.prefix, self.ahead = self.prefix[:left], self.ahead[:left]


def _moves(gone: list[int], count: int) -> tuple[list[int], list[int], int]:
    """Return the places that ``gone`` (ascending) leave, the last places that move there, and how many stay."""
    left, leaving = count - len(gone), set(gone)
    return [i for i in gone if i < left], [i for i in range(left, count) if i not in leaving], left


def most_stored(rows: int, budget: int, prompts: int, width: int) -> int:
    """Return the most tokens allocated for this number of rows of ``budget`` tokens and prompts of ``width``."""
    return with_spare(rows) * whole_blocks(budget) + with_spare(prompts) * width


def with_spare(places: int) -> int:
    """Return how many places are allocated where more come one by one."""
    return places + places // 4


def whole_blocks(columns: int) -> int:
    """Return how many columns are allocated."""
    return -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK


def cache_for(model: Any, device: torch.device) -> SharedPromptCache:
    """Return an empty cache of the model's shapes, found by sending one token through it.

    Raises ValueError for a model that stores something other than keys and values of its tokens.
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
    return SharedPromptCache(shapes, seen.layers[0].keys.dtype, device)


class HFEngine(InProcessEngine):
    """Satisfies :class:`core.engines.RolloutEngine` for any causal language model of transformers.

    ``model`` is copied, unless ``adopt`` hands it over. ``dtype`` (of the weights) and ``device`` default to the
    model's. At most ``max_batch_rows`` samples decode at once, their keys and values fill at most ``cache_gib``
    GiB, and a prefill sends about ``max_prefill_tokens`` through the model at once; what does not fit waits in
    the order of arrival. ``logits_noise`` is the standard deviation of noise on the logits that samples are drawn from,
    for studies of engines that differ from the learner. Raises ValueError for a model that it cannot run.
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
        logits_noise: float = 0.0,
        adopt: bool = False,
    ):
        if not 0 <= logits_noise < math.inf:
            raise ValueError(f"logits_noise={logits_noise}: a standard deviation is a number from 0 on")
        self.model = _prepared(model if adopt else copy.deepcopy(model), device, dtype)
        self.device = self.model.device
        config = self.model.config.get_text_config()
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        max_length = getattr(config, "max_position_embeddings", None)
        super().__init__(tokenizer, eos_ids(tokenizer, self.model), vocab_size, max_length)
        cache = cache_for(self.model, self.device)
        self.limits = BatchLimits(max_batch_rows, max_prefill_tokens, int(cache_gib * 2**30 / cache.bytes_per_token))
        unknown = unknown_among(known_ids(tokenizer), len(self.model.get_output_embeddings().weight))
        self.batch = DecodeBatch(self.model, self.limits, cache, unknown, logits_noise)

    def _check(self, request: SampleRequest) -> None:
        super()._check(request)
        prompt, budget = request.prompt_ids, request.sampling.max_tokens
        if most_stored(1, budget, 1, len(prompt)) > self.limits.cache_tokens:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_tokens={budget} is more than the cache holds "
                f"({self.limits.cache_tokens} tokens): raise the engine's cache_gib"
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

    def _model(self) -> nn.Module:
        return self.model

    def begin_update(self, weights: Sequence[Weight]) -> None:
        super().begin_update(weights)
        self._received: list[Checksum | None] = []

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        values, received = bucket.open(self.device)
        own = self.model.state_dict(keep_vars=True)
        for weight, value in zip(bucket.weights, values, strict=True):
            own[weight.names[0]].copy_(value)
        self._received.append(received)

    def join(self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float) -> None:
        GROUP.join(address, first_rank, size, self.device, timeout_s)

    def _finish(self) -> list[Proof]:
        release()
        self.batch.version += 1
        return [Proof(tuple(self._received), weights_checksum(self.model.named_parameters()), self.weight_sums())]

    @property
    def weights_dtype(self) -> torch.dtype:
        """Return the number format of its weights."""
        return self.model.dtype

    def weight_sums(self) -> dict[str, int]:
        """Return checksums of the weights that it computes with, by name."""
        return use_checks.weight_sums(self.model.named_parameters())

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
