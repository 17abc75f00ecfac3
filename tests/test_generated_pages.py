"""Committed pages that are generated equal what their records give. Slow, and the only tests that compare them.

A change of the code that changes a page does not fail the default suite: ``make report`` and
``python -m tests.test_generated_pages`` (tables inside documents) generate the pages again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from results.reporting import readme_tables
from results.reporting.run_reader import load_run
from results.reporting.summaries import summarise
from tests.test_structure import TOP_LEVEL

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
pytestmark = pytest.mark.slow


def top_level_table() -> str:
    rows = [f"| `{package}` | {', '.join(f'`{each}`' for each in below)} |" for package, below in TOP_LEVEL.items()]
    return "\n".join(["| package | may import |", "|---|---|", *rows])


BLOCKS = {  # (document, name of the markers): what stands between them
    ("core/README.md", "imports"): top_level_table,
}


def with_block(text: str, name: str, block: str) -> str:
    """Return the text with this block between its markers ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    assert text.count(begin) == text.count(end) == 1, f"no markers of the block {name}"
    return f"{text.partition(begin)[0]}{begin}{block}\n{end}{text.partition(end)[2]}"


@pytest.mark.parametrize(("document", "name"), BLOCKS)
def test_a_generated_block_is_up_to_date(document, name):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert text == with_block(text, name, BLOCKS[document, name]()), "run python -m tests.test_generated_pages"


def test_the_tables_of_results_are_what_the_committed_runs_give():
    assert readme_tables.update(RESULTS, check=True) == 0
    for path in sorted(RESULTS.glob("*/*/summary.json")):
        assert json.loads(path.read_text()) == summarise(load_run(path.parent)), path


if __name__ == "__main__":
    for (document, name), block in BLOCKS.items():
        path = ROOT / document
        path.write_text(with_block(path.read_text(encoding="utf-8"), name, block()), encoding="utf-8")
