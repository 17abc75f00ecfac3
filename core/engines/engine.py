"""The rollout engine contract: token ids in, token ids out, one request a sample, asynchronous.

:class:`RolloutEngine` is what the loop requires of an engine, and what all engines have in common:
the checks of requests, the steps of a weight update, and the rule that ends a response. ``hf.py``
(transformers, in this process) and ``vllm.py`` satisfy the contract. ``sglang.py`` names its
exceptions.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.config import registry
from core.config.code_by_path import load_object
from core.config.schema import Config, RolloutConfig, ValKwargs
from core.data.vocabulary import end_ids, known_ids, unknown_among
from core.engines.weight_buckets import (
    GROUP,
    Bucket,
    Checksum,
    Proof,
    Weight,
    check_weights,
    held_weights,
)
from core.learner.models import positions
from core.types import KeptSets, Segment, Stop, Trajectory
from core.vision.pictures import Pictures

# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    ``temperature=0`` is greedy; ``top_k=-1`` and ``top_p=1.0`` switch truncation off. The token
    that ends a response stays in it: the end-of-sequence id, a stop id, or the one that completes a
    ``stop`` string.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    kept_sets: bool = False  # the trajectory has the ids that top_k and top_p kept for each token

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"SamplingParams.max_tokens={self.max_tokens}: must be at least 1")

    @property
    def truncates(self) -> bool:
        """Return whether top-p or top-k may cut tokens off."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def records_kept(self) -> bool:
        """Return whether kept ids are recorded: they are asked for, and something may be cut."""
        return self.kept_sets and self.truncates


def sampling_params(config: Config, section: RolloutConfig | ValKwargs) -> SamplingParams:
    """Return how rollout or rollout.val_kwargs samples; greedy without ``do_sample``."""
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=section.temperature if section.do_sample else 0.0,
        top_p=section.top_p if section.do_sample else 1.0,
        top_k=section.top_k if section.do_sample else -1,
        ignore_eos=config.actor_rollout_ref.rollout.ignore_eos,
        kept_sets=section is config.actor_rollout_ref.rollout and bool(section.kept_sets),
    )


@dataclass(frozen=True)
class SampleRequest:
    """One sample to draw.

    The response depends on the weights and on all fields except ``episode``, and not on other
    requests in flight (up to rounding). Each turn of an ``episode`` begins with all of the turn
    before.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    episode: int | None = None
    # In the order of their placeholders in prompt_ids, which has one for each of their tokens
    media: Pictures | None = None


# -- responses -------------------------------------------------------------------------------------


class StopRule:
    """Decides after every token whether a response has ended. Each request has its own rule.

    Every engine decides here, so that a trajectory's ``stop`` means the same for all of them.
    The order is: end of sequence, stop id, stop string, limit.
    """

    def __init__(self, sampling: SamplingParams, eos: frozenset[int], tokenizer: Any):
        self.eos = frozenset() if sampling.ignore_eos else eos
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.strings = sampling.stop
        self.max_tokens = sampling.max_tokens
        self.tokenizer = tokenizer
        # The last tokens, over which a stop string may be spread: one token a byte, and some more,
        # since the first tokens of a text may be decoded differently and special ones have no text
        longest = max(map(len, self.strings), default=0)
        self.tail = 4 * longest + 16

    def ended(self, ids: Sequence[int]) -> Stop | None:
        """Return why the tokens so far are the whole response; None if they are not."""
        if ids[-1] in self.eos:
            return Stop.EOS
        if ids[-1] in self.stop_ids:
            return Stop.STOP_TOKEN
        if self.strings:
            text = self.tokenizer.decode(ids[-self.tail :], skip_special_tokens=True)
            if any(stop in text for stop in self.strings):
                return Stop.STOP_STRING
        return Stop.LENGTH if len(ids) >= self.max_tokens else None


@dataclass(eq=False)
class Generation:
    """A request in flight and what was sampled for it so far."""

    request: SampleRequest
    rule: StopRule
    version: int
    future: asyncio.Future | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Sequence[int]] = field(
        default_factory=list
    )  # of each token, where they are recorded
    stop: Stop | None = None
    # The position of the next token less the number of tokens before it: below zero after pictures
    position_offset: int = 0

    def write(self, token: int, logprob: float | None, kept: Sequence[int] | None = None) -> bool:
        """Add a token and the ids that truncation kept; return whether it was the last token.

        Raises FloatingPointError if the log-prob is not finite.
        """
        if logprob is None or not -np.inf < logprob < np.inf:
            raise FloatingPointError(
                "the model's logits are not finite: its weights hold NaN or infinite values"
            )
        self.ids.append(token)
        self.logprobs.append(logprob)
        if kept is not None:
            self.kept.append(kept)
        self.stop = self.rule.ended(self.ids)
        return self.stop is not None

    def trajectory(self) -> Trajectory:
        """Return the whole turn."""
        text = self.rule.tokenizer.decode(self.ids, skip_special_tokens=True)
        kept = None
        if self.request.sampling.records_kept:
            counts = np.array([len(ids) for ids in self.kept], np.int32)
            kept = KeptSets(np.concatenate(self.kept).astype(np.int32), counts)
        return Trajectory(
            prompt_ids=np.array(self.request.prompt_ids),
            response_ids=np.array(self.ids),
            response_mask=np.ones(len(self.ids), bool),
            logprobs=np.array(self.logprobs),
            segments=(Segment("policy", text),),
            stop=self.stop,
            policy_version=self.version,
            seed=self.request.seed,
            kept=kept,
        )


# -- the contract ----------------------------------------------------------------------------------


class RolloutEngine:
    """What the loop requires of an engine.

    An update is ``begin_update``, ``load`` for each bucket, ``end_update``. No request may be in
    flight, and none may come before its end.

    ``model`` is transformers' model, or its skeleton on the meta device. ``max_length`` bounds the
    prompt and response together. An engine adds ``sample`` and ``probe``, and the methods with an
    underscore at the end of this class.
    """

    sleeps = False  # whether ``sleep`` frees the device's memory until the next update

    def __init__(
        self,
        tokenizer: Any,
        model: nn.Module,
        device: torch.device,
        max_length: int = sys.maxsize,
    ):
        self.tokenizer = tokenizer
        self.model = model
        self.device = device
        self.eos = end_ids(tokenizer, getattr(model, "generation_config", None))
        self.vocab_size = model.config.get_text_config().vocab_size
        # Ids that are never sampled: the model has logits for them, and the tokenizer no text
        self.unknown = unknown_among(known_ids(tokenizer), self.vocab_size)
        self.max_length = min(max_length, positions(model.config))
        self.policy_version = 0  # of the weights that the latest update brought
        self.asleep = False
        self._closed = False
        self._received: list[Checksum | None] = []  # of the buckets of an update

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Return a one-turn trajectory. Cancelling the awaiting task aborts the request.

        Log-probs are of the distribution that was sampled from: after temperature, top-k and top-p,
        and at temperature 1 for greedy. Requests with equal prompts and pictures that are in flight
        together share one prefill.

        Raises ValueError for a request that the model or the cache cannot hold, RuntimeError once
        the engine is closed, FloatingPointError if the weights give no finite logits.
        """
        raise NotImplementedError

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return ``log p(token t | tokens < t)`` at temperature 1 for t = 1..len-1, float32.

        They are compared with the learner's after a weight sync.
        """
        raise NotImplementedError

    def _begin(self, request: SampleRequest) -> Generation:
        """Return the generation of a request. Raises as :meth:`sample`."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self.asleep:
            raise RuntimeError("the engine is asleep: update_weights wakes it")
        prompt = request.prompt_ids
        budget = request.sampling.max_tokens
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ValueError(
                "SampleRequest.prompt_ids: empty, or not of the model, which has "
                f"{self.vocab_size} tokens"
            )
        if len(prompt) + budget > self.max_length:
            raise ValueError(
                f"{len(prompt)} tokens + max_tokens={budget} are beyond the {self.max_length} of "
                "the model's max_position_embeddings or rollout.max_model_len: lower "
                "data.max_prompt_length or max_response_length"
            )
        rule = StopRule(request.sampling, self.eos, self.tokenizer)
        return Generation(request, rule, self.policy_version)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> list[Proof]:
        """Replace all weights by those of this process."""
        bucket = held_weights(named_tensors)
        self.begin_update(bucket.weights)
        self.load(bucket)
        return self.end_update(version)

    def join(self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float) -> None:
        """Join the group of ``size`` processes in which rank 0 broadcasts weights.

        The engine's devices are ``first_rank`` and those that follow.
        """
        GROUP.join(address, first_rank, size, self.device, timeout_s)

    def begin_update(self, weights: Sequence[Weight]) -> None:
        """Begin to replace all weights.

        Raises ValueError if a name is unknown, missing or of another shape, and RuntimeError if
        requests are in flight; then nothing has changed.
        """
        self._refuse_in_flight("update_weights")
        check_weights(self.model, weights)
        self._received = []

    def load(self, bucket: Bucket) -> None:
        """Copy the weights of a bucket."""
        values, received = bucket.open(self.device)
        self._received.append(received)
        self._copy(bucket.weights, values)

    def end_update(self, version: int) -> list[Proof]:
        """Set ``policy_version`` and return a proof for each device.

        Nothing that was computed with former weights (prefix caches) outlives it.
        """
        proofs = self._finish()
        self.asleep = False
        self.policy_version = version
        return proofs

    def sleep(self) -> None:
        """Give the device's memory to the learner until the next update, if the engine can."""
        self._refuse_in_flight("sleep")
        if self.sleeps and not self.asleep:
            self._sleep()
            self.asleep = True

    def close(self) -> None:
        """Cancel what is in flight and free model and cache. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._cancel_all()
            self._free()

    def _refuse_in_flight(self, action: str) -> None:
        count = self._in_flight()
        if count:
            raise RuntimeError(
                f"{action} with {count} requests in flight: await or cancel them first"
            )

    # -- what each engine does in its own way ----------------------------------------------------

    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        """Copy the values of a bucket's weights."""
        raise NotImplementedError

    def _finish(self) -> list[Proof]:
        """Let all later requests use the new weights, and return a proof for each device."""
        raise NotImplementedError

    def _in_flight(self) -> int:
        """Return the number of requests in flight."""
        raise NotImplementedError

    def _cancel_all(self) -> None:
        """Cancel all requests in flight."""
        raise NotImplementedError

    def _sleep(self) -> None:
        """Free the device's memory."""
        raise NotImplementedError

    def _free(self) -> None:
        """Free the model and the cache."""
        raise NotImplementedError


def make_engine(
    config: Config,
    model: Callable[[], nn.Module] | None,
    tokenizer: Any,
    device: torch.device,
) -> RolloutEngine:
    """Make the engine that ``actor_rollout_ref.rollout.name`` names.

    ``model`` gives the policy, which becomes the engine's own; vLLM and SGLang need an update
    before they sample. Without ``model``, if nothing learns, the engine itself reads the weights at
    the model's path. Raises InputError for an engine that this machine cannot have.
    """
    make = load_object(registry.ENGINES[config.actor_rollout_ref.rollout.name].function)
    return make(config, model, tokenizer, device)
