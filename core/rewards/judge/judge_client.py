"""Sends a judge's requests to an OpenAI-compatible server and keeps every reply on disk, by the content of its request.

* A server that is away, busy, slow or broken is sent a request again for ``give_up_s``
  (:mod:`reward_scores.http_client`): one that restarts costs retries and no verdict, however many answers wait. What
  another attempt cannot change (other 4xx, a reply of another model) fails at once. A failure is a value, and never
  a grade; the caller counts it.
* Replies are kept as they came, nonsense included: at temperature 0 another try would give the same. A run that is
  repeated or resumed sends no request twice, and needs no server for what is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from core.answer_cache import AnswerCache
from reward_scores.http_client import HttpClient, HttpOptions, RequestFailed
from reward_scores.http_client import Reply as HttpReply
from reward_scores.score import ScoreStatus

if TYPE_CHECKING:
    from core.config.sections.reward import JudgeConfig

log = logging.getLogger(__name__)

KEY = "reward_model.judge"
PROBE_S = 20.0  # for the list of models, when a run starts
FOLDER = "replies"
FAILURES = ("timeout", "connect", "busy", "status", "refused", "model", "nonsense")


@dataclass(frozen=True, config={"strict": True})
class Reply:
    """A server's reply as it is kept: its text, why it ended, and the tokens that it took.

    Raises ValueError where a field is missing or of another type.
    """

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


class JudgeFailure(Exception):
    """A request that brought no verdict; ``kind`` is one of :data:`FAILURES`."""

    def __init__(self, kind: str, what: str):
        super().__init__(what)
        self.kind = kind

    @property
    def status(self) -> ScoreStatus:
        return ScoreStatus.TIMEOUT if self.kind == "timeout" else ScoreStatus.CRASH


class JudgeClient:
    """A client of one server and model; see the module's head."""

    def __init__(self, config: JudgeConfig):
        self.config = config
        self.url = config.url.rstrip("/")
        self._counts: Counter[str] = Counter()
        self._flights: dict[str, asyncio.Task[Reply]] = {}
        key = os.environ.get(config.api_key_env)  # a server of one's own needs none
        self.http = HttpClient(
            "judge",
            HttpOptions(
                config.timeout_s,
                config.give_up_s,
                connections=config.max_concurrent,
                headers={"authorization": f"Bearer {key}"} if key else {},
            ),
        )
        self.cache = ReplyCache(config.cache_dir)

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the client's thread; return its concurrent future."""
        return self.http.loop.submit(work)

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call."""

        def take() -> Counter[str]:
            taken, self._counts = self._counts, Counter()
            return taken

        sent = self.http.take_counts()
        return self.http.loop.call(take) + Counter(requests=sent["attempts"], retries=sent["retries"])

    def close(self) -> None:
        """End connections, thread and cache. A second call does nothing."""
        self.http.close()
        self.cache.close()

    # -- on the client's thread ------------------------------------------------------------------

    async def reply(self, body: Mapping[str, Any], occasion: str = "") -> Reply:
        """Return the reply to a request, kept or new. Requests with the same ``occasion`` and body are one.

        A caller that is cancelled leaves the request to those who wait for it too. Raises JudgeFailure.
        """
        key = hashlib.sha256(json.dumps([body, occasion], sort_keys=True).encode()).hexdigest()
        if (cached := self.cache.get(key)) is not None:
            self.count("cached")
            return cached
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.ensure_future(self._kept(key, body))
            flight.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(flight)

    def _landed(self, key: str, done: asyncio.Task[Reply]) -> None:
        del self._flights[key]
        if not done.cancelled():
            done.exception()  # seen, also where nobody waits for it any more

    async def _kept(self, key: str, body: Mapping[str, Any]) -> Reply:
        reply = await self._request(body)
        self.cache.set(key, reply)
        self.count("prompt_tokens", reply.prompt_tokens)
        self.count("completion_tokens", reply.completion_tokens)
        return reply

    async def _request(self, body: Mapping[str, Any]) -> Reply:
        sent = {name: value for name, value in body.items() if name != "extra_body"} | body.get("extra_body", {})
        try:
            answer, reply = await self.http.request("POST", f"{self.url}/chat/completions", sent, _read_completion)
        except RequestFailed as failure:
            raise _judge_failure(failure, f" (try {failure.failures.total()})") from failure
        model = body["model"]
        if answer.get("model") and not str(answer["model"]).startswith(model):  # gpt-x is answered by gpt-x-2026-01-01
            raise JudgeFailure("model", f"{answer['model']!r} replied, and {KEY}.model={model} was requested")
        return reply

    async def models(self) -> list[str]:
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


class ReplyCache:
    """Replies by the hash of their request, in a folder that several processes may share."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder).expanduser() / FOLDER
        self._answers = AnswerCache(self.path, f"{KEY}.cache_dir")

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Reply | None:
        """Return the kept reply; None where there is none, or what is kept is none."""
        kept = self._answers.get(key)
        try:
            return None if kept is None else Reply(**kept)
        except (ValueError, TypeError) as error:
            self._answers.warn(f"a kept reply is damaged ({error}): it is requested again")
            return None

    def set(self, key: str, reply: Reply) -> None:
        self._answers.set({key: asdict(reply)})

    def close(self) -> None:
        self._answers.close()
