"""Committed pages that are generated equal what their records give. Slow, and the only tests that compare them.

A change of the code that changes a page does not fail the default suite: ``make report`` and
``python -m tests.test_generated_pages`` (tables inside documents) generate the pages again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from recipes.lab import discrimination
from results.reporting import claims, feasibility, readme_tables
from results.reporting.run_reader import load_run, summarise
from results.reporting.study import Records, load_study
from results.reporting.study_report import write_report
from tests.test_structure import TOP_LEVEL

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
STUDIES = sorted(ROOT.glob("recipes/*/study*.yaml"))
CALIBRATED = ("lab/study_tallies", "lab/study_trails", "dapo/study_claims", "search_r1/study_conflicts")
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


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_studys_report_is_what_its_records_give(path, tmp_path):
    study = load_study(path)
    shutil.copy(RESULTS / "references.yaml", tmp_path)
    written = write_report(study, Records(RESULTS / study.recipe / study.name), tmp_path)
    assert written.read_text() == (RESULTS / study.recipe / f"{study.name}.md").read_text()


def test_the_page_of_claims_is_what_the_records_give(tmp_path):
    for path in STUDIES:
        if (records := RESULTS / path.parent.name / path.stem).is_dir():
            shutil.copytree(records, tmp_path / path.parent.name / path.stem)
    written = claims.write(tmp_path)
    for suffix in (".md", ".html"):
        assert written.with_suffix(suffix).read_text() == (RESULTS / "claims.md").with_suffix(suffix).read_text()


def test_the_page_of_discrimination_is_what_the_records_give(tmp_path):
    for study in CALIBRATED:
        shutil.copytree(RESULTS / study, tmp_path / study)
    written = discrimination.write(tmp_path)
    for suffix in (".md", ".json"):
        assert (
            written.with_suffix(suffix).read_text() == (RESULTS / "lab/discrimination").with_suffix(suffix).read_text()
        )


def test_the_readmes_table_of_hardware_is_the_generated_one():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == readme_tables.with_block(readme, feasibility.render_hardware(RESULTS), *readme_tables.HARDWARE)


if __name__ == "__main__":
    for (document, name), block in BLOCKS.items():
        path = ROOT / document
        path.write_text(with_block(path.read_text(encoding="utf-8"), name, block()), encoding="utf-8")
