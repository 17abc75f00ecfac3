"""The phases of a step on a cluster, over Ray actors.

Batches are split over the learner ranks here, about equal in tokens. They travel without padding
and with the fields that a phase reads, once for each group of ranks that share sequences, and one
rank of the group replies. Of weights the driver passes on where a bucket is, never its bytes: a
rank of each node leaves it in memory for the node's engines, or rank 0 broadcasts it to engines
with GPUs of their own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from core.cluster.ray_pools import RayProcesses, rank_name
from core.config.schema import Config
from core.config.training_keys import Sharing
from core.data.vocabulary import known_ids
from core.engines.weight_buckets import Checksum, merged
from core.errors import WorkersLost, message_of
from core.learner.batching import contributing_sequences, rank_shares
from core.learner.learner import (
    CRITIC_READS,
    PASS_READS,
    actor_reads,
    zero_advantage_gives_no_gradient,
)
from core.learner.models import compute_dtype
from core.learner.packed_attention import scattered
from core.learner.passes import WeightSyncError, compare_probe
from core.types import TrainBatch


class RayWorkers(RayProcesses):
    """The phases of a step over the learner ranks and engines of a cluster.

    Checkpoints need a folder that all nodes see.
    """

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, **learner: Any):
        super().__init__(config, device, known_token_ids=known_ids(tokenizer), **learner)
        rollout = config.actor_rollout_ref.rollout
        self.bucket_bytes = rollout.update_weights_bucket_megabytes * 2**20
        self.broadcasts = not config.actor_rollout_ref.hybrid_engine
        self.joined = False  # whether rank 0 and the engines are in a group
        # On one GPU they alternate
        self.generates_while_learning = self.broadcasts or self.device.type == "cpu"

    # -- passes and updates ----------------------------------------------------------------------

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        part = self.config.actor_rollout_ref.actor
        return tuple(self._pass("old_log_prob", "compute_log_probs", batch, part))

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        part = self.config.actor_rollout_ref.ref
        return self._pass("ref", "compute_ref_log_prob", batch, part, role)[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        return self._pass("values", "compute_values", batch, self.config.critic)[0]

    def update_actor(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        part = self.config.actor_rollout_ref.actor
        by_group = self._split(
            steps, part, partial(actor_reads, part), zero_advantage_gives_no_gradient(part)
        )
        return self._update("update_actor", part, by_group, lr_multiplier)

    def update_critic(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        part = self.config.critic
        by_group = self._split(steps, part, lambda _: CRITIC_READS, False)
        return self._update("update_critic", part, by_group, lr_multiplier)

    def _free_gpus(self) -> None:
        """Put engines on the learners' GPUs to sleep until the next sync."""
        if self.engines_sleep:
            self.engine.sleep()

    def _shares(self, lengths_B: Tensor, together: int) -> list[Tensor]:
        """Return the sequences of each group of ``together`` neighbours, which share them."""
        groups = self.ranks // together
        if self.config.trainer.balance_batch:
            return rank_shares(lengths_B, groups)
        return list(torch.arange(len(lengths_B)).tensor_split(groups))

    def _pass(
        self, phase: str, method: str, batch: TrainBatch, part: Sharing, *arguments: str
    ) -> list[Tensor]:
        """Run a pass over all sequences and return its tensors, flat as a batch stores them."""
        self._free_gpus()
        together = part.together
        shares = self._shares(batch.lengths, together)
        batches = [batch.only(PASS_READS).rows(share) for share in shares]
        sent = [ray.put(share_batch) for share_batch in batches]
        calls = {}
        for rank in range(self.ranks):
            replies = rank % together == 0
            calls[rank_name(rank)] = (method, sent[rank // together], replies, *arguments)
        results = []  # of each share, by the tensors of the pass
        for reply in self.watch.call(phase, "run_pass", calls):
            if reply is not None:
                # Copied: Ray's arrays are read-only, which tensors cannot be
                results.append([torch.from_numpy(array.copy()) for array in reply])
        whole = [torch.zeros(batch.tokens, dtype=values_M.dtype) for values_M in results[0]]
        for share, share_batch, values in zip(shares, batches, results, strict=True):
            for target, values_M in zip(whole, values, strict=True):
                batch.put_into(target, share, scattered(values_M, share_batch.response_mask))
        return whole

    def _split(
        self,
        steps: Iterable[TrainBatch],
        part: Sharing,
        reads: Callable[[TrainBatch], Sequence[str]],
        only_advantages: bool,
    ) -> list[list[TrainBatch]]:
        """Return the mini-batches of each group of ranks, with the fields that ``reads`` returns.

        Sequences that train are shared out apart from those that only a metric reads.
        """
        together = part.together
        by_group: list[list[TrainBatch]] = [[] for _ in range(self.ranks // together)]
        for step in steps:
            trains = contributing_sequences(step, skip_zero_advantage=only_advantages)
            shares = []
            for chosen in (trains, ~trains):
                rows = chosen.nonzero()[:, 0]
                shares.append([rows[share] for share in self._shares(step.lengths[rows], together)])
            for mini_batches, indices in zip(by_group, zip(*shares, strict=True), strict=True):
                mini_batches.append(step.only(reads(step)).rows(torch.cat(indices)))
        return by_group

    def _update(
        self, phase: str, part: Sharing, by_group: list[list[TrainBatch]], lr_multiplier: float
    ) -> dict[str, float]:
        """Take the optimizer steps of all mini-batches on all ranks. Return the metrics."""
        self._free_gpus()
        sent = [ray.put(mini_batches) for mini_batches in by_group]
        calls = {}
        for rank in range(self.ranks):
            calls[rank_name(rank)] = (phase, sent[rank // part.together], lr_multiplier)
        return self.watch.call(phase, "update", calls)[0]

    # -- weights ---------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> dict[str, float]:
        """Bring the weights to every engine, and prove it by checksums and by a probe.

        Raises WorkersLost where a proof fails: a restart may mend it, and a run must not go on with
        other weights.
        """
        try:
            self._transfer(version)
            ids, expected = self._all("probe", "probe")[0]
            bf16 = not self.config.full_precision
            diffs = [compare_probe(expected, probe, bf16=bf16) for probe in self.engine.probes(ids)]
        except WeightSyncError as error:
            raise WorkersLost(message_of(error)) from error
        return {"rollout_corr/probe_diff": max(diffs)}

    def _transfer(self, version: int) -> None:
        """Gather, hand over and load one bucket after the other. Compare what was received."""
        if self.broadcasts and not self.joined:
            self._join_engines()
        # Who keeps buckets: rank 0 to broadcast them, or one rank of each node for its engines
        keepers = [0] if self.broadcasts else range(0, self.ranks, self.per_node)
        dtype = compute_dtype(self.config.actor_rollout_ref.rollout.dtype) or torch.float32
        options = []
        for rank in range(self.ranks):
            options.append((dtype, self.bucket_bytes, rank in keepers, self.broadcasts))
        self.engine.begin_update(self._processes("begin_sync", options)[0])
        sent: list[Checksum] = []
        no_options = [()] * self.ranks
        while None not in (buckets := self._processes("next_bucket", no_options)):
            bucket = merged(buckets)
            sender = {}
            if self.broadcasts:
                sender[rank_name(0)] = self.learners[0].broadcast.remote(bucket.size)
            self.engine.load(bucket, sender)
            sent.append(bucket.checksum)
        for device, proof in enumerate(self.engine.end_update(version)):
            if list(proof.received) != sent:
                raise WeightSyncError(
                    f"device {device} of an engine got other bytes than were sent"
                )

    def _processes(self, method: str, options: Sequence[tuple]) -> list[Any]:
        """Call a method of every rank's process in a weight sync."""
        calls = {rank_name(rank): arguments for rank, arguments in enumerate(options)}
        return self.watch.call("update_weights", method, calls)

    def _join_engines(self) -> None:
        """Make a group of rank 0 and every device of the engines."""
        size = 1 + len(self.engine.engines) * self.engine_gpus
        limit = self.watch.limit("update_weights")
        calls = {rank_name(0): self.learners[0].join_engines.remote(size, limit)}
        for number, name in enumerate(self.engine.engines):
            first = 1 + number * self.engine_gpus
            join = "join", self.address, first, size, limit
            calls[name] = self.watch.actors[name].call.remote(*join)
        self.watch.wait("update_weights", calls)
        self.joined = True

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, folder: Path) -> Mapping[str, str]:
        by_rank = self._all("save_checkpoint", "save", str(folder.absolute()))
        return {name: digest for hashes in by_rank for name, digest in hashes.items()}

    def load(self, folder: Path) -> None:
        self._all("load_checkpoint", "load", str(folder.absolute()))

    def _all(self, phase: str, method: str, *arguments: Any) -> list[Any]:
        """Call the learner's method on every rank."""
        calls = dict.fromkeys(map(rank_name, range(self.ranks)), (method, *arguments))
        return self.watch.call(phase, "call", calls)
