"""Keep a retriever's answers on disk: one SQLite file an index, which several processes may share.

The client uses it, so that a run can be repeated without a server.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from recipes.search_r1.index.passages import Passage

SUFFIX = ".sqlite"


class Cache:
    """Passages by query and ``topk``. An empty list is an answer; None means that none is kept.

    It may be used from any one thread at a time, and by several processes.
    """

    def __init__(self, folder: Path, identity: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{identity}{SUFFIX}"
        self._db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost the last answers, which are searched again
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS answers (query TEXT, topk INT, passages TEXT, PRIMARY KEY (query, topk))"
        )

    def get(self, query: str, topk: int) -> list[Passage] | None:
        row = self._db.execute("SELECT passages FROM answers WHERE query=? AND topk=?", (query, topk)).fetchone()
        return None if row is None else [Passage(**passage) for passage in json.loads(row[0])]

    def put(self, found: Mapping[str, Sequence[Passage]], queries: Sequence[str], topk: int) -> None:
        rows = [(query, topk, json.dumps([asdict(passage) for passage in found[query]])) for query in queries]
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def stores(folder: Path) -> list[str]:
    """Return the identities of the indices whose answers the folder holds."""
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
