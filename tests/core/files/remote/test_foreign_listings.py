"""Listings of a remote folder: the names that they hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.errors import InputError
from core.files.remote.cache import listing
from core.files.remote.urls import Remote


@pytest.mark.parametrize(
    "name", ["bucket/run/../../escaped", "bucket/run//etc/passwd", "other/file", "bucket/run/a\\b"]
)
def test_a_remote_listing_names_files_below_its_folder(name):
    fs = SimpleNamespace(
        invalidate_cache=lambda: None, info=lambda path: {"type": "directory"}, find=lambda path, detail: {name: {}}
    )
    with pytest.raises(InputError, match="leads out of its folder"):
        listing(Remote(fs, "bucket/run"))
