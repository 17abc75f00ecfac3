"""Runs tests with a bug planted: ``python -m pytest -p tests.museum.plugin --museum BUG NODE_ID``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--museum", metavar="BUG", help="plant this bug of tests/museum/bugs.yaml in every test")


def pytest_configure(config: pytest.Config) -> None:
    bug = config.getoption("--museum")
    if bug is not None:
        from tests.museum.mutations import planted

        block = planted(bug)  # before any test module is imported: what they import is what is planted
        block.__enter__()
        config.add_cleanup(lambda: block.__exit__(None, None, None))
