"""The page of recorded tokens in a real browser."""

from __future__ import annotations

import pytest

from results.reporting.trace_page import write_trace
from tests.browser import SCHEMES, WIDTHS, chromium, contrast, opened, overflow
from tests.results.test_trace import traced_run


@pytest.mark.parametrize(("size", "scheme"), zip(WIDTHS, SCHEMES, strict=True))
def test_it_fits_is_coloured_by_the_field_and_tells_a_tokens_numbers(tmp_path, size, scheme):
    text = "<img src=x onerror=alert(1)>"
    path = write_trace([traced_run(tmp_path / "grpo" / "run", (1, 2), text=text)])[0]
    with chromium() as browser, opened(browser, path, *size, scheme) as page:
        assert overflow(page) <= 0
        colours = []
        for field in ("advantages", "rollout_log_probs"):
            page.select_option("#field", field)
            colours.append(
                page.evaluate("getComputedStyle(document.querySelector('i')).backgroundColor")
            )
        assert colours[0] != colours[1]
        page.hover("i:nth-of-type(3)")
        assert page.inner_text("#told").startswith('"m": ') and "advantages 0.5" in page.inner_text(
            "#told"
        )
        assert contrast(page, "h1") >= 4.5 and contrast(page, ".about") >= 4.5
