"""Each page in docs/frameworks is run by the test of its name, on several ranks; tests/test_docs.py leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import FRAMEWORKS
from tests.test_docs import blocks_of


@pytest.mark.parametrize("page", sorted(FRAMEWORKS.glob("*.md")), ids=lambda page: page.stem)
def test_each_page_has_its_test(page):
    test = Path(__file__).with_name(f"test_{page.stem}.py")
    assert f'page_code("{page.stem}")' in test.read_text("utf-8") or f'"{page.stem}.md"' in test.read_text("utf-8")
    assert any(block.language == "python" for block in blocks_of(page.read_text("utf-8")))
