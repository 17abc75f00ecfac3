"""What the clients of a run's servers (retriever, judge, Sandbox Fusion) share: retries, the key, the largest reply.

A failure that a later try mends is no failure: a server that restarts costs retries and no answer. A client gives up
where the server answered nobody for ``give_up_s`` seconds, or where the tries and pauses of one request took as long
though others were answered. Time in which a request waits for its turn counts as neither, so the budget does not depend
on how many requests wait. No request is sent here: two of the clients are asynchronous, and the third, a scorer, must
not import what they need.
"""

from __future__ import annotations

import os
import random
import time

LARGEST_REPLY = 64 * 2**20  # bytes that are read of one: a broken server must not fill the memory
LONGEST_ASKED_S = 120.0  # of what a server may ask for by Retry-After


class Patience:
    """The retries of one client's requests to one server. Several threads may use it.

    Args:
        give_up_s: how long a server may be away.
        pause_s, longest_pause_s: the first pause before another try, doubled until the longest.
    """

    def __init__(self, give_up_s: float, pause_s: float, longest_pause_s: float):
        self.give_up_s, self.pause_s, self.longest_pause_s = give_up_s, pause_s, longest_pause_s
        self._random = random.Random()  # pauses only; no result depends on it
        self._answered = time.monotonic()
        self._away_since: float | None = None

    @property
    def away_s(self) -> float:
        """How long ago the server stopped to answer, 0 where nothing failed since its last answer."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def answered(self) -> float:
        """Note an answer; return for how long there was none before it, 0 where nothing had failed."""
        away = self.away_s
        self._answered, self._away_since = time.monotonic(), None
        return away

    def pause(self, begun: float, tries: int, spent_s: float, asked_s: float = 0.0) -> float | None:
        """Return how long to wait after a try that failed, or None to give up.

        Args:
            begun: when the try began (``time.monotonic``).
            tries: of this request, this one included.
            spent_s: on the tries and pauses of this request.
            asked_s: what the server asked for by ``Retry-After``.
        """
        if self._away_since is None:  # a try from before the last answer says nothing of the time before that
            self._away_since = max(begun, self._answered)
        longest = min(self.longest_pause_s, self.pause_s * 2 ** min(tries - 1, 30))
        pause = max(asked_s, longest) * self._random.uniform(0.5, 1.0)
        return None if max(self.away_s, spent_s) + pause >= self.give_up_s else pause


def asked_seconds(retry_after: str | None) -> float:
    """Return ``Retry-After`` in seconds; a date or an unreadable value counts as none."""
    try:
        return min(LONGEST_ASKED_S, max(0.0, float(retry_after or 0)))
    except ValueError:
        return 0.0


def authorization(variable: str | None) -> dict[str, str]:
    """Return the header for the key in an environment variable: a bearer's, unless it names its own scheme.

    Raises ValueError where the variable is not set. A key never stands in a configuration, which is recorded.
    """
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env={variable}: the variable is not set; export it before the run starts")
    return {"authorization": key if " " in key else f"Bearer {key}"}
