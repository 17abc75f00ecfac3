"""The in-process engine: a transformers model, decoded by our own loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.engines import SampleRequest
from core.engines.decoding import BatchLimits, DecodeBatch, cache_for, most_stored
from core.engines.kv_cache import ATTENTION
from core.engines.stepped import Row, SteppedEngine
from core.engines.stopping import eos_ids
from core.engines.weights import checked_weights


class HFEngine(SteppedEngine):
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
        self.device = self.model.device
        config = self.model.config.get_text_config()
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        max_length = getattr(config, "max_position_embeddings", None)
        super().__init__(tokenizer, eos_ids(tokenizer, self.model), vocab_size, max_length)
        cache = cache_for(self.model, self.device)
        self.limits = BatchLimits(max_batch_rows, max_prefill_tokens, int(cache_gib * 2**30 / cache.bytes_per_token))
        self.batch = DecodeBatch(self.model, self.limits, cache)

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

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, target, tensor in checked_weights(self.model, named_tensors):
            target.data.copy_(tensor)

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
