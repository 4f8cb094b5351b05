from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from shardstream.errors import ShardStreamWarning
from shardstream.prepare import PrepareSettings, prepare

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "some", "other", "cats", "sit", "mats")


@pytest.fixture
def rows():
    """300 rows of text of many lengths, some of it missing."""
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(0, 60)))) for _ in range(300)]
    return [{"id": k, "text": None if k % 97 == 3 else text, "n": [k] * (k % 3)} for k, text in enumerate(texts)]


@pytest.fixture
def lines(tmp_path, rows):
    """The rows as three shards of JSON lines in a folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    for shard, (first, end) in enumerate([(0, 100), (100, 101), (101, 300)]):
        text = "".join(json.dumps(row) + "\n" for row in rows[first:end])
        (folder / f"{shard}.jsonl").write_text(text)
    return folder


@pytest.fixture
def write():
    """Prepares in this process, with small shards; further settings by name."""

    def call(inputs, output, step=None, **settings):
        small = {"num_workers": 0, "shard_num_bytes": 4000, "block_num_bytes": 2000, **settings}
        with warnings.catch_warnings():
            if settings.get("format", "").startswith("tar"):
                warnings.simplefilter("ignore", ShardStreamWarning)
            return prepare([inputs], output, step, PrepareSettings(**small))

    return call


def bytes_of(folder):
    """What a reader of the output sees, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name[0].isdigit()}
