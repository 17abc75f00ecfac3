"""Caches of a judge's replies from somebody else: nothing outside of their folder is read or written."""

from __future__ import annotations

import struct

import pytest

from core.files.sqlite_store import BESIDE
from core.rewards.judge.judge_client import FILE, Reply, ReplyCache

REPLY = Reply("text", "stop", 1, 2)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_a_foreign_cache_of_replies_reads_and_deletes_inside_of_its_folder(name, tmp_path):
    (tmp_path / "secret").write_text("secret")
    cache = ReplyCache(tmp_path / "cache")
    cache._store.execute("INSERT INTO replies VALUES ('key', ?)", (name,))
    assert cache.get("key") is None  # a text is a reply, or nothing; it is no file's name
    cache.set("key", REPLY)
    assert cache.get("key") == REPLY
    cache.close()
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("ending", BESIDE)
def test_a_link_beside_a_foreign_cache_of_replies_is_not_followed(ending, tmp_path):
    for folder in ("cache", "other"):
        cache = ReplyCache(tmp_path / folder)
        cache.set("key", REPLY)
        cache.close()
    secret, link = tmp_path / "other" / FILE, tmp_path / "cache" / f"{FILE}{ending}"
    before = secret.read_bytes()
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    cache = ReplyCache(tmp_path / "cache")
    assert cache.get("key") is None
    cache.set("new", REPLY)
    cache.close()
    assert link.is_symlink() and secret.read_bytes() == before
    assert [path.name for path in (tmp_path / "other").iterdir()] == [FILE]


def test_a_foreign_caches_journal_deletes_nothing_elsewhere(tmp_path):
    """Where a transaction of several files was cut off, SQLite deletes the file that the journal's end names."""
    secret, folder = tmp_path / "secret", tmp_path / "cache"
    secret.write_bytes(b"secret")
    ReplyCache(folder).close()
    name = str(secret).encode()
    end = [len(name), sum(name)]
    journal = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + struct.pack(">5I", 0, 0, 1, 512, 4096)
    journal = journal.ljust(512, b"\0") + struct.pack(">I", 2**18 + 1) + name + struct.pack(">2I", *end) + journal[:8]
    (folder / f"{FILE}-journal").write_bytes(journal)
    cache = ReplyCache(folder)
    cache.set("key", REPLY)
    cache.close()
    assert secret.read_bytes() == b"secret" and (folder / f"{FILE}-journal").read_bytes() == journal
