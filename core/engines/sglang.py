"""SGLang behind the engine contract: a running server on this machine, reached by HTTP alone.

This starts a server of version 0.5.23::

    python -m sglang.launch_server --model-path MODEL --dtype float32 \\
        --context-length LONGEST+8 --skip-tokenizer-init --skip-server-warmup \\
        --incremental-streaming-output --sampling-mask-max-tokens VOCABULARY

It keeps its memory while the learner works. A CPU also needs SGLANG_USE_CPU_ENGINE=1,
OMP_NUM_THREADS=1 and ``--device cpu --attention-backend torch_native --sampling-backend pytorch
--disable-overlap-schedule``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from core.config.schema import Config
from core.engines.engine import Generation, RolloutEngine, SampleRequest
from core.engines.weight_buckets import Proof, Weight
from core.errors import InputError, WorkersLost
from core.learner.models import load_policy, positions
from core.types import Trajectory
from reward_scores.http_client import HttpClient, HttpOptions, Reply, RequestFailed

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.engine_kwargs.sglang.url"
CONNECTIONS = 512  # at a time: a shell's usual limit is 1024 open files
ATTEMPTS = 3  # to get a whole answer
PAUSE_S = 0.5  # before the second attempt, twice as much before the third
# What a model's generation_config could set beside the request's own parameters
NEUTRAL = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_p": 0.0,
}


# What a part of a stream raises that is not what the server documents
UNREADABLE = (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError)


class CutStream(RuntimeError):
    """A streamed response is not whole."""


class SGLangEngine(RolloutEngine):
    """The engine of a server, with these exceptions to the contract.

    - A seed decides nothing, so a repeated run has other answers.
    - ``top_p`` is a share of the whole vocabulary also if ``top_k`` cuts it.
    - Requests with one prompt that arrive together may each compute it.
    - Weights that are not finite show only in the probe.
    - Pictures are refused.

    At most ``max_rows`` requests are with the server at once. Every response is streamed, and its
    end is decided here, token by token. A stream that is cut is requested again, ``ATTEMPTS`` times
    in all.
    """

    def __init__(
        self,
        tokenizer: Any,
        skeleton: nn.Module,
        server: SGLangServer,
        device: Any,
        max_length: int,
        max_rows: int,
    ):
        super().__init__(tokenizer, skeleton, device, max_length)
        self.server = server
        # Added to the logits before the log-probs are taken; JSON has no infinity
        self.never = {str(token): -1e9 for token in self.unknown.tolist()}
        self._names = map(str, count())
        self._room = asyncio.Semaphore(max_rows)  # used on the client's thread alone
        self._sent: dict[str, tuple[Future, asyncio.AbstractEventLoop]] = {}
        self._new_weights: dict[str, Tensor] = {}  # of the update under way
        self._streams = 0
        self._cut_streams = 0

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Sample a trajectory. Raises as the contract has it, and WorkersLost without a server."""
        self._begin(request)  # refuses what cannot be answered
        if request.media:
            raise ValueError(
                "SampleRequest.media: rollout.name=sglang sends no pictures; use hf or vllm"
            )
        name = next(self._names)
        future = self.server.submit(self._answer(request))
        self._sent[name] = (future, asyncio.get_running_loop())
        try:
            generation = await asyncio.wrap_future(future)
        finally:
            self._sent.pop(name, None)
        return generation.trajectory()

    async def _answer(self, request: SampleRequest) -> Generation:
        """Return a whole answer. Raises WorkersLost if every stream is cut."""
        async with self._room:
            attempts = 0
            while True:
                generation = self._begin(request)
                attempts += 1
                self._streams += 1
                try:
                    await self._follow(next(self._names), generation)
                    return generation
                except CutStream as error:
                    self._cut_streams += 1
                    problem = (
                        f"SGLang's server at {self.server.url} gave no whole answer: {error} "
                        f"({self._cut_streams} of {self._streams} streams were cut)"
                    )
                    if attempts == ATTEMPTS:
                        text = f"{problem}, and so in {ATTEMPTS} attempts"
                        raise WorkersLost(text) from error
                    log.warning("%s; it is requested again", problem)
                await asyncio.sleep(PAUSE_S * attempts)

    async def _follow(self, name: str, generation: Generation) -> None:
        """Write what the server samples to the generation until it ends.

        Aborts the request unless the server has ended it.
        """
        reason = None
        try:
            async with aclosing(self.server.generate(self._body(name, generation))) as parts:
                async for tokens, logprobs, reason in parts:
                    highest = max(tokens, default=0)
                    if highest >= self.vocab_size:
                        raise CutStream(f"token {highest} came; the model has {self.vocab_size}")
                    # A busy process gets several tokens at once, and the last one may be among them
                    for token, logprob in zip(tokens, logprobs, strict=True):
                        if generation.write(token, logprob):
                            return
                    if reason is not None:
                        break
            length = len(generation.ids)
            raise CutStream(
                f"it ended a response with {reason or 'no reason'} after {length} tokens"
            )
        finally:
            if reason is None:
                self.server.send("/abort_request", {"rid": name})

    def _body(self, name: str, generation: Generation) -> dict[str, Any]:
        """Return the body of a request for ``/generate``."""
        sampling = generation.request.sampling
        params: dict[str, Any] = {
            **NEUTRAL,
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "ignore_eos": True,
        }
        if self.never:
            params["logit_bias"] = self.never
        body = {
            "rid": name,
            "input_ids": list(generation.request.prompt_ids),
            "return_logprob": True,
            "stream": True,
            "sampling_params": params,
        }
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else self.vocab_size
        truncates = top_k < self.vocab_size or sampling.top_p < 1
        if sampling.temperature > 0 and truncates:
            params |= {"top_p": sampling.top_p, "top_k": top_k}
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return body

    def _in_flight(self) -> int:
        for name, (future, loop) in list(self._sent.items()):
            if loop.is_closed():
                future.cancel()
                del self._sent[name]
        return len(self._sent)

    def _cancel_all(self) -> None:
        for future, _ in self._sent.values():
            future.cancel()

    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        """Keep weights for the end of the update; a tied one by its first name, as in a file."""
        for weight, value in zip(weights, values, strict=True):
            self._new_weights[weight.names[0]] = value.detach().cpu().contiguous()

    def _finish(self) -> list[Proof]:
        """Let the server, which is on this machine, read the weights from a folder."""
        with TemporaryDirectory() as folder:
            save_file(self._new_weights, f"{folder}/model.safetensors", {"format": "pt"})
            self.model.config.save_pretrained(folder)
            self._new_weights = {}
            self.server.call(
                "/update_weights_from_disk",
                {"model_path": folder, "load_format": "safetensors", "abort_all_requests": True},
            )
        self.server.call("/flush_cache", {})
        reply = self.server.call("/weights_checker", {"action": "checksum"})
        received = tuple(self._received)
        checksums = [int(rank["per_gpu_checksum"], 16) for rank in reply["ranks"]]
        return [Proof(received, {"all": (checksum,)}) for checksum in checksums]

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        reply = self.server.call(
            "/generate",
            {
                "input_ids": list(token_ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
                "stream": False,
            },
        )
        logprobs = [triple[0] for triple in reply["meta_info"]["input_token_logprobs"][1:]]
        return np.array([np.nan if each is None else each for each in logprobs], np.float32)

    def _free(self) -> None:
        self.server.close()


class SGLangServer:
    """The server at ``url``; ``submit`` starts coroutines on its client's thread.

    A request is repeated while the server is busy (status 503 and such), for ``timeout_s``. Raises
    RuntimeError with the server's words if it refuses, WorkersLost if it is gone or silent.
    """

    def __init__(self, url: str, timeout_s: float):
        self.url = url.rstrip("/")
        options = HttpOptions(
            timeout_s,
            give_up_s=timeout_s,
            connections=CONNECTIONS,
            keep_alive=False,  # the server ends idle ones, at times under a request that took one
            trust_env=False,  # a proxy of the environment is for what is elsewhere
            # A server that is gone would come back without our weights
            retried=lambda failure, _: failure.kind == "busy",
        )
        self._http = HttpClient("SGLang client", options)
        self.submit = self._http.submit

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> Future:
        """Send a request, a GET without ``body``; return the future of its reply."""
        return self.submit(self._reply(path, body))

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self.send(path, body).result()

    def close(self) -> None:
        self._http.close()

    async def generate(
        self, body: Mapping[str, Any]
    ) -> AsyncIterator[tuple[list[int], list[Any], str | None]]:
        """Yield what is new of a streamed response: ids, log-probs, and the reason for its end.

        Raises CutStream if a part lacks something.
        """
        known = 0
        try:
            async with aclosing(self._http.lines("POST", f"{self.url}/generate", body)) as lines:
                async for line in lines:
                    text = line.removeprefix("data: ")
                    if not text.startswith("{"):
                        continue
                    try:
                        reply = json.loads(text)
                        if "error" in reply:
                            raise RuntimeError(f"SGLang refused /generate: {reply['error']}")
                        ids, logprobs, reason = _new_tokens(reply, known)
                    except UNREADABLE as error:
                        raise CutStream(
                            "a part of a response cannot be read "
                            f"({type(error).__name__}: {error}): {text:.200}"
                        ) from error
                    known += len(ids)
                    yield ids, logprobs, reason
        except RequestFailed as failure:
            raise self._error("/generate", failure) from failure

    async def _reply(self, path: str, body: Mapping[str, Any] | None) -> Any:
        method = "GET" if body is None else "POST"
        try:
            reply: Reply = await self._http.request(method, f"{self.url}{path}", body)
            is_json = reply.headers.get("content-type", "").startswith("application/json")
            value = reply.json() if is_json else reply.text
        except RequestFailed as failure:
            raise self._error(path, failure) from failure
        if isinstance(value, dict) and value.get("success") is False:
            raise RuntimeError(f"SGLang refused {path}: {reply.text:.600}")
        return value

    def _error(self, path: str, failure: RequestFailed) -> Exception:
        if failure.status or failure.kind == "reply":
            return RuntimeError(f"SGLang refused {path}: {failure}")
        return WorkersLost(f"SGLang's server at {self.url} is lost: {path}: {failure}")


def _new_tokens(reply: Mapping[str, Any], known: int) -> tuple[list[int], list[Any], str | None]:
    """Return the ids after the ``known`` first, their log-probs, and the reason for the end."""
    meta = reply["meta_info"]
    new = meta["completion_tokens"] - known
    pairs = meta["output_token_logprobs"] if new else []
    # Log-probs of the truncated distribution, from which the tokens were sampled, stand apart
    logprobs = meta.get("output_token_sampling_logprobs") or [pair[0] for pair in pairs]
    lists = (reply["output_ids"], logprobs, [pair[1] for pair in pairs])
    shortest = min(map(len, lists))
    if new < 0 or shortest < new:
        raise CutStream(f"only {shortest} of {new} new tokens came")
    # A stream has all tokens each time or, with --incremental-streaming-output, the new ones
    ids, logprobs, ids_of_logprobs = (values[len(values) - new :] for values in lists)
    if ids != ids_of_logprobs or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise CutStream(f"the new tokens are {ids}, and their log-probs are of {ids_of_logprobs}")
    return ids, logprobs, (meta["finish_reason"] or {}).get("type")


def problems(config: Config) -> list[str]:
    """Return why a run cannot have its server, a line for each reason."""
    options = config.actor_rollout_ref.rollout.engine_kwargs.get("sglang") or {}
    section = KEY.removesuffix(".url")
    lines = [
        f"{section}.{name}: is no option here; give it to the server"
        for name in {*options} - {"url"}
    ]
    if not options.get("url"):
        lines.append(
            f"{KEY}: rollout.name=sglang needs the URL of a running server; see "
            "core/engines/sglang.py"
        )
    if config.trainer.backend == "ray":
        lines.append(
            f"{KEY}: a server is one engine, and trainer.backend=ray has several; set "
            "trainer.backend=local"
        )
    return lines


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> SGLangEngine:
    """Make an engine on the server at ``rollout.engine_kwargs.sglang.url``. Raises InputError."""
    refusals = problems(config)
    if refusals:
        raise InputError(refusals)
    rollout = config.actor_rollout_ref.rollout
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    server = SGLangServer(rollout.engine_kwargs["sglang"]["url"], config.trainer.first_phase_s)
    try:
        server.call("/server_info")
    except (RuntimeError, WorkersLost) as error:
        server.close()
        raise InputError(f"{KEY}={server.url}: {error}") from error
    return SGLangEngine(
        tokenizer,
        skeleton,
        server,
        device=device,
        max_length=min(config.longest_sequence, positions(skeleton.config)),
        max_rows=rollout.max_num_seqs,
    )
