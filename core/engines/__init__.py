"""The rollout engine contract: token ids in, token ids out, one request a sample, asynchronous.

``hf.py`` (transformers, in process) and ``vllm.py`` satisfy it, ``sglang.py`` but for what its
docstring says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from core.config import registry
from core.config.code_by_path import load_object
from core.types import Trajectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from core.config.schema import Config, RolloutConfig, ValKwargs
    from core.engines.weight_buckets import Bucket, Proof, Weight
    from core.vision.pictures import Pictures


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled. ``temperature=0`` is greedy; ``top_k=-1`` and ``top_p=1.0``
    switch truncation off. What ends a response is kept: a stop id, the end-of-sequence id, the
    token that completes a ``stop`` string."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"SamplingParams.max_tokens={self.max_tokens}: must be at least 1")


@dataclass(frozen=True)
class SampleRequest:
    """One sample to draw. The response depends on the weights and on all fields but ``episode``,
    not on the other requests in flight (up to rounding). Each turn of an ``episode`` begins with
    all of the one before."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    episode: int | None = None
    # In the order of their placeholders in ``prompt_ids``, one a token of theirs
    media: Pictures | None = None


class RolloutEngine(Protocol):
    """What the loop requires of an engine. An update (``begin_update``, ``load`` for each bucket,
    ``end_update``) needs that nothing is in flight; between its begin and its end the engine must
    not sample."""

    policy_version: int  # of the weights that the latest update brought

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Return a one-turn trajectory, with log-probs of the distribution that was sampled from
        (after temperature, top-k and top-p; of temperature 1 for greedy). Requests with equal
        ``prompt_ids`` and ``media`` in flight together share one prefill. Cancelling the awaiting
        task aborts the request."""

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> list[Proof]:
        """Replace all weights by those of this process."""

    def join(self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float) -> None:
        """Join the group of ``size`` processes in which rank 0 broadcasts weights, as
        ``first_rank`` and following."""

    def begin_update(self, weights: Sequence[Weight]) -> None:
        """Begin to replace all weights by these. Raises ValueError where a name is unknown, missing
        or of another shape, and RuntimeError where requests are in flight, and changes nothing
        then."""

    def load(self, bucket: Bucket) -> None:
        """Copy the weights of a bucket."""

    def end_update(self, version: int) -> list[Proof]:
        """Set ``policy_version`` and return a proof for each device. Nothing that was computed with
        former weights (prefix caches) outlives it."""

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return ``log p(token t | tokens < t)`` at temperature 1 for t = 1..len-1, compared with
        the learner's."""

    def sleep(self) -> None:
        """Give the device's memory to the learner until the next update, where the engine was made
        for it."""

    def close(self) -> None:
        """Cancel what is in flight and free what the engine holds."""


class NoEngine:
    """What stands for an engine in a run that answers nothing."""

    def sleep(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def sampling_params(config: Config, section: RolloutConfig | ValKwargs) -> SamplingParams:
    """Return how a configuration section (rollout, or rollout.val_kwargs) samples; greedy without
    ``do_sample``."""
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=section.temperature if section.do_sample else 0.0,
        top_p=section.top_p if section.do_sample else 1.0,
        top_k=section.top_k if section.do_sample else -1,
        ignore_eos=config.actor_rollout_ref.rollout.ignore_eos,
    )


def make_engine(
    config: Config, model: Callable[[], nn.Module] | None, tokenizer: Any, device: torch.device
) -> RolloutEngine:
    """Make the engine that ``actor_rollout_ref.rollout.name`` names. ``model`` gives the policy,
    which becomes the engine's own; vLLM and SGLang need an update before they sample. Without
    ``model``, where nothing learns, the engine reads the weights of the model's path itself. Raises
    InputError for an engine that cannot be had."""
    make = load_object(registry.ENGINES[config.actor_rollout_ref.rollout.name].function)
    return make(config, model, tokenizer, device)
