"""Shared by all tests: one torch thread a process (pytest-xdist fills the cores), no network, no logins, hf."""

import os
import textwrap

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def hf_unless_named(monkeypatch):
    """What a test runs does not depend on whether vLLM is installed."""
    monkeypatch.setattr("core.config.derived_defaults.find_spec", lambda name: None)


@pytest.fixture
def write(tmp_path):
    """Writes a user's module and returns its path."""

    def _write(body, name="mine.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(body))
        return str(file)

    return _write
