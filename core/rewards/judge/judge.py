"""A judge: a generative model behind a URL that grades answers (``reward_model.judge``), in place of a classifier.

Each answer gets ``votes`` replies, whose numbers are combined. Where fewer than half of them can be read the answer has
no score, and ``reward_model.on_error`` decides what becomes of it. Beside one answer of ``canary_every`` an answer of
known grade is sent to the server too; which answers and which canary depends on the answer's text, so that a repeated
run sends the same. What is sent and kept is decided by ``judge_client``, what a judge reads by ``judge_prompt``, and
what is read from its reply by ``judge_verdict``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from core.errors import InputError
from core.rewards.judge.judge_client import FAILURES, KEY, JudgeClient, JudgeFailure
from core.rewards.judge.judge_prompt import CANARIES, TEMPLATE, Canary, Case, Template, read_canaries
from core.rewards.judge.judge_verdict import NoVerdict, VerdictRule
from core.rewards.model_score import Answer, ModelScore

if TYPE_CHECKING:
    from core.config.sections.reward import JudgeConfig

log = logging.getLogger(__name__)

COMBINE = {"mean": statistics.fmean, "median": statistics.median}
SHOWN = 3  # canaries that a message names


class JudgeLost(RuntimeError):
    """So many answers in a row had no verdict that going on would be waiting for nothing."""


@dataclass(frozen=True)
class Vote:
    """What one reply gave: a number and the tokens that it took, or a failure."""

    value: float = 0.0
    tokens: int = 0
    failure: JudgeFailure | None = None


class Judge:
    """Grades answers by ``reward_model.judge``. Raises InputError for files or patterns that cannot be used."""

    def __init__(self, config: JudgeConfig):
        self.config = config
        self.rule = VerdictRule.of(config)
        self.template = Template.read(config.template or TEMPLATE, f"{KEY}.template")
        self.canaries: tuple[Canary, ...] = ()
        if config.canary_every:
            path = config.canaries or CANARIES
            self.canaries = read_canaries(path, f"{KEY}.canaries", reference=self.template.reads_reference)
        self.client = JudgeClient(config)
        self._failed_in_row = 0
        self._warned: set[str] = set()

    async def run(self, answer: Answer) -> ModelScore:
        """Return the answer's number, or why it has none. Raises JudgeLost after ``max_failures`` of these in a row."""
        case = Case.of(answer.messages, answer.response, answer.ground_truth)
        return await asyncio.wrap_future(self.client.start(self._graded(case)))

    def usage(self, prefix: str) -> dict[str, float]:
        """Return what the judge cost since the last call: requests, kept replies, failures, tokens and their price."""
        config, counts = self.config, self.client.take_counts()
        cost = counts["prompt_tokens"] * config.prompt_price + counts["completion_tokens"] * config.completion_price
        names = ("requests", "cached", "retries", "prompt_tokens", "completion_tokens")
        failures = {f"failures_{kind}": counts[kind] for kind in FAILURES}
        values = {**{name: counts[name] for name in names}, **failures, "cost": cost / 1e6}
        return {f"{prefix}_{name}": float(value) for name, value in values.items()}

    def check(self, agreement: float | None) -> None:
        """Check that the server has the model, and that it agrees with the canaries (``agreement``: at least so often).

        Where no server can be reached but replies are kept, a run may be a repetition and begins. Raises InputError.
        """
        where = f"{KEY}.url={self.config.url}"
        try:
            models = self.client.start(self.client.models()).result()
        except JudgeFailure as failure:
            self._check_failed_list(where, failure)
        else:
            if models and self.config.model not in models:
                has = ", ".join(models[:5]) + (f" and {len(models) - 5} more" if len(models) > 5 else "")
                raise InputError(f"{KEY}.model={self.config.model}: {self.config.url} has {has}; name one of these")
        if self.canaries and agreement is not None:
            self._check_canaries(where, agreement)

    def _check_failed_list(self, where: str, failure: JudgeFailure) -> None:
        if failure.kind == "connect" and len(self.client.cache):
            cached = f"{len(self.client.cache)} replies of {KEY}.cache_dir={self.config.cache_dir}"
            log.warning("%s: cannot be reached (%s); the %s answer, and what they lack fails", where, failure, cached)
        elif failure.kind == "connect":
            raise InputError(f"{where}: cannot be reached ({failure}); start the server, or name one that runs")
        elif failure.kind == "refused" and failure.args[0].startswith(("status 401", "status 403")):
            raise InputError(
                f"{where}: refuses access ({failure}); the environment variable {self.config.api_key_env} "
                f"({KEY}.api_key_env) must hold its key"
            )
        else:  # some servers list nothing; the canaries show whether this one replies
            log.warning("%s: lists no models (%s), so that %s.model is unchecked", where, failure, KEY)

    def _check_canaries(self, where: str, agreement: float) -> None:
        votes = self.client.start(self._all_canaries()).result()
        if failed := [vote.failure for vote in votes if vote.failure is not None]:
            raise InputError(
                f"{where}: no verdict on {len(failed)} of the {len(votes)} canaries, on the first one because of: "
                f"{failed[0]}; correct the server, the template or how a verdict is read"
            )
        missed = [c for c, vote in zip(self.canaries, votes, strict=True) if not self._agrees(c, vote.value)]
        share = 1 - len(missed) / len(votes)
        if share < agreement:
            shown = ", ".join(f"{canary.case.response!r:.80}" for canary in missed[:SHOWN])
            raise InputError(
                f"{where}: {self.config.model} agrees with {share:.0%} of the canaries and "
                f"trainer.health.judge_agreement.bound={agreement:g}; it grades wrongly: {shown}. Take a stronger "
                "model or another template, or lower the bound"
            )

    def close(self) -> None:
        """End the connections. A second call does nothing."""
        self.client.close()

    # -- on the client's thread ------------------------------------------------------------------

    async def _all_canaries(self) -> Sequence[Vote]:
        return await asyncio.gather(*(self._vote(canary.case, 0, "start") for canary in self.canaries))

    async def _graded(self, case: Case) -> ModelScore:
        digest = hashlib.blake2b(json.dumps(astuple(case)).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        due = bool(self.canaries) and number % self.config.canary_every == 0
        work = [self._vote(case, vote) for vote in range(self.config.votes)]
        if due:
            canary = self.canaries[number // self.config.canary_every % len(self.canaries)]
            work.append(self._vote(canary.case, 0, digest.hex()))
        votes = await asyncio.gather(*work)
        notes = {"judge_addressed": float(case.addresses_judge or self.rule.occurs_in(case.response))}
        if due and (beside := votes.pop()).failure is None:
            notes["judge_canary"] = float(self._agrees(canary, beside.value))
        return self._combined(votes, notes)

    def _combined(self, votes: Sequence[Vote], notes: dict[str, float]) -> ModelScore:
        values = [vote.value for vote in votes if vote.failure is None]
        if len(values) * 2 <= len(votes):
            failures = [vote.failure for vote in votes if vote.failure is not None]
            self._failed_in_row += 1
            if self._failed_in_row >= self.config.max_failures:
                raise JudgeLost(
                    f"{KEY}.url={self.config.url}: {self._failed_in_row} answers in a row had no verdict, the last one "
                    f"because of: {failures[-1]}. The run ends, and the same command goes on from its last checkpoint"
                )
            timed_out = any(failure.kind == "timeout" for failure in failures)
            reason = f"{len(failures)} of {len(votes)} votes failed: {failures[-1]}"
            return ModelScore(error=reason, timed_out=timed_out)
        self._failed_in_row = 0
        notes["judge_tokens"] = float(sum(vote.tokens for vote in votes))
        if len(votes) > 1:
            notes["judge_spread"] = max(values) - min(values)
        return ModelScore(COMBINE[self.config.combine](values), notes=notes)

    async def _vote(self, case: Case, vote: int, occasion: str = "") -> Vote:
        """Return one reply's number. ``occasion`` makes it another request than the same one at another time."""
        try:
            reply = await self.client.reply(self._body(case, vote), occasion)
            if reply.finish == "length":  # [[1 may have been about to become [[10]]
                raise JudgeFailure("nonsense", f"the reply was cut off at {KEY}.max_tokens={self.config.max_tokens}")
            try:
                return Vote(self.rule.read(reply.text), reply.prompt_tokens + reply.completion_tokens)
            except NoVerdict as error:
                raise JudgeFailure("nonsense", f"no verdict in {reply.text[-200:]!r}: {error}") from None
        except JudgeFailure as failure:
            self.client.count(failure.kind)
            if failure.kind not in self._warned:
                self._warned.add(failure.kind)
                where = f"{KEY}.url={self.config.url}"
                log.warning("%s: no verdict: %s; more of this kind are only counted", where, failure)
            return Vote(failure=failure)

    def _body(self, case: Case, vote: int) -> dict[str, Any]:
        """Return the request of a vote. It is all that decides a reply, and so the key under which that is kept."""
        config = self.config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": self.template.fill(case, vote)}],
            "temperature": config.temperature,
            "seed": config.seed + vote,
            "max_tokens": config.max_tokens,
            **self.rule.request,
        }
        body = {name: value for name, value in body.items() if config.extra.get(name, value) is not None}
        own = {name: value for name, value in config.extra.items() if value is not None}
        return {**body, "extra_body": own} if own else body

    def _agrees(self, canary: Canary, value: float) -> bool:
        return value > self.rule.middle if canary.right else value < self.rule.middle
