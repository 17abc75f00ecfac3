"""The weight sync of a cluster: from the learner ranks' shards to every engine, bucket by bucket, and the proof.

The driver passes on where a bucket is, never its bytes. A rank of each node leaves it in memory for the node's engines;
for engines with GPUs of their own (``hybrid_engine=False``) rank 0 broadcasts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.cluster.ray_pools import RayProcesses, rank_name
from core.engines.weight_buckets import Checksum, Proof, merged
from core.errors import WorkersLost
from core.learner.models import compute_dtype
from core.learner.passes import WeightSyncError, compare_probe

PHASE = "update_weights"


class WeightSync:
    """Brings the policy of ``processes`` to their engines."""

    def __init__(self, processes: RayProcesses):
        self.processes, self.watch = processes, processes.watch
        part = processes.config.actor_rollout_ref
        self.broadcasts = not part.hybrid_engine
        self.dtype = compute_dtype(part.rollout.dtype) or torch.float32
        self.limit = part.rollout.update_weights_bucket_megabytes * 2**20
        self.joined = False  # whether rank 0 and the engines are in a group

    def run(self, version: int, *, bf16: bool) -> dict[str, float]:
        """Bring the weights to every engine; prove it by checksums, and by a probe within the bound of the precision.

        Raises WorkersLost where a proof fails: a restart of the processes may mend it, and a run must not go on with an
        engine that has other weights.
        """
        try:
            self._transfer(version)
            ids, expected = self.watch.call("probe", "call", {rank_name(r): ("probe",) for r in self._all()})[0]
            probes = self.processes.engine.probes(ids)
            checked = [compare_probe(expected, probe, bf16=bf16) for probe in probes]
        except WeightSyncError as error:
            raise WorkersLost(str(error)) from error
        return {"rollout_corr/probe_diff": max(checked)}

    def _transfer(self, version: int) -> None:
        """Gather, hand over and load one bucket after the other, and compare what was received."""
        engine = self.processes.engine
        if self.broadcasts and not self.joined:
            self._join()
        # Who keeps buckets: rank 0 to broadcast them, or one rank of each node for its engines
        keepers = self._all()[:1] if self.broadcasts else self._all()[:: self.processes.per_node]
        options = [(self.dtype, self.limit, rank in keepers, self.broadcasts) for rank in self._all()]
        engine.begin_update(self._ranks("begin_sync", options)[0])
        sent: list[Checksum] = []
        while None not in (buckets := self._ranks("next_bucket")):
            bucket = merged(buckets)
            sender = {rank_name(0): self.processes.learners[0].broadcast.remote()} if self.broadcasts else {}
            engine.load(bucket, sender)
            sent.append(bucket.checksum)
        proofs = engine.end_update(version)
        self._ranks("end_sync")
        compare_received(sent, proofs)

    def _all(self) -> range:
        return range(self.processes.ranks)

    def _ranks(self, method: str, options: Sequence[tuple] | None = None) -> list[Any]:
        """Call a method of every rank's process."""
        each = options or [()] * self.processes.ranks
        return self.watch.call(PHASE, method, {rank_name(rank): one for rank, one in enumerate(each)})

    def _join(self) -> None:
        """Make a group of rank 0 and every device of the engines."""
        names, each = self.processes.engine.engines, self.processes.engine_gpus
        size, timeout_s = 1 + len(names) * each, self.watch.timeout_s
        calls = {rank_name(0): self.processes.learners[0].join_engines.remote(size, timeout_s)}
        for number, name in enumerate(names):
            arguments = (self.processes.address, 1 + number * each, size, timeout_s)
            calls[name] = self.watch.actors[name].call.remote("join", *arguments)
        self.watch.wait(PHASE, calls)
        self.joined = True


def compare_received(sent: Sequence[Checksum], proofs: Sequence[Proof]) -> None:
    """Compare the buckets of one engine with those of the learner. Raises WeightSyncError where bytes differ."""
    for device, proof in enumerate(proofs):
        wrong = [number for number, pair in enumerate(zip(sent, proof.received, strict=True), 1) if pair[0] != pair[1]]
        if wrong:
            raise WeightSyncError(
                f"in the weight sync buckets {wrong} of {len(sent)} arrived at device {device} of an engine with other "
                "bytes than the learner sent"
            )
