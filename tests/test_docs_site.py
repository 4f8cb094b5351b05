"""The docs as a site: built strictly, its links and anchors checked; every public name is in the reference."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools.docs_site import site_links

ROOT = Path(__file__).parents[1]


class Anchors(HTMLParser):
    """What a page can be linked at, and where it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id") or "")
        for name in ("href", "src"):
            if values.get(name):
                self.links.append(values[name])


def broken_links(site: Path) -> list[str]:
    """Returns the links of all pages that lead to no file or anchor of the site."""
    pages = {}
    for page in site.rglob("*.html"):
        pages[page] = Anchors()
        pages[page].feed(page.read_text("utf-8"))
    broken = []
    for page, anchors in pages.items():
        for link in anchors.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":  # which is at no place of its own
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            has_anchor = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
            if not target.exists() or not has_anchor:
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert {"readme.html", "changelog.html"} <= {page.name for page in site.glob("*.html")}
    reference = (site / "reference" / "torch.html").read_text("utf-8")
    assert 'id="shardstream.torch.dataset.StreamingDataset"' in reference
    assert "no-run" not in (site / "benchmarks.html").read_text("utf-8")  # remarks for the tests are not shown
    assert broken_links(site) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="there"></h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html"></a><a href="https://host/x"></a>'
    )
    assert broken_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html"]


@pytest.mark.parametrize(
    ("link", "source", "expected"),
    [
        ("[a](order.md#lanes)", "index.md", "[a](order.md#lanes)"),
        ("[a](docs/order.md)", "readme.md", "[a](order.md)"),
        ("[a](docs/)", "readme.md", "[a](index.md)"),
        ("[a](../CHANGELOG.md)", "index.md", "[a](changelog.md)"),
        ("[a](../order.md)", "adr/0001-order.md", "[a](../order.md)"),
        ("[a](../tools/train.py)", "index.md", "a (`tools/train.py`)"),
        ("[a](https://host/x)", "index.md", "[a](https://host/x)"),
        ("[a](#here)", "index.md", "[a](#here)"),
    ],
)
def test_links_of_the_repository_are_links_of_the_site(link, source, expected):
    pages = frozenset({"index.md", "order.md", "readme.md", "changelog.md", "adr/0001-order.md"})
    assert site_links(link, source, pages) == expected


def test_a_link_to_no_file_is_refused():
    with pytest.raises(FileNotFoundError, match=r"docs/index.md links to ../gone.py"):
        site_links("[a](../gone.py)", "index.md", frozenset())


@pytest.mark.parametrize("package", ["shardstream", "shardstream.torch"])
def test_every_public_name_is_in_the_reference(package):
    module = importlib.import_module(package)
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    errors = set(vars(importlib.import_module("shardstream.errors")))
    assert "::: shardstream.errors\n" in pages
    assert set(module.__all__) - {"__version__"} - errors <= named


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f" {page}\n" not in nav} == set()
