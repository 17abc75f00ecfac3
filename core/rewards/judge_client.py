"""Sends a judge's requests to an OpenAI-compatible server and keeps every reply on disk, by the content of its request.

* A server that is away, busy, slow or broken is sent a request again, with growing, jittered pauses, for ``give_up_s``.
  What another try cannot change (other 4xx, a reply of another model) fails at once. A failure is a value, and never
  a grade; the caller counts it.
* Replies are kept as they came, nonsense included: at temperature 0 another try would give the same. A run that is
  repeated or resumed sends no request twice, and needs no server for what is kept.
* Requests run on a thread of their own, so that they advance while the caller's event loop decodes or updates, and one
  client serves several event loops, one after the other.

``openai`` makes the requests, without its own retries: they would neither be counted nor end at a deadline.
``diskcache`` keeps the replies: several runs may share a folder. It evicts nothing here, and never unpickles: a folder
of replies may come from somebody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InputError
from core.file_names import inside
from reward_scores.score import ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import JudgeConfig

log = logging.getLogger(__name__)

KEY = "reward_model.judge"
PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0  # the first pause before another try, doubled until the longest
LONGEST_ASKED_S = 120.0  # of what a server may ask for by Retry-After
PROBE_S = 20.0  # for the list of models, when a run starts
PASSES = (408, 409, 425, 429)  # statuses below 500 that may pass
FAILURES = ("timeout", "connect", "busy", "status", "refused", "model", "nonsense")


@dataclass(frozen=True)
class Reply:
    """A server's reply as it is kept: its text, why it ended, and the tokens that it took."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


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
        self._random = random.Random()  # pauses only; no result depends on it
        self._flights: dict[str, asyncio.Task[Reply]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._openai: Any = None
        self._turn: asyncio.Semaphore | None = None
        self.cache = open_cache(config.cache_dir)

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
            return Reply(**json.loads(kept))
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
        self.cache.set(key, json.dumps(asdict(reply)))
        self.count("prompt_tokens", reply.prompt_tokens)
        self.count("completion_tokens", reply.completion_tokens)
        return reply

    async def _asked(self, body: Mapping[str, Any]) -> Reply:
        """Send a request until there is a reply.

        No try begins after ``give_up_s``. Raises the last JudgeFailure then, or one that no other try would change.
        """
        begun, tries = time.monotonic(), 0
        while True:
            try:
                async with self._limit():
                    return await self._attempt(body)
            except JudgeFailure as failure:
                tries += 1
                longest = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(tries - 1, 30))
                pause = max(failure.wait_s, longest * self._random.uniform(0.5, 1.0))
                if not failure.passes or time.monotonic() - begun + pause >= self.config.give_up_s:
                    raise JudgeFailure(failure.kind, f"{failure} (try {tries})") from failure
                self.count("retries")
                await asyncio.sleep(pause)

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
            import openai

            # A server of one's own needs no key, and the library insists on one
            key = os.environ.get(self.config.api_key_env) or "none"
            self._openai = openai.AsyncOpenAI(
                base_url=self.config.url, api_key=key, max_retries=0, timeout=self.config.timeout_s
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
        self.cache.close()  # each thread has a connection of its own


def _of_status(status: int, message: str, headers: Mapping[str, str]) -> JudgeFailure:
    what = f"status {status}: {message:.300}"
    if status in PASSES or status == 503:
        return JudgeFailure("busy", what, _seconds(headers.get("retry-after")), passes=True)
    return JudgeFailure("status" if status >= 500 else "refused", what, passes=status >= 500)


def _seconds(retry_after: str | None) -> float:
    """Return ``Retry-After`` in seconds; a date or an unreadable value counts as none."""
    try:
        return min(LONGEST_ASKED_S, max(0.0, float(retry_after or 0)))
    except ValueError:
        return 0.0


def open_cache(folder: str | Path) -> Any:
    """Return a mapping of texts in a folder that several processes may share. Raises InputError."""
    import sqlite3

    import diskcache

    class Texts(diskcache.Disk):
        """Texts alone: a file that was made to be unpickled is refused."""

        def fetch(self, mode: int, filename: Any, value: Any, read: bool) -> Any:
            if mode not in (diskcache.core.MODE_RAW, diskcache.core.MODE_TEXT):
                raise ValueError(f"{KEY}.cache_dir={folder}: holds an entry that is no text; name another folder")
            if mode == diskcache.core.MODE_TEXT:
                inside(Path(folder).expanduser(), filename, f"{KEY}.cache_dir={folder}")
            return super().fetch(mode, filename, value, read)

        def remove(self, file_path: str) -> None:
            inside(Path(folder).expanduser(), file_path, f"{KEY}.cache_dir={folder}")
            super().remove(file_path)

    try:  # by default a gigabyte is kept, and the oldest replies are dropped beyond it
        return diskcache.Cache(str(Path(folder).expanduser()), disk=Texts, eviction_policy="none", cull_limit=0)
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"{KEY}.cache_dir={folder}: cannot be opened ({error}); name a local folder") from error
