"""What must hold of the tokens of a recorded trajectory: each check returns where it does not.

A finding is no proof of a bug and its absence no proof of none: it is where to look first. Each check is one function
of a trajectory, its group and its step; :data:`CHECKS` names them. Nothing here imports torch.
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

    def array(self, name: str) -> np.ndarray | None:
        return self.one.field(name)

    @property
    def mask(self) -> np.ndarray:
        return self.one.arrays["response_mask"]

    @property
    def sampled(self) -> np.ndarray:
        return self.one.arrays["sampled"]


Found = Iterator[tuple[str, np.ndarray | None]]


def mask_of_others(seen: Seen) -> Found:
    """Yield tokens that are trained on though the policy did not write them."""
    if seen.config.get("actor_rollout_ref.actor.state_masking", True) is not False:
        yield "in the mask, and not written by the policy", seen.mask & ~seen.sampled
    else:
        yield "in the mask, and part of the prompt", seen.mask & (np.arange(seen.one.length) < seen.one.prompt)


def mask_missing(seen: Seen) -> Found:
    """Yield tokens that the policy wrote and that are not in the mask."""
    yield "written by the policy, and not in the mask", seen.sampled & ~seen.mask


def loss_mask(seen: Seen) -> Found:
    """Yield tokens that carry loss and must not, or the other way round."""
    carries = seen.one.arrays["loss_mask"]
    if seen.one.about["masked"]:
        yield "carries loss, though the score of the answer is masked", carries
        return
    yield "carries loss outside the mask", carries & ~seen.mask
    if not seen.config.get("algorithm.rollout_correction.rollout_rs"):
        yield "in the mask, and carries no loss", seen.mask & ~carries


def engine_log_probs(seen: Seen) -> Found:
    """Yield tokens whose log-prob in the batch is not what the engine reported, or cannot be one."""
    batch, engine = seen.array("rollout_log_probs"), seen.one.arrays["engine"]
    if batch is not None:
        yield "the batch has another log-prob than the engine reported", np.abs(batch - engine) > NOISE
    yield "a log-prob above 0", engine > NOISE
    yield "a log-prob of a token that the engine did not sample", (engine != 0) & ~seen.sampled


def engine_against_learner(seen: Seen) -> Found:
    """Yield where engine and learner differ by more than rounding, and whether a shift by one explains it."""
    learner = seen.one.learner()
    if learner is None:
        return
    batch = seen.array("rollout_log_probs")
    engine = seen.one.arrays["engine"] if batch is None else batch
    both = seen.sampled & ~np.isnan(learner)
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
    value, now, old = seen.array("ratio"), seen.array("log_prob"), seen.array("old_log_probs")
    if value is None:
        return
    if (
        old is not None
        and now is not None
        and seen.config.get("actor_rollout_ref.actor.policy_loss.loss_mode") != "gspo"
    ):
        expected = np.exp(np.clip(now - old, -20, 20))
        yield "the ratio is not exp(log-prob - old log-prob)", np.abs(value / expected - 1) > 0.01
    elif old is None and not seen.config.get("algorithm.rollout_correction.bypass_mode"):
        yield "the ratio is not 1 in the only optimizer step of the batch", np.abs(value - 1) > 0.01
    advantage, clip = seen.array("advantages"), seen.array("clip")
    if (
        clip is not None
        and advantage is not None
        and seen.config.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "vanilla"
    ):
        low, high = seen.step.meta["clip"]
        beyond = ((value > high + 0.01) & (advantage > 0)) | ((value < low - 0.01) & (advantage < 0))
        yield f"the ratio is outside {low:g} to {high:g}, and the clip did nothing", beyond & (clip == 0)


def advantages(seen: Seen) -> Found:
    """Yield advantages outside the mask, that are no numbers, or that have the wrong sign for their reward."""
    value = seen.array("advantages")
    if value is None:
        return
    yield "an advantage outside the mask", (value != 0) & ~seen.mask
    yield "an advantage that is no number", ~np.isfinite(value)
    own = value[seen.mask]
    rows = [t for t in seen.group.trajectories if t.about["reward"] is not None and t.about["counted"]]
    if not len(own) or len(rows) < 2 or seen.array("values") is not None or np.ptp(own) > 1e-5:
        return  # an estimator that gives each token its own advantage
    mean, reward = np.mean([t.about["reward"] for t in rows]), seen.one.about["reward"]
    if _leaves_one_out(seen) and abs(reward - mean) > 1e-4 and own[0] * (reward - mean) < 0:
        yield f"the reward {reward:.3g} against {mean:.3g} in the group, and an advantage of the other sign", seen.mask


def _leaves_one_out(seen: Seen) -> bool:
    """Return whether the estimator compares an answer with the others of its group, and with nothing else."""
    named = str(seen.config.get("algorithm.adv_estimator"))
    return named in ("grpo", "rloo", "grpo_passk", "gpg")


def loss_weights(seen: Seen) -> Found:
    """Yield weights where no loss is, none where there is some, and weights that depend on how a batch was split."""
    weight, carries = seen.array("loss_weight"), seen.one.arrays["loss_mask"]
    if weight is None:
        return
    known = ~np.isnan(weight)
    yield "a loss weight where no loss is carried", known & (weight != 0) & ~carries
    yield "carries loss with a weight of 0", known & (weight == 0) & carries
    if not carries.any():
        return
    share = {"token-mean": lambda w, n: w, "seq-mean-token-mean": lambda w, n: w * n}
    mode = seen.config.get("actor_rollout_ref.actor.loss_agg_mode")
    if mode not in share:
        return
    others = [_weight(t, share[mode]) for t in seen.group.trajectories]
    typical = np.median([one for one in others if one is not None])
    mine = _weight(seen.one, share[mode])
    if mine is not None and abs(mine / typical - 1) > 0.01:
        text = f"its loss weight is {mine / typical:.3g} times that of its group, with loss_agg_mode={mode}"
        yield text, carries


def _weight(one: TracedTrajectory, share: Callable[[float, int], float]) -> float | None:
    weight, carries = one.field("loss_weight"), one.arrays["loss_mask"]
    if weight is None or not (carries & ~np.isnan(weight)).any():
        return None
    return share(float(np.nanmax(weight[carries])), int(carries.sum()))


def values(seen: Seen) -> Found:
    """Yield values and entropies that cannot be."""
    for name in ("values", "returns", "entropy"):
        found = seen.array(name)
        if found is not None:
            yield f"{name}: no number", seen.mask & np.isinf(found)
    entropy = seen.array("entropy")
    if entropy is not None:
        yield "an entropy below 0", entropy < -NOISE


def age(seen: Seen) -> Found:
    """Yield a policy that is older than trainer.max_staleness allows, or newer than the step."""
    steps, most = seen.step.step - 1 - seen.one.about["version"], seen.config.get("trainer.max_staleness", 0)
    if not 0 <= steps <= most:
        yield f"written by a policy that is {steps} steps old; trainer.max_staleness={most}", None


def ending(seen: Seen) -> Found:
    """Yield an end that the stream of tokens does not have."""
    meta, ids = seen.step.meta, seen.one.arrays["ids"]
    ends = np.isin(ids, meta["ends"] if "ends" in meta else [meta["eos"]])  # the latter of earlier versions
    last = np.arange(len(ids)) == len(ids) - 1
    if seen.one.about["stop"] == "eos":
        yield "stopped at the end of the sequence, and its last token is another one", last & ~ends
    rollout = "actor_rollout_ref.rollout"
    # An episode is also truncated where a tool's answer found no room after a complete turn.
    one_turn = not (seen.config.get(f"{rollout}.agent_loop") or seen.config.get(f"{rollout}.multi_turn.enable"))
    if seen.one.about["stop"] == "length" and one_turn:
        yield "truncated, and its last token ends the sequence", last & ends & seen.sampled
    # The prompt's first two tokens alike: a beginning that the template and the tokenizer both wrote.
    double = (np.arange(len(ids)) == 1) & (seen.one.prompt > 2) & (ids == ids[0])
    special = str(seen.one.texts.known[str(int(ids[0]))]).startswith("<")
    yield "the prompt begins twice", double if special else np.zeros(len(ids), bool)


CHECKS: Mapping[str, Callable[[Seen], Found]] = {
    "mask of others": mask_of_others,
    "mask missing": mask_missing,
    "loss mask": loss_mask,
    "engine log-probs": engine_log_probs,
    "engine and learner": engine_against_learner,
    "ratio": ratio,
    "advantages": advantages,
    "loss weights": loss_weights,
    "values": values,
    "age": age,
    "ending": ending,
}


def findings(seen: Seen) -> list[Finding]:
    """Return what the checks find in a trajectory that trained; one that was dropped has nothing to check."""
    found = []
    if "response_mask" not in seen.one.arrays or seen.group.about["dropped"]:
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
