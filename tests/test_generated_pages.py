"""The tables of results equal what their committed records give. Slow, and the only test that compares them.

A change of the code that changes a page does not fail the default suite: ``make report`` generates the pages again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from results.reporting import readme_tables
from results.reporting.run_reader import load_run
from results.reporting.summaries import summarise

RESULTS = Path(__file__).resolve().parent.parent / "results"


@pytest.mark.slow
def test_the_tables_of_results_are_what_the_committed_runs_give():
    assert readme_tables.update(RESULTS, check=True) == 0
    for path in sorted(RESULTS.glob("*/*/summary.json")):
        assert json.loads(path.read_text()) == summarise(load_run(path.parent)), path
