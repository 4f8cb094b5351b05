"""The page in a browser: narrow, printed, by keyboard, and as a screen reader is told of it."""

from __future__ import annotations

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from shardstream.audit import Labels
from shardstream.plan import Plan
from shardstream.report import report_on_plan
from tests.support.corpora import parquet_manifest
from tests.support.ledgers import write_ledger

pytestmark = pytest.mark.rest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LOOKS = [(width, scheme) for width in (360, 1280) for scheme in ("light", "dark")]

# Contrast as WCAG 2 defines it, of every text against the background behind it.
CONTRASTS = """() => {
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = numbers(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    const pair = [light(numbers(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    found.push([(pair[0] + 0.05) / (pair[1] + 0.05), element.textContent.trim().slice(0, 60)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A report with every kind of figure, a shard whose name has no place to break, and hostile names."""
    folder = tmp_path_factory.mktemp("browser")
    manifest = parquet_manifest(folder / "data", [400, 250, 350, 10], 10, tokens_column="tokens")
    manifest.urls[0] = "a" * 120 + "<img src=x onerror=console.error(1)>.parquet"
    plan = Plan.make(manifest, batch_size=5, world_size=2)
    write_ledger(folder / "ledger", plan)
    labels = Labels.from_array([uid % 7 for uid in range(1010)], 1010)
    page = folder / "report.html"
    page.write_text(report_on_plan(plan, labels=labels, ledger=folder / "ledger").to_html(), "utf-8")
    return page


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium: playwright brings none of its own."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `make browser` installs it where apt-get may")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        # Its sandbox refuses to start for root, which containers of CI are.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, written):
    """Opens the page, in which nothing may be logged or asked for."""
    contexts, said = [], []

    def open_page(width: int = 1280, scheme: str = "light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if not request.url.startswith("data:") else None)
        page.goto(written.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert set(said) == {written.as_uri()}


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_fits_and_can_be_read(opened, width, scheme):
    page = opened(width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """width => [...document.querySelectorAll('body *')].filter(each => !each.closest('.scroll table, .skip')
        && each.getBoundingClientRect().right > width + 0.5).map(each => each.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside, width) == []
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []
    sizes = page.evaluate(
        "[...document.querySelectorAll('.axis, figcaption, td')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12


def test_marks_are_drawn(opened):
    page = opened()
    boxes = "[...document.querySelectorAll('.plot > svg')].map(each => each.getBoundingClientRect().height)"
    heights = page.evaluate(boxes)
    assert len(heights) >= 12
    assert min(heights) > 100
    filled = "new Set([...document.querySelectorAll('.panels path')].map(each => getComputedStyle(each).fill)).size"
    assert page.evaluate(filled) >= 2
    for kind in ("bar", "line", "spread"):
        inked = f"[...document.querySelectorAll('.plot .{kind}')].every(each => each.getTotalLength() > 0)"
        assert page.locator(f".plot .{kind}").count() > 0
        assert page.evaluate(inked)


def test_printed_with_all_its_tables(opened):
    page = opened()
    hidden = page.locator("details table").first
    assert not hidden.is_visible()
    page.emulate_media(media="print")
    assert all(each.is_visible() for each in page.locator("figure table").all())
    assert not page.locator("nav").is_visible()
    assert not any(each.is_visible() for each in page.locator("summary").all())
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 with margins of 1 cm
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_headings_are_in_order(opened):
    page = opened()
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title().startswith("shardstream report: ")
    assert [page.locator(role).count() for role in ("main", "header", "nav", "footer")] == [1] * 4


def test_a_screen_reader_is_told_of_every_figure(opened):
    page = opened()
    figures = page.get_by_role("figure").all()
    assert len(figures) == page.locator("figure").count() >= 12
    for figure in figures:
        picture = figure.get_by_role("img")
        assert picture.count() == 1
        assert len(picture.get_attribute("aria-label")) > 40
        figure.locator("summary").click()
        assert figure.get_by_role("table").count() == 1
        assert figure.get_by_role("columnheader").count() >= 1
        assert figure.get_by_role("rowheader").count() >= 1
    named = "each => each.ariaLabel || document.getElementById(each.getAttribute('aria-labelledby')).textContent"
    assert all(region.evaluate(named) for region in page.get_by_role("region").all())
    tree = page.locator("body").aria_snapshot()
    assert "Skip to the report" in tree
    assert len(re.findall(r"- '?img \"", tree)) == len(figures)


def test_by_keyboard(opened):
    page = opened()
    focused = "(each => [each.tagName, each.textContent.trim().slice(0, 40)])(document.activeElement)"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == ["A", "Skip to the report"]
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # seen once it has the focus
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    stops = []
    for _ in range(page.locator("main summary, main .scroll").count()):
        page.keyboard.press("Tab")
        stop = page.evaluate(focused)
        if stop[0] == "BODY":
            break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        stops.append(stop)
    assert {tag for tag, _ in stops} == {"SUMMARY", "DIV"}
    assert [tag for tag, _ in stops].count("SUMMARY") == page.locator("summary").count()
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.evaluate("each => each.open")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "scroll"
