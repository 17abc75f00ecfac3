"""Health checks: bounds on a step's metrics, and the last step that was within all of them.

A check compares a number of the step with ``trainer.health.<check>.bound`` (null: off). The run
warns beyond a bound; beyond that of ``nonfinite`` it saves a checkpoint and ends. A run whose score
has not risen after a third or two of its steps gets the likely reason. The state is plain data, a
part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.config.schema import HealthConfig

Values = Mapping[str, float]
SCORE = "critic/score/mean"
# Share of all answers of a step, dropped groups included, that have no score
FAILED_RATE = "reward/failed_rate"
SKIPPED = "skipped_updates"
NONFINITE = "nonfinite"  # the check that ends a run

CHECKS = {
    NONFINITE: "{:g} steps in a row skipped an update whose gradients were not finite: lower "
    "optim.lr or grad_clip",
    "entropy": "the policy's entropy is {:.3g} nats a token: it has stopped exploring; raise "
    "clip_ratio_high, lower lr",
    "reward_drop": "the mean score over reward_window steps is {:.3g} below its best: look at "
    "samples of both times",
    "logp_diff": "log-probs of engine and learner differ by {:.3g} on average: samples are "
    "off-policy; algorithm.rollout_correction weighs for that",
    "entropy_gap": "entropy and -log p of the sampled tokens are {:.3g} standard errors apart: "
    "look at the temperature of each, at the mask, and at what draws the tokens",
    "zero_variance": "{:.0%} of the groups have equal scores and teach nothing: the data may be "
    "too easy or too hard",
    "scorer_errors": "the scorer failed on {:.1%} of the answers of the last steps: the first "
    "failure was printed",
}
STUCK_STEPS = 3
# Metric -> the likely reason if it is 1 in STUCK_STEPS steps in a row, and the key to look at
STUCK = {
    "response_length/clip_ratio": "answers are cut off; raise data.max_response_length, or look "
    "at the model's end-of-sequence token",
    "reward/parse_error_rate": "answers cannot be read by the scorer; look at the form that "
    "prompts require, and at data_source or custom_reward_function.path",
    "reward/zero_variance_share": "groups have equal scores and teach nothing; look at "
    "actor_rollout_ref.rollout.n, the scorer, and how hard data.train_files is",
}
RATE = "actor_rollout_ref.actor.optim.lr"
LEAST_STEPS = 10  # before anything is said about the learning rate
NOISE = 2.0  # standard errors that a change has to exceed
ENTROPY = "actor/entropy"
COLLAPSED = 0.2  # share of the first steps' entropy below which it has collapsed
DRIFT = 0.02  # share of the entropy that a change exceeds where the policy moves
# Share of the entropy by which it changes from step to step where a policy is thrown about
SWING = 0.1
# Metrics that an update of the policy raises, and the mean below which it hardly moves. With one
# optimizer step a batch, old and new policy are one in the first two.
MOVEMENT = {"actor/pg_clipfrac": 1e-3, "actor/ppo_kl": 1e-3, "actor/kl_loss": 1e-3}
NO_SPREAD = "reward/zero_variance_share"
MOST = 0.9  # share of groups of equal scores beyond which the rest teaches little
LOOK = "read answers and scores in samples.jsonl, and raise data.train_batch_size if they are noisy"
REMEMBERED = {SCORE, FAILED_RATE, ENTROPY, *MOVEMENT, *STUCK}


@dataclass
class Health:
    """The state of the checks between steps.

    ``history`` has the metrics in ``REMEMBERED`` of every step that had them.
    """

    last_healthy_step: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)

    def check(self, step: int, values: Values, config: HealthConfig) -> dict[str, str]:
        """Remember a step's metrics, and return check -> text for each bound that it crossed."""
        for name in REMEMBERED & values.keys():
            self.history.setdefault(name, []).append(values[name])
        skipping = [part for part in ("actor", "critic") if values.get(f"{part}/{SKIPPED}")]
        skipped = sum(values[f"{part}/{SKIPPED}"] for part in skipping)
        self.history.setdefault(SKIPPED, []).append(skipped)
        crossed = {}
        for name, value in self.measured(values, config.reward_window).items():
            bound = getattr(config, name).bound
            if bound is None or value is None:
                continue
            within = {NONFINITE: value < bound, "entropy": value >= bound}.get(name, value <= bound)
            if not within:  # NaN is beyond any bound
                text = CHECKS[name].format(value)
                crossed[name] = f"{text} (trainer.health.{name}.bound={bound:g})"
        # The norm of the gradient is absent if every update was skipped
        stepped = all(f"{part}/grad_norm" in values for part in skipping)
        if not crossed and stepped:
            self.last_healthy_step = step
        return crossed

    def measured(self, values: Values, window: int) -> dict[str, float | None]:
        """Return the number that each check compares, None if there is none yet."""
        gap = values.get("rollout_corr/entropy_gap_z")
        scores = self.history.get(SCORE, [])
        failed = self.history.get(FAILED_RATE)
        means = [fmean(scores[end - window : end]) for end in range(window, len(scores) + 1)]
        return {
            NONFINITE: _last_in_row(self.history[SKIPPED], bool),
            "entropy": values.get("actor/entropy"),
            "reward_drop": max(means) - means[-1] if means else None,
            "logp_diff": values.get("rollout_corr/logp_diff_mean"),
            "entropy_gap": None if gap is None else abs(gap),
            "zero_variance": values.get("reward/zero_variance_share"),
            "scorer_errors": fmean(failed[-window:]) if failed else None,
        }

    def stuck(self) -> str | None:
        """Return the likeliest reason why STUCK_STEPS steps taught nothing.

        It is returned after the last of these steps, and not again after more of them.
        """
        for name, text in STUCK.items():
            steps = _last_in_row(self.history.get(name, []), lambda share: share >= 1)
            if steps == STUCK_STEPS:
                return f"in {steps} steps in a row 100% of the {text}"
            if steps > STUCK_STEPS:
                return None
        return None

    def flat_advice(self, total_steps: int, values: Values) -> str | None:
        """Return the likely reason why the score has not risen, None if it has or for no reason.

        It is looked for after a third of the steps, at least ``LEAST_STEPS``, and after twice as
        many once more.
        """
        scores = self.history.get(SCORE, [])
        entropies = self.history.get(ENTROPY, [])
        first_look = max(LEAST_STEPS, -(-total_steps // 3))
        if len(scores) not in (first_look, 2 * first_look) or not entropies:
            return None
        rate = f"{RATE}={values.get('actor/lr', 0.0):g}"
        start, end = fmean(scores[:3]), fmean(scores[-3:])
        course = f"in {len(scores)} steps the mean score has not risen ({start:.3g}, {end:.3g})"
        start, end = fmean(entropies[:3]), fmean(entropies[-3:])
        change = _change(scores)
        if change <= NOISE and end < COLLAPSED * start:
            collapse = f"the entropy fell from {start:.3g} to {end:.3g}"
            return f"{rate}: may be too large: {course} and {collapse}; try a third of it"
        if abs(change) > NOISE:
            return None
        looks_first = len(scores) == first_look
        equal = fmean(self.history.get(NO_SPREAD, [0.0]))
        if equal > MOST:  # groups of equal scores teach nothing at any rate
            told = not looks_first or equal == 1  # stuck() reports it where all groups are so
            return None if told else f"{course}: {equal:.0%} of the {STUCK[NO_SPREAD]}"
        moves = [
            abs(fmean(self.history.get(name, [0.0]))) > least for name, least in MOVEMENT.items()
        ]
        drifts = abs(_change(entropies)) > NOISE and abs(end - start) > DRIFT * start
        # A policy that is thrown about: its entropy is noisy, so the noise hides every change
        swing = fmean(abs(b - a) for a, b in pairwise(entropies)) / max(fmean(entropies), 1e-9)
        if any(moves) or drifts or swing > SWING:
            # Where groups were dropped the mean is that of questions half solved, and stays
            silent = looks_first or values.get("collect/prompts_dropped")
            return None if silent else f"{course}, although the policy moves; {LOOK}"
        if change < -1 or not looks_first:
            return None
        # Not by clip fraction and KL: with one optimizer step a batch they are 0 at any rate
        return f"{rate}: may be too small: {course}, and the entropy stays; try ten times as much"


def _change(values: Sequence[float]) -> float:
    """Return the second half's mean less the first half's, in standard errors.

    The noise is that of neighbouring values, whose difference holds little of a trend.
    """
    half = len(values) // 2
    change = fmean(values[-half:]) - fmean(values[:half])
    variance = fmean((b - a) ** 2 for a, b in pairwise(values)) / 2
    error = (2 * variance / half) ** 0.5
    return change / error if error else 0.0


def _last_in_row(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """Count the values at the end for which a condition holds without a gap."""
    return len(list(takewhile(holds, reversed(values))))
