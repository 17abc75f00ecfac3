"""The report page in a real browser: what stands first, values under pointer and keys, narrow
screens, dark ones."""

from __future__ import annotations

import pytest

from results import report
from tests.browser import (
    SCHEMES,
    WIDTHS,
    chromium,
    contrast,
    first_paint_ms,
    opened,
    overflow,
    pictures_without_text,
)
from tests.core.synthetic import configured, make_run


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = []
    for seed in (1, 2):
        named = {"trainer.seed": seed, "trainer.experiment_name": f"lab_s{seed}"}
        runs.append(make_run(folder / "grpo" / f"lab_s{seed}", configured(named)))
    other = configured({"actor_rollout_ref.actor.clip_ratio_c": 5.0})
    runs.append(make_run(folder / "ppo" / "lab_s1", other, critic=True))
    assert report.main([*map(str, runs), "--out", str(folder)]) == 0
    return folder / "report.html"


@pytest.mark.parametrize(("size", "scheme"), zip(WIDTHS, SCHEMES, strict=True))
def test_it_fits_and_can_be_read(browser, page_path, size, scheme):
    with opened(browser, page_path, *size, scheme) as page:
        assert (
            overflow(page) <= 0
            and pictures_without_text(page) == []
            and first_paint_ms(page) < 2000
        )
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is (scheme == "light")
        assert (
            min(
                contrast(page, one)
                for one in ("p.strong", "p.caption", "th", "figcaption span", "summary")
            )
            >= 4.5
        )
        assert (
            page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
            != "rgb(0, 0, 0)"
        )
        first = page.locator(".scroll").first
        assert first.evaluate("one => one.scrollWidth <= one.clientWidth")


def test_values_are_under_the_pointer_and_under_the_arrow_keys(browser, page_path):
    with opened(browser, page_path) as page:
        figure = page.locator("figure").first
        figure.locator("svg").hover()
        shown = figure.locator("output").inner_text().splitlines()
        assert shown[0].startswith("step ") and len(shown) == 3  # two experiments
        page.mouse.move(0, 0)
        assert figure.locator("output").count() == 0
        figure.focus()
        page.keyboard.press("ArrowRight")
        assert figure.locator("output").inner_text().startswith("step 0\n")
        page.keyboard.press("End")
        last = figure.locator("output").inner_text()
        assert last.startswith("step 20\n")
        assert all(1 < float(line.split()[-1]) <= 100 for line in last.splitlines()[1:])
        page.keyboard.press("ArrowLeft")
        assert figure.locator("output").inner_text().startswith("step 15\n")
        page.keyboard.press("Tab")
        assert figure.locator("output").count() == 0
