"""Keep a retriever's answers on disk: one SQLite file an index, which several processes may share.

The client uses it, so that a run can be repeated without a server.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from core.files.sqlite_store import open_store
from recipes.search_r1.index.passages import Passage, RetrievalError
from recipes.search_r1.wire import from_kept

log = logging.getLogger(__name__)

SUFFIX = ".sqlite"
TABLE = "CREATE TABLE answers (query TEXT, topk INT, passages TEXT, PRIMARY KEY (query, topk))"


class Cache:
    """Passages by query and ``topk``. An empty list is an answer; None means that none is kept.

    It may be used from any one thread at a time, and by several processes.
    """

    def __init__(self, folder: Path, identity: str):
        if not re.fullmatch(r"[\w-][\w.-]*", identity):  # it may come from a server, and becomes a file's name
            raise RetrievalError(f"the index is named {identity!r}, which cannot be the name of a file in cache_dir")
        self.path = folder / f"{identity}{SUFFIX}"
        self._db = open_store(self.path, TABLE, "retriever.client.cache_dir")
        self._warned = False

    def get(self, query: str, topk: int) -> list[Passage] | None:
        try:
            row = self._db.execute("SELECT passages FROM answers WHERE query=? AND topk=?", (query, topk)).fetchone()
            return None if row is None else from_kept(row[0], topk)
        except (sqlite3.Error, RetrievalError) as error:
            self._warn(f"a kept answer is damaged ({error}): it is requested again")
            return None

    def put(self, found: Mapping[str, Sequence[Passage]], queries: Sequence[str], topk: int) -> None:
        rows = [(query, topk, json.dumps([asdict(passage) for passage in found[query]])) for query in queries]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:  # the passages are there all the same
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._warn(f"an answer cannot be kept ({error})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            log.warning("%s: %s; more of this kind are not reported", self.path, what)
        self._warned = True

    def close(self) -> None:
        self._db.close()


def stores(folder: Path) -> list[str]:
    """Return the identities of the indices whose answers the folder holds."""
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
