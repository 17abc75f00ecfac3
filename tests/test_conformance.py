"""Golden vectors: every one passes or is a listed departure, and the committed report says so."""

import os
import re

import pytest

from tests import conformance


@pytest.mark.skipif("GOLDEN_DIR" in os.environ, reason="the committed report is of the committed vectors")
def test_golden_report_is_what_the_command_writes():
    results, missing = conformance.run_all()
    assert [failure for one in results for failure in one.failures] == []
    committed, fresh = (
        re.sub(r"< 1e[+-]?\d+", "0", report)
        for report in (conformance.DEFAULT_OUT.read_text(encoding="utf-8"), conformance.render(results, missing))
    )
    assert committed == fresh, "run python -m tests.conformance"
