"""From groups to tensors, and from a batch to the pieces that memory allows.

What defines the objective (which rows make an optimizer step, and each token's weight in it) is
decided here once, before anything is split by memory: micro-batches and ranks only add up partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from core.algorithm.losses import loss_weights
from core.config import tables
from core.types import ScoredGroup, TrainBatch, Trajectory
from reward_scores.score import ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import ActorConfig, CriticConfig


def make_batch(groups: Sequence[ScoredGroup], pad_id: int, state_masking: bool = True) -> TrainBatch:
    """The ``P`` groups as one right-padded batch of ``B`` rows, in the order of the groups.

    A row whose score is masked has an empty ``loss_mask``: no loss, and out of every denominator. An
    answer that could not be graded is out of its group's statistics too; one that was cut short is not.

    Without ``state_masking`` what tools wrote is trained on as if the policy had written it: Search-R1's ablation.
    """
    rows = [(t, s) for group in groups for t, s in zip(group.trajectories, group.scores, strict=True)]
    if not rows:
        raise ValueError("make_batch needs at least one group")
    width = max(len(t.prompt_ids) + len(t.response_ids) for t, _ in rows)
    trajectories = [t for t, _ in rows]
    sampled = response_mask = _padded(trajectories, width, "response_mask", False, torch.bool)
    if not state_masking:
        begins = torch.tensor([len(t.prompt_ids) for t in trajectories])[:, None]
        response_mask = (torch.arange(width) >= begins) & (torch.arange(width) < _lengths(trajectories)[:, None])
    live = torch.tensor([not s.masked for _, s in rows])
    errored = torch.tensor([s.masked and s.status in (ScoreStatus.TIMEOUT, ScoreStatus.CRASH) for _, s in rows])
    sizes = torch.tensor([len(group) for group in groups])
    baselines = [group.baseline for group in groups]
    return TrainBatch(
        input_ids=_padded(trajectories, width, "response_ids", pad_id, torch.int64),
        attention_mask=_lengths(trajectories)[:, None] > torch.arange(width),
        response_mask=response_mask,
        loss_mask=response_mask & live[:, None],
        group=torch.arange(len(groups)).repeat_interleave(sizes),
        reward=torch.tensor([s.value for _, s in rows], dtype=torch.float32),
        in_group_stats=~errored,
        rollout_log_probs=_padded(trajectories, width, "logprobs", 0.0, torch.float32),
        sampled_mask=None if state_masking else sampled,
        baseline=None
        if None in baselines
        else torch.tensor([b.value for b in baselines], dtype=torch.float32).repeat_interleave(sizes),
    )


def _lengths(trajectories: Sequence[Trajectory]) -> Tensor:
    return torch.tensor([len(t.prompt_ids) + len(t.response_ids) for t in trajectories])


def _padded(trajectories: Sequence[Trajectory], width: int, name: str, fill, dtype: torch.dtype) -> Tensor:
    """[B, width]; the prompt's stretch holds its ids, or ``fill`` for what only responses have."""
    out = np.full((len(trajectories), width), fill)
    for row, trajectory in zip(out, trajectories, strict=True):
        start, value = len(trajectory.prompt_ids), getattr(trajectory, name)
        if name == "response_ids":
            row[:start] = trajectory.prompt_ids
        row[start : start + len(value)] = value
    return torch.from_numpy(out).to(dtype)


def token_rewards(batch: TrainBatch) -> Tensor:
    """[B, T]: the row's reward on the last token that the policy wrote.

    Not on the last token of the response: where that is a tool's output, GAE and the returns would
    never see the reward. A response with no policy token gets none.
    """
    positions = torch.arange(batch.response_mask.shape[1])
    last = torch.where(batch.response_mask, positions, -1).amax(dim=1)
    at_last = (positions == last[:, None]) & batch.response_mask
    return at_last * batch.reward[:, None]


def optimizer_steps(
    batch: TrainBatch,
    *,
    prompts: int,
    epochs: int = 1,
    agg_mode: str = "token-mean",
    scale_factor: float,
    shuffle_seed: int | None = None,
) -> Iterator[TrainBatch]:
    """The batches of the step's optimizer steps, each with its ``loss_weight``.

    ``scale_factor`` is the constant that seq-mean-token-sum-norm divides by.

    ``prompts`` groups make one optimizer step (verl's ``ppo_mini_batch_size``), in the order of the
    batch or, with ``shuffle_seed``, shuffled anew in every epoch. A step never splits a group; the
    last one is smaller where the number of groups does not divide.
    """
    n_groups = int(batch.group.max()) + 1
    for epoch in range(epochs):
        order = np.arange(n_groups)
        if shuffle_seed is not None:
            order = np.random.default_rng((shuffle_seed, epoch)).permutation(n_groups)
        for start in range(0, n_groups, prompts):
            chosen = torch.isin(batch.group, torch.from_numpy(order[start : start + prompts]))
            rows = batch.rows(chosen.nonzero()[:, 0])
            weight = loss_weights(rows.loss_mask, agg_mode, scale_factor=scale_factor)
            yield rows.adding(loss_weight=weight)


def busy_rows(batch: TrainBatch, *, only_advantages_train: bool) -> Tensor:
    """[B] bool: the rows that can move a weight.

    ``loss_weight`` was computed before, over all rows, so leaving the others out keeps the objective. A row without
    weight never moves anything. One whose advantages are all zero does not either, if nothing but the
    policy-gradient term trains (no KL loss, no entropy bonus, no critic).
    """
    busy = (batch.need("loss_weight") != 0).any(dim=1)
    if only_advantages_train:
        busy &= (batch.need("advantages") != 0).any(dim=1)
    return busy


def split_idle_rows(batch: TrainBatch, *, only_advantages_train: bool) -> tuple[TrainBatch, TrainBatch]:
    """The rows that can move a weight, and those that cannot; either may be empty."""
    busy = busy_rows(batch, only_advantages_train=only_advantages_train)
    return batch.rows(busy.nonzero()[:, 0]), batch.rows((~busy).nonzero()[:, 0])


def rank_shares(lengths_B: Tensor, ranks: int) -> list[Tensor]:
    """The row numbers of each rank, ascending: about equally many tokens, and equally many rows (or one less).

    The longest row that is left goes to the rank with the fewest tokens among those with room.
    """
    room = -(-len(lengths_B) // ranks)
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]
    for row in torch.argsort(lengths_B, descending=True, stable=True).tolist():
        rank = min((r for r in range(ranks) if len(shares[r]) < room), key=lambda r: (loads[r], len(shares[r])))
        loads[rank] += int(lengths_B[row])
        shares[rank].append(row)
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


def micro_batches(
    batch: TrainBatch, *, max_rows: int | None = None, max_tokens: int | None = None, packed: bool = False
) -> Iterator[tuple[Tensor, TrainBatch]]:
    """Pieces with their row numbers, each cut to its longest row.

    ``max_rows`` bounds the rows of a piece, ``max_tokens`` what it computes, so that the budget is never exceeded: its
    rows times its width, padding included, or, ``packed``, its tokens. Padded pieces have rows of similar length.
    Raises ValueError for a row that alone is over the budget.
    """
    lengths = batch.attention_mask.sum(dim=1)
    order = torch.argsort(lengths, descending=True, stable=True)
    if max_tokens is not None and len(order) and int(lengths[order[0]]) > max_tokens:
        raise ValueError(
            f"a sequence of {int(lengths[order[0]])} tokens is longer than the token budget of {max_tokens}: "
            "raise ppo_max_token_len_per_gpu (or log_prob_max_token_len_per_gpu)"
        )
    if packed and max_tokens is not None and max_rows is None:
        pieces = _first_fit(lengths, order, max_tokens)
    else:
        pieces = _runs(lengths, order, max_rows, max_tokens)
    for index in pieces:
        yield index, batch.rows(index).cut(int(lengths[index[0]]))


def _runs(lengths: Tensor, order: Tensor, max_rows: int | None, max_tokens: int | None) -> Iterator[Tensor]:
    """Rows one after another, the longest first, as many as fit with padding."""
    start = 0
    while start < len(order):
        rows = len(order) - start
        if max_rows is not None:
            rows = min(rows, max_rows)
        if max_tokens is not None:
            rows = min(rows, max_tokens // int(lengths[order[start]]))
        yield order[start : start + rows]
        start += rows


def _first_fit(lengths: Tensor, order: Tensor, max_tokens: int) -> list[Tensor]:
    """Each row, the longest first, into the first piece with room for it: never more than 11/9 of the fewest pieces
    plus one (first-fit decreasing, Johnson 1973)."""
    pieces: list[list[int]] = []
    room: list[int] = []
    for row in order.tolist():
        length = int(lengths[row])
        place = next((i for i, left in enumerate(room) if left >= length), len(room))
        if place == len(room):
            pieces.append([])
            room.append(max_tokens)
        pieces[place].append(row)
        room[place] -= length
    return [torch.tensor(piece) for piece in pieces]


def steps_of(
    batch: TrainBatch, part: ActorConfig | CriticConfig, response_length: int, loss_mode: str = ""
) -> Iterator[TrainBatch]:
    """The optimizer steps that the configuration makes of a batch."""
    return optimizer_steps(
        batch,
        prompts=part.ppo_mini_batch_size,
        epochs=part.ppo_epochs,
        agg_mode=tables.policy_loss(loss_mode).aggregation or part.loss_agg_mode,
        scale_factor=part.loss_scale_factor or response_length,
        shuffle_seed=part.data_loader_seed if part.shuffle else None,
    )
