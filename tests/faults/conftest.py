"""The files of a tiny run, made once for the tests of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.tiny_run import prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder)
    return folder
