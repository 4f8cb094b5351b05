from __future__ import annotations

import pytest

from tests.support.corpora import parquet_manifest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """80 samples in uneven shards, one of them empty, in blocks of at most 7."""
    return parquet_manifest(tmp_path_factory.mktemp("corpus"), [23, 0, 40, 17])
