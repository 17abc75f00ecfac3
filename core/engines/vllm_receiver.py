"""What runs inside each of vLLM's processes: the receiving end of a weight update, and the mask of unknown ids.

vLLM imports this file in its processes because :class:`WeightProof` is their extension; importing it registers the
back end "buckets" of vLLM's own weight-transfer interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerLogitsProcessor

from core.engines.weight_buckets import GROUP, Bucket, Checksum, Proof, weights_checksum

if TYPE_CHECKING:
    from torch import nn

BACKEND = "buckets"
UNKNOWN = "unknown_ids"  # of vLLM's additional_config


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


@dataclass
class Join(WeightTransferInitInfo):
    """The group in which weights are broadcast: where it meets, this engine's first rank in it, and its size."""

    address: tuple[str, int]
    first_rank: int
    size: int
    timeout_s: float


@dataclass
class Arrival(WeightTransferUpdateInfo):
    """One bucket."""

    bucket: Bucket


class BucketReceiver(WeightTransferEngine[Join, Arrival]):
    """Loads buckets as vLLM loads a checkpoint: layer by layer, into the tensors that its kernels read."""

    init_info_cls = Join
    update_info_cls = Arrival
    model: nn.Module

    def init_transfer_engine(self, init_info: Join) -> None:
        rank = init_info.first_rank + self.parallel_config.rank
        GROUP.join(init_info.address, rank, init_info.size, self.device, init_info.timeout_s)

    def start_weight_update(self) -> None:
        self.received: list[Checksum | None] = []
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Arrival) -> None:
        """Load a bucket. A tied weight goes under each of its names: a head that vLLM packed for itself would stay
        stale without its own."""
        bucket = update_info.bucket
        values, received = bucket.open(self.device)  # vLLM keeps them until a layer is complete
        self.received.append(received)
        pairs = zip(bucket.weights, values, strict=True)
        self.model.load_weights([(name, value) for weight, value in pairs for name in weight.names])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Has nothing to free."""


class WeightProof:
    """What vLLM's workers can do beside their own methods."""

    weight_transfer_engine: BucketReceiver

    def weight_proof(self) -> Proof:
        """Return what this process received, and the checksum of what its kernels read."""
        receiver = self.weight_transfer_engine
        return Proof(tuple(receiver.received), weights_checksum(receiver.model.named_parameters()))


WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
