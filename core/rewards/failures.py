"""What becomes known of answers that could not be scored: the first one's report, the rates, and the end of a dead run.

What a failed answer counts is ``reward_model.on_error``'s choice, which :mod:`core.rewards.layer` applies.
"""

from __future__ import annotations

import logging

from core.rewards.grading import Failure, Job
from reward_scores.score import Score

log = logging.getLogger(__name__)

COUNTS = {"zero": "it counts 0", "mask": "it carries no loss"}


class RewardError(RuntimeError):
    """Answers could not be scored, and the run cannot go on: by ``reward_model.on_error``, or since none ever could."""


class Failures:
    """Counts answers and those without a score; warns of the first of these and of the first part that is no number."""

    def __init__(self, on_error: str):
        self.on_error = on_error
        self.answers = self.failed = 0  # since the last rate
        self.all_answers = self.all_failed = 0
        self.first = ""  # the report of the first failure
        self._noted = False

    def count(self, result: Score | Failure, job: Job, uid: str) -> None:
        self.answers += 1
        self.all_answers += 1
        if isinstance(result, Failure):
            self.failed += 1
            self.all_failed += 1
            if not self.first:
                self.first = f"{described(result, job, uid)}\n{result.detail}"
                if self.on_error in COUNTS and not result.fatal:  # otherwise the run ends with it
                    log.warning(
                        "%s(reward_model.on_error=%s: %s. Shown once; reward/failed_rate has the share of each step)",
                        self.first,
                        self.on_error,
                        COUNTS[self.on_error],
                    )
        elif result.notes and not self._noted:
            self._noted = True
            log.warning(
                "the scorer of data_source=%r returns parts that are no finite numbers (%s): they are kept as texts "
                "beside the answers and have no metric. Shown once",
                job.data_source,
                ", ".join(f"{name}={text!r:.60}" for name, text in result.notes.items()),
            )

    def rate(self, name: str) -> dict[str, float]:
        """Return the share of failures since the last call, dropped groups included; nothing without answers."""
        share = {name: self.failed / self.answers} if self.answers else {}
        self.answers = self.failed = 0
        return share

    def stop_if_all(self, least: int = 1) -> None:
        """Raise RewardError where at least ``least`` answers were scored so far and every one failed."""
        if self.all_failed == self.all_answers >= least:
            raise RewardError(
                f"the scorer failed on each of the {self.all_answers} answers so far, so that nothing can be learnt or "
                f"measured; the first one:\n{self.first}"
            )


def described(result: Failure, job: Job, uid: str) -> str:
    """Return which answer failed, in one line."""
    return (
        f"scoring failed ({result.status.value}) on uid={uid!r}, data_source={job.data_source!r}, "
        f"ground_truth={job.ground_truth!r:.300}, response (its end)={job.response[-1000:]!r}"
    )
