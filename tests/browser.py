"""A real browser for pages: playwright with the system's Chromium; tests skip where either is
absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WIDTHS = ((1280, 900), (390, 844))
SCHEMES = ("light", "dark")


@contextmanager
def chromium() -> Iterator:
    """Start the browser; skips the test where playwright or Chromium is not installed."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[test]'"
    )
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser, path: Path, width: int = 1280, height: int = 900, scheme: str = "light", at: str = ""
) -> Iterator:
    """Open a page from disk without a network. Fails at the end where a script raised, or something
    was fetched."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
    )
    page, errors, asked = context.new_page(), [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(10_000)
    page.goto(path.resolve().as_uri() + at)
    yield page
    context.close()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def overflow(page) -> int:
    """Return by how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def pictures_without_text(page) -> list[str]:
    """Return the pictures that a reader who cannot see them learns nothing of."""
    return page.evaluate(
        """[...document.querySelectorAll('img, svg, canvas, [role=img]')]
           .filter((one) => !(one.getAttribute('alt') || one.getAttribute('aria-label') || one.querySelector('title')))
           .filter((one) => !one.closest('[aria-hidden=true], [role=img][aria-label] *'))
           .map((one) => one.outerHTML.slice(0, 80))"""
    )


def first_paint_ms(page) -> float:
    """Return when the browser first showed something, in milliseconds since it began to load."""
    painted = "performance.getEntriesByName('first-contentful-paint')"
    while not page.evaluate(f"{painted}.length"):  # a page is loaded before it is painted
        page.wait_for_timeout(50)
    return page.evaluate(f"{painted}[0].startTime")


def contrast(page, selector: str) -> float:
    """Return the WCAG contrast of an element's text with the page behind it."""
    return page.evaluate(
        """(selector) => {
          const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
          const light = (colour) => {
            canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
              .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const one = light(getComputedStyle(document.querySelector(selector)).color);
          const other = light(getComputedStyle(document.body).backgroundColor);
          return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        }""",
        selector,
    )
