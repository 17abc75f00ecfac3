"""The phases of a step on a cluster: those of :class:`core.cluster.workers.LocalWorkers` over Ray
actors.

Batches are split over the learner ranks here, about equal in tokens. They travel without padding
and with the fields that a phase reads, once a sequence-parallel group, and one rank of the group
replies. Of weights the driver passes on where a bucket is, never its bytes: a rank of each node
leaves it in memory for the node's engines, or rank 0 broadcasts it to engines with GPUs of their
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from core.cluster.ray_pools import RayProcesses, rank_name
from core.data.vocabulary import known_ids
from core.engines.weight_buckets import Checksum, merged
from core.errors import WorkersLost, message_of
from core.learner.batching import contributing_sequences, rank_shares
from core.learner.learner import CRITIC_READS, PASS_READS, actor_reads, only_advantages_train
from core.learner.models import compute_dtype
from core.learner.packing import scattered
from core.learner.passes import WeightSyncError, compare_probe
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config


class RayWorkers(RayProcesses):
    """The phases over the learner ranks and engines of a cluster. Checkpoints need a folder that
    all nodes see."""

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, **learner: Any):
        super().__init__(config, tokenizer, device, known=known_ids(tokenizer), **learner)
        part = config.actor_rollout_ref
        self.bucket_bytes = part.rollout.update_weights_bucket_megabytes * 2**20
        self.broadcasts = not part.hybrid_engine
        self.joined = False  # whether rank 0 and the engines are in a group

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        part = self.config.actor_rollout_ref.actor
        return tuple(self._pass("old_log_prob", "compute_log_probs", batch, part))

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        return self._pass(
            "ref", "compute_ref_log_prob", batch, self.config.actor_rollout_ref.ref, role
        )[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        return self._pass("values", "compute_values", batch, self.config.critic)[0]

    def update_actor(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        part = self.config.actor_rollout_ref.actor
        reads = functools.partial(actor_reads, part)
        return self._update(
            "update_actor", part, steps, reads, only_advantages_train(part), lr_multiplier
        )

    def update_critic(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        part = self.config.critic
        return self._update(
            "update_critic", part, steps, lambda _: CRITIC_READS, False, lr_multiplier
        )

    def sync_weights(self, version: int) -> dict[str, float]:
        """Bring the weights to every engine; prove it by checksums, and by a probe within the bound
        of the precision.

        Raises WorkersLost where a proof fails: a restart may mend it, and a run must not go on with
        other weights.
        """
        try:
            self._transfer(version)
            ids, expected = self._all("probe", "probe")[0]
            probes = self.engine.probes(ids)
            checked = [
                compare_probe(expected, probe, bf16=not self.config.full_precision)
                for probe in probes
            ]
        except WeightSyncError as error:
            raise WorkersLost(message_of(error)) from error
        return {"rollout_corr/probe_diff": max(checked)}

    def _transfer(self, version: int) -> None:
        """Gather, hand over and load one bucket after the other, and compare what was received."""
        if self.broadcasts and not self.joined:
            self._join_engines()
        # Who keeps buckets: rank 0 to broadcast them, or one rank of each node for its engines
        keepers = range(self.ranks)[:1] if self.broadcasts else range(self.ranks)[:: self.per_node]
        dtype = compute_dtype(self.config.actor_rollout_ref.rollout.dtype) or torch.float32
        options = [
            (dtype, self.bucket_bytes, rank in keepers, self.broadcasts)
            for rank in range(self.ranks)
        ]
        self.engine.begin_update(self._processes("begin_sync", options)[0])
        sent: list[Checksum] = []
        while None not in (buckets := self._processes("next_bucket")):
            bucket = merged(buckets)
            sender = (
                {rank_name(0): self.learners[0].broadcast.remote(bucket.size)}
                if self.broadcasts
                else {}
            )
            self.engine.load(bucket, sender)
            sent.append(bucket.checksum)
        for device, proof in enumerate(self.engine.end_update(version)):
            if list(proof.received) != sent:
                raise WeightSyncError(
                    f"device {device} of an engine got other bytes than the learner sent"
                )

    def _processes(self, method: str, options: Sequence[tuple] | None = None) -> list[Any]:
        """Call a method of every rank's process in a weight sync."""
        calls = {rank_name(rank): one for rank, one in enumerate(options or [()] * self.ranks)}
        return self.watch.call("update_weights", method, calls)

    def _join_engines(self) -> None:
        """Make a group of rank 0 and every device of the engines."""
        size = 1 + len(self.engine.engines) * self.engine_gpus
        limits = size, self.watch.limit("update_weights")
        calls = {rank_name(0): self.learners[0].join_engines.remote(*limits)}
        for number, name in enumerate(self.engine.engines):
            arguments = (self.address, 1 + number * self.engine_gpus, *limits)
            calls[name] = self.watch.actors[name].call.remote("join", *arguments)
        self.watch.wait("update_weights", calls)
        self.joined = True

    @property
    def overlaps(self) -> bool:
        """Whether engine and learner can work at once: not where they alternate on a GPU."""
        return self.device.type == "cpu" or not self.config.actor_rollout_ref.hybrid_engine

    def save(self, folder: Path) -> Mapping[str, str]:
        hashes = self._all("save_checkpoint", "save", str(folder.absolute()))
        return {name: digest for of_rank in hashes for name, digest in of_rank.items()}

    def load(self, folder: Path) -> None:
        self._all("load_checkpoint", "load", str(folder.absolute()))

    def _all(self, phase: str, method: str, *arguments: Any) -> list[Any]:
        """Call the learner's method on every rank."""
        return self.watch.call(
            phase, "call", {rank_name(r): (method, *arguments) for r in range(self.ranks)}
        )

    def _free_gpus(self) -> None:
        """Put engines on the learners' GPUs to sleep until the next sync."""
        if self._engines_sleep:
            self.engine.sleep()

    def _shares(self, lengths_B: Tensor, together: int) -> list[Tensor]:
        """Return the sequences of each group of ``together`` neighbours, which share the same
        ones."""
        groups = self.ranks // together
        if self.config.trainer.balance_batch:
            return rank_shares(lengths_B, groups)
        return list(torch.arange(len(lengths_B)).tensor_split(groups))

    def _pass(
        self, phase: str, method: str, batch: TrainBatch, part: Any, *arguments: str
    ) -> list[Tensor]:
        """Run a pass of ``part`` over all sequences and return its tensors, flat as a batch stores
        them."""
        self._free_gpus()
        together = part.together
        shares = self._shares(batch.lengths, together)
        batches = [batch.only(PASS_READS).rows(share) for share in shares]
        sent = [ray.put(each) for each in batches]
        calls = {
            rank_name(rank): (method, sent[rank // together], rank % together == 0, *arguments)
            for rank in range(self.ranks)
        }
        replies = [
            reply for reply in self.watch.call(phase, "run_pass", calls) if reply is not None
        ]
        # Copied: Ray's arrays are read-only, which tensors cannot be.
        results = [[torch.from_numpy(array.copy()) for array in reply] for reply in replies]
        whole = [torch.zeros(batch.tokens, dtype=values.dtype) for values in results[0]]
        for share, of_share, values in zip(shares, batches, results, strict=True):
            for target, values_M in zip(whole, values, strict=True):
                batch.put(target, share, scattered(values_M, of_share.response_mask))
        return whole

    def _update(
        self,
        phase: str,
        part: Any,
        steps: Iterable[TrainBatch],
        reads: Callable[[TrainBatch], Sequence[str]],
        only: bool,
        lr_multiplier: float,
    ) -> dict[str, float]:
        """Take all optimizer ``steps`` of ``part``, where ``only`` the advantages may train.

        ``reads`` are the fields of a mini-batch that travel. Sequences that train are shared out
        apart from those that only a metric reads.
        """
        self._free_gpus()
        together = part.together
        by_group: list[list[TrainBatch]] = [[] for _ in range(self.ranks // together)]
        for step in steps:
            contributes = contributing_sequences(step, only_advantages_train=only)
            shares = []
            for chosen in (contributes, ~contributes):
                rows = chosen.nonzero()[:, 0]
                shares.append([rows[share] for share in self._shares(step.lengths[rows], together)])
            for mine, indices in zip(by_group, zip(*shares, strict=True), strict=True):
                mine.append(step.only(reads(step)).rows(torch.cat(indices)))
        sent = [ray.put(mine) for mine in by_group]
        calls = {
            rank_name(r): (phase, sent[r // together], lr_multiplier) for r in range(self.ranks)
        }
        return self.watch.call(phase, "call", calls)[0]
