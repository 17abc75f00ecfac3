"""vLLM behind the engine contract: its core in this process, stepped by our loop.

Ids go in, ids and log-probs come out; ``core.engines.engine.StopRule`` decides what ended a
response. Samples of a prompt share its whole blocks by prefix caching. With tensor parallelism vLLM
starts a process for each GPU, which imports this file for :class:`BucketReceiver` and
:class:`UnknownIds`.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from core.config.schema import Config
from core.config.section import FULL_PRECISION
from core.data.draw_order import derive_seed
from core.data.vocabulary import known_ids, unknown_among
from core.engines.engine import Generation
from core.engines.in_process_engine import InProcessEngine
from core.engines.weight_buckets import GROUP, Bucket, Checksum, Proof, Weight, checksum
from core.errors import InputError, WorkersLost
from core.learner.models import config_changes, load_policy, positions, resolve_path
from core.vision.pictures import Pictures, modality_of

# Read when vllm is imported: the engine core in this process, a quiet log, the caller's threads
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

DEVICE = current_platform.device_type  # where this build of vLLM computes: "cpu" or "cuda"
# For keys and values; vLLM's own default is a share of the machine's memory
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
UNKNOWN = "unknown_ids"  # a key of vLLM's additional_config
KEPT_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
HIDDEN_MODULE = "llvmlite.binding.ffi"
# A logit bias that no sampling reaches. UnknownIds cannot be used with sampling masks
UNLIKELY = -100.0
MOST_UNLIKELY = 1024  # entries that a logit bias of vLLM may have
LEAST_LENGTH = 64  # tokens of prompt and response: the probe's text is a prompt too


class VLLMEngine(InProcessEngine):
    """The engine of vLLM, which samples once the first weights have come: before, they are random.

    ``skeleton`` is the model on the meta device; ``options`` are vLLM's engine arguments. With
    ``enable_sleep_mode`` among them, ``sleep`` frees the GPU. Weights that are not finite leave
    their mark in the cache for good.
    """

    def __init__(self, tokenizer: Any, skeleton: nn.Module, **options: Any):
        processes = options.get("tensor_parallel_size", 1)
        # Without an executor named here vLLM would look for a Ray of its own inside a Ray actor
        executor = "mp" if processes > 1 else "uni"
        options = {**FIXED, "distributed_executor_backend": executor, **options}
        if DEVICE == "cpu":
            options = _on_cpu(options)
        self.reads_media = modality_of(skeleton.config).reads_media
        if self.reads_media:
            from core.vision.vllm_pictures import prepare

            options |= prepare(skeleton)
        vocab_size = skeleton.config.get_text_config().vocab_size
        unknown = unknown_among(known_ids(tokenizer), vocab_size)
        self.masks = bool(options.get("return_sampling_mask"))  # whether vLLM returns kept ids
        if self.masks and len(unknown) > MOST_UNLIKELY:
            raise ValueError(
                f"{len(unknown)} ids are unknown to the tokenizer, and vLLM bars {MOST_UNLIKELY}"
            )
        if len(unknown) and not self.masks:
            options["logits_processors"] = [f"{__name__}:UnknownIds"]
            options["additional_config"] = {UNKNOWN: unknown.tolist()}
        with _process_kept(), _hf_advised():
            self.llm = LLMEngine.from_engine_args(EngineArgs(**options))
        max_length = self.llm.model_config.max_model_len
        super().__init__(tokenizer, skeleton, torch.device(DEVICE), max_length)
        self.sleeps = bool(options.get("enable_sleep_mode"))
        self._by_name: dict[str, Generation] = {}
        self._names = map(str, count())

    def _running(self) -> list[Generation]:
        return list(self._by_name.values())

    def _admit(self) -> None:
        for generation in self._waiting:  # vLLM has a queue of its own
            request = generation.request
            sampling = request.sampling
            rule = generation.rule
            end_ids = [i for i in sorted(rule.eos | rule.stop_ids) if i < self.vocab_size]
            # Where stop strings may end a response, every token is examined; else it comes whole
            output_kind = RequestOutputKind.DELTA if rule.strings else RequestOutputKind.FINAL_ONLY
            name = next(self._names)
            self._by_name[name] = generation
            self._submit(
                name,
                request.prompt_ids,
                request.media,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                # Hashed, since torch's generator on a CPU reads only the lower 32 bits
                seed=derive_seed("vllm", request.seed),
                max_tokens=sampling.max_tokens,
                stop_token_ids=end_ids,
                ignore_eos=True,  # it is among the stop ids, or not wanted
                logprobs=0,  # of the sampled token
                output_kind=output_kind,
            )
        self._waiting = []

    def _submit(
        self, name: str, token_ids: tuple[int, ...], media: Pictures | None, **params: Any
    ) -> None:
        if self.masks:
            params |= self._with_mask(**params)
        sampling = SamplingParams(flat_logprobs=True, detokenize=False, **params)
        if media:
            from core.vision.vllm_pictures import engine_input

            prompt = engine_input(token_ids, media)
        else:
            prompt = tokens_input(list(token_ids))
        self.llm.add_request(name, prompt, sampling)

    def _with_mask(self, temperature: float, top_k: int = -1, **_: Any) -> dict[str, Any]:
        """Return parameters that vLLM requires where it returns masks: a temperature and a top-k.

        A greedy request samples the best token alone; its log-probs are then 0, and nothing reads
        those of greedy answers.
        """
        if temperature == 0:
            temperature, top_k = 1.0, 1
        bias = dict.fromkeys(self.unknown.tolist(), UNLIKELY)
        return {
            "temperature": temperature,
            "top_k": top_k if top_k > 0 else self.vocab_size,
            "logit_bias": bias or None,
        }

    def _advance(self) -> list[Generation]:
        ended = []
        for output in self._guarded(self.llm.step):
            name = output.request_id
            generation = self._by_name[name]
            (part,) = output.outputs
            has_ended = False
            masks = [None] * len(part.token_ids)
            if generation.request.sampling.records_kept:
                masks = part.sampling_mask.token_ids
            for token in zip(part.token_ids, part.logprobs.logprobs, masks, strict=True):
                if has_ended := generation.write(*token):
                    break  # a part may hold tokens behind the end
            # Only a stop string may end a response before vLLM does
            ended_early = has_ended and not output.finished
            if (output.finished and not has_ended) or (ended_early and not generation.rule.strings):
                raise RuntimeError(
                    f"vLLM ended a response with {part.finish_reason} ({part.stop_reason})"
                )
            if has_ended:
                ended.append(name)
                if not output.finished:
                    self.llm.abort_request([name])
        return [self._by_name.pop(name) for name in ended]

    def _drop(self, generations: list[Generation]) -> None:
        gone = set(map(id, generations))
        names = [name for name, each in self._by_name.items() if id(each) in gone]
        self.llm.abort_request(names)
        for name in names:
            del self._by_name[name]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each of vLLM's processes, and return their results."""
        return self._guarded(self.llm.collective_rpc, method, args=arguments)

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
        self._refuse_in_flight("probe")
        self._submit(
            "probe",
            token_ids,
            None,
            max_tokens=1,
            temperature=0,
            prompt_logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = []
        while not outputs:
            outputs = self._guarded(self.llm.step)
        return np.array(outputs[0].prompt_logprobs.logprobs, np.float32)

    def _guarded(self, method: Any, *arguments: Any, **named: Any) -> Any:
        """Call a method of vLLM's.

        Raises WorkersLost if one of its processes died: the run may start again.
        """
        try:
            with _hf_advised():
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
    """Lets vLLM's workers load buckets as a checkpoint, into the tensors that its kernels read."""

    def join_weights_group(
        self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float
    ) -> None:
        GROUP.join(address, first_rank + self.rank, size, self.device, timeout_s)

    def begin_buckets(self) -> None:
        self.received: list[Checksum | None] = []
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.get_model())

    def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket, a tied weight by each of its names: vLLM may have packed its own head."""
        values, received = bucket.open(self.device)  # vLLM keeps them until a layer is complete
        self.received.append(received)
        named = [
            (name, value)
            for weight, value in zip(bucket.weights, values, strict=True)
            for name in weight.names
        ]
        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights(named)

    def end_buckets(self) -> Proof:
        """End the reload; return checksums of what came, and of what the kernels read."""
        model = self.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        checksums = {name: checksum(value) for name, value in model.named_parameters()}
        return Proof(tuple(self.received), checksums)


class UnknownIds(LogitsProcessor, RunnerLogitsProcessor):
    """Keeps ids that the tokenizer does not know from being sampled; log-probs are of the others.

    Both of vLLM's model runners take it: the second one, on GPUs, needs a class of its own.
    """

    def __init__(self, vllm_config: Any, where: Any, is_pin_memory: bool = False):
        unknown = vllm_config.additional_config[UNKNOWN]
        # On the CPU: the second runner makes this among the weights, whose memory sleep gives away
        self.ids = torch.tensor(unknown, dtype=torch.int64, device="cpu")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: all requests have the same ids."""

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:
        ids = self.ids.to(logits.device, non_blocking=True)
        return logits.index_fill_(1, ids, -torch.inf)


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the CPU build needs.

    The cache is bounded, and prompts are computed whole, as torch's generator requires.
    """
    tokens = max(options.get("max_num_batched_tokens", 0), options["max_model_len"])
    return {
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        **options,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": tokens,
    }


def engine_arguments(config: Config, skeleton: nn.Module) -> dict[str, Any]:
    """Return vLLM's arguments for a configuration; ``rollout.engine_kwargs.vllm`` goes first."""
    roles = config.actor_rollout_ref
    rollout = roles.rollout
    longest = max(config.longest_sequence, LEAST_LENGTH)
    over_ray = config.trainer.backend == "ray"
    arguments = {
        "model": resolve_path(roles.model.path),
        "trust_remote_code": roles.model.trust_remote_code,
        "hf_overrides": config_changes(roles.model),
        "dtype": "float32" if rollout.dtype in FULL_PRECISION else "bfloat16",
        "tensor_parallel_size": rollout.tensor_model_parallel_size if over_ray else 1,
        "max_model_len": min(longest, positions(skeleton.config)),
        # The learner needs the GPU in its turn, unless the engine has a GPU of its own
        "enable_sleep_mode": DEVICE == "cuda" and rollout.free_cache_engine and roles.hybrid_engine,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "max_num_seqs": rollout.max_num_seqs,
        "return_sampling_mask": rollout.kept_sets,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
    }
    for name, value in deepcopy(rollout.engine_kwargs.get("vllm") or {}).items():
        if value is not None:
            arguments[name] = value
    return arguments


@contextmanager
def _process_kept() -> Iterator[None]:
    """Restore what vLLM's CPU worker changes in this process.

    It sets variables that are for its children, and replaces torch.set_num_threads. Meanwhile
    llvmlite's library is hidden from it: vLLM 0.32 reads ``vars()`` of every attribute of every
    module, and for a handle of a library any name is a function.
    """
    variables = {name: os.environ.get(name) for name in KEPT_VARIABLES}
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    hidden_module = sys.modules.pop(HIDDEN_MODULE, None)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        if hidden_module is not None:
            sys.modules[HIDDEN_MODULE] = hidden_module
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _hf_advised() -> Iterator[None]:
    """Raise vLLM's errors on a CPU, where it lacks kernels, as an InputError that advises hf."""
    try:
        yield
    except Exception as error:
        if DEVICE != "cpu" or isinstance(error, InputError | MemoryError):
            raise
        raise InputError(
            "actor_rollout_ref.rollout.name=vllm: vLLM failed on this machine's CPU "
            f"({type(error).__name__}: {error}); set actor_rollout_ref.rollout.name=hf"
        ) from error


def make(config: Config, model: Any, tokenizer: Any, device: torch.device) -> VLLMEngine:
    """Make the engine of a configuration. Raises InputError."""
    if device.type != DEVICE:
        raise InputError(
            f"actor_rollout_ref.rollout.name=vllm: the installed vLLM computes on {DEVICE}, the "
            f"run is on {device.type}: set trainer.device={DEVICE}, or use hf"
        )
    kept_sets = config.actor_rollout_ref.rollout.kept_sets
    if kept_sets and DEVICE == "cpu":
        raise _without_masks("a Triton kernel makes its sampling masks, and its CPU build has none")
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    arguments = engine_arguments(config, skeleton)
    if model is None:  # nothing learns: vLLM reads the weights, and no learner needs the GPU
        arguments |= {"load_format": "auto", "enable_sleep_mode": False}
    try:
        return VLLMEngine(tokenizer, skeleton, **arguments)
    except ValueError as error:
        raise (_without_masks(error) if kept_sets else error) from error


def _without_masks(reason: str | Exception) -> InputError:
    return InputError(
        f"actor_rollout_ref.rollout.kept_sets=True: vLLM returns no kept ids here ({reason}); set "
        "it to False, or actor_rollout_ref.rollout.name=hf"
    )
