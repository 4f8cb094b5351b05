"""Real processes: every sample exactly once over ranks and workers, and again after a resume with other ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardstream.torch import StreamingDataset, StreamingLoader
from tests.support.corpora import parquet_manifest, tar_manifest
from tests.support.processes import run_ranks
from tests.support.streams import joined

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

GLOBAL_BATCH = 24


def _loader(manifest, cursor, kind):
    dataset = StreamingDataset(manifest, batch_size=2, global_batch=GLOBAL_BATCH, seed=7)
    if cursor is not None:
        dataset.load_state_dict(cursor)
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    return StreamingLoader(dataset, **options) if kind == "streaming" else DataLoader(dataset, None, **options)


def _epoch(loader, num_windows=None):
    """Trains on an epoch, or a part of it; every window ends in a collective, as an optimizer step does."""
    consumed, cursor, done = [], None, 0
    for batch in loader:
        consumed.append(batch.sample_ids[~batch.is_padding].tolist())
        cursor = tuple(batch.cursor.state_dict().items())
        if batch.is_last_in_window:
            dist.barrier()
            done += 1
            if done == num_windows:
                break
    return consumed, cursor


def _stopped(rank, manifest, cursor, num_windows, kind):
    consumed, cursor = _epoch(_loader(manifest, cursor, kind), num_windows)
    return [consumed], cursor


def _whole(rank, manifest, cursor, kind):
    loader = _loader(manifest, cursor, kind)
    (rest, _), (second, cursor) = _epoch(loader), _epoch(loader)
    return [rest, second], cursor


@pytest.mark.parametrize(("kind", "world_sizes"), [("streaming", (2, 3)), ("plain", (3, 2))])
def test_each_sample_once_over_a_resume_with_other_ranks(tmp_path, kind, world_sizes):
    if kind == "streaming":
        manifest = parquet_manifest(tmp_path, [53, 0, 90, 57], 11)  # 200 samples: eight windows and a third
    else:
        manifest = tar_manifest(tmp_path, [53, 0, 90, 57])
    before = run_ranks(_stopped, world_sizes[0], manifest, None, 3, kind, has_workers=True)
    assert len({cursor for _, cursor in before}) == 1, "the same cursor on every rank"
    cursor = dict(before[0][1])
    assert (cursor["epoch"], cursor["position"]) == (0, 3 * GLOBAL_BATCH)
    after = run_ranks(_whole, world_sizes[1], manifest, cursor, kind, has_workers=True)
    ends = {end for _, end in after}
    assert len(ends) == 1
    assert dict(ends.pop())["epoch"] == 2
    first = joined(ids for consumed, _ in before for ids in consumed[0])
    rest = joined(ids for consumed, _ in after for ids in consumed[0])
    second = joined(ids for consumed, _ in after for ids in consumed[1])
    assert Counter(first + rest) == Counter(range(200))
    assert Counter(second) == Counter(range(200))
    assert len({len(consumed[1]) for consumed, _ in after}) == 1, "equal steps"
