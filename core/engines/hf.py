"""The in-process engine: a transformers model, decoded by our own loop.

One task of the running event loop decodes while requests are in flight and ends with the last of them. It
gives way between steps, so that what is finished is scored while the rest decodes. No threads and no timers:
what the requests' consumers do decides the order of everything, and a replay repeats it to the bit.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.engines import SampleRequest
from core.engines.decoding import BatchLimits, DecodeBatch, DecodeStats, Row, cache_for, most_stored
from core.engines.kv_cache import ATTENTION
from core.engines.stopping import StopRule, eos_ids, one_turn
from core.types import Trajectory

SETTLED_TURNS = 32  # after verdicts from elsewhere came: more than all that they set off can take
TURNS = 4  # turns of the event loop after a sample ended: its consumer, and whom that one wakes, may ask for more


class HFEngine:
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
        self.model = _prepared(model if adopt else copy.deepcopy(model), device, dtype)
        self.tokenizer = tokenizer
        self.device = self.model.device
        self.policy_version = 0
        self.eos = eos_ids(tokenizer, self.model)
        config = self.model.config.get_text_config()
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        cache = cache_for(self.model, self.device)
        self.limits = BatchLimits(max_batch_rows, max_prefill_tokens, int(cache_gib * 2**30 / cache.bytes_per_token))
        self._batch = DecodeBatch(self.model, self.limits, cache)
        self._waiting: list[Row] = []
        self._task: asyncio.Task | None = None
        self._closed = False
        # Awaited before each step: consumers whose answers come from elsewhere are then not overtaken by the next
        # step, and a replay stays exact. True: some of those answers came, and who got them may ask for more.
        self.before_step: Callable[[], Awaitable[bool]] | None = None

    @property
    def stats(self) -> DecodeStats:
        return self._batch.stats

    async def sample(self, request: SampleRequest) -> Trajectory:
        """As the contract says. Raises ValueError for a request that this model or cache cannot hold,
        RuntimeError once the engine is closed, FloatingPointError where the weights give no finite logits."""
        self._check(request)
        self._wake()
        row = Row(
            request,
            asyncio.get_running_loop().create_future(),
            StopRule.of(request.sampling, self.eos, self.tokenizer),
            self.policy_version,
        )
        self._waiting.append(row)
        self.stats.requests += 1
        return await row.future

    def _check(self, request: SampleRequest) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        prompt, budget = request.prompt_ids, request.sampling.max_tokens
        if not prompt:
            raise ValueError("SampleRequest.prompt_ids is empty: a response needs at least one token to follow")
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ValueError(
                f"SampleRequest.prompt_ids holds ids from {min(prompt)} to {max(prompt)}, but the model has "
                f"{self.vocab_size} tokens: is it this model's tokenizer?"
            )
        if self.max_length is not None and len(prompt) + budget > self.max_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_tokens={budget} is beyond the model's "
                f"max_position_embeddings={self.max_length}: lower data.max_prompt_length or data.max_response_length"
            )
        if most_stored(1, budget, 1, len(prompt)) > self.limits.cache_tokens:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_tokens={budget} is more than the cache holds "
                f"({self.limits.cache_tokens} tokens): raise the engine's cache_gib"
            )

    def _wake(self) -> None:
        """Starts the decoding task, unless it runs. What a former event loop left behind is dropped."""
        loop = asyncio.get_running_loop()
        if self._task is not None and self._task.get_loop() is loop and not self._task.done():
            return
        self._drop_all()
        self._task = loop.create_task(self._decode())

    async def _decode(self) -> None:
        task, turns = asyncio.current_task(), TURNS
        try:
            while True:
                await self._let_consumers_act(turns)
                self._drop_aborted()
                self._admit()
                if not self._batch.rows:
                    return
                finished = self._batch.step()
                for row in finished:
                    if not row.future.done():
                        row.future.set_result(self._trajectory(row))
                turns = TURNS if finished else 1
        except Exception as error:
            for row in self._in_flight():
                row.future.set_exception(error)
        finally:
            if self._task is task:  # else another event loop has taken over
                self._drop_all()

    async def _let_consumers_act(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        while self.before_step is not None and await self.before_step():
            for _ in range(SETTLED_TURNS):
                await asyncio.sleep(0)

    def _admit(self) -> None:
        count = self._batch.room_for(self._waiting)
        if count:
            joining, self._waiting = self._waiting[:count], self._waiting[count:]
            self._batch.admit(joining)

    def _drop_aborted(self) -> None:
        self._waiting, aborted = _split(self._waiting)
        slots = [slot for slot, row in enumerate(self._batch.rows) if row.future.done()]
        self._batch.remove(slots)
        self.stats.aborted += len(aborted) + len(slots)

    def _in_flight(self) -> list[Row]:
        return _split(self._batch.rows + self._waiting)[0]

    def _drop_all(self) -> None:
        for row in self._in_flight():
            if not row.future.get_loop().is_closed():
                row.future.cancel()
        self._waiting = []
        self._batch.clear()
        self._task = None

    def _trajectory(self, row: Row) -> Trajectory:
        return one_turn(row.request, row.ids, row.logprobs, row.stop, row.version, self.tokenizer)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As the contract says. Every weight must come, under one of its names where it has several (tied
        embeddings); two names of one weight must agree. Nothing is changed where anything is wrong."""
        live = [row for row in self._in_flight() if not row.future.get_loop().is_closed()]
        if live:
            raise RuntimeError(f"update_weights with {len(live)} requests in flight: await or cancel them first")
        for target, tensor in checked_weights(self.model, named_tensors):
            target.data.copy_(tensor)
        self.policy_version = version

    @torch.inference_mode()
    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """As the contract says: [len(token_ids) - 1] float32."""
        ids = torch.tensor([token_ids], device=self.device)
        logprob_TV = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprob_TV.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def close(self) -> None:
        """Cancels what is in flight and lets go of model and cache. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        task = self._task
        self._drop_all()
        if task is not None and not task.get_loop().is_closed():
            task.cancel()
        self.model = self._batch.model = None


def checked_weights(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (weight of the model, its new value), or a ValueError that lists all that is wrong.

    Names are those of ``state_dict``; names that share a weight are one weight.
    """
    own = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    given = dict(named_tensors)
    problems = [f"{name}: unknown" for name in given if name not in own]
    for name, tensor in given.items():
        if name in own and tensor.shape != own[name].shape:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, the engine's is {tuple(own[name].shape)}")
    pairs = []
    for names in names_of.values():
        values = [given[name] for name in names if name in given]
        if not values:
            problems.append(f"{' = '.join(names)}: missing")
            continue
        if any(not _same(values[0], other) for other in values[1:]):
            problems.append(f"{' = '.join(names)}: one weight in the engine, but given with different values")
        pairs.append((own[names[0]], values[0]))
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"update_weights: {len(problems)} weights do not fit, none was changed: {shown}")
    return pairs


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Those that somebody awaits, and the others."""
    return [row for row in rows if not row.future.done()], [row for row in rows if row.future.done()]


def _prepared(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """For inference: eval mode, no gradients, our attention where transformers lets a model choose."""
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
    elif getattr(model.config, "sliding_window", None) and "sliding_attention" in _layer_types(model.config):
        raise ValueError(
            f"rollout.name=hf cannot run {type(model).__name__}: eager attention with a sliding window; load it "
            "with attn_implementation=sdpa or use another engine"
        )
    return model


def _layer_types(config: Any) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ("sliding_attention",))
