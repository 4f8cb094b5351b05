"""The memory of a plan is known before anything is read, and what does not fit is refused with what would."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from shardstream.errors import PlanError
from shardstream.fetch import Reading, fetch
from shardstream.layout import RowsLayout
from shardstream.manifest import Manifest
from shardstream.memory import (
    MemoryNeed,
    default_memory_num_bytes,
    fitted,
    gather_batches,
    memory_need,
    most_batches,
)
from shardstream.mixing import Mixture
from shardstream.mixture_plan import MixturePlan
from shardstream.plan import Plan
from tests.support.corpora import parquet_manifest

MIB = 1 << 20


def manifest_of(num_blocks, rows, block_num_bytes, *, run_rows=None, kind="parquet", root="/data"):
    """Blocks that do not exist, all of one size; one shard for each hundred."""
    shards = -(-num_blocks // 100)
    made = Manifest.synthetic(
        num_shards=shards, blocks_per_shard=num_blocks // shards, rows_per_block=rows, run_rows=run_rows
    )
    return replace(
        made, root=root, formats=[kind] * shards, block_num_bytes=np.full(made.num_blocks, block_num_bytes, np.int64)
    )


def need_of(manifest, reading=None, num_workers=1, **options):
    return memory_need(Plan.make(manifest, **{"batch_size": 32, **options}), reading, num_workers)


SMALL = manifest_of(1000, 1000, MIB)  # decoded about 4 MiB each
HUGE = manifest_of(1, 1_000_000, 1 << 30, run_rows=2000)


@pytest.mark.parametrize(
    ("manifest", "options", "runs", "streams", "mib"),
    [
        (SMALL, {"lanes": 1}, 1 + 11, 0, (70, 90)),
        (SMALL, {"lanes": 32}, 32 + 11, 0, (190, 210)),
        (SMALL, {"lanes": 32, "world_size": 8}, 4 + 11, 0, (80, 100)),
        (SMALL, {"lanes": 32, "world_size": 5}, 7 + 1 + 11, 0, (100, 130)),  # shares of ranks cut lanes
        (manifest_of(1000, 1000, 100_000), {"lanes": 32}, 43, 0, (15, 25)),  # small blocks
        (manifest_of(1000, 1000, 3 * MIB // 2), {"lanes": 32}, 43, 0, (290, 340)),  # not larger than a run may be
        (HUGE, {"lanes": 1}, 1 + 6, 7, (100, 200)),
        (HUGE, {"lanes": 32}, 32 + 6, 38, (600, 800)),
        (manifest_of(1000, 100, 4 * MIB, kind="tar"), {"lanes": 32}, 52, 0, (40, 60)),
    ],
)  # fmt: skip
def test_what_a_plan_needs(manifest, options, runs, streams, mib):
    need = need_of(manifest, Reading(keeps_lane_ends=False, look_ahead=3), **options)
    assert abs(need.num_open_runs - runs) <= 1
    assert abs(need.num_streams - streams) <= 1
    assert mib[0] * MIB <= need.num_bytes <= mib[1] * MIB, need


@pytest.mark.parametrize(
    ("options", "num_workers", "kept"),
    [({"lanes": 32}, 1, 31), ({"lanes": 32, "world_size": 8}, 1, 3), ({"lanes": 1}, 1, 0), ({"lanes": 32}, 2, 0)],
)
def test_what_lanes_share_is_kept_by_one_reader_and_given_up_first(options, num_workers, kept):
    need = need_of(SMALL, num_workers=num_workers, **options)
    assert need.kept_num_bytes == kept * 4 * MIB
    plan = Plan.make(SMALL, batch_size=32, **options)
    tight = Reading(memory_num_bytes=need.num_bytes - kept * 4 * MIB)
    assert fitted(plan, tight, num_workers) == replace(tight, keeps_lane_ends=not kept and num_workers == 1)


def test_mapped_tars_take_nothing_until_they_are_remote():
    local, remote = (manifest_of(1000, 100, 4 * MIB, kind="tar", root=root) for root in ("/data", "s3://bucket"))
    assert need_of(local).runs_num_bytes == 0
    assert need_of(remote).runs_num_bytes > 100 * MIB
    assert (need_of(local).ahead_num_bytes, need_of(remote).ahead_num_bytes) == (0, 128 * MIB)


def test_orders_without_blocks_hold_a_run_for_each_row():
    need = need_of(SMALL, shuffle="full")
    assert need.num_open_runs == 1000
    assert need_of(SMALL, Reading(gather_rows=32, look_ahead=1), shuffle="full").num_open_runs == 3 * 32


def test_workers_with_lanes_of_their_own():
    plan = Plan.make(SMALL, batch_size=4, lanes=4)
    shared, own = memory_need(plan, num_workers=4), memory_need(plan.with_pin(16), num_workers=4)
    rows_held = 8 * 2048 // 4  # look-ahead and two more, of a worker's share of a gather
    assert shared.num_open_runs == 4 + -(-4 * rows_held // 1000)  # others read three quarters of what it enters
    assert own.num_open_runs == 4 + -(-rows_held // 1000)
    assert shared.gathers_num_bytes == own.gathers_num_bytes == memory_need(plan).gathers_num_bytes // 4


def test_a_mixture_needs_what_its_sources_need():
    plan = MixturePlan.make(Mixture({"a": (SMALL, 0.5), "b": (HUGE, 0.5)}), batch_size=32)
    need = memory_need(plan)
    assert need.num_streams > 0
    assert need.num_open_runs > need.num_streams


def test_unknown_sizes_are_said_to_be_unknown():
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=10, rows_per_block=10)
    assert need_of(manifest) is None
    plan, reading = Plan.make(manifest, batch_size=2), Reading(memory_num_bytes=1)
    assert fitted(plan, reading) is reading


# ------------------------------------------------------------------------------------------------ the budget


def test_what_fits_is_left_alone():
    plan, reading = Plan.make(SMALL, batch_size=32), Reading(memory_num_bytes=1 << 30)
    assert fitted(plan, reading) is reading


@pytest.mark.parametrize("mib", [1000, 300, 250, 200, 180, 160])
def test_look_ahead_and_gathers_shrink_to_fit(mib):
    manifest = replace(SMALL, root="s3://bucket")
    plan, reading = Plan.make(manifest, batch_size=32, lanes=32), Reading(memory_num_bytes=mib * MIB)
    smaller = fitted(plan, reading)
    assert memory_need(plan, smaller).num_bytes <= mib * MIB
    for name in ("look_ahead", "gather_rows", "ahead_num_bytes"):
        assert 0 < getattr(smaller, name) <= getattr(reading, name)
    if smaller.gather_rows < reading.gather_rows:
        assert smaller.look_ahead == 1, "gathers are what makes reading fast: they shrink last"


def test_what_cannot_fit_is_refused_with_what_would():
    plan = Plan.make(HUGE, batch_size=8, global_batch=32, lanes=32)
    with pytest.raises(PlanError, match="more memory than it may") as caught:
        fitted(plan, Reading(memory_num_bytes=200 * MIB))
    text = str(caught.value)
    assert "expected at most 200 MiB a process" in text
    lanes, lanes_mib = map(int, re.search(r"lanes=(\d+): (\d+) MiB", text).groups())
    ranks, ranks_mib = map(int, re.search(r"(\d+) ranks: (\d+) MiB", text).groups())
    least = int(re.search(r"memory_num_bytes=\) of at least (\d+) MiB", text).group(1))
    assert "reshard" in text
    fitting = Reading(memory_num_bytes=200 * MIB)
    assert fitted(replace(plan, lanes=lanes), fitting).memory_num_bytes == 200 * MIB
    batch = {"batch_size": 1 if ranks == 32 else 32 // ranks, "accumulate": 1}
    assert fitted(replace(plan, world_size=ranks, **batch), fitting)
    assert fitted(plan, Reading(memory_num_bytes=least * MIB))
    assert max(lanes_mib, ranks_mib) <= 200 < least
    with pytest.raises(PlanError):
        fitted(replace(plan, lanes=2 * lanes), fitting)


def test_the_default_refuses_no_usual_data():
    assert default_memory_num_bytes() >= 256 * MIB
    plan = Plan.make(SMALL, batch_size=32)
    assert memory_need(plan).num_bytes < 1 << 30


def test_ranks_and_workers_of_a_host_share_its_memory(monkeypatch):
    alone = default_memory_num_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert default_memory_num_bytes() == max(alone // 2, 256 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert default_memory_num_bytes(2) == max(alone // 2, 256 * MIB)


def test_nothing_is_read_before_it_is_refused(tmp_path):
    manifest = parquet_manifest(tmp_path, [50], 10)
    for shard in tmp_path.glob("*.parquet"):
        shard.unlink()
    plan = Plan.make(manifest, batch_size=4)
    with pytest.raises(PlanError, match="more memory"):
        next(fetch(plan, plan.micro_batches(0, plan.cursor()), reading=Reading(memory_num_bytes=1)))


def test_a_smaller_budget_changes_no_row(tmp_path):
    manifest = parquet_manifest(tmp_path, [90, 30], 10)
    plan = Plan.make(manifest, batch_size=4, accumulate=2)

    def ids(reading):
        gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading)
        return np.concatenate([gathered.sample_ids for gathered in gathers]).tolist()

    most = memory_need(plan).num_bytes
    least = memory_need(plan, Reading(look_ahead=1, gather_rows=4)).num_bytes
    assert least < most
    assert ids(Reading(memory_num_bytes=least)) == ids(Reading(memory_num_bytes=most))


def test_a_figure_is_near_what_a_process_takes(tmp_path):
    """Of blocks of 4 MB that do not compress, 16 lanes: measured in a process of its own."""
    code = f"""
import numpy as np, psutil, pyarrow as pa, pyarrow.parquet as pq
from shardstream.fetch import Reading, fetch
from shardstream.index import build_manifest
from shardstream.memory import memory_need
from shardstream.plan import Plan
folder, rng = {str(tmp_path)!r}, np.random.default_rng(0)
values = pa.array([rng.bytes(8192) for _ in range(512 * 40)], pa.binary())
pq.write_table(pa.table({{"x": values}}), folder + "/a.parquet", row_group_size=512, use_dictionary=False)
del values
manifest = build_manifest([folder + "/a.parquet"], num_workers=0)
plan = Plan.make(manifest, batch_size=16, lanes=16)
pa.default_memory_pool().release_unused()
before = most = psutil.Process().memory_info().rss
for gathered in fetch(plan, plan.micro_batches(0, plan.cursor()), reading=Reading(num_threads=2)):
    most = max(most, psutil.Process().memory_info().rss)
print(memory_need(plan).num_bytes, most - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    need, seen = map(int, done.stdout.split())
    # Less than may be: data is thought to be packed four to one, and gathers hold no copies of bytes.
    assert 0.3 * need < seen < 1.2 * need, (need / MIB, seen / MIB)


# ------------------------------------------------------------------------------------------------ values


def test_needs_are_shown_and_told_in_json():
    need = MemoryNeed(3, 5 * MIB, 1, 13 * MIB, 2 * MIB, MIB, 0)
    assert str(need) == "21 MiB (3 open runs 5 MiB, 1 streams 13 MiB, kept for lane ends 2 MiB, gathers 1 MiB)"
    assert need.to_dict()["num_bytes"] == 21 * MIB


@pytest.mark.parametrize(("row_num_bytes", "most_rows", "batches"), [(100, 2048, 64), (100, 64, 2), (1 << 20, 2048, 1)])
def test_gathers_are_bounded_in_rows_and_bytes(row_num_bytes, most_rows, batches):
    plan = Plan.make(SMALL, batch_size=32, lanes=32)
    assert most_batches(plan, row_num_bytes, most_rows, 1) == batches


@pytest.mark.parametrize(
    ("change", "batches"),
    [
        ({}, 4 * 12 + 1),
        ({"dtypes": {"jpg": np.dtype(np.uint8)}}, 12),
        ({"kind": "tar.zst"}, 12),
        ({"kind": "mds"}, 12),
        ({"root": "s3://bucket"}, 12),
        ({"reading": Reading(cache_dir="/cache", cache_local=True)}, 12),
        ({"reading": Reading(gather_rows=64)}, 2),
    ],
)
def test_gathers_of_bytes_that_stay_in_their_files_are_larger(change, batches):
    options = {"kind": "tar", "root": "/data", "dtypes": {}, "reading": Reading(), **change}
    manifest = manifest_of(1000, 100, 100 * 42_000, kind=options["kind"], root=options["root"])
    plan = Plan.make(manifest, batch_size=32, lanes=32)
    assert gather_batches(plan, RowsLayout(plan, ["jpg"], options["dtypes"]), options["reading"], 1) == batches
