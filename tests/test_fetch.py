from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as thread_pools
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardstream.columns import Rows, python_values
from shardstream.errors import DecodeError, PlanError, ReadError, ShardChangedError
from shardstream.fetch import Reading, ReadStats, fetch
from shardstream.formats.parquet import ParquetFormat
from shardstream.layout import RowsLayout
from shardstream.plan import Plan
from tests.support.corpora import manifest_of_files, parquet_manifest, tar_manifest, with_runs
from tests.support.threads import readers, soon


@pytest.fixture(scope="module", autouse=True)
def no_readers_of_other_tests():
    """Loops that were left in a test of another file: what holds their datasets may not have been collected yet."""
    gc.collect()
    for thread in readers():
        thread.join(30)


@pytest.fixture(params=[1, 64], ids=["no core left", "cores left"], autouse=True)
def num_cores(request, monkeypatch):
    """Rows are made and copied by threads of their own only where cores are left: both ways must do the same."""
    monkeypatch.setattr("shardstream.open_runs.num_cores", lambda: request.param)


def open_files(folder):
    """What this process has open below a folder."""
    return [file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))]


def is_closed_soon(folder):
    """Whether readers end and files are closed before long: not at once, where nobody waits for it."""
    return soon(lambda: not (readers() or open_files(folder)))


def one_by_one(gathers):
    """The micro-batches of gathers; closing it closes the reading."""
    try:
        for gathered in gathers:
            yield from gathered.micro_batches()
    finally:
        gathers.close()


def watched(plan, reading, num_batches=None):
    """Returns the runs that are read, as weak references that are added on the way, and the micro-batches."""
    held = []

    class Watched(RowsLayout):
        def prepared(self, key, rows):
            run = super().prepared(key, rows)
            held.append(weakref.ref(run))
            return run

    planned = islice(plan.micro_batches(0, plan.cursor()), num_batches)
    return held, one_by_one(fetch(plan, planned, layout=Watched(plan), reading=reading))


def fetched(plan, rank=0, *, start=None, columns=None, worker=0, num_workers=1, most=None, **options):
    planned = plan.micro_batches(rank, start or plan.cursor(), worker=worker, num_workers=num_workers)
    layout = RowsLayout(plan, columns)
    return one_by_one(fetch(plan, islice(planned, most), layout=layout, num_workers=num_workers, **options))


def python_rows(rows: Rows):
    columns = {name: python_values(name, column) for name, column in rows.columns.items()}
    return [
        {name: values[row].tolist() if isinstance(values[row], np.ndarray) else values[row]
         for name, values in columns.items()}
        for row in range(rows.num_rows)
    ]  # fmt: skip


def naive_rows(manifest):
    """Every row of every shard, read with the format's own reader; index is the sample id."""
    return [row for shard in range(manifest.num_shards) for row in pq.read_table(manifest.url(shard)).to_pylist()]


# ------------------------------------------------------------------------------------------------ what is read


LAYOUT = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),  # shard sizes
    st.integers(1, 12),  # rows of a row group
    st.integers(1, 12),  # rows of a run
)
SPLIT = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))  # P, b, accumulate, W
ORDER = st.sampled_from(
    [(True, None), (True, 1), (True, 5), (False, None), (False, 3), ("full", None), ("torch", None)]
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(layout=LAYOUT, split=SPLIT, order=ORDER, tail=st.sampled_from(["pad", "uneven", "continue"]), data=st.data())
def test_fetch_equals_a_naive_reader(tmp_path_factory, layout, split, order, tail, data):
    sizes, row_group_size, run_rows = layout
    world_size, batch_size, accumulate, num_workers = split
    manifest = with_runs(parquet_manifest(tmp_path_factory.mktemp("fetch"), sizes, row_group_size), run_rows)
    plan = Plan.make(
        manifest,
        world_size=world_size,
        batch_size=batch_size,
        accumulate=accumulate,
        seed=4,
        shuffle=order[0],
        lanes=order[1],
        tail=tail,
    )
    everything, first_sample = naive_rows(manifest), manifest.first_sample
    reading = Reading(num_threads=data.draw(st.integers(1, 3)), look_ahead=data.draw(st.integers(1, 4)),
                      gather_rows=data.draw(st.sampled_from([1, 7, 2048])))  # fmt: skip
    position = data.draw(st.integers(0, (manifest.num_samples - 1) // plan.global_batch)) * plan.global_batch
    start = plan.cursor(data.draw(st.integers(0, 2)), position)
    for rank in range(world_size):
        for worker in range(num_workers):
            planned = plan.micro_batches(rank, start, worker=worker, num_workers=num_workers)
            batches = list(islice(planned, 30))
            seen = list(one_by_one(fetch(plan, iter(batches), reading=reading, num_workers=num_workers)))
            assert [f.batch.batch_index for f in seen] == [batch.batch_index for batch in batches]
            for batch, got in zip(batches, seen, strict=True):
                ahead, local = np.divmod(batch.positions, plan.num_positions)
                want = []
                for further, where in zip(ahead.tolist(), local.tolist(), strict=True):
                    shard, row = plan.epoch(batch.epoch + further).order.locate(np.array([where]))
                    want.append(int(first_sample[shard[0]] + row[0]))
                assert got.sample_ids.tolist() == want
                assert python_rows(got.rows) == [everything[sample] for sample in want]
    assert not readers()


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_tar_samples(tmp_path, suffix):
    manifest = with_runs(tar_manifest(tmp_path, [5, 0, 17, 3], suffix), 4)
    plan = Plan.make(manifest, batch_size=4, seed=1)
    for got in fetched(plan):
        for sample, row in zip(got.sample_ids.tolist(), python_rows(got.rows), strict=True):
            assert row["uid"] == str(sample).encode()
            assert row["__key__"] == f"{sample:06d}"


def test_columns_are_chosen_and_kept_in_order(tmp_path):
    plan = Plan.make(parquet_manifest(tmp_path, [9]), batch_size=3)
    assert [list(got.rows.columns) for got in fetched(plan, columns=("text", "uid"))] == [["text", "uid"]] * 3


# ------------------------------------------------------------------------------------------------ how it is read


def test_the_first_batch_waits_for_its_own_blocks_only(tmp_path):
    plan = Plan.make(parquet_manifest(tmp_path, [200], 5), batch_size=4, lanes=4)
    stats = ReadStats()
    batches = fetched(plan, stats=stats, reading=Reading(look_ahead=1))
    next(batches)
    assert stats.num_blocks_opened <= 4 + 8, "its own, and those of the one gather ahead"
    assert stats.num_samples == 4
    batches.close()


def test_nothing_stands_between_the_first_batch_and_its_consumer(tmp_path, monkeypatch):
    """Its blocks are decoded first, and no other gather is copied before it was handed out."""
    plan = Plan.make(parquet_manifest(tmp_path, [200], 5), batch_size=4, lanes=4)
    decoded, copied = [], []
    decode_runs = ParquetFormat.decode_runs

    def noting(self, shard, block, *rest):
        decoded.append(block)
        return decode_runs(self, shard, block, *rest)

    class Noting(RowsLayout):
        def planned(self, batches):
            planned = super().planned(batches)

            def make(runs):
                copied.append(len(batches))
                return planned.make(runs)

            return planned._replace(make=make)

    monkeypatch.setattr(ParquetFormat, "decode_runs", noting)
    gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), layout=Noting(plan), reading=Reading(num_threads=1))
    first = next(gathers)
    assert copied == [1]
    assert decoded[:4] == plan.locate(0, first.batches[0].positions).block.tolist()
    next(gathers)
    assert copied[:2] == [1, 2], "in order"
    gathers.close()


@pytest.mark.parametrize("run_rows", [3, 100])
@pytest.mark.parametrize(
    ("lanes", "accumulate", "num_workers"), [(1, 1, 1), (8, 2, 1), (8, 4, 2), (16, 2, 1), (16, 1, 2), (12, 1, 1)]
)
def test_a_block_is_opened_once_by_each_lane_that_ends_in_it(tmp_path, run_rows, lanes, accumulate, num_workers):
    """Lanes up to several global batches, gathers of any size: nothing is dropped between two visits of a lane."""
    manifest = with_runs(parquet_manifest(tmp_path, [240, 160], 20), run_rows)
    plan = Plan.make(manifest, batch_size=8 // accumulate, accumulate=accumulate, lanes=lanes)
    for gather_rows in (1, 64):
        stats = ReadStats()
        for worker in range(num_workers):
            reading = Reading(gather_rows=gather_rows)
            for _ in fetched(plan, worker=worker, num_workers=num_workers, stats=stats, reading=reading):
                pass
        visits = 2 * lanes if run_rows < 20 else lanes  # phases cut blocks as often again
        assert stats.num_blocks_opened <= manifest.num_blocks + visits, stats
        assert stats.num_samples == 400


@pytest.mark.parametrize(("world_size", "lanes"), [(1, 8), (2, 8), (1, 16), (3, 12), (1, 24)])
@pytest.mark.parametrize("tail", ["pad", "continue"])
def test_a_block_that_two_lanes_of_a_reader_share_is_opened_once(tmp_path, world_size, lanes, tail):
    manifest = parquet_manifest(tmp_path, [740, 467], 20)
    plan = Plan.make(manifest, batch_size=24 // world_size, world_size=world_size, lanes=lanes, tail=tail)
    opened = {}
    for keeps in (True, False):
        stats, reading = ReadStats(), Reading(keeps_lane_ends=keeps, gather_rows=24, look_ahead=1)
        for rank in range(world_size):
            for _ in fetched(plan, rank, stats=stats, reading=reading, most=2 * 1207 // 24):
                pass
        opened[keeps] = stats.num_blocks_opened
    num_epochs = 1 + (tail == "continue")
    assert opened[False] - opened[True] >= num_epochs * (lanes - world_size) // 2, "few lanes end with a block"
    if (world_size, tail) == (1, "pad"):
        assert opened[True] == manifest.num_blocks


@pytest.mark.parametrize(("world_size", "lanes"), [(3, 8), (6, 16), (5, 32)])
def test_what_is_kept_is_bounded_where_lanes_do_not_divide_among_ranks(tmp_path, world_size, lanes):
    """Another rank may read the end of a lane that this one read the beginning of; that must not add up."""
    manifest = parquet_manifest(tmp_path, [740, 467], 20)
    plan = Plan.make(manifest, batch_size=8, world_size=world_size, lanes=lanes, tail="continue")
    held, batches = watched(plan, Reading(gather_rows=8, look_ahead=1), num_batches=1500)
    counts = [sum(ref() is not None for ref in held[-200:]) for _ in batches]
    of_rank = lanes // world_size + 2
    assert of_rank <= max(counts) <= 2 * of_rank + (of_rank - 1) + 8 * 3, (
        "its lanes', gathers', and those that are kept"
    )


def test_what_was_kept_is_let_go_at_the_end_of_the_epoch(tmp_path):
    plan = Plan.make(parquet_manifest(tmp_path, [240, 167], 20), batch_size=24, lanes=8, tail="continue")
    held, batches = watched(plan, Reading(gather_rows=24, look_ahead=1), num_batches=100)
    most = max(sum(ref() is not None for ref in held) for _ in batches)
    assert len(held) > 100
    assert 8 <= most <= 8 * 2 + 8 + 8, "of the lanes, and those that gathers ahead have entered; and what lanes share"


def test_settings_that_could_not_work_are_refused():
    for wrong in ({"look_ahead": 0}, {"num_threads": 0}, {"gather_rows": -1}, {"timeout_s": 0}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            Reading(**wrong)


# ------------------------------------------------------------------------------------------------ how it ends


@pytest.mark.parametrize("end", ["break", "close", "exhausted"])
def test_no_thread_and_no_file_is_left(tmp_path, end):
    plan = Plan.make(with_runs(parquet_manifest(tmp_path, [200, 100], 50), 5), batch_size=4, lanes=4)
    batches = fetched(plan)
    next(batches)
    assert readers()
    if end == "close":
        batches.close()
    elif end == "exhausted":
        assert sum(1 for _ in batches) == 74
    del batches
    assert not readers()
    assert not open_files(tmp_path)


def test_it_starts_nothing_before_it_is_iterated(tmp_path):
    plan = Plan.make(parquet_manifest(tmp_path, [20]), batch_size=4)
    batches = fetched(plan)
    assert not readers()
    assert not open_files(tmp_path)
    batches.close()
    assert not readers()


def test_an_exception_of_the_consumer_closes_everything(tmp_path):
    plan = Plan.make(with_runs(parquet_manifest(tmp_path, [100], 50), 5), batch_size=4)

    def consume():
        for _ in fetched(plan):
            raise KeyError

    with pytest.raises(KeyError):
        consume()
    assert not readers()
    assert not open_files(tmp_path)


def reading_that_hangs(tmp_path, monkeypatch):
    """A loop some batches of which are out, while a thread is decoding what later ones need; and what lets it go on."""
    asked, release, decode_runs = threading.Event(), threading.Event(), ParquetFormat.decode_runs

    def hanging(format_, shard, block, *arguments):
        if block > 0:
            asked.set()
            release.wait(60)
        return decode_runs(format_, shard, block, *arguments)

    monkeypatch.setattr(ParquetFormat, "decode_runs", hanging)
    plan = Plan.make(parquet_manifest(tmp_path, [100], 50), batch_size=4, shuffle=False, lanes=1)
    batches = fetched(plan)
    while not asked.wait(0.05):
        next(batches)
    return batches, release


@pytest.mark.parametrize("name", ["shardstream-read_9", "Thread-1"])
def test_a_generator_that_is_collected_in_another_thread_is_not_waited_for_there(tmp_path, monkeypatch, name):
    batches, release = reading_that_hangs(tmp_path, monkeypatch)
    forgotten = [batches]
    del batches
    ended = threading.Event()

    def collect():
        forgotten.pop().close()
        ended.set()

    threading.Thread(target=collect, name=name, daemon=True).start()
    assert ended.wait(20)
    release.set()
    assert is_closed_soon(tmp_path)


def test_a_loop_that_went_on_in_another_thread_is_waited_for_there(tmp_path):
    batches = fetched(Plan.make(with_runs(parquet_manifest(tmp_path, [100], 50), 5), batch_size=4))
    with ThreadPoolExecutor(1) as other:
        other.submit(next, batches).result()
    next(batches)
    batches.close()
    assert not readers()
    assert not open_files(tmp_path)


@pytest.mark.parametrize("of_whom", ["another pool", "its ranges"])
def test_a_generator_that_is_collected_while_a_pool_takes_a_task_needs_no_lock_of_it(tmp_path, monkeypatch, of_whom):
    plan = Plan.make(parquet_manifest(tmp_path, [200], 10), batch_size=4)
    reading = Reading(num_threads=2, cache_dir=tmp_path / "cache", cache_local=True)
    forgotten, ended = [fetched(plan, reading=reading)], threading.Event()
    next(forgotten[0])

    class WorkItem(thread_pools._WorkItem):
        """Stands for the garbage collector, which may run wherever a pool's ``submit`` allocates."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            if forgotten:
                forgotten.pop().close()

    pool = ThreadPoolExecutor(1)
    if of_whom == "its ranges":
        pool = forgotten[0].gi_frame.f_locals["gathers"].gi_frame.f_locals["runs"]._ranges._threads

    def submit():
        with suppress(RuntimeError):  # a thread of its own took a task before, and the pool is closed
            pool.submit(int)
        ended.set()

    monkeypatch.setattr(thread_pools, "_WorkItem", WorkItem)
    threading.Thread(target=submit, daemon=True).start()
    assert ended.wait(20)
    assert is_closed_soon(tmp_path)
    pool.shutdown()


def test_a_loop_that_is_left_does_not_wait_for_ever(tmp_path, monkeypatch):
    batches, release = reading_that_hangs(tmp_path, monkeypatch)
    monkeypatch.setattr("shardstream.fetch._CLOSING_S", 0.1)
    batches.close()
    assert readers()
    release.set()
    assert is_closed_soon(tmp_path)


def test_what_failed_is_said_though_a_later_run_hangs(tmp_path, monkeypatch):
    release, asked = threading.Event(), []

    def failing_then_hanging(*arguments):
        asked.append(arguments)
        if len(asked) == 1:
            raise DecodeError("no data")
        release.wait(30)
        yield

    monkeypatch.setattr(ParquetFormat, "decode_runs", failing_then_hanging)
    plan = Plan.make(parquet_manifest(tmp_path, [200], 5), batch_size=4, lanes=4)
    timer = threading.Timer(3, release.set)  # closing waits for what hangs
    timer.start()
    with pytest.raises(DecodeError, match="no data"):
        next(fetched(plan, reading=Reading(num_threads=2, timeout_s=2)))
    timer.join()


def damage(manifest, shard):
    """Overwrites some bytes of a shard's first block; size, times and footer stay."""
    path = Path(manifest.url(shard))
    stamp = path.stat()
    with path.open("r+b") as file:
        file.seek(int(manifest.block_offset[manifest.shard_first_block[shard]]) + 2)
        file.write(b"\xff" * 40)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_damage_in_the_middle_names_shard_and_block_and_closes_everything(tmp_path):
    manifest = parquet_manifest(tmp_path, [20, 20, 20], 10)
    plan = Plan.make(manifest, batch_size=4, shuffle=False)
    damage(manifest, 1)
    batches = fetched(plan, reading=Reading(gather_rows=4))
    assert [next(batches).sample_ids.tolist() for _ in range(5)] == np.arange(20).reshape(5, 4).tolist()
    with pytest.raises(DecodeError, match=r"part-00001\.parquet, block 2\]"):
        next(batches)
    assert not readers()
    assert not open_files(tmp_path)


def test_a_shard_that_is_gone_or_another_is_named(tmp_path):
    manifest = parquet_manifest(tmp_path, [20, 20])
    Path(manifest.url(1)).unlink()
    with pytest.raises(ReadError, match=r"part-00001\.parquet"):
        list(fetched(Plan.make(manifest, batch_size=4)))
    pq.write_table(pa.table({"uid": [1, 2, 3]}), manifest.url(1))
    with pytest.raises(ShardChangedError, match=r"part-00001\.parquet"):
        list(fetched(Plan.make(replace(manifest), batch_size=4)))


def test_text_that_is_not_utf_8_names_shard_and_block(tmp_path):
    good, bad = pa.array(["a", "b", "c"]), pa.array([b"d", b"\xff", b"f"]).view(pa.string())
    for number, column in enumerate((good, bad)):
        pq.write_table(pa.table({"text": column}), tmp_path / f"{number}.parquet")
    manifest = manifest_of_files(sorted(tmp_path.iterdir()))
    with pytest.raises(DecodeError, match=r"column 'text' holds text that is not UTF-8.*1\.parquet, block 1\]"):
        list(fetched(Plan.make(manifest, batch_size=6)))


def test_a_fault_of_a_format_is_an_error_with_a_place(tmp_path, monkeypatch):
    plan = Plan.make(parquet_manifest(tmp_path, [20], 20), batch_size=4)

    def broken():
        raise ZeroDivisionError("a fault")

    # In the thread that decodes, and in the one that makes rows of what was decoded.
    for runs in ((broken() for _ in range(1)), iter([broken])):
        monkeypatch.setattr(ParquetFormat, "decode_runs", lambda *_, runs=runs: (run for run in runs))
        with pytest.raises(ReadError, match=r"ZeroDivisionError: a fault \[.*part-00000\.parquet, block 0\]"):
            next(fetched(plan))
    monkeypatch.setattr(ParquetFormat, "decode_runs", lambda *_: (rows for rows in ()))
    with pytest.raises(DecodeError, match=r"fewer runs than were indexed \[.*part-00000\.parquet, block 0\]"):
        next(fetched(plan))


def test_a_read_that_hangs_is_given_up_at_the_deadline(tmp_path, monkeypatch):
    plan = Plan.make(parquet_manifest(tmp_path, [20], 20), batch_size=4)
    release = threading.Event()

    def hanging(*_):
        release.wait(60)
        yield

    monkeypatch.setattr(ParquetFormat, "decode_runs", hanging)
    begun = time.monotonic()
    try:
        with pytest.raises(ReadError, match=r"data was not there after 0\.2 s \[.*part-00000\.parquet, block 0\]"):
            next(fetched(plan, reading=Reading(timeout_s=0.2)))
        assert time.monotonic() - begun < 30, "it did not wait for the read"
    finally:
        release.set()
    for thread in readers():
        thread.join(20)


def test_runs_that_are_no_longer_needed_are_let_go(tmp_path):
    """What is held follows what is open: a run whose rows were all handed out can be freed."""
    plan = Plan.make(with_runs(parquet_manifest(tmp_path, [600], 100), 10), batch_size=10, shuffle=False)
    held, batches = watched(plan, Reading(gather_rows=20))
    for _ in batches:  # the threads that made them may be just letting go of some
        assert soon(lambda: sum(ref() is not None for ref in held) <= 12), "of six gathers"
    assert len(held) == 60


def test_few_gathers_are_copied_before_they_are_asked_for(tmp_path):
    """Of gathers further ahead runs are held, which give their rows when it is their turn: not both."""
    made = []

    class Watched(RowsLayout):
        def planned(self, batches):
            planned = super().planned(batches)
            return planned._replace(make=lambda runs: made.append(len(runs)) or planned.make(runs))

    plan = Plan.make(parquet_manifest(tmp_path, [600], 20), batch_size=4, lanes=4)
    planned = plan.micro_batches(0, plan.cursor())
    num_taken = 0
    for _ in fetch(plan, planned, layout=Watched(plan), reading=Reading(gather_rows=4, look_ahead=6)):
        num_taken += 1
        if num_taken % 50 == 10:
            time.sleep(0.05)  # time to copy more than it should
        assert len(made) <= num_taken + 1
    assert len(made) == num_taken == 150
