"""The page of the token microscope in a real browser: what a reader sees, points at and types."""

from __future__ import annotations

import pytest

from results.reporting.trace_page import write_trace
from tests.browser import SCHEMES, WIDTHS, chromium, contrast, opened, overflow, pictures_without_text
from tests.results.test_trace import TOOL, later
from tests.results.traced_run import EVIL, traced_run

TEXT = "\x01<script>document.title='owned'</script> é"  # the first character is a token that is a whole element


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    """Two runs on the same questions; the second one's learner is a token late."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        traced_run(folder / "grpo" / "good", (1, 2), tool=TOOL, text=TEXT),
        traced_run(folder / "grpo" / "late", (1,), {"old": later}, seed=1, length=120),
    ]
    return write_trace(runs, folder / "trace.html")[0]


@pytest.fixture
def page(browser, page_path):
    with opened(browser, page_path, at="#0") as one:  # the first answer; without it, the first with a finding
        one.wait_for_selector("body[data-ready]")
        yield one


@pytest.mark.parametrize(("size", "scheme"), zip(WIDTHS, SCHEMES, strict=True))
def test_it_fits_and_can_be_read(browser, page_path, size, scheme):
    with opened(browser, page_path, *size, scheme) as page:
        page.wait_for_selector("body[data-ready]")
        for field in page.eval_on_selector_all("#field option", "all => all.map((one) => one.value)"):
            page.select_option("#field", field)
        page.keyboard.press("f")
        page.keyboard.press("?")
        assert overflow(page) <= 0 and pictures_without_text(page) == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is (scheme == "light")
        texts = ("h1", "#summary", ".row .parts", ".right", ".wrong", ".tag.alarm")
        assert min(contrast(page, one) for one in texts) >= 4.5


def test_html_in_an_answer_is_shown_and_never_run(page):
    page.wait_for_timeout(100)
    assert page.title().startswith("Tokens of") and page.locator("img, main b b, h2 b").count() == 0
    assert EVIL + "<script>" in page.locator("article .policy .tokens").first.inner_text()


def test_the_keyboard_does_all(page):
    assert page.locator("h2", has_text="Answer 1 of 4, grpo/good, step 1").count() == 1
    page.keyboard.press("j")
    page.locator("h2", has_text="Answer 2 of 4, grpo/good, step 1").wait_for()
    assert page.locator(".row[aria-current]").count() == 1
    page.keyboard.press("k")
    page.locator("h2", has_text="Answer 1 of 4, grpo/good, step 1").wait_for()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told = page.locator("#token").inner_text()
    assert all(word in told for word in ("log-prob, engine", "advantage", "mask and loss", "age of the policy"))
    assert page.locator(".t.now").count() == 1
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("j")  # a letter, not a command
    assert page.locator("h2", has_text="Answer 1 of 4, grpo/good, step 1").count() >= 1
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "search"


def test_filters_and_search_leave_what_they_name(page):
    every = page.locator(".row").count()
    page.locator("#chips button", has_text="findings").click()
    late = page.locator(".row").count()
    assert 0 < late < every and page.locator(".step", has_text="late").count() == page.locator(".step").count() == 1
    page.locator("h2", has_text="grpo/late").first.wait_for()
    assert "a shift by one" in page.locator(".findings").first.inner_text()
    page.keyboard.press("n")
    assert page.locator(".t.now.found").count() == 1
    page.locator("#chips button", has_text="findings").click()
    page.fill("#from", "0.5")
    assert 0 < page.locator(".row").count() < every and page.locator(".row .wrong").count() == 0
    page.fill("#from", "")
    page.fill("#search", "no such TOOL")
    page.locator(".row").nth(every - 1).wait_for(state="detached")
    assert page.locator(".row").count() > 0 and page.locator(".t.hit").count() > 5
    page.fill("#search", "in no answer at all")
    page.get_by_text("No answer passes the filters.").wait_for()
