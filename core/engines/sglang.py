"""SGLang behind the engine contract: a server beside this process, reached by its HTTP surface alone.

Ids go in, ids and log-probs come out, and ``core.engines.sampling`` decides what ended a response, as for every engine.
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
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.config.section import FULL_PRECISION, thaw
from core.engines import SampleRequest
from core.engines.in_process_engine import Engine, Row, positions
from core.engines.sampling import eos_ids
from core.engines.sglang_server import SGLangServer, launch, problems, python_of_sglang
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
# All that a model's generation_config could set beside what a request sets
NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_p": 0.0}
SPARE = 8  # positions that SGLang keeps free behind prompt and response
CPU_CACHE_TOKENS = 1 << 18  # the most that a CPU's cache holds; SGLang's own default is a share of the machine's memory
NEVER = -1e9  # JSON has no infinity
GROUP = "weights"  # in which this process broadcasts to the server's
JOIN_S = 300.0  # for the server to join it


class SGLangEngine(Engine):
    """Satisfies :class:`core.engines.RolloutEngine`, but for what the module's head names.

    ``skeleton`` is the model without weights (on the meta device). At most ``max_rows`` requests are with the server
    at once. With ``sleeps`` the server was started such that it can free its memory. ``close`` ends the server.
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
        super().__init__(tokenizer, skeleton, device, max_length)
        self.server, self.sleeps = server, sleeps
        # Added to the logits before the log-probs are taken
        self.never = {str(one): NEVER for one in self.unknown.tolist()}
        # What ends a response of the server's own accord
        self.ends = self.eos | eos_ids(skeleton.config.get_text_config())
        self._names = map(str, count())
        self._room = asyncio.Semaphore(max_rows)  # of the client's thread
        self._sent: dict[str, tuple[Future, asyncio.AbstractEventLoop]] = {}
        self._group: dist.ProcessGroupGloo | None = None

    async def sample(self, request: SampleRequest) -> Trajectory:
        """Sample a trajectory. Raises ValueError for a request that this model cannot hold, RuntimeError once the
        engine is closed, FloatingPointError where the weights give no finite logits, WorkersLost without a server."""
        self._check(request)
        if request.media:
            raise ValueError("SampleRequest.media: rollout.name=sglang sends none; use rollout.name=hf or vllm")
        row, name = self._row(request), next(self._names)
        future = self.server.loop.submit(self._follow(name, row))
        self._sent[name] = future, asyncio.get_running_loop()
        try:
            await asyncio.wrap_future(future)
        finally:
            self._sent.pop(name, None)
        return self._trajectory(row)

    async def _follow(self, name: str, row: Row) -> None:
        """Write what the server samples to the row until it ends, and abort the request unless the server ended it."""
        ids = row.rule.eos | row.rule.stop_ids
        # Each token is examined here where stop strings may end the row, or ids of the server's own must not.
        streams = row.rule.strings is not None or (bool(ids) and not self.ends <= ids)
        body, why = self._body(name, row, streams), None
        async with self._room:
            try:
                async with aclosing(self.server.generate(body)) as parts:
                    async for tokens, logprobs, why in parts:
                        left, done = list(zip(tokens, logprobs, strict=True))[::-1], False
                        while left and not done:  # a stream may have more: several come at once to a busy process
                            done = row.write(*left.pop())
                        if (why is not None and not done) or (left and not streams):
                            found = f"{why}, {len(left)} tokens after {len(row.ids)}"
                            raise RuntimeError(f"SGLang ended a response with {found}")
                        if done:
                            return
            finally:
                if why is None:
                    self.server.send("/abort_request", {"rid": name})

    def _body(self, name: str, row: Row, streams: bool) -> dict[str, Any]:
        sampling, ids = row.request.sampling, sorted(row.rule.eos | row.rule.stop_ids)
        params: dict[str, Any] = {**NEUTRAL, "temperature": sampling.temperature, "max_new_tokens": sampling.max_tokens}
        if self.never:
            params["logit_bias"] = self.never
        params |= {"ignore_eos": streams or not ids, "stop_token_ids": ids}  # the former would ignore the latter too
        body = {"rid": name, "input_ids": list(row.request.prompt_ids), "return_logprob": True, "stream": streams}
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
        ranks = 1 + self.server.get("/server_info")["tp_size"]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        where = {"master_address": "127.0.0.1", "master_port": store.port, "group_name": GROUP}
        joining = {**where, "rank_offset": 1, "world_size": ranks, "backend": "gloo"}
        reply = self.server.send("/init_weights_update_group", joining)
        for prefix in (GROUP, f"{GROUP}/", "cpu/"):  # torch puts the latter two before a group's names
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
            **{"group_name": GROUP, "flush_cache": False},
        }
        reply = self.server.send("/update_weights_from_distributed", body)
        sent = [self._group.broadcast(value, root=0) for value in values]
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
        self._group = None
        self.server.close()


def server_arguments(
    config: Config, skeleton: nn.Module, device: torch.device, *, reads_weights: bool
) -> dict[str, Any]:
    """Return the server's arguments for a configuration; those of ``engine_kwargs.sglang`` override the others."""
    part, data = config.actor_rollout_ref, config.data
    model, rollout = part.model, part.rollout
    longest = min(rollout.max_model_len or data.max_prompt_length + data.max_response_length, positions(skeleton))
    on_cpu, cuda = device.type == "cpu", device.type == "cuda"
    overrides = {name: value for name, value in thaw(model.override_config).items() if name != "attn_implementation"}
    return {
        **FIXED,
        **(ON_CPU if on_cpu else {}),
        "model_path": resolve_path(model.path),
        "load_format": "auto" if reads_weights else "dummy",
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": overrides or None,
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
        **thaw(rollout.engine_kwargs.get("sglang") or {}),
    }


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> SGLangEngine:
    """Make an engine on a server that is started for it; ``rollout.engine_kwargs.sglang.*`` are its arguments.

    Without ``model`` the server has the weights of the model's folder, because no update brings any. Raises InputError
    for a server that cannot be had.
    """
    if missing := problems():
        raise InputError(missing)
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    arguments = server_arguments(config, skeleton, device, reads_weights=model is None)
    timeout_s = float(config.trainer.phase_timeout_s)
    return SGLangEngine(
        tokenizer,
        skeleton,
        launch(python_of_sglang(), arguments, timeout_s, on_cpu=device.type == "cpu"),
        device=device,
        max_length=arguments["context_length"] - SPARE,
        max_rows=config.actor_rollout_ref.rollout.max_num_seqs,
        sleeps=bool(arguments["enable_memory_saver"]),
    )
