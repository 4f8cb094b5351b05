"""What a loader says of itself is what happened, however many processes read for it."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest

from shardstream.audit import audit
from shardstream.errors import PlanError
from shardstream.torch import StreamingDataset, StreamingLoader, Topology
from tests.support.corpora import parquet_manifest, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """400 samples in 40 blocks, whose tokens the manifest knows."""
    return parquet_manifest(tmp_path_factory.mktemp("counted"), [200, 200], 10, tokens_column="tokens")


def dataset_of(manifest, **options):
    options = {"batch_size": 5, "accumulate": 2, "lanes": 5, "seed": 3, "topology": Topology(0, 1), **options}
    return StreamingDataset(manifest, **options)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("per_batch", [False, True])
def test_counts_are_those_of_the_epoch(counted, num_workers, per_batch):
    dataset = dataset_of(counted, transform=dict if per_batch else None)
    loader = StreamingLoader(dataset, num_workers=num_workers)
    for _ in range(2):  # what a second epoch reads is needed once more
        assert len(list(loader)) == 80
    stats, cost = loader.stats(), audit(dataset.plan, num_workers=num_workers, epochs=1).reading
    assert (stats.num_batches, stats.num_samples) == (160, 800)
    assert stats.num_tokens == 2 * sum(len(tokens_of(uid)) for uid in range(400))
    assert stats.num_blocks_needed == 2 * 40
    other = audit(dataset.plan, num_workers=num_workers, epochs=1, start=dataset.plan.cursor(1)).reading
    assert stats.num_blocks_opened == cost.num_opens + other.num_opens
    assert stats.read_amplification == stats.num_blocks_opened / 80
    assert stats.num_bytes > 0
    assert (stats.num_requests, stats.num_cache_hits) == (0, 0)
    assert json.loads(json.dumps(stats.to_dict()))["num_samples"] == 800


def test_waiting_and_holding_are_told_apart(counted):
    loader = StreamingLoader(dataset_of(counted))
    began = time.perf_counter()
    for _, batch in zip(range(4), loader, strict=False):
        del batch
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    stats = loader.stats()
    assert 0.2 <= stats.held_s <= seconds
    assert 0 < stats.wait_s <= seconds - 0.2
    assert stats.wait_share == stats.wait_s / (stats.wait_s + stats.held_s)


def test_time_between_passes_is_nobodys(counted):
    loader = StreamingLoader(dataset_of(counted))
    list(loader)
    held = loader.stats().held_s
    time.sleep(0.1)
    batches = iter(loader)
    next(batches)
    assert loader.stats().held_s - held < 0.1


def test_a_figure_that_is_not_known_is_none(corpus):
    loader = StreamingLoader(dataset_of(corpus))
    assert loader.stats().read_amplification is None
    next(iter(loader))
    assert loader.stats().num_tokens is None


def test_packed_tokens_are_counted(counted):
    loader = StreamingLoader(dataset_of(counted, sequence_length=16, batch_size=1, accumulate=1))
    num_batches = len(list(loader))
    assert loader.stats().num_tokens == num_batches * 16


def test_one_line_an_interval_on_request(counted, caplog):
    caplog.set_level(logging.INFO, "shardstream")
    loader = StreamingLoader(dataset_of(counted), log_every_s=0.05)
    for _, _batch in zip(range(8), loader, strict=False):
        time.sleep(0.02)
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 3
    pattern = r"[\d,]+ samples/s, [\d,]+ tokens/s, [\d.,]+ MB/s, waited [\d.]+ s of [\d.]+ s, \d+ blocks opened, .*"
    assert re.fullmatch(pattern, lines[0])


def test_silence_is_the_default(counted, caplog):
    caplog.set_level(logging.INFO, "shardstream")
    list(StreamingLoader(dataset_of(counted)))
    assert not caplog.records


def test_the_interval_must_be_positive(counted):
    with pytest.raises(PlanError, match="log_every_s"):
        StreamingLoader(dataset_of(counted), log_every_s=0)
