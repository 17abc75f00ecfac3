"""Shared by all tests: one torch thread a process (pytest-xdist fills the cores), no network, no
logins, hf."""

import os
import textwrap
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray's workers would wait for every other process of a busy machine, and tests of them time out
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file with module fixtures on one worker, which sets them up once; spread
    all others."""
    from xdist.scheduler import LoadScopeScheduling

    class ModuleFixtureScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0] if has_module_fixtures(nodeid.split("::")[0]) else nodeid

    return ModuleFixtureScheduling(config, log) if config.getoption("dist") == "load" else None


@cache
def has_module_fixtures(file):
    return 'scope="module"' in (ROOT / file).read_text()


@pytest.fixture(autouse=True)
def hf_unless_named(monkeypatch):
    """What a test runs does not depend on whether vLLM is installed."""
    monkeypatch.setattr("core.config.defaults.find_spec", lambda name: None)


@pytest.fixture
def write(tmp_path):
    """Writes a user's module and returns its path."""

    def _write(body, name="mine.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(body))
        return str(file)

    return _write
