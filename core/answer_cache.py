"""Answers of a server, kept in a folder that several processes may share, so that a run repeats without the server.

The library diskcache keeps them, as JSON and never as pickles: a folder may come from somebody else.
"""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diskcache

from core.errors import InputError

log = logging.getLogger(__name__)
UNUSABLE = (sqlite3.Error, OSError, zlib.error, ValueError, TypeError, KeyError, diskcache.Timeout)


class AnswerCache:
    """Answers, JSON values, by text. Raises InputError, which begins with ``key``, for a folder that cannot be used."""

    def __init__(self, folder: Path, key: str):
        self.folder, self._warned = folder, False
        try:
            # All in one file, however long an answer is: a run folder behind a URL sends the database's last state.
            settings = {"eviction_policy": "none", "disk_min_file_size": 2**30}
            self._cache = diskcache.Cache(folder, disk=diskcache.JSONDisk, **settings)
        except UNUSABLE as error:
            fix = "remove it, or name another folder"
            raise InputError(f"{key}={folder.parent}: {folder.name} cannot be opened ({error}); {fix}") from error

    def __len__(self) -> int:
        return len(self._cache)

    def get(self, request: str) -> Any:
        """Return the kept answer, or None where there is none that can be read."""
        try:
            return self._cache.get(request)
        except UNUSABLE as error:
            self.warn(f"a kept answer is damaged ({error}): it is requested again")
            return None

    def set(self, answers: Mapping[str, Any]) -> None:
        """Keep answers. Where the disk cannot, the run goes on: they are there all the same."""
        try:
            with self._cache.transact(retry=True):
                for request, answer in answers.items():
                    self._cache.set(request, answer)
        except UNUSABLE as error:
            self.warn(f"an answer cannot be kept ({error})")

    def warn(self, what: str) -> None:
        """Report the first trouble."""
        if not self._warned:
            log.warning("%s: %s; more of this kind are not reported", self.folder, what)
        self._warned = True

    def close(self) -> None:
        self._cache.close()
