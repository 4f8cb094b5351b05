"""Clocks jump: deadlines are of the monotonic clock. What the wall clock says is only written down."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "shardstream"
# Times in a ledger, for people; ages of files in a cache, whose times are of that clock, too.
ALLOWED = {"torch/rounds.py", "torch/watched.py", "cache.py"}


def _asks_the_wall_clock(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("time", "time"), ("datetime", "now"), ("datetime", "utcnow")}
        for node in ast.walk(tree)
    )


def test_only_what_writes_times_down_asks_the_wall_clock():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if _asks_the_wall_clock(ast.parse(path.read_text("utf-8")))
    }
    assert found == ALLOWED
