"""What the tests of formats share; the tests that every format must pass are ``shardstream.testing.FormatTests``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardstream.manifest import Manifest
from shardstream.testing import FormatTests, Row, indexed, manifest_of, python_rows, python_values, read_all

__all__ = ["FormatTests", "Row", "counts_of", "indexed", "manifest_of", "python_rows", "python_values", "read_all"]


def counts_of(manifest: Manifest, shard: int, *names: str) -> Mapping[str, list[Any]]:
    """Some lists of a shard as Python lists."""
    assert manifest.lists is not None
    return {name: values.tolist() for name, values in manifest.lists.read(shard, names).items()}
