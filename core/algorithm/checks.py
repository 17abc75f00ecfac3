"""Checks of every step: relations between values that the step has anyway, whatever the settings.

Each compares and changes nothing. A relation that does not hold is an error in the code or in a
user's hook, so it ends the run before it trains on the values. How far entropy and -log p of the
samples are apart is a metric, which ``trainer.health`` bounds.
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

ENTROPY_TOLERANCE = 0.02  # nats a token by which entropy and -log p may differ without a fault
# Nats that tokens too rare to be in a sample may take from its mean of -log p, at about five
# standard errors: a token of 15 nats that is expected 14 times is absent once in a million samples
RARE_NATS = 35.0


def require(holds: Any, phase: str, finding: str, remedy: str) -> None:
    """Raise BrokenInvariant with the phase, the finding and where to look, unless it holds."""
    if not holds:
        raise BrokenInvariant(f"invariant broken in phase {phase}: {finding}; {remedy}")


def of_tokens(function: Callable[[Any], Any], inputs: Any, shape: torch.Size, second: type) -> Any:
    """Call a policy loss or an estimator and return its pair, with a number for each token.

    ``second`` is the type of the pair's second value: a tensor, or the dict of stats. Raises
    InputError if a user's own function returns anything else: a mean would spread over all tokens
    unseen.
    """
    result = function(inputs)
    expected = [list(shape), list(shape) if second is Tensor else second.__name__]
    values = result if isinstance(result, tuple) else (result,)
    actual = [list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in values]
    if actual != expected:
        name = getattr(function, "__qualname__", function)
        raise InputError(
            f"{name} returned {actual}, expected {expected}; "
            "return a number for each token, and no mean"
        )
    return result


# -- sampled tokens ------------------------------------------------------------------------------


class SampledTurns:
    """The turns that the engine returned, by episode, until a step has trained on them."""

    def __init__(self) -> None:
        self.turns: dict[int, list[Trajectory]] = {}

    def watch(self, engine: Any) -> WatchedEngine:
        """Return an engine for episodes whose turns are kept here."""
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
        """Check that the tokens and log-probs that train are those of the sampled turns, in order.

        Turns that came from elsewhere (a checkpoint, a hook's own engine) are not known here.
        """
        for group in groups:
            for trajectory in group.trajectories:
                turns = self.turns.get(trajectory.seed)
                if turns is None:
                    continue
                for field in ("response_ids", "logprobs"):
                    sampled = np.concatenate([getattr(turn, field) for turn in turns])
                    trained = getattr(trajectory, field)[trajectory.response_mask]
                    require(
                        np.array_equal(trained, sampled),
                        "batch",
                        f"{field} of the trajectory of seed {trajectory.seed} are not what the "
                        "engine returned",
                        "an agent loop or a hook changed tokens, mask or log-probs after they were "
                        "sampled",
                    )


class WatchedEngine:
    """An engine whose turns are kept, to be compared with what trains."""

    def __init__(self, engine: Any, sampled: SampledTurns):
        self.engine = engine
        self.sampled = sampled

    async def sample(self, request: Any) -> Trajectory:
        """Return the engine's trajectory."""
        turn = await self.engine.sample(request)
        self.sampled.add(request, turn)
        return turn


def batch_is_sampled(groups: Sequence[ScoredGroup], batch: TrainBatch) -> None:
    """Check that the batch has the tokens, masks and log-probs of the trajectories, in order."""
    ids = []
    by_policy = []
    log_probs = []
    for trajectory in (t for group in groups for t in group.trajectories):
        ids += [trajectory.prompt_ids, trajectory.response_ids]
        by_policy += [np.zeros(len(trajectory.prompt_ids), np.bool_), trajectory.response_mask]
        log_probs.append(trajectory.logprobs[trajectory.response_mask])
    by_policy_N = np.concatenate(by_policy)
    mask_N = batch.sampled_mask if batch.has("sampled_mask") else batch.response_mask
    wrong_mask = int((mask_N.numpy() != by_policy_N).sum())
    batch_log_probs = batch.rollout_log_probs.numpy()[by_policy_N]
    for holds, finding in (
        (
            np.array_equal(batch.input_ids.numpy(), np.concatenate(ids)),
            "input_ids are not what was sampled",
        ),
        (
            wrong_mask == 0,
            f"the mask of {wrong_mask} tokens is not whether the policy wrote them",
        ),
        (
            np.array_equal(batch_log_probs, np.concatenate(log_probs)),
            "rollout_log_probs of the policy's tokens are not those of the engine",
        ),
    ):
        require(
            holds,
            "batch",
            finding,
            "sequences were reordered or masked after they were sampled: look at what makes the "
            "batch",
        )


# -- numbers -------------------------------------------------------------------------------------


def finite(batch: TrainBatch, phase: str, *names: str) -> None:
    """Check that fields which a phase has set hold neither an infinity nor NaN."""
    for name in names:
        if batch.has(name):
            count = int((~getattr(batch, name).isfinite()).sum())
            finding = f"{count} numbers of {name} are not finite"
            require(not count, phase, finding, "look at the weights and at the scores")


def entropy_gap_z(metrics: Mapping[str, float], tokens: int) -> float | None:
    """Return by how many standard errors entropy and -log p differ beyond the tolerance.

    If samples are drawn from the whole distribution, ``-log p`` of a token has the entropy as its
    expectation. The difference of engine and learner (precision, staleness) moves the mean, hence
    the tolerance. A small sample lacks rare tokens in mean and variance alike: the standard error
    has a term for them that falls with the number of tokens (as in the empirical Bernstein bound,
    Maurer & Pontil 2009, arXiv:0907.3740, theorem 4).
    """
    mean = metrics.get("rollout_corr/entropy_gap")
    mean_square = metrics.get("rollout_corr/entropy_gap_square")
    if mean is None or tokens < 100 or mean_square <= 0:
        return None
    tolerance = ENTROPY_TOLERANCE + 3 * metrics.get("rollout_corr/logp_diff_mean", 0.0)
    beyond = max(0.0, abs(mean) - tolerance)
    standard_error = math.sqrt(mean_square / tokens) + RARE_NATS / tokens
    return math.copysign(beyond / standard_error, mean)
