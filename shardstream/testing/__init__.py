"""Tests for those who write formats: a class to subclass with pytest, and what it is made of.

It needs pytest, which shardstream itself does not.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("shardstream.testing._formats")  # before it is imported: failures show both sides

from shardstream.testing._formats import FormatTests  # noqa: E402
from shardstream.testing._rows import (  # noqa: E402
    Row,
    indexed,
    manifest_of,
    python_rows,
    python_values,
    read_all,
)

__all__ = ["FormatTests", "Row", "indexed", "manifest_of", "python_rows", "python_values", "read_all"]
