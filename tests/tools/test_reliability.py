"""The page on reliability says what the counts say."""

from __future__ import annotations

import json

import pytest

from tools.reliability import COUNTS, PAGE, RENDERERS, load_counts, page


def test_the_page_is_what_its_counts_say():
    """Otherwise: python -m tools.reliability."""
    counts = load_counts()
    assert counts
    assert set(counts) <= set(RENDERERS)
    assert page(PAGE.read_text("utf-8"), counts) == PAGE.read_text("utf-8")


@pytest.mark.parametrize("path", sorted(COUNTS.glob("*.json")), ids=lambda path: path.stem)
def test_nothing_was_violated_in_what_is_published(path):
    assert json.loads(path.read_text("utf-8"))["violations"] == []


def test_a_violation_is_shown_and_text_around_the_counts_is_kept():
    text = "before\n\n<!-- counts: soak -->\n\nold\n\n<!-- end -->\n\nafter <!-- counts: faults --> x <!-- end -->"
    report = {
        "num_micro_batches": 1000,
        "num_workers": 0,
        "num_epochs": 2,
        "took_s": 60,
        "growth_bytes_per_micro_batch": 2.0,
        "pss_mb": [1, 9],
        "num_threads": [1, 1],
        "num_files": [1, 1],
        "violations": ["memory grew"],
    }
    new = page(text, {"soak": report})
    assert new.startswith("before\n\n<!-- counts: soak -->\n\n1,000 micro-batches")
    assert "**Violated**:\n\n- memory grew" in new
    assert "old" not in new
    assert new.endswith("after <!-- counts: faults -->\n\nNot run yet.\n\n<!-- end -->")
    assert page(new, {"soak": report}) == new
