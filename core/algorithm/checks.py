"""Checks of a step: relations between values that the step has anyway, whatever the settings are.
Always on.

Each compares and changes nothing. A relation that does not hold is an error in the code, or in a
hook of the user's, so it ends the run before it trains on the values. How far entropy and -log p of
the samples are apart is a metric, which ``trainer.health`` bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core.errors import BrokenInvariant, InputError

if TYPE_CHECKING:
    from core.types import ScoredGroup, TrainBatch, Trajectory

SUM_TO_ONE = ("token-mean", "seq-mean-token-mean")
ENTROPY_ROOM = 0.02  # nats a token by which entropy and -log p may differ without a fault
# Nats that tokens too rare to be in a sample may take from its mean of -log p, at about five
# standard errors: a token of 15 nats that is expected 14 times is absent once in a million samples
RARE_NATS = 35.0


def require(holds: Any, phase: str, found: str, remedy: str) -> None:
    """Raise BrokenInvariant with the phase, what was found and where to look, unless the relation
    holds."""
    if not holds:
        raise BrokenInvariant(f"invariant broken in phase {phase}: {found}; {remedy}")


def of_tokens(function: Callable[[Any], Any], inputs: Any, shape: torch.Size, second: type) -> Any:
    """Return the pair that a policy loss or an estimator returns, whose tensors hold a number for
    each token.

    Raises InputError for what a user's own returns otherwise: a mean would spread over all tokens
    unseen.
    """
    found = function(inputs)
    wanted = [list(shape), list(shape) if second is Tensor else second.__name__]
    pair = found if isinstance(found, tuple) else (found,)
    got = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in pair]
    if got != wanted:
        name = getattr(function, "__qualname__", function)
        raise InputError(
            f"{name} returned {got}, expected {wanted}; return a number for each token, and no mean"
        )
    return found


# -- what was sampled ------------------------------------------------------------------------------


class SampledTurns:
    """The turns that the engine returned, by episode, until a step has trained on them."""

    def __init__(self) -> None:
        self.turns: dict[int, list[Trajectory]] = {}

    def watch(self, engine: Any) -> WatchedEngine:
        """Return the engine as episodes use it: each turn that it returns is kept."""
        return WatchedEngine(engine, self)

    def add(self, request: Any, turn: Trajectory) -> None:
        episode = request.seed if request.episode is None else request.episode
        # The first turn, perhaps of an episode that was begun before and given up
        if request.seed == episode:
            self.turns[episode] = []
        self.turns.setdefault(episode, []).append(turn)

    def forget(self, oldest: int) -> None:
        """Forget what no later step may train on: samples of policies older than ``oldest``."""
        self.turns = {
            seed: turns for seed, turns in self.turns.items() if turns[-1].policy_version >= oldest
        }

    def check(self, groups: Sequence[ScoredGroup]) -> None:
        """Check that the tokens that train, and their log-probs, are those of the trajectory's
        turns, in order.

        Turns that came from elsewhere (a checkpoint, a hook's own engine) are not known here.
        """
        for one in (trajectory for group in groups for trajectory in group.trajectories):
            turns = self.turns.get(one.seed, ())
            for name in ("response_ids", "logprobs") if turns else ():
                sampled = np.concatenate([getattr(turn, name) for turn in turns])
                same = np.array_equal(getattr(one, name)[one.response_mask], sampled)
                found = (
                    f"{name} of the trajectory of seed {one.seed} are not what the engine returned"
                )
                remedy = (
                    "an agent loop or a hook changed tokens, mask or log-probs after they "
                    "were sampled"
                )
                require(same, "batch", found, remedy)


class WatchedEngine:
    """An engine whose turns are kept, to be compared with what trains."""

    def __init__(self, engine: Any, sampled: SampledTurns):
        self.engine, self.sampled = engine, sampled

    async def sample(self, request: Any) -> Trajectory:
        """Return the engine's trajectory."""
        turn = await self.engine.sample(request)
        self.sampled.add(request, turn)
        return turn


def batch_is_sampled(groups: Sequence[ScoredGroup], batch: TrainBatch) -> None:
    """Check that each sequence has the tokens, the mask and the engine's log-probs of its
    trajectory."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    remedy = (
        "sequences were reordered or masked after they were sampled: look at what makes the batch"
    )
    ids = np.concatenate([ids for t in trajectories for ids in (t.prompt_ids, t.response_ids)])
    require(
        np.array_equal(batch.input_ids.numpy(), ids),
        "batch",
        "input_ids are not what was sampled",
        remedy,
    )
    wrote = np.concatenate(
        [m for t in trajectories for m in (np.zeros(len(t.prompt_ids), np.bool_), t.response_mask)]
    )
    mask = batch.sampled_mask if batch.has("sampled_mask") else batch.response_mask
    wrong = int((mask.numpy() != wrote).sum())
    require(
        not wrong,
        "batch",
        f"the mask of {wrong} tokens is not whether the policy wrote them",
        remedy,
    )
    sampled = np.concatenate([t.logprobs[t.response_mask] for t in trajectories])
    same = np.array_equal(batch.rollout_log_probs.numpy()[wrote], sampled)
    require(
        same,
        "batch",
        "rollout_log_probs of the policy's tokens are not those of the engine",
        remedy,
    )


def weights_sum_to_one(step: TrainBatch, mode: str) -> None:
    """Check that an optimizer step weighs the tokens that carry loss alone, and that a mean's
    weights sum to one."""
    weight = step.loss_weight
    left = int((step.loss_mask.bool() != (weight != 0)).sum())
    found = f"{left} tokens have a loss weight and carry no loss, or carry loss and have no weight"
    require(
        not left,
        "update",
        found,
        "an answer's end of the sequence carries loss like its other tokens",
    )
    if mode in SUM_TO_ONE and bool(step.loss_mask.any()):
        total = float(weight.sum(dtype=torch.float64))
        remedy = "the mean must be over the tokens that carry loss, and over no others"
        require(
            abs(total - 1) < 1e-3,
            "update",
            f"with loss_agg_mode={mode} the weights sum to {total:.4g}",
            remedy,
        )


# -- advantages ------------------------------------------------------------------------------------


def finite(batch: TrainBatch, phase: str, *names: str) -> None:
    """Check that fields which a phase has set hold neither an infinity nor NaN."""
    for name in names:
        if batch.has(name):
            count = int((~getattr(batch, name).isfinite()).sum())
            found = f"{count} numbers of {name} are not finite"
            require(not count, phase, found, "look at the weights and at the scores")


# -- entropy ---------------------------------------------------------------------------------------


def entropy_gap_z(metrics: Mapping[str, float], tokens: int) -> float | None:
    """Return how many standard errors entropy and -log p of the sampled tokens are apart beyond
    what is allowed.

    Where samples are drawn from the whole distribution, ``-log p`` of a token has the entropy as
    its expectation. What engine and learner differ by (precision, staleness) moves the mean, hence
    the allowance. A small sample lacks rare tokens in mean and variance alike: the standard error
    has a term for them that falls with the number of tokens (as in the empirical Bernstein bound,
    Maurer & Pontil 2009, arXiv:0907.3740, theorem 4).
    """
    mean, square = (
        metrics.get(f"rollout_corr/{name}") for name in ("entropy_gap", "entropy_gap_square")
    )
    if mean is None or tokens < 100 or square <= 0:
        return None
    room = ENTROPY_ROOM + 3 * metrics.get("rollout_corr/logp_diff_mean", 0.0)
    beyond = max(0.0, abs(mean) - room)
    return math.copysign(beyond / (math.sqrt(square / tokens) + RARE_NATS / tokens), mean)
