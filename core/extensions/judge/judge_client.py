"""Sends a judge's requests to an OpenAI-compatible server and keeps every reply on disk, by the content of its request.

* A server that is away, busy, slow or broken is sent a request again, with growing, jittered pauses, for ``give_up_s``
  (:mod:`reward_scores.server_calls`): one that restarts costs retries and no verdict, however many answers wait. What
  another try cannot change (other 4xx, a reply of another model) fails at once. A failure is a value, and never
  a grade; the caller counts it.
* Replies are kept as they came, nonsense included: at temperature 0 another try would give the same. A run that is
  repeated or resumed sends no request twice, and needs no server for what is kept.
* Requests run on a thread of their own, so that they advance while the caller's event loop decodes or updates, and one
  client serves several event loops, one after the other.

``openai`` makes the requests, without its own retries: they would neither be counted nor end at a deadline. Replies
are kept by :mod:`core.files.sqlite_store`, since a folder of them may come from somebody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.files.sqlite_store import open_store
from reward_scores.score import ScoreStatus
from reward_scores.server_calls import LARGEST_REPLY, Patience, asked_seconds

if TYPE_CHECKING:
    from core.config.sections.judge import JudgeConfig

log = logging.getLogger(__name__)

KEY = "reward_model.judge"
PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0  # the first pause before another try, doubled until the longest
PROBE_S = 20.0  # for the list of models, when a run starts
PASSES = (408, 409, 425, 429)  # statuses below 500 that may pass
# .db: core/extensions/remote/written_through.py sends such files as databases
FILE, TABLE = "replies.db", "CREATE TABLE replies (key TEXT PRIMARY KEY, reply TEXT)"
FAILURES = ("timeout", "connect", "busy", "status", "refused", "model", "nonsense")


@dataclass(frozen=True)
class Reply:
    """A server's reply as it is kept: its text, why it ended, and the tokens that it took."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def from_json(cls, text: Any) -> Reply:
        """Return the reply that a cache holds. Raises ValueError or TypeError where the text is none."""
        reply = cls(**json.loads(text))
        for name, kind in (("text", str), ("finish", str), ("prompt_tokens", int), ("completion_tokens", int)):
            if not isinstance(getattr(reply, name), kind):
                raise ValueError(f"{name} is {getattr(reply, name)!r:.40}")
        return reply


class JudgeFailure(Exception):
    """A request that brought no verdict; ``kind`` is one of :data:`FAILURES`."""

    def __init__(self, kind: str, what: str, wait_s: float = 0.0, *, passes: bool = False):
        super().__init__(what)
        self.kind, self.wait_s, self.passes = kind, wait_s, passes

    @property
    def status(self) -> ScoreStatus:
        return ScoreStatus.TIMEOUT if self.kind == "timeout" else ScoreStatus.CRASH


class JudgeClient:
    """A client of one server and model; see the module's head. ``counts`` holds what happened since it was taken."""

    def __init__(self, config: JudgeConfig):
        import openai  # noqa: F401 - here, because it takes a second that no request should wait for

        self.config = config
        self._counts: Counter[str] = Counter()
        self._patience = Patience(config.give_up_s, PAUSE_S, LONGEST_PAUSE_S)
        self._flights: dict[str, asyncio.Task[Reply]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._openai: Any = None
        self._turn: asyncio.Semaphore | None = None
        self.cache = ReplyCache(config.cache_dir)

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the client's thread; return its concurrent future."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the judge is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call."""
        return self.start(self._take()).result()

    async def _take(self) -> Counter[str]:
        taken, self._counts = self._counts, Counter()
        return taken

    def close(self) -> None:
        """End connections, thread and cache. A second call does nothing."""
        if self._loop.is_closed():
            return
        self.start(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.cache.close()

    # -- on the client's thread ------------------------------------------------------------------

    async def reply(self, body: Mapping[str, Any], occasion: str = "") -> Reply:
        """Return the reply to a request, kept or new. Requests with the same ``occasion`` and body are one.

        A caller that is cancelled leaves the request to those who wait for it too. Raises JudgeFailure.
        """
        key = hashlib.sha256(json.dumps([body, occasion], sort_keys=True).encode()).hexdigest()
        if (kept := self.cache.get(key)) is not None:
            self.count("cached")
            return kept
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
        reply = await self._asked(body)
        self.cache.set(key, reply)
        self.count("prompt_tokens", reply.prompt_tokens)
        self.count("completion_tokens", reply.completion_tokens)
        return reply

    async def _asked(self, body: Mapping[str, Any]) -> Reply:
        """Send a request until there is a reply. Raises JudgeFailure: the last one, or one that no try would change."""
        tries, spent_s = 0, 0.0
        while True:
            async with self._limit():
                begun = time.monotonic()
                try:
                    reply = await self._attempt(body)
                except JudgeFailure as failure:
                    tries, spent_s = tries + 1, spent_s + time.monotonic() - begun
                    pause = self._patience.pause(begun, tries, spent_s, failure.wait_s) if failure.passes else None
                    if pause is None:
                        raise JudgeFailure(failure.kind, f"{failure} (try {tries})") from failure
                else:
                    self._patience.answered()
                    return reply
            self.count("retries")
            await asyncio.sleep(pause)
            spent_s += pause

    async def _attempt(self, body: Mapping[str, Any]) -> Reply:
        import openai

        self.count("requests")
        try:
            # The whole try is bounded: the library's limit is that of each read, which a trickle of bytes would pass
            async with asyncio.timeout(self.config.timeout_s):
                found = await self._client().chat.completions.create(**body)
        except (TimeoutError, openai.APITimeoutError):
            raise JudgeFailure("timeout", f"no reply in {self.config.timeout_s:g} s", passes=True) from None
        except openai.APIConnectionError as error:
            raise JudgeFailure("connect", f"{error} ({error.__cause__})", passes=True) from error
        except openai.APIStatusError as error:
            raise _of_status(error.status_code, error.message, error.response.headers) from error
        except (openai.OpenAIError, ValueError) as error:  # a body that is cut off, say
            raise JudgeFailure("status", f"unreadable reply ({type(error).__name__}: {error})", passes=True) from error
        return self._read(found, body["model"])

    def _read(self, found: Any, model: str) -> Reply:
        try:
            choice, usage = found.choices[0], found.usage
            made = Reply(
                choice.message.content or "",
                choice.finish_reason or "",
                usage.prompt_tokens if usage else 0,
                usage.completion_tokens if usage else 0,
            )
        except (AttributeError, TypeError, IndexError):
            raise JudgeFailure("status", f"not a chat completion: {found!r:.200}", passes=True) from None
        if found.model and not found.model.startswith(model):  # gpt-x is answered by gpt-x-2026-01-01
            raise JudgeFailure("model", f"{found.model!r} replied, and {KEY}.model={model} was asked")
        return made

    async def models(self) -> list[str]:
        """Return the names of the models that the server lists. Raises JudgeFailure."""
        import openai

        try:
            async with asyncio.timeout(PROBE_S):
                return [one.id async for one in self._client().models.list()]
        except (TimeoutError, openai.APIConnectionError) as error:
            raise JudgeFailure("connect", str(error) or f"no reply in {PROBE_S:g} s") from error
        except openai.APIStatusError as error:
            raise _of_status(error.status_code, error.message, error.response.headers) from error
        except (openai.OpenAIError, ValueError, AttributeError, TypeError) as error:
            raise JudgeFailure("status", f"no list of models ({type(error).__name__}: {error})") from error

    def _limit(self) -> asyncio.Semaphore:
        if self._turn is None:
            self._turn = asyncio.Semaphore(self.config.max_concurrent)
        return self._turn

    def _client(self) -> Any:
        if self._openai is None:
            import httpx
            import openai

            from core.rewards.http_replies import bounded

            # A server of one's own needs no key, and the library insists on one
            key = os.environ.get(self.config.api_key_env) or "none"
            most = httpx.Limits(max_connections=self.config.max_concurrent)
            self._openai = openai.AsyncOpenAI(
                base_url=self.config.url,
                api_key=key,
                max_retries=0,
                timeout=self.config.timeout_s,
                http_client=httpx.AsyncClient(limits=most, follow_redirects=True, **bounded(LARGEST_REPLY)),
            )
        return self._openai

    async def _end(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._openai is not None:
            await self._openai.close()


def _of_status(status: int, message: str, headers: Mapping[str, str]) -> JudgeFailure:
    what = f"status {status}: {message:.300}"
    if status in PASSES or status == 503:
        return JudgeFailure("busy", what, asked_seconds(headers.get("retry-after")), passes=True)
    return JudgeFailure("status" if status >= 500 else "refused", what, passes=status >= 500)


class ReplyCache:
    """Replies by the hash of their request, in one file of a folder that several processes may share."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder).expanduser() / FILE
        self._store = open_store(self.path, TABLE, f"{KEY}.cache_dir")
        self._warned = False

    def __len__(self) -> int:
        return self._store.execute("SELECT COUNT(*) FROM replies").fetchone()[0]

    def get(self, key: str) -> Reply | None:
        """Return the kept reply; None where there is none, or what is kept is none."""
        try:
            row = self._store.execute("SELECT reply FROM replies WHERE key=?", (key,)).fetchone()
            return None if row is None else Reply.from_json(row[0])
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._warn(f"a kept reply is damaged ({error}): it is requested again")
            return None

    def set(self, key: str, reply: Reply) -> None:
        try:
            self._store.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, json.dumps(asdict(reply))))
        except sqlite3.Error as error:  # the verdict is there all the same
            self._warn(f"a reply cannot be kept ({error})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            log.warning("%s: %s; more of this kind are not reported", self.path, what)
        self._warned = True

    def close(self) -> None:
        self._store.close()
