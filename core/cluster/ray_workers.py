"""The phases of a step on a cluster: those of :class:`core.cluster.workers.LocalWorkers` over Ray actors.

Batches are split over the learner ranks here, about equal in tokens. They travel without padding and with the fields
that a phase reads, once a sequence-parallel group, and one rank of the group replies. Every call of an actor goes
through :class:`core.cluster.ray_watch.Watch`: it has a deadline, and an actor that dies ends it at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from core.checkpoint.provenance import ModelFingerprint
from core.cluster.ray_pools import RayProcesses, rank_name
from core.cluster.ray_weights import WeightSync
from core.data.vocabulary import known_ids
from core.learner.batching import contributing_sequences, mini_batching, rank_shares
from core.learner.learner import CRITIC_READS, PASS_READS, actor_reads, only_advantages_train
from core.learner.models import compute_dtype
from core.learner.packing import scattered
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.learner.passes import Traced


class RayWorkers(RayProcesses):
    """The phases over the learner ranks and engines of a cluster. Checkpoints need a folder that all nodes see."""

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, **learner: Any):
        super().__init__(config, tokenizer, device, known=known_ids(tokenizer), **learner)
        self.weight_sync = WeightSync(self)
        actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
        self.actor_mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)
        self.critic_mini_batches = mini_batching(config.critic, length)

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        part = self.config.actor_rollout_ref.actor
        return tuple(self._pass("old_log_prob", "compute_log_probs", batch, part))

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        return self._pass("ref", "compute_ref_log_prob", batch, self.config.actor_rollout_ref.ref)[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        return self._pass("values", "compute_values", batch, self.config.critic)[0]

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        part = self.config.actor_rollout_ref.actor
        mini_batches, reads = self.actor_mini_batches(batch), actor_reads(part, batch)
        return self._update("update_actor", mini_batches, reads, only_advantages_train(part), lr_multiplier, part)

    def traced(self, rows: Collection[int]) -> Traced:
        parts = self._each("trace", "traced", [(tuple(rows),)] * self.ranks)
        return {row: values for part in parts for row, values in part.items()}

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        mini_batches = self.critic_mini_batches(batch)
        return self._update("update_critic", mini_batches, CRITIC_READS, False, lr_multiplier, self.config.critic)

    def sync_weights(self, version: int) -> dict[str, float]:
        return self.weight_sync.run(version, bf16=not self.full_precision)

    def logprob_noise(self, token_ids: Sequence[int]) -> float:
        self._free_gpus()
        return self._each("old_log_prob", "logprob_noise", [(tuple(token_ids),)] * self.ranks)[0]

    @property
    def full_precision(self) -> bool:
        part = self.config.actor_rollout_ref
        return compute_dtype(part.actor.fsdp_config.dtype) is None and compute_dtype(part.rollout.dtype) is None

    @property
    def overlaps(self) -> bool:
        """Whether engine and learner can work at once: not where they alternate on a GPU."""
        return self.device.type == "cpu" or not self.config.actor_rollout_ref.hybrid_engine

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        return self._each("fingerprints", "fingerprints", [()])[0]

    def save(self, folder: Path) -> Mapping[str, str]:
        hashes = self._each("save_checkpoint", "save", [(str(folder.absolute()),)] * self.ranks)
        return {name: digest for of_rank in hashes for name, digest in of_rank.items()}

    def load(self, folder: Path) -> None:
        self._each("load_checkpoint", "load", [(str(folder.absolute()),)] * self.ranks)

    def _each(self, phase: str, method: str, arguments: Sequence[tuple]) -> list[Any]:
        """Call the learner's method on rank 0, 1, ... with the rank's arguments."""
        return self.watch.call(phase, "call", {rank_name(rank): (method, *a) for rank, a in enumerate(arguments)})

    def _free_gpus(self) -> None:
        """Put engines on the learners' GPUs to sleep until the next sync."""
        if self._engines_sleep:
            self.engine.sleep()

    def _shares(self, lengths_B: Tensor, together: int) -> list[Tensor]:
        """Return the sequences of each group of ``together`` neighbours, which share the same ones."""
        groups = self.ranks // together
        if self.config.trainer.balance_batch:
            return rank_shares(lengths_B, groups)
        return list(torch.arange(len(lengths_B)).tensor_split(groups))

    def _pass(self, phase: str, method: str, batch: TrainBatch, part: Any) -> list[Tensor]:
        """Run a pass of ``part`` over all sequences and return its tensors, flat as a batch stores them."""
        self._free_gpus()
        together = part.together
        shares = self._shares(batch.lengths, together)
        batches = [batch.only(PASS_READS).rows(share) for share in shares]
        sent = [ray.put(each) for each in batches]
        calls = {rank_name(rank): (method, sent[rank // together], rank % together == 0) for rank in range(self.ranks)}
        replies = [reply for reply in self.watch.call(phase, "run_pass", calls) if reply is not None]
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
        mini_batches: Iterable[TrainBatch],
        reads: Sequence[str],
        only_advantages: bool,
        lr_multiplier: float,
        part: Any,
    ) -> dict[str, float]:
        """Take all optimizer steps of ``part``. Sequences that train are shared out apart from those that only a
        metric reads."""
        self._free_gpus()
        together = part.together
        by_group: list[list[TrainBatch]] = [[] for _ in range(self.ranks // together)]
        for mini_batch in mini_batches:
            contributes = contributing_sequences(mini_batch, only_advantages_train=only_advantages)
            shares = []
            for chosen in (contributes, ~contributes):
                rows = chosen.nonzero()[:, 0]
                shares.append([rows[share] for share in self._shares(mini_batch.lengths[rows], together)])
            for mine, indices in zip(by_group, zip(*shares, strict=True), strict=True):
                mine.append(mini_batch.only(reads).rows(torch.cat(indices)))
        sent = [ray.put(mine) for mine in by_group]
        return self._each(phase, phase, [(sent[rank // together], lr_multiplier) for rank in range(self.ranks)])[0]
