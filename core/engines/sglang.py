"""SGLang behind the engine contract: a server beside this process, reached by its HTTP surface alone.

Ids go in, ids and log-probs come out, and ``core.engines.stopping`` decides what ended a response, as for every engine.
Requests are followed on the thread of the HTTP client.
Weights travel by the server's update group: this process is its rank 0 and broadcasts over gloo, through host memory,
what it received; the server's processes are the other ranks. The engine is tested with SGLang 0.5.23 on a CPU.

Of the contract (:mod:`core.engines`) SGLang cannot keep this, and ``core.config.registry.ENGINES`` has it as facts that
the configuration's rules read:

* A seed decides nothing: ``sampling_seed`` did not reproduce a sample, and the mode that would make it do so refuses
  the attention of a CPU. A request that is repeated has another answer, so a run that is repeated or resumed has other
  ones too. Greedy answers are equal up to rounding.
* ``top_p`` counts probabilities of the whole vocabulary also where ``top_k`` cuts it. The log-probs are those of what
  was sampled from, but with both set it is not the distribution of the other engines.
* Requests with one prompt that arrive together may each compute it; the server's cache shares it with later ones.
* Weights that are not finite show in the probe alone: the sampler replaces NaN. Pictures are not sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.config.limits import FULL_PRECISION
from core.config.section import thaw
from core.engines import SampleRequest
from core.engines.in_process_engine import Engine, Row, positions
from core.engines.sglang_server import KEY, OWN, ResponsePart, SGLangServer, launch, problems, python_of
from core.engines.stopping import eos_ids
from core.engines.weight_buckets import Proof, Weight
from core.errors import InputError
from core.learner.models import load_policy, resolve_path
from core.types import Trajectory

if TYPE_CHECKING:
    from core.config.schema import Config

ON_CPU = {
    **{"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"},
    **{"disable_overlap_schedule": True, "sleep_on_idle": True},  # the learner needs the cores in its turn
}
FIXED = {
    **{"skip_tokenizer_init": True, "skip_server_warmup": True, "incremental_streaming_output": True},
    **{"log_level": "warning", "random_seed": 0},
}
SPARE = 8  # positions that SGLang keeps free behind prompt and response
CPU_CACHE_TOKENS = 1 << 18  # the most that a CPU's cache holds; SGLang's own default is a share of the machine's memory
NEVER = -1e9  # JSON has no infinity
CLOSE_S = 10.0  # for a server that goes on to forget this engine
JOIN_S = 300.0  # for the server to join the update group


class SGLangEngine(Engine):
    """Satisfies :class:`core.engines.RolloutEngine`, but for what the module's head names.

    ``skeleton`` is the model without weights (on the meta device). At most ``max_rows`` requests are with the server
    at once. With ``sleeps`` the server was started such that it can free its memory. ``close`` ends the server where
    it is this process's own. Raises InputError where the server has another model or number format.
    """

    def __init__(
        self,
        tokenizer: Any,
        skeleton: nn.Module,
        server: SGLangServer,
        *,
        device: torch.device,
        max_length: int,
        max_rows: int,
        sleeps: bool = False,
    ):
        if max_length < positions(skeleton):
            self.length_key = "actor_rollout_ref.rollout.max_model_len"
        super().__init__(tokenizer, skeleton, device, max_length)
        self.server, self.sleeps = server, sleeps
        # Added to the logits before the log-probs are taken
        self.never = {str(one): NEVER for one in self.unknown.tolist()}
        self.ends = self.eos | eos_ids(
            skeleton.config.get_text_config()
        )  # what ends a response of the server's own accord
        self.name = uuid.uuid4().hex[:8]  # of this engine, among those that a server has met
        self._numbers = count()
        self._room = asyncio.Semaphore(max_rows)  # of the client's thread
        self._sent: dict[str, tuple[Future, asyncio.AbstractEventLoop]] = {}
        self._group: dist.ProcessGroupGloo | None = None
        self.served = server.get("/model_info")["weight_version"]  # the server's name of its weights

    def _check(self, request: SampleRequest) -> None:
        super()._check(request)
        if request.media:
            raise ValueError("SampleRequest.media: rollout.name=sglang sends none; use rollout.name=hf or vllm")

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Sample a trajectory. Raises ValueError for a request that this model cannot hold, RuntimeError once the
        engine is closed, FloatingPointError where the weights give no finite logits, WorkersLost without a server."""
        self._check(request)
        row, name = self._row(request), f"{self.name}-{next(self._numbers)}"
        future = self.server.loop.submit(self._follow(name, row))
        self._sent[name] = future, asyncio.get_running_loop()
        try:
            await asyncio.wrap_future(future)
        finally:
            self._sent.pop(name, None)
        return self._trajectory(row)

    async def _follow(self, name: str, row: Row) -> None:
        """Write what the server samples to the row until it ends, and abort the request unless the server ended it."""
        async with self._room:
            ended = False
            try:
                async with aclosing(self.server.generate(self._body(name, row))) as parts:
                    async for part in parts:
                        ended = part.ended is not None
                        if self._write(row, part):
                            return
            finally:
                if not ended:
                    self.server.send("/abort_request", {"rid": name})

    def _watches(self, row: Row) -> bool:
        """Return whether each token is examined here: stop strings may end it, or the server's own ids must not."""
        watched = row.rule.eos | row.rule.stop_ids
        return row.rule.strings is not None or (bool(watched) and not self.ends <= watched)

    def _body(self, name: str, row: Row) -> dict[str, Any]:
        sampling, streams = row.request.sampling, self._watches(row)
        ids = sorted(row.rule.eos | row.rule.stop_ids)
        # All that a model's generation_config could set is set here.
        params: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        params |= {"min_p": 0.0, "temperature": sampling.temperature, "max_new_tokens": sampling.max_tokens}
        if self.never:
            params["logit_bias"] = self.never
        params |= {"ignore_eos": streams or not ids, "stop_token_ids": ids}  # the former would ignore the latter too
        body = {"rid": name, "input_ids": list(row.request.prompt_ids), "return_logprob": True, "stream": streams}
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else self.vocab_size
        if sampling.temperature > 0 and (top_k < self.vocab_size or sampling.top_p < 1):
            params |= {"top_p": sampling.top_p, "top_k": top_k}
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return {**body, "sampling_params": params}

    def _write(self, row: Row, part: ResponsePart) -> bool:
        """Append what the server wrote to the row; return whether it ended."""
        if part.version != self.served:
            problem = f"the weights of SGLang's server are {part.version}, this engine's are {self.served}"
            raise RuntimeError(f"{problem}: another process updates them; a server serves one run at a time")
        done, left = False, len(part.ids)
        for token, logprob in zip(part.ids, part.logprobs, strict=True):
            if logprob is None or not np.isfinite(logprob):
                raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinite values")
            done, left = row.write(token, logprob), left - 1
            if done:  # a stream may have more: it brings several at once where this process was busy
                break
        if part.ended is not None and not done or left and not self._watches(row):
            raise RuntimeError(f"SGLang ended a response {left} tokens after {len(row.ids)} with {part.ended}")
        return done

    def _in_flight(self) -> int:
        for name, (future, loop) in list(self._sent.items()):
            if loop.is_closed():
                future.cancel()
                del self._sent[name]
        return len(self._sent)

    def _cancel_all(self) -> None:
        for future, _ in self._sent.values():
            future.cancel()

    def begin_update(self, weights: Sequence[Weight]) -> None:
        """Stop the server, wake it where it sleeps, and open its update."""
        super().begin_update(weights)
        if self._group is None:
            self._group = self._joined()
        self.server.post("/pause_generation", {"mode": "abort"})
        if self.asleep:
            self.server.post("/resume_memory_occupation", {"tags": ["weights"]})
        self.server.post("/begin_weight_update", {"selector": "all"})

    def _joined(self) -> dist.ProcessGroupGloo:
        """Return a group of this process and the server's, which torch there makes as ``init_process_group`` does."""
        timeout = timedelta(seconds=min(JOIN_S, self.server.timeout_s))
        with socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM
        ) as probe:  # the address of this machine towards the server
            probe.connect((urlsplit(self.server.url).hostname, 9))  # sends nothing
            host = probe.getsockname()[0]
        ranks = 1 + self.server.get("/server_info")["tp_size"]
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        where = {"master_address": host, "master_port": store.port, "group_name": self.name}
        reply = self.server.send(
            "/init_weights_update_group", {**where, "rank_offset": 1, "world_size": ranks, "backend": "gloo"}
        )
        for prefix in (self.name, f"{self.name}/", "cpu/"):  # torch puts the latter two before a group's names
            store = dist.PrefixStore(prefix, store)
        group = dist.ProcessGroupGloo(store, 0, ranks, timeout)
        reply.result()
        return group

    def _copy(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        """Broadcast weights to the server. A tied weight goes by its first name, as in a checkpoint."""
        values = [value.detach().cpu().contiguous() for value in values]
        body = {
            "names": [weight.names[0] for weight in weights],
            "dtypes": [str(value.dtype).removeprefix("torch.") for value in values],
            "shapes": [list(value.shape) for value in values],
            **{"group_name": self.name, "flush_cache": False},
        }
        reply = self.server.send("/update_weights_from_distributed", body)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        sent = [self._group.broadcast([value], options) for value in values]
        reply.result()  # before waiting: a server that refuses receives nothing
        for one in sent:
            one.wait()

    def _finish(self) -> list[Proof]:
        self.server.post("/end_weight_update", {})
        if self.asleep:
            self.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self.server.post("/flush_cache", {})
        ranks = self.server.post("/weights_checker", {"action": "checksum"})["ranks"]
        self.server.post("/continue_generation", {})
        return [Proof(tuple(self._received), (int(rank["per_gpu_checksum"], 16),)) for rank in ranks]

    def end_update(self, version: int) -> list[Proof]:
        proofs = super().end_update(version)
        self.served = f"{self.name}/{version}"  # every response has it: the updates of another run would show
        self.server.post("/update_weight_version", {"new_version": self.served, "abort_all_requests": False})
        return proofs

    def _sleep(self) -> None:
        self.server.post("/release_memory_occupation", {})

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of the tokens after the first, [len(token_ids) - 1] float32."""
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(token_ids), "sampling_params": params, "return_logprob": True}
        reply = self.server.post("/generate", {**body, "logprob_start_len": 0, "stream": False})
        log_probs = [triple[0] for triple in reply["meta_info"]["input_token_logprobs"][1:]]
        return np.array([np.nan if one is None else one for one in log_probs], np.float32)

    def _free(self) -> None:
        if self.server.process is None and self._group is not None:
            with suppress(RuntimeError, TimeoutError):
                self.server.send("/destroy_weights_update_group", {"group_name": self.name}).result(CLOSE_S)
        self._group = None
        self.server.close()


def check_server(server: SGLangServer, arguments: dict[str, Any]) -> None:
    """Check that a server which others started can stand for one with these arguments.

    Of the same model means of the same path: SGLang loads weights of another size in part, without an error. Raises
    InputError with what differs in model, number format or room, or that nothing answers there.
    """
    try:
        facts = {**server.get("/model_info"), **server.get("/server_info")}
    except RuntimeError as error:
        raise InputError(f"{KEY}.url={server.url}: {error}; start a server there, or leave the key out") from error
    wrong = []
    if facts["dtype"] != arguments["dtype"]:
        wrong.append(f"dtype {facts['dtype']}, not {arguments['dtype']}")
    if os.path.realpath(facts["model_path"]) != os.path.realpath(arguments["model_path"]):
        wrong.append(f"model_path {facts['model_path']}, not {arguments['model_path']}")
    room, longest = facts["max_req_input_len"] + SPARE, arguments["context_length"] - SPARE
    if room < longest:
        wrong.append(f"room for {room} tokens, not {longest}")
    if wrong:
        fix = "start one for this run's model, or leave the key out to have one started"
        raise InputError(f"{KEY}.url={server.url}: the server has {'; '.join(wrong)}; {fix}")


def server_arguments(
    config: Config, skeleton: nn.Module, device: torch.device, *, reads_weights: bool
) -> dict[str, Any]:
    """Return the server's arguments for a configuration; those of ``engine_kwargs.sglang`` override the others."""
    part, data = config.actor_rollout_ref, config.data
    model, rollout = part.model, part.rollout
    options = thaw(rollout.engine_kwargs.get("sglang") or {})
    longest = min(rollout.max_model_len or data.max_prompt_length + data.max_response_length, positions(skeleton))
    on_cpu, cuda = device.type == "cpu", device.type == "cuda"
    overrides = {name: value for name, value in thaw(model.override_config).items() if name != "attn_implementation"}
    arguments = {
        **FIXED,
        **(ON_CPU if on_cpu else {}),
        "model_path": resolve_path(model.path),
        "load_format": "auto" if reads_weights else "dummy",
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": overrides or None,
        "enable_fp32_lm_head": model.fp32_lm_head,
        "dtype": "float32" if rollout.dtype in FULL_PRECISION else "bfloat16",
        "tp_size": rollout.tensor_model_parallel_size if config.trainer.backend == "ray" else 1,
        "context_length": longest + SPARE,
        "max_running_requests": rollout.max_num_seqs,
        "max_total_tokens": min(rollout.max_num_seqs * (longest + SPARE), CPU_CACHE_TOKENS) if on_cpu else None,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "disable_cuda_graph": rollout.enforce_eager,
        "mem_fraction_static": rollout.gpu_memory_utilization if cuda else None,
        # The learner needs the GPU in its turn, unless the engine has one of its own.
        "enable_memory_saver": cuda and rollout.free_cache_engine and part.hybrid_engine and not reads_weights,
        "sampling_mask_max_tokens": skeleton.config.get_text_config().vocab_size,  # top_p alone may keep them all
    }
    return arguments | {name: value for name, value in options.items() if name not in OWN}


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> SGLangEngine:
    """Make an engine on the server that a configuration names, or on one that is started for it.

    ``rollout.engine_kwargs.sglang.*`` are the arguments of its server, ``python`` and ``url``. Without ``model`` the
    server has the weights of the model's folder, because no update brings any. Raises InputError for a server that
    cannot be had, or has another model.
    """
    rollout, timeout_s = config.actor_rollout_ref.rollout, float(config.trainer.phase_timeout_s)
    options = thaw(rollout.engine_kwargs.get("sglang") or {})
    if missing := problems(config):
        raise InputError(missing)
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    arguments = server_arguments(config, skeleton, device, reads_weights=model is None)
    if options.get("url"):
        server = SGLangServer(options["url"], timeout_s)
        try:
            check_server(server, arguments)
        except BaseException:
            server.close()
            raise
    else:
        server = launch(python_of(options), arguments, timeout_s, on_cpu=device.type == "cpu")
    return SGLangEngine(
        tokenizer,
        skeleton,
        server,
        device=device,
        max_length=arguments["context_length"] - SPARE,
        max_rows=rollout.max_num_seqs,
        sleeps=bool(arguments["enable_memory_saver"]),
    )
