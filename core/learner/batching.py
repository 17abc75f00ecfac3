"""From groups to tensors, and from a batch to mini-batches, shares of ranks and micro-batches.

Which sequences make an optimizer step, and each token's weight in it, is decided here once, before
memory splits it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.algorithm.losses import loss_weights
from core.algorithm.sequences import count_by_sequence
from core.config import code_by_path, registry
from core.config.training_keys import ActorConfig, CriticConfig
from core.data.draw_order import permutation
from core.types import KeptSets, ScoredGroup, TrainBatch

SHUFFLE_SEED = 42  # of a step's trajectories, as verl's data_loader_seed


def make_batch(groups: Sequence[ScoredGroup], pad_id: int) -> TrainBatch:
    """Return the ``P`` groups as one batch of ``B`` sequences, in the order of the groups.

    A sequence whose score is masked has an empty ``loss_mask``: no loss, and out of every
    denominator. An answer that could not be graded is out of its group's statistics too; one that
    was cut short is not. If the greedy answer could not be graded, its group has no baseline, and
    all of it is left out.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    trajectories, scores, are_branches = zip(*sequences, strict=True)
    group_sizes = torch.tensor([len(group.sequences) for group in groups])
    ids, masks, log_probs, kept_sets = [], [], [], []
    for trajectory in trajectories:
        prompt_length = len(trajectory.prompt_ids)
        ids += [trajectory.prompt_ids, trajectory.response_ids]
        masks += [np.zeros(prompt_length, np.bool_), trajectory.response_mask]
        log_probs += [np.zeros(prompt_length, np.float32), trajectory.logprobs]
        kept_sets += [(None, prompt_length), (trajectory.kept, len(trajectory.response_ids))]
    lengths = torch.tensor([len(t.prompt_ids) + len(t.response_ids) for t in trajectories])
    response_mask = torch.from_numpy(np.concatenate(masks))
    lacks_baseline_P = torch.tensor(
        [group.baseline is not None and group.baseline.left_out for group in groups]
    )
    is_ungraded = torch.tensor([score.left_out for score in scores])
    is_ungraded |= lacks_baseline_P.repeat_interleave(group_sizes)
    carries_loss = ~torch.tensor([score.masked for score in scores]) & ~is_ungraded
    baseline = None
    if all(group.baseline is not None for group in groups):
        baseline_P = torch.tensor([group.baseline.value for group in groups], dtype=torch.float32)
        baseline = baseline_P.repeat_interleave(group_sizes)
    media = {
        number: group.prompt.media for number, group in enumerate(groups) if group.prompt.media
    }
    kept = KeptSets.joined(kept_sets)
    return TrainBatch(lengths, pad_id, media).adding(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        response_mask=response_mask,
        loss_mask=response_mask & carries_loss.repeat_interleave(lengths),
        group=torch.arange(len(groups)).repeat_interleave(group_sizes),
        reward=torch.tensor([score.value for score in scores], dtype=torch.float32),
        in_group_stats=~is_ungraded,
        is_branch=torch.tensor(are_branches) if any(are_branches) else None,
        rollout_log_probs=torch.from_numpy(np.concatenate(log_probs)),
        kept_counts=None if kept is None else torch.from_numpy(kept.counts),
        kept_ids=None if kept is None else torch.from_numpy(kept.ids),
        baseline=baseline,
    )


# -- mini-batches ----------------------------------------------------------------------------------


def mini_batching(
    section: ActorConfig | CriticConfig, response_length: int, loss_mode: str = ""
) -> Callable[[TrainBatch], Iterator[TrainBatch]]:
    """Return a function that cuts a batch into mini-batches, as a configuration section has it.

    If the policy loss treats some tokens apart, the mini-batch has ``selected`` or
    ``selection_order``, by the old log-probs or without those by the engine's.
    """
    loss = registry.policy_loss(loss_mode)
    agg_mode = loss.aggregation or section.loss_agg_mode
    select = code_by_path.load_object(loss.selects) if loss.selects else None

    def cut(batch: TrainBatch) -> Iterator[TrainBatch]:
        for mini_batch in mini_batches(
            batch,
            prompts=section.ppo_mini_batch_size,
            epochs=section.ppo_epochs,
            agg_mode=agg_mode,
            scale_factor=section.loss_scale_factor or response_length,
            shuffle_seed=SHUFFLE_SEED if section.shuffle else None,
        ):
            if select is not None:
                old_log_probs = mini_batch.optional("old_log_probs")
                if old_log_probs is None:
                    old_log_probs = mini_batch.rollout_log_probs
                selection = select(
                    old_log_probs,
                    mini_batch.advantages,
                    mini_batch.loss_weight,
                    section.policy_loss,
                )
                field = "selection_order" if loss.replaces_clipped else "selected"
                mini_batch = mini_batch.adding(**{field: selection})
            yield mini_batch

    return cut


def mini_batches(
    batch: TrainBatch,
    *,
    prompts: int,
    epochs: int = 1,
    agg_mode: str = "token-mean",
    scale_factor: float,
    shuffle_seed: int | None = None,
) -> Iterator[TrainBatch]:
    """Yield the mini-batches of all epochs with their ``loss_weight``; each is one optimizer step.

    A mini-batch has all sequences of ``prompts`` groups (verl's ``ppo_mini_batch_size``), the last
    one of an epoch perhaps fewer. Groups stay in the order of the batch or, with ``shuffle_seed``,
    are shuffled anew in every epoch. ``scale_factor`` is the divisor of seq-mean-token-sum-norm.
    """
    n_groups = int(batch.group.max()) + 1
    for epoch in range(epochs):
        order = np.arange(n_groups)
        if shuffle_seed is not None:
            order = permutation(n_groups, shuffle_seed, epoch)
        for start in range(0, n_groups, prompts):
            groups = torch.from_numpy(order[start : start + prompts])
            rows = torch.isin(batch.group, groups).nonzero()[:, 0]
            mini_batch = batch.rows(rows)
            weights = loss_weights(
                mini_batch.loss_mask, mini_batch.lengths, agg_mode, scale_factor=scale_factor
            )
            yield mini_batch.adding(loss_weight=weights)


def contributing_sequences(batch: TrainBatch, *, skip_zero_advantage: bool) -> Tensor:
    """Return [B] bool: the sequences that can move a weight; the others may be left out.

    A sequence without loss weight moves nothing. Nor does one whose advantages are all zero, if no
    other term of the loss trains.
    """
    contributes = count_by_sequence(batch.loss_weight != 0, batch.lengths) > 0
    if skip_zero_advantage:
        contributes &= count_by_sequence(batch.advantages != 0, batch.lengths) > 0
    return contributes


def split_zero_gradient(
    batch: TrainBatch, *, skip_zero_advantage: bool
) -> tuple[TrainBatch, TrainBatch]:
    """Return the sequences that can move a weight and those that cannot; either may be empty."""
    contributes = contributing_sequences(batch, skip_zero_advantage=skip_zero_advantage)
    contributing = contributes.nonzero()[:, 0]
    idle = (~contributes).nonzero()[:, 0]
    return batch.rows(contributing), batch.rows(idle)


def rank_shares(lengths_B: Tensor, ranks: int) -> list[Tensor]:
    """Return each rank's sequences, ascending: about equally many tokens, and as many sequences.

    The longest sequence that is left goes to the rank with the fewest tokens, among ranks that have
    not got their number of sequences yet. The last rank may have fewer sequences.
    """
    most_sequences = -(-len(lengths_B) // ranks)
    tokens = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in torch.argsort(lengths_B, descending=True, stable=True).tolist():
        with_room = (rank for rank in range(ranks) if len(shares[rank]) < most_sequences)
        rank = min(with_room, key=tokens.__getitem__)
        shares[rank].append(index)
        tokens[rank] += int(lengths_B[index])
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


class MicroBatchSize(NamedTuple):
    """A memory setting: the most sequences, or tokens, of one pass."""

    max_sequences: int | None = None
    max_tokens: int | None = None


def training_size(section: ActorConfig | CriticConfig) -> MicroBatchSize:
    """Return the size of the passes of actor or critic; frozen models use the actor's."""
    if section.use_dynamic_bsz:
        return MicroBatchSize(max_tokens=section.ppo_max_token_len_per_gpu)
    return MicroBatchSize(max_sequences=section.ppo_micro_batch_size_per_gpu)


def micro_batches(
    batch: TrainBatch, *, max_sequences: int | None = None, max_tokens: int | None = None
) -> Iterator[tuple[Tensor, TrainBatch]]:
    """Yield pieces of at most so many sequences or tokens, with the indices of their sequences.

    First-fit decreasing (Johnson 1973): the longest sequence that is left goes into the first piece
    with room. Raises ValueError for a sequence that is longer than ``max_tokens``.
    """
    if max_tokens is not None:
        sizes = batch.lengths.tolist()
        capacity = max_tokens
    else:
        sizes = [1] * len(batch)
        capacity = max_sequences or len(batch)
    pieces: list[list[int]] = []
    room: list[int] = []  # what is left of the capacity of each piece
    for index in torch.argsort(batch.lengths, descending=True, stable=True).tolist():
        size = sizes[index]
        if size > capacity:
            raise ValueError(
                f"a sequence of {size} tokens is longer than the token budget of {capacity}: "
                "raise ppo_max_token_len_per_gpu"
            )
        with_room = (number for number, left in enumerate(room) if left >= size)
        place = next(with_room, len(pieces))
        if place == len(pieces):
            pieces.append([])
            room.append(capacity)
        pieces[place].append(index)
        room[place] -= size
    for piece in pieces:
        index = torch.tensor(piece)
        yield index, batch.rows(index)
