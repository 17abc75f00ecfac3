"""A bound on the replies that an httpx client reads: one without end, or one that unpacks to gigabytes, is an error.

The bound is a hook of the client, not a transport: a client with a transport of its own ignores the proxies of the
environment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

PLAIN = {"accept-encoding": "identity"}  # header of the requests: the size of a compressed reply is not known


class BadReply(httpx.ReadError):
    """The reply is larger than the bound, or compressed."""


class _Counted(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, largest: int):
        self._stream, self._largest = stream, largest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > self._largest:
                raise BadReply(f"the reply has more than {self._largest} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def bounded(largest: int) -> dict[str, Any]:
    """Return the arguments ``headers`` and ``event_hooks`` of an httpx client that reads at most ``largest`` bytes."""

    async def hook(response: httpx.Response) -> None:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            await response.aclose()
            raise BadReply(f"the reply is compressed ({encoding}), which was not requested")
        response.stream = _Counted(response.stream, largest)

    return {"headers": dict(PLAIN), "event_hooks": {"response": [hook]}}
