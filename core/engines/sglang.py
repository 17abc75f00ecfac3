"""SGLang behind the engine contract: a running server on this machine, reached by its HTTP surface
alone.

``python -m sglang.launch_server --model-path MODEL --dtype float32 --context-length LONGEST+8
--skip-tokenizer-init --skip-server-warmup --incremental-streaming-output --sampling-mask-max-tokens
VOCABULARY`` starts one (0.5.23), which keeps its memory while the learner works; a CPU also needs
SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 and ``--device cpu --attention-backend torch_native
--sampling-backend pytorch --disable-overlap-schedule``.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from core.engines import SampleRequest
from core.engines.in_process_engine import Engine, Row
from core.engines.weight_buckets import Proof, Weight
from core.errors import InputError, WorkersLost
from core.learner.models import load_policy, positions
from core.types import Trajectory
from reward_scores.http_client import HttpClient, HttpOptions, Reply, RequestFailed

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.engine_kwargs.sglang.url"
CONNECTIONS = 512  # at a time: a shell's usual limit is 1024 open files
ATTEMPTS = 3  # at a whole answer
PAUSE_S = 0.5  # before the second one
# All that a model's generation_config could set beside what a request sets; ends are decided here
NEUTRAL = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_p": 0.0,
}


class CutStream(RuntimeError):
    """A streamed response is not whole."""


class SGLangEngine(Engine):
    """Satisfies :class:`core.engines.RolloutEngine`, but for what ``core.config.registry.ENGINES``
    has as facts.

    A seed decides nothing, so a run that is repeated has other answers. ``top_p`` counts
    probabilities of the whole vocabulary also where ``top_k`` cuts it. Requests with one prompt
    that arrive together may each compute it. Weights that are not finite show in the probe alone.
    No pictures are sent. At most ``max_rows`` requests are with the server at once. Every response
    is streamed and examined here token by token. A stream that is cut is no answer: it is requested
    again, at most ``ATTEMPTS`` times in all.
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
        self.never = {str(one): -1e9 for one in self.unknown.tolist()}
        self._names = map(str, count())
        self._room = asyncio.Semaphore(max_rows)  # of the client's thread
        self._sent: dict[str, tuple[Future, asyncio.AbstractEventLoop]] = {}
        self._new: dict[str, Tensor] = {}  # weights of an update
        self._streams = 0
        self._cut_streams = 0

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Sample a trajectory. Raises as the in-process engines do, and WorkersLost without a
        server."""
        self._begin(request)
        if request.media:
            raise ValueError(
                "SampleRequest.media: rollout.name=sglang sends none; use rollout.name=hf or vllm"
            )
        name = next(self._names)
        future = self.server.submit(self._answer(request))
        self._sent[name] = future, asyncio.get_running_loop()
        try:
            row = await asyncio.wrap_future(future)
        finally:
            self._sent.pop(name, None)
        return row.trajectory()

    async def _answer(self, request: SampleRequest) -> Row:
        """Return the row with a whole answer. Raises WorkersLost where every stream is cut."""
        async with self._room:
            attempts = 0
            while True:
                row = self._begin(request)
                attempts += 1
                self._streams += 1
                try:
                    await self._follow(next(self._names), row)
                    return row
                except CutStream as error:
                    self._cut_streams += 1
                    rate = f"{self._cut_streams} of {self._streams} streams were cut"
                    text = (
                        f"SGLang's server at {self.server.url} gave no whole answer: {error} "
                        f"({rate})"
                    )
                    if attempts == ATTEMPTS:
                        raise WorkersLost(f"{text}, and so in {ATTEMPTS} attempts") from error
                    log.warning("%s; it is requested again", text)
                await asyncio.sleep(PAUSE_S * attempts)

    async def _follow(self, name: str, row: Row) -> None:
        """Write what the server samples to the row until it ends, and abort the request unless the
        server ended it."""
        why = None
        try:
            async with aclosing(self.server.generate(self._body(name, row))) as parts:
                async for tokens, logprobs, why in parts:
                    if max(tokens, default=0) >= self.vocab_size:
                        raise CutStream(
                            f"the model has {self.vocab_size} tokens, and {max(tokens)} came"
                        )
                    # It stops at the last token: several come at once to a busy process
                    if any(row.write(*pair) for pair in zip(tokens, logprobs, strict=True)):
                        return
                    if why is not None:
                        break
            raise CutStream(
                f"it ended a response with {why or 'no reason'} after {len(row.ids)} tokens"
            )
        finally:
            if why is None:
                self.server.send("/abort_request", {"rid": name})

    def _body(self, name: str, row: Row) -> dict[str, Any]:
        sampling = row.request.sampling
        own = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "ignore_eos": True,
        }
        params: dict[str, Any] = {**NEUTRAL, **own}
        if self.never:
            params["logit_bias"] = self.never
        body = {
            "rid": name,
            "input_ids": list(row.request.prompt_ids),
            "return_logprob": True,
            "stream": True,
        }
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else self.vocab_size
        if sampling.temperature > 0 and (top_k < self.vocab_size or sampling.top_p < 1):
            params |= {"top_p": sampling.top_p, "top_k": top_k}
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return {**body, "sampling_params": params}

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
        """Keep weights for the end of the update. A tied weight goes by its first name, as in a
        checkpoint."""
        pairs = zip(weights, values, strict=True)
        self._new |= {weight.names[0]: value.detach().cpu().contiguous() for weight, value in pairs}

    def _finish(self) -> list[Proof]:
        """Let the server, which is on this machine, read the weights from a folder."""
        with TemporaryDirectory() as folder:
            save_file(self._new, f"{folder}/model.safetensors", {"format": "pt"})
            self.model.config.save_pretrained(folder)
            self._new = {}
            where = {"model_path": folder, "load_format": "safetensors", "abort_all_requests": True}
            self.server.call("/update_weights_from_disk", where)
        self.server.call("/flush_cache", {})
        ranks = self.server.call("/weights_checker", {"action": "checksum"})["ranks"]
        return [
            Proof(tuple(self._received), {"all": (int(rank["per_gpu_checksum"], 16),)})
            for rank in ranks
        ]

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of the tokens after the first, [len(token_ids) - 1] float32."""
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(token_ids), "sampling_params": params, "return_logprob": True}
        reply = self.server.call("/generate", {**body, "logprob_start_len": 0, "stream": False})
        log_probs = [triple[0] for triple in reply["meta_info"]["input_token_logprobs"][1:]]
        return np.array([np.nan if one is None else one for one in log_probs], np.float32)

    def _free(self) -> None:
        self.server.close()


class SGLangServer:
    """A server that answers at ``url``; ``submit`` starts coroutines on its client's thread.

    A request is repeated while the server is busy (status 503 and such), for ``timeout_s``. They
    raise RuntimeError with the server's words where it refuses one, and WorkersLost where it is
    gone or silent.
    """

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        # No connection is kept: the server ends idle ones, at times under a request that just took
        # one. A proxy of the environment is for what is elsewhere.
        options = HttpOptions(
            timeout_s,
            give_up_s=timeout_s,
            connections=CONNECTIONS,
            keep_alive=False,
            trust_env=False,
            # One that is gone comes back without our weights
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
        """Yield what is new of a streamed response: ids, log-probs and SGLang's reason for the end
        (None before it).

        Raises CutStream where a part lacks something.
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
                        ids, logprobs, why = _new_tokens(reply, known)
                    except (
                        ValueError,
                        RecursionError,
                        KeyError,
                        TypeError,
                        AttributeError,
                        IndexError,
                    ) as error:
                        what = f"{type(error).__name__}: {error}"
                        raise CutStream(
                            f"a part of a response cannot be read ({what}): {text:.200}"
                        ) from error
                    known += len(ids)
                    yield ids, logprobs, why
        except RequestFailed as failure:
            raise self._error("/generate", failure) from failure

    async def _reply(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            reply: Reply = await self._http.request(
                "GET" if body is None else "POST", f"{self.url}{path}", body
            )
            json_type = reply.headers.get("content-type", "").startswith("application/json")
            value = reply.json() if json_type else reply.text
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
    """Return the ids that follow the ``known`` first ones, their log-probs, and SGLang's reason for
    the end."""
    meta = reply["meta_info"]
    new = meta["completion_tokens"] - known
    pairs = meta["output_token_logprobs"] if new else []
    # Those of the truncated distribution, which is what was sampled from, are apart
    logprobs = meta.get("output_token_sampling_logprobs") or [pair[0] for pair in pairs]
    # A stream has all tokens each time, or with --incremental-streaming-output the new ones
    lists = reply["output_ids"], logprobs, [pair[1] for pair in pairs]
    if new < 0 or min(map(len, lists)) < new:
        raise CutStream(f"only {min(map(len, lists))} of {new} new tokens came")
    ids, logprobs, named = (values[len(values) - new :] for values in lists)
    if ids != named or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise CutStream(f"the new tokens are {ids}, and their log-probs are of {named}")
    return ids, logprobs, (meta["finish_reason"] or {}).get("type")


def problems(config: Config) -> list[str]:
    """Return why a run cannot have its server, a line each."""
    given = config.actor_rollout_ref.rollout.engine_kwargs.get("sglang") or {}
    lines = [
        f"{KEY[:-3]}{name}: is no option here; give it to the server" for name in {*given} - {"url"}
    ]
    if not given.get("url"):
        lines.append(
            f"{KEY}: rollout.name=sglang needs the URL of a running server; see "
            f"core/engines/sglang.py"
        )
    if config.trainer.backend == "ray":
        lines.append(
            f"{KEY}: a server is one engine, and trainer.backend=ray has several; set "
            f"trainer.backend=local"
        )
    return lines


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> SGLangEngine:
    """Make an engine on the server at ``rollout.engine_kwargs.sglang.url``. Raises InputError."""
    if missing := problems(config):
        raise InputError(missing)
    rollout, data = config.actor_rollout_ref.rollout, config.data
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    server = SGLangServer(rollout.engine_kwargs["sglang"]["url"], config.trainer.first_phase_s)
    try:
        server.call("/server_info")
    except (RuntimeError, WorkersLost) as error:
        server.close()
        raise InputError(f"{KEY}={server.url}: {error}") from error
    longest = data.max_prompt_length + data.max_response_length
    limits = {
        "max_length": min(longest, positions(skeleton.config)),
        "max_rows": rollout.max_num_seqs,
    }
    return SGLangEngine(tokenizer, skeleton, server, device=device, **limits)
