"""Keep a retriever's answers on disk: one folder an index, which several processes may share.

The client uses it, so that a run can be repeated without a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import diskcache

from recipes.search_r1.index.passages import Passage, RetrievalError
from recipes.search_r1.wire import from_kept

DATABASE = "cache.db"  # diskcache's file in a folder of answers


class Cache:
    """Passages by query and ``topk``. An empty list is an answer; None means that none is kept.

    It may be used from any one thread at a time, and by several processes.
    """

    def __init__(self, folder: Path, identity: str):
        # It may come from a server, and becomes a folder's name
        if not re.fullmatch(r"[\w-][\w.-]*", identity):
            raise RetrievalError(
                f"the index is named {identity!r}, which cannot be the name of a "
                f"folder in cache_dir"
            )
        self.path = folder / identity
        self._answers = diskcache.Cache(self.path, disk=diskcache.JSONDisk, eviction_policy="none")

    def get(self, query: str, topk: int) -> list[Passage] | None:
        kept = self._answers.get(json.dumps([query, topk]), retry=True)
        try:
            return None if kept is None else from_kept(kept, topk)
        except RetrievalError:  # damaged, or of another program: it is requested again
            return None

    def put(
        self, found: Mapping[str, Sequence[Passage]], queries: Sequence[str], topk: int
    ) -> None:
        with self._answers.transact(retry=True):
            for query in queries:
                passages = json.dumps([asdict(passage) for passage in found[query]])
                self._answers.set(json.dumps([query, topk]), passages)

    def close(self) -> None:
        self._answers.close()


def stores(folder: Path) -> list[str]:
    """Return the identities of the indices whose answers the folder holds."""
    return sorted(path.parent.name for path in folder.glob(f"*/{DATABASE}"))
