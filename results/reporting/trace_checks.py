"""What must hold of the tokens of a recorded trajectory: each check yields where it does not.

A finding is no proof of a bug and its absence no proof of none: it is where to look first. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from results.reporting.trace_reader import TracedGroup, TracedStep, TracedTrajectory

NOISE = 1e-4  # nats: what rounding of float32 makes of a log-prob
GAP = 0.1  # nats a token: ten times what bf16 gives
MARKED = 400  # tokens of a finding that a page marks
ACTOR = "actor_rollout_ref.actor"
LEAVE_ONE_OUT = ("grpo", "rloo", "grpo_passk", "gpg")  # compare an answer with its group, and with nothing else


@dataclass(frozen=True)
class Finding:
    """A sentence about a trajectory, and the tokens that it is about; none where it is about all of it."""

    check: str
    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What a check reads: a trajectory that trained, with its group, its step and the run's configuration (flat)."""

    one: TracedTrajectory
    group: TracedGroup
    step: TracedStep
    config: Mapping[str, Any]


Found = Iterator[tuple[str, np.ndarray | None]]


def mask(seen: Seen) -> Found:
    """Yield tokens in the mask that the policy did not write, and the other way round; so of the loss."""
    arrays = seen.one.arrays
    inside, sampled, carries = arrays["response_mask"], arrays["sampled"], arrays["loss_mask"]
    written = sampled if seen.config.get(f"{ACTOR}.state_masking", True) is not False else inside
    yield "in the mask, and not written by the policy", inside & ~written
    yield "written by the policy, and not in the mask", sampled & ~inside
    if seen.one.about["masked"]:
        yield "carries loss, though the score of the answer is masked", carries
        return
    yield "carries loss outside the mask", carries & ~inside
    if not seen.config.get("algorithm.rollout_correction.rollout_rs"):
        yield "in the mask, and carries no loss", inside & ~carries


def log_probs(seen: Seen) -> Found:
    """Yield log-probs that are none, and where engine and learner differ by more than rounding, perhaps by a shift."""
    one = seen.one
    batch, reported, learner, sampled = (
        one.field("rollout_log_probs"),
        one.arrays["engine"],
        one.learner(),
        one.arrays["sampled"],
    )
    if batch is not None:
        yield "the batch has another log-prob than the engine reported", np.abs(batch - reported) > NOISE
    yield "a log-prob above 0", reported > NOISE
    if learner is None:
        return
    engine, both = reported if batch is None else batch, sampled & ~np.isnan(learner)
    gap = np.where(both, np.abs(learner - engine), 0.0)
    if not both.any() or (mean := gap[both].mean()) <= GAP:
        return
    places = np.flatnonzero(both)
    for shift, where in ((1, "later"), (-1, "earlier")):
        inside = places[(places + shift >= 0) & (places + shift < len(engine))]
        if len(inside) > 3 and np.abs(learner[inside] - engine[inside + shift]).mean() < mean / 4:
            yield f"the learner's log-prob is the engine's one token {where}: a shift by one", gap > GAP
            return
    yield f"engine and learner differ by {mean:.3g} nats a token", gap > GAP


def ratio(seen: Seen) -> Found:
    """Yield tokens whose ratio does not follow from the log-probs, and those that should have been clipped."""
    one, mode = seen.one, seen.config.get(f"{ACTOR}.policy_loss.loss_mode")
    value, now, old, advantage, clip = map(one.field, ("ratio", "log_prob", "old_log_probs", "advantages", "clip"))
    if value is None:
        return
    if old is not None and now is not None and mode != "gspo":
        expected = np.exp(np.clip(now - old, -20, 20))
        yield "the ratio is not exp(log-prob - old log-prob)", np.abs(value / expected - 1) > 0.01
    if clip is not None and advantage is not None and mode == "vanilla":
        low, high = seen.step.meta["clip"]
        beyond = ((value > high + 0.01) & (advantage > 0)) | ((value < low - 0.01) & (advantage < 0))
        yield f"the ratio is outside {low:g} to {high:g}, and the clip did nothing", beyond & (clip == 0)


def advantages(seen: Seen) -> Found:
    """Yield advantages outside the mask, that are no numbers, or that have the wrong sign for their reward."""
    value, inside = seen.one.field("advantages"), seen.one.arrays["response_mask"]
    if value is None:
        return
    yield "an advantage outside the mask", (value != 0) & ~inside
    yield "an advantage that is no number", ~np.isfinite(value)
    rows = [t for t in seen.group.trajectories if t.about["reward"] is not None and t.about["counted"]]
    own = value[inside]
    if not len(own) or len(rows) < 2 or seen.config.get("algorithm.adv_estimator") not in LEAVE_ONE_OUT:
        return
    mean, reward = np.mean([t.about["reward"] for t in rows]), seen.one.about["reward"]
    if abs(reward - mean) > 1e-4 and own[0] * (reward - mean) < 0:
        yield f"the reward {reward:.3g} against {mean:.3g} in the group, and an advantage of the other sign", inside


def loss_weights(seen: Seen) -> Found:
    """Yield weights where no loss is carried, and the other way round."""
    weight, carries = seen.one.field("loss_weight"), seen.one.arrays["loss_mask"]
    if weight is not None:
        known = ~np.isnan(weight)
        yield "a loss weight where no loss is carried", known & (weight != 0) & ~carries
        yield "carries loss with a weight of 0", known & (weight == 0) & carries


def age(seen: Seen) -> Found:
    """Yield a policy that is older than trainer.max_staleness allows, or newer than the step."""
    steps, most = seen.step.step - 1 - seen.one.about["version"], seen.config.get("trainer.max_staleness", 0)
    if not 0 <= steps <= most:
        yield f"written by a policy that is {steps} steps old; trainer.max_staleness={most}", None


CHECKS: Mapping[str, Callable[[Seen], Found]] = {
    "mask": mask,
    "log-probs": log_probs,
    "ratio": ratio,
    "advantages": advantages,
    "loss weights": loss_weights,
    "age": age,
}


def findings(seen: Seen) -> list[Finding]:
    """Return what the checks find in a trajectory that trained."""
    found = []
    if "response_mask" not in seen.one.arrays:
        return found
    for name, check in CHECKS.items():
        with np.errstate(invalid="ignore", over="ignore"):
            results = list(check(seen))
        for text, where in results:
            if where is None:
                found.append(Finding(name, text))
            elif where.any():
                places = np.flatnonzero(where)
                count = f"{len(places)} token{'s' * (len(places) > 1)}: "
                found.append(Finding(name, count + text, tuple(places[:MARKED].tolist())))
    return found
