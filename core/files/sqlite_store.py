"""One SQLite file of answers that a client keeps, for several processes at a time.

A folder of kept answers may come from somebody else, or have lost a part. Nothing outside the folder is read or written
because of what a file in it says, and nothing in it is code: texts are the only values, and a file with other tables,
with triggers or views is not used. A file that cannot be used is ignored with a warning, and the run begins without
kept answers.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from core.errors import InputError

log = logging.getLogger(__name__)

BESIDE = ("", "-wal", "-shm", "-journal")  # what SQLite opens with a file


def open_store(path: Path, table: str, key: str) -> sqlite3.Connection:
    """Return a connection to the file with this one table (``CREATE TABLE ...``), which is made where it is missing.

    Any one thread at a time may use it. Where the file is damaged or another program's, the connection is to memory.
    Raises InputError, which begins with ``key``, where the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _opened(str(path), table, _foreign(path))
    except sqlite3.OperationalError as error:  # of the folder: no rights, no space, a lock that is never given back
        raise InputError(f"{key}={path.parent}: {path.name} cannot be opened ({error}); name a local folder") from error
    except OSError as error:
        raise InputError(f"{key}={path.parent}: cannot be opened ({error}); name a local folder") from error
    except (sqlite3.DatabaseError, ValueError) as error:
        log.warning(
            "%s=%s: %s is ignored (%s), and nothing is kept in it; remove it, or name another folder",
            key,
            path.parent,
            path.name,
            error,
        )
        return _opened(":memory:", table, None)


def _foreign(path: Path) -> str | None:
    """Return why the file must not be opened, None where it may be."""
    for ending in BESIDE:
        if path.with_name(path.name + ending).is_symlink():
            return f"{path.name}{ending} is a link to another place"
    if path.with_name(path.name + "-journal").exists():  # it may name files elsewhere; WAL, used here, has none
        return f"{path.name}-journal is not of this program"
    return None


def _opened(path: str, table: str, refused: str | None) -> sqlite3.Connection:
    if refused:
        raise ValueError(refused)
    store = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
    try:
        store.execute("PRAGMA trusted_schema=OFF")
        schema = [" ".join(sql.split()) for (sql,) in store.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL")]
        if schema and schema != [table]:
            raise ValueError("it holds other tables than this program's")
        store.execute("PRAGMA journal_mode=WAL")
        store.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost the last answers, which are requested again
        store.execute(table.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
    except BaseException:
        store.close()
        raise
    return store
