"""A judge: a generative model behind a URL that grades answers (``reward_model.judge``), in place of a classifier.

Each answer gets ``votes`` replies of an OpenAI-compatible server, whose numbers are combined. Where fewer than half of
them can be read the answer has no score, and ``reward_model.on_error`` decides what becomes of it. Beside one answer of
``canary_every`` an answer of known grade is sent too; which answers and which canary depends on the answer's text, so
that a repeated run sends the same.

* A server that is away, busy, slow or broken is sent a request again for ``give_up_s``
  (:mod:`reward_scores.http_client`). What another attempt cannot change (other 4xx, a reply of another model) fails at
  once. A failure is a value, and never a grade.
* Replies are kept on disk by the content of their request, as they came, nonsense included: at temperature 0 another
  try would give the same. A run that is repeated or resumed sends no request twice, and needs no server for those.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from core.answer_cache import AnswerCache
from core.errors import InputError
from core.rewards.grading import Answer, ModelScore
from core.rewards.judge_texts import (
    CANARIES,
    KEY,
    TEMPLATE,
    Canary,
    Case,
    NoVerdict,
    Template,
    VerdictRule,
    read_canaries,
)
from reward_scores.http_client import HttpClient, HttpOptions, RequestFailed
from reward_scores.http_client import Reply as HttpReply

if TYPE_CHECKING:
    from core.config.sections.reward import JudgeConfig

log = logging.getLogger(__name__)

COMBINE = {"mean": statistics.fmean, "median": statistics.median}
SHOWN = 3  # canaries that a message names
PROBE_S = 20.0  # for the list of models, when a run starts
FAILURES = ("timeout", "connect", "busy", "status", "refused", "model", "nonsense")
COUNTS = ("requests", "cached", "retries", "prompt_tokens", "completion_tokens")


class JudgeLost(RuntimeError):
    """So many answers in a row had no verdict that going on would be waiting for nothing."""


class JudgeFailure(Exception):
    """A request that brought no verdict; ``kind`` is one of :data:`FAILURES`."""

    def __init__(self, kind: str, what: str):
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, config={"strict": True})
class Reply:
    """A server's reply as it is kept. Raises ValueError where a field is missing or of another type."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, config={"arbitrary_types_allowed": True})
class Vote:
    """What one reply gave: a number and the tokens that it took, or a failure."""

    value: float = 0.0
    tokens: int = 0
    failure: JudgeFailure | None = None


class Judge:
    """Grades answers by ``reward_model.judge``. Raises InputError for files or patterns that cannot be used."""

    def __init__(self, config: JudgeConfig):
        self.config, self.url = config, config.url.rstrip("/")
        self.rule = VerdictRule.of(config)
        self.template = Template.read(config.template or TEMPLATE, f"{KEY}.template")
        self.canaries: tuple[Canary, ...] = ()
        if config.canary_every:
            path = config.canaries or CANARIES
            self.canaries = read_canaries(path, f"{KEY}.canaries", reference=self.template.reads_reference)
        self.cache = AnswerCache(Path(config.cache_dir).expanduser() / "replies", f"{KEY}.cache_dir")
        token = os.environ.get(config.api_key_env)  # a server of one's own needs none
        headers = {"authorization": f"Bearer {token}"} if token else {}
        options = HttpOptions(config.timeout_s, config.give_up_s, connections=config.max_concurrent, headers=headers)
        self.http = HttpClient("judge", options)
        self._counts: Counter[str] = Counter()
        self._requested: dict[str, asyncio.Task[Reply]] = {}
        self._failed_in_row = 0
        self._warned: set[str] = set()

    async def run(self, answer: Answer) -> ModelScore:
        """Return the answer's number, or why it has none. Raises JudgeLost after ``max_failures`` of these in a row."""
        case = Case.of(answer.messages, answer.response, answer.ground_truth)
        return await asyncio.wrap_future(self.http.loop.submit(self._graded(case)))

    def usage(self, prefix: str) -> dict[str, float]:
        """Return what the judge cost since the last call: requests, kept replies, failures, tokens and their price."""

        def take() -> Counter[str]:
            taken, self._counts = self._counts, Counter()
            return taken

        sent, config = self.http.take_counts(), self.config
        counts = self.http.loop.call(take) + Counter(requests=sent["attempts"], retries=sent["retries"])
        cost = counts["prompt_tokens"] * config.prompt_price + counts["completion_tokens"] * config.completion_price
        failures = {f"failures_{kind}": counts[kind] for kind in FAILURES}
        values = {**{name: counts[name] for name in COUNTS}, **failures, "cost": cost / 1e6}
        return {f"{prefix}_{name}": float(value) for name, value in values.items()}

    def close(self) -> None:
        """End connections, thread and cache. A second call does nothing."""
        self.http.close()
        self.cache.close()

    # -- at start ----------------------------------------------------------------------------------

    def check(self, agreement: float | None) -> None:
        """Check that the server has the model, and that it agrees with the canaries (``agreement``: at least so often).

        Where no server can be reached but replies are kept, a run may be a repetition and begins. Raises InputError.
        """
        where, config = f"{KEY}.url={self.config.url}", self.config
        try:
            models = self.http.loop.submit(self._models()).result()
        except JudgeFailure as failure:
            self._check_failed_list(where, failure)
        else:
            if models and config.model not in models:
                has = ", ".join(models[:5]) + (f" and {len(models) - 5} more" if len(models) > 5 else "")
                raise InputError(f"{KEY}.model={config.model}: {config.url} has {has}; name one of these")
        if self.canaries and agreement is not None:
            self._check_canaries(where, agreement)

    def _check_failed_list(self, where: str, failure: JudgeFailure) -> None:
        if failure.kind == "connect" and len(self.cache):
            cached = f"{len(self.cache)} replies of {KEY}.cache_dir={self.config.cache_dir}"
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
        async def all_votes() -> Sequence[Vote]:
            return await asyncio.gather(*(self._vote(canary.case, 0, "start") for canary in self.canaries))

        votes = self.http.loop.submit(all_votes()).result()
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

    # -- verdicts, on the client's thread ----------------------------------------------------------

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
            reason = f"{len(failures)} of {len(votes)} votes failed: {failures[-1]}"
            return ModelScore(error=reason, timed_out=any(failure.kind == "timeout" for failure in failures))
        self._failed_in_row = 0
        notes["judge_tokens"] = float(sum(vote.tokens for vote in votes))
        if len(votes) > 1:
            notes["judge_spread"] = max(values) - min(values)
        return ModelScore(COMBINE[self.config.combine](values), notes=notes)

    async def _vote(self, case: Case, vote: int, occasion: str = "") -> Vote:
        """Return one reply's number. ``occasion`` makes it another request than the same one at another time."""
        try:
            reply = await self._reply(self._body(case, vote), occasion)
            if reply.finish == "length":  # [[1 may have been about to become [[10]]
                raise JudgeFailure("nonsense", f"the reply was cut off at {KEY}.max_tokens={self.config.max_tokens}")
            try:
                return Vote(self.rule.read(reply.text), reply.prompt_tokens + reply.completion_tokens)
            except NoVerdict as error:
                raise JudgeFailure("nonsense", f"no verdict in {reply.text[-200:]!r}: {error}") from None
        except JudgeFailure as failure:
            self._counts[failure.kind] += 1
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
        return body | {name: value for name, value in config.extra.items() if value is not None}

    def _agrees(self, canary: Canary, value: float) -> bool:
        return value > self.rule.middle if canary.right else value < self.rule.middle

    # -- requests, on the client's thread ----------------------------------------------------------

    async def _reply(self, body: Mapping[str, Any], occasion: str) -> Reply:
        """Return the reply to a request, kept or new. Requests with the same ``occasion`` and body are one.

        A caller that is cancelled leaves the request to those who wait for it too. Raises JudgeFailure.
        """
        key = hashlib.sha256(json.dumps([body, occasion], sort_keys=True).encode()).hexdigest()
        if (kept := self._kept(key)) is not None:
            self._counts["cached"] += 1
            return kept
        if key not in self._requested:
            task = self._requested[key] = asyncio.ensure_future(self._request(key, body))
            task.add_done_callback(lambda done: self._answered(key, done))
        return await asyncio.shield(self._requested[key])

    def _answered(self, key: str, done: asyncio.Task[Reply]) -> None:
        del self._requested[key]
        if not done.cancelled():
            done.exception()  # seen, also where nobody waits for it any more

    def _kept(self, key: str) -> Reply | None:
        kept = self.cache.get(key)
        try:
            return None if kept is None else Reply(**kept)
        except (ValueError, TypeError) as error:
            self.cache.warn(f"a kept reply is damaged ({error}): it is requested again")
            return None

    async def _request(self, key: str, body: Mapping[str, Any]) -> Reply:
        try:
            answer, reply = await self.http.request("POST", f"{self.url}/chat/completions", body, _read_completion)
        except RequestFailed as failure:
            raise _judge_failure(failure, f" (try {failure.failures.total()})") from failure
        model = body["model"]
        if answer.get("model") and not str(answer["model"]).startswith(model):  # gpt-x is answered by gpt-x-2026-01-01
            raise JudgeFailure("model", f"{answer['model']!r} replied, and {KEY}.model={model} was requested")
        self.cache.set({key: asdict(reply)})
        self._counts["prompt_tokens"] += reply.prompt_tokens
        self._counts["completion_tokens"] += reply.completion_tokens
        return reply

    async def _models(self) -> list[str]:
        """Return the names of the models that the server lists. Raises JudgeFailure."""
        try:
            listed = (await self.http.send_once("GET", f"{self.url}/models", longest_s=PROBE_S)).json()
            return [str(model["id"]) for model in listed["data"]]
        except RequestFailed as failure:
            raise _judge_failure(failure) from failure
        except (KeyError, TypeError) as error:
            raise JudgeFailure("status", f"no list of models ({type(error).__name__}: {error})") from error


def _read_completion(reply: HttpReply) -> tuple[dict[str, Any], Reply]:
    answer = reply.json()
    try:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        text, finish = choice["message"].get("content") or "", choice.get("finish_reason") or ""
        return answer, Reply(text, finish, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise RequestFailed("reply", f"not a chat completion: {answer!r:.200}") from error


def _judge_failure(failure: RequestFailed, note: str = "") -> JudgeFailure:
    kind = "status" if failure.kind == "reply" else failure.kind
    return JudgeFailure(kind, f"{failure!s:.300}{note}")
