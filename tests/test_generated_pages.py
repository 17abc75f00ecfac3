"""The tables of results equal what their committed records give. Slow, and the only test that
compares them.

A change of the code that changes a page does not fail the default suite: ``make report`` generates
the pages again.
"""

from __future__ import annotations

import json
from pathlib import Path

from results import report
from results.reporting.run_reader import load_run
from results.reporting.summaries import summarise

RESULTS = Path(__file__).resolve().parent.parent / "results"


def rounded(value):
    """Numbers to nine digits: the last ones are the library's."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_tables_of_results_are_what_the_committed_runs_give():
    assert report.update(RESULTS, check=True) == 0
    for path in sorted(RESULTS.glob("*/*/summary.json")):
        assert rounded(json.loads(path.read_text())) == rounded(summarise(load_run(path.parent))), (
            path
        )
