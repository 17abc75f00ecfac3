"""What this repository's engines share: the checks of requests and updates, and the loop of those
that decode here.

One task of the running event loop steps while requests are in flight and ends with the last of
them. It yields between steps, so that what is finished is scored while the rest decodes. There are
no threads and no timers: the requests' consumers alone decide the order of everything, and a replay
repeats it to the bit.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.data.vocabulary import end_ids, known_ids, unknown_among
from core.engines import SampleRequest
from core.engines.sampling import StopRule
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
from core.types import Segment, Stop, Trajectory

log = logging.getLogger(__name__)

# Turns of the event loop after scores from elsewhere came: more than all their effects can take
SETTLED_TURNS = 32
TURNS = 4  # turns after a sample ended: its consumer, and those that it wakes, may request more


@dataclass(eq=False)
class Row:
    """A request in flight and what it has written so far."""

    request: SampleRequest
    rule: StopRule
    version: int
    future: asyncio.Future | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None
    offset: int = 0  # of positions from the count of tokens, below zero behind pictures

    def write(self, token: int, logprob: float) -> bool:
        """Append a token; return whether it was the last. Raises FloatingPointError for one that is
        not finite."""
        if logprob is None or not -np.inf < logprob < np.inf:
            raise FloatingPointError(
                "the model's logits are not finite: its weights hold NaN or infinite values"
            )
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.stop = self.rule.ended(self.ids)
        return self.stop is not None

    def trajectory(self) -> Trajectory:
        """Return what was written, which is a whole turn."""
        return Trajectory(
            prompt_ids=np.array(self.request.prompt_ids),
            response_ids=np.array(self.ids),
            response_mask=np.ones(len(self.ids), bool),
            logprobs=np.array(self.logprobs),
            segments=(
                Segment("policy", self.rule.tokenizer.decode(self.ids, skip_special_tokens=True)),
            ),
            stop=self.stop,
            policy_version=self.version,
            seed=self.request.seed,
        )


class Engine:
    """The parts of :class:`core.engines.RolloutEngine` that do not depend on what computes.

    ``model`` is transformers' model, or its skeleton on the meta device; ``max_length`` bounds
    prompt and response. A subclass has ``_copy`` (the weights of a bucket), ``_finish`` (makes new
    weights those of all requests and returns a proof for each device), ``_in_flight`` (counts
    requests), ``_cancel_all``, ``_free``, and ``_sleep`` if it sleeps.
    """

    sleeps = False  # whether ``sleep`` frees the device's memory until the next update

    def __init__(
        self, tokenizer: Any, model: nn.Module, device: torch.device, max_length: int = sys.maxsize
    ):
        self.tokenizer, self.model, self.device = tokenizer, model, device
        # Ids that end a response
        self.eos = end_ids(tokenizer, getattr(model, "generation_config", None))
        self.vocab_size = model.config.get_text_config().vocab_size
        # Ids that are never drawn
        self.unknown = unknown_among(known_ids(tokenizer), self.vocab_size)
        self.max_length = min(max_length, positions(model.config))
        self.policy_version = 0
        self.asleep = self._closed = False
        self._received: list[Checksum | None] = []

    def _begin(self, request: SampleRequest) -> Row:
        """Return the row of a request. Raises RuntimeError or ValueError where it cannot be
        answered."""
        if self._closed or self.asleep:
            raise RuntimeError(
                f"the engine is {'closed' if self._closed else 'asleep: update_weights wakes it'}"
            )
        prompt, budget = request.prompt_ids, request.sampling.max_tokens
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ValueError(
                f"SampleRequest.prompt_ids: empty, or not of the model, which has "
                f"{self.vocab_size} tokens"
            )
        if len(prompt) + budget > self.max_length:
            rule = (
                f"{len(prompt)} tokens + max_tokens={budget} are beyond the {self.max_length} "
                f"of the model's"
            )
            fix = "lower data.max_prompt_length or max_response_length"
            raise ValueError(f"{rule} max_position_embeddings or rollout.max_model_len: {fix}")
        return Row(
            request, StopRule(request.sampling, self.eos, self.tokenizer), self.policy_version
        )

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> list[Proof]:
        bucket = held_weights(named_tensors)
        self.begin_update(bucket.weights)
        self.load(bucket)
        return self.end_update(version)

    def begin_update(self, weights: Sequence[Weight]) -> None:
        self._refuse_in_flight("update_weights")
        check_weights(self.model, weights)
        self._received = []

    def load(self, bucket: Bucket) -> None:
        values, received = bucket.open(self.device)
        self._received.append(received)
        self._copy(bucket.weights, values)

    def end_update(self, version: int) -> list[Proof]:
        proofs = self._finish()
        self.asleep, self.policy_version = False, version
        return proofs

    def join(self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float) -> None:
        GROUP.join(address, first_rank, size, self.device, timeout_s)

    def sleep(self) -> None:
        self._refuse_in_flight("sleep")
        if self.sleeps and not self.asleep:
            self._sleep()
            self.asleep = True

    def _refuse_in_flight(self, what: str) -> None:
        if count := self._in_flight():
            raise RuntimeError(
                f"{what} with {count} requests in flight: await or cancel them first"
            )

    def close(self) -> None:
        """Cancel what is in flight and free model and cache. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._cancel_all()
            self._free()


class InProcessEngine(Engine):
    """An engine that computes a step of all running rows at a time. A subclass has ``_running``
    (those), ``_admit`` (moves what has room from the front of ``_waiting``), ``_advance`` (takes a
    step and returns the rows that ended with it, which have left) and ``_drop`` (running rows)."""

    # Awaited before each step: consumers whose answers come from elsewhere are then not overtaken
    # by the next step, and a replay stays exact. True: some of those answers came, and their
    # receivers may request more.
    before_step: Callable[[], Awaitable[bool]] | None = None

    def __init__(
        self, tokenizer: Any, model: nn.Module, device: torch.device, max_length: int = sys.maxsize
    ):
        super().__init__(tokenizer, model, device, max_length)
        # Of all consumers that wait, in the order of their arrival
        self._requests: dict[Row, None] = {}
        self._waiting: list[Row] = []
        self._task: asyncio.Task | None = None

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Sample a trajectory. Raises ValueError for a request that this model or cache cannot
        hold, RuntimeError once the engine is closed, FloatingPointError where the weights give no
        finite logits."""
        row, loop = self._begin(request), asyncio.get_running_loop()
        if self._task is None or self._task.get_loop() is not loop or self._task.done():
            self._drop_all()  # what a former event loop left behind
            self._task = loop.create_task(self._decode())
        row.future = loop.create_future()
        self._waiting.append(row)
        self._requests[row] = None
        try:
            return await row.future
        finally:
            del self._requests[row]

    async def _decode(self) -> None:
        task, turns = asyncio.current_task(), TURNS
        try:
            while True:
                await self._let_consumers_act(turns)
                self._waiting = _awaited(self._waiting)
                if aborted := [row for row in self._running() if row.future.done()]:
                    self._drop(aborted)
                self._admit()
                if not self._running():
                    return
                finished = self._advance()
                for row in _awaited(finished):
                    row.future.set_result(row.trajectory())
                turns = TURNS if finished else 1
        except Exception as error:
            live = self._live()
            for row in live:
                row.future.set_exception(error)
            if not live:  # nobody awaits an answer: the fault must not end here unseen
                raise
        finally:
            if self._task is task:  # else another event loop has taken over
                self._drop_all()

    async def _let_consumers_act(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        while self.before_step is not None and await self.before_step():
            for _ in range(SETTLED_TURNS):
                await asyncio.sleep(0)

    def _in_flight(self) -> int:
        live = len(self._live())
        if not live:  # what a closed event loop left behind must not go on with other weights
            self._waiting = []
            self._drop(list(self._running()))
        return live

    def _live(self) -> list[Row]:
        return [
            row for row in _awaited(list(self._requests)) if not row.future.get_loop().is_closed()
        ]

    def _drop_all(self) -> None:
        for row in self._live():
            row.future.cancel()
        self._waiting = []
        self._task = None
        try:
            self._drop(list(self._running()))
        except Exception:  # of an engine that failed before: its first fault is the reason to show
            log.warning("requests could not be aborted", exc_info=True)

    def _cancel_all(self) -> None:
        task = self._task
        self._drop_all()
        if task is not None and not task.get_loop().is_closed():
            task.cancel()


def _awaited(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row.future.done()]
