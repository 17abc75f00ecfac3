"""What runs inside each of vLLM's processes: the receiving end of a weight update, and the mask of unknown ids.

vLLM imports this file in its processes because :class:`BucketReceiver` extends its workers there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerLogitsProcessor

from core.engines.weight_buckets import GROUP, Bucket, Checksum, Proof, checksum

UNKNOWN = "unknown_ids"  # of vLLM's additional_config


class BucketReceiver:
    """What vLLM's workers can do beside their own methods: load buckets as vLLM loads a checkpoint, layer by layer,
    into the tensors that its kernels read."""

    def join_weights_group(self, address: tuple[str, int], first_rank: int, size: int, timeout_s: float) -> None:
        """Join the group in which weights are broadcast, in which ``first_rank`` is this engine's first process."""
        GROUP.join(address, first_rank + self.rank, size, self.device, timeout_s)

    def begin_buckets(self) -> None:
        """Begin to reload."""
        self.received: list[Checksum | None] = []
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.get_model())

    def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket. A tied weight goes under each of its names: a head that vLLM packed for itself would stay
        stale without its own."""
        values, received = bucket.open(self.device)  # vLLM keeps them until a layer is complete
        self.received.append(received)
        pairs = zip(bucket.weights, values, strict=True)
        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights([(name, value) for weight, value in pairs for name in weight.names])

    def end_buckets(self) -> Proof:
        """End the reload; return what this process received, and the checksum of what its kernels read."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)
        return Proof(tuple(self.received), {name: checksum(one) for name, one in self.get_model().named_parameters()})


class UnknownIds(LogitsProcessor, RunnerLogitsProcessor):
    """Never samples an id that the tokenizer does not know; log-probs are of the ids that are left.

    It has the interfaces of both of vLLM's model runners: the second one, on GPUs, needs a class of its own.
    """

    def __init__(self, vllm_config: Any, where: Any, is_pin_memory: bool = False):
        device = getattr(where, "device", where)  # the second runner gives the state of its requests
        self.ids = torch.tensor(vllm_config.additional_config[UNKNOWN], dtype=torch.int64, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: all requests have the same ids."""

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:
        return logits.index_fill_(1, self.ids, -torch.inf)
