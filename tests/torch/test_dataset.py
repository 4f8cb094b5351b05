"""What is in a batch: columns, transforms, collation, targets; and the public cases of what a rank gets."""

from __future__ import annotations

import inspect
import multiprocessing
import time
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from shardstream.errors import DecodeError, ManifestError, PlanError, ShardStreamWarning, TopologyError
from shardstream.permutation import key64
from shardstream.torch import Ragged, StreamingDataset, StreamingLoader, Topology, pad_tokens
from tests.support.corpora import manifest_of_files, parquet_manifest, text_of, tokens_of
from tests.support.streams import joined, loader_of, real_ids, uids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def dataset_of(manifest, rank=0, world_size=1, **options):
    return StreamingDataset(manifest, topology=Topology(rank, world_size), **{"batch_size": 4, "seed": 2, **options})


def seen_by_ranks(manifest, world_size, num_workers=0, **options):
    """What each rank's loader hands out in one epoch."""
    datasets = [dataset_of(manifest, rank, world_size, **options) for rank in range(world_size)]
    return [list(loader_of("plain", dataset, num_workers)) for dataset in datasets]


# ------------------------------------------------------------------------------------------------ columns


def test_a_batch_has_every_column_in_its_natural_form(corpus):
    for batch in dataset_of(corpus):
        uid = batch.sample_ids.tolist()
        assert batch["uid"].tolist() == uid
        assert batch["uid"].dtype == torch.int64
        assert isinstance(batch["tokens"], Ragged)
        assert batch["tokens"].tolist() == [tokens_of(u) for u in uid]
        assert batch["tokens"].values.dtype == torch.int32
        assert batch["text"] == [text_of(u) for u in uid]


def test_unknown_columns_are_refused_with_the_nearest_name(corpus):
    with pytest.raises(PlanError, match=r"there is no column 'tokns'.*did you mean 'tokens'\?"):
        dataset_of(corpus, columns=["uid", "tokns"])
    with pytest.raises(PlanError, match=r"columns= is a list of names: found 'tokens'; write \['tokens'\]"):
        dataset_of(corpus, columns="tokens")
    with pytest.raises(PlanError, match=r"there is no column 'labels': expected uid or tokens or text"):
        dataset_of(corpus, targets={"lm": "labels"}, shifted=True)


def test_a_manifest_is_taken_from_its_file(tmp_path):
    manifest = parquet_manifest(tmp_path / "data", [9], output=str(tmp_path / "m.parquet"))
    dataset = dataset_of(str(tmp_path / "m.parquet"), batch_size=3)
    assert dataset.manifest.fingerprint == manifest.fingerprint
    assert sorted(real_ids(loader_of("plain", dataset, 2))) == list(range(9))


# ------------------------------------------------------------------------------------------------ transforms


def remember(sample):
    return {"uid": sample["uid"], "id": sample["__id__"], "seed": sample["__seed__"] % 2**62, "url": sample["__url__"]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_gets_identity_and_seed_whatever_reads_it(corpus, num_workers):
    """After a resume too: augmentation depends on seed, epoch and sample only."""
    dataset = dataset_of(corpus, transform=remember)
    dataset.load_state_dict(dataset.plan.cursor(1, 40))
    loader = loader_of("streaming", dataset, num_workers)
    for epoch in (1, 2):
        for batch in loader:
            ids = batch.sample_ids.tolist()
            assert batch["uid"].tolist() == batch["id"].tolist() == ids
            assert batch["seed"].tolist() == [key64(2, epoch, "sample", i) % 2**62 for i in ids]
            shards = corpus.shard_of_sample(np.array(ids)).tolist()
            assert batch["url"] == [corpus.url(shard) for shard in shards]


def test_the_seed_of_a_sample_is_that_of_its_epoch_where_windows_reach_over(corpus):
    dataset = dataset_of(corpus, transform=remember, tail="continue", batch_size=48)
    _, batch = (batch for batch, _ in zip(dataset, range(2), strict=False))  # positions 48..95: 16 of epoch 1
    pairs = list(zip(batch["id"].tolist(), batch["seed"].tolist(), strict=True))
    of_epoch = [sum(key64(2, epoch, "sample", sample) % 2**62 == seed for sample, seed in pairs) for epoch in range(3)]
    assert of_epoch == [32, 16, 0]


def fail_at_37(sample):
    if sample["uid"] == 37:
        raise ValueError("no good")
    return {"uid": sample["uid"]}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_transform_names_shard_row_and_sample(corpus, num_workers):
    loader = loader_of("plain", dataset_of(corpus, transform=fail_at_37), num_workers)
    with pytest.raises(DecodeError, match=r"sample 37: ValueError: no good \[.*part-00002\.parquet, row 14\]"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_that_is_swallowed_does_not_end_the_epoch_early(corpus, num_workers):
    dataset = dataset_of(corpus, transform=fail_at_37)
    for kind in ("plain", "streaming"):
        loader = loader_of(kind, dataset, num_workers)
        batches = iter(loader)
        num_errors = 0
        for _ in range(60):
            try:
                next(batches)
            except DecodeError:
                num_errors += 1
            except StopIteration:
                break
        assert num_errors > 5
        assert dataset.start.epoch == 0


def test_a_transform_must_return_a_sample(corpus):
    with pytest.raises(DecodeError, match=r"transform returned None for sample \d+ \[.*row \d+\]; return a sample"):
        list(dataset_of(corpus, transform=lambda _: None))
    with pytest.raises(DecodeError, match="a transform must return a dict: found list"):
        list(dataset_of(corpus, transform=lambda sample: [sample]))


def test_a_transform_that_changes_nothing_gives_the_same_batches(corpus):
    for plain, through in zip(dataset_of(corpus), dataset_of(corpus, transform=dict), strict=True):
        assert plain.keys() == through.keys()
        assert plain["uid"].equal(through["uid"])
        assert plain["tokens"].tolist() == through["tokens"].tolist()
        assert plain["tokens"].values.dtype == through["tokens"].values.dtype


def test_collate_takes_samples_or_columns(corpus):
    def lengths(samples):
        return {"length": torch.tensor([len(sample["tokens"]) for sample in samples]), "id": samples[0]["__id__"]}

    for batch in dataset_of(corpus, collate=lengths):
        assert batch["length"].tolist() == [u % 5 for u in batch.sample_ids.tolist()]
        assert batch["id"] == batch.sample_ids[0]
    for batch in dataset_of(corpus, collate=pad_tokens("tokens", length=6)):
        assert batch["input_ids"].shape == batch["labels"].shape == (4, 6)
        assert "tokens" not in batch


# ------------------------------------------------------------------------------------------------ targets


def test_targets_are_declared(corpus):
    with pytest.raises(PlanError, match="targets need shifted="):
        dataset_of(corpus, targets={"lm": "tokens"})
    for shifted in (True, False):
        for batch in dataset_of(corpus, targets={"lm": "tokens"}, shifted=shifted):
            want = [max(0, u % 5 - (not shifted)) for u in batch.sample_ids.tolist()]
            assert batch.valid_tokens["lm"].tolist() == want


def test_targets_by_a_callable_and_of_collated_columns(corpus):
    dataset = dataset_of(
        corpus,
        collate=pad_tokens("tokens"),
        targets={"lm": "labels", "odd": lambda columns: columns["uid"] % 2},
        shifted=True,
    )
    for batch in dataset:
        ids = batch.sample_ids.tolist()
        assert batch.valid_tokens["lm"].tolist() == [max(0, u % 5 - 1) for u in ids]
        assert batch.valid_tokens["odd"].tolist() == [u % 2 for u in ids]
    with pytest.raises(PlanError, match="head 'lm' counts column 'nothing', which is not in the batch"):
        list(dataset_of(corpus, transform=dict, targets={"lm": "nothing"}, shifted=True))
    with pytest.raises(PlanError, match=r"must be counts per sample: expected int64\[4\], found \[1\]"):
        list(dataset_of(corpus, targets={"x": lambda _: torch.ones(1)}))


def test_labels_of_padding_rows_are_masked(corpus):
    """On the copies that fill the last window, no loss may count anything."""
    dataset = dataset_of(corpus, rank=1, world_size=2, batch_size=32, targets={"lm": "tokens"}, shifted=True)
    *_, last = dataset
    assert last.is_padding.sum() == 24
    for tokens, uid, is_padding in zip(
        last["tokens"].tolist(), last["uid"].tolist(), last.is_padding.tolist(), strict=True
    ):
        assert tokens == ([-100] * (uid % 5) if is_padding else tokens_of(uid))
    assert last.valid_tokens["lm"][last.is_padding].sum() == 0


def test_case_c28_none_and_empty_lists_through_the_loader(tmp_path):
    tokens = [[1, 2, 3], [], None, [4], [], [5, 6]]
    pq.write_table(
        pa.table({"uid": list(range(6)), "tokens": pa.array(tokens, pa.list_(pa.int32()))}),
        tmp_path / "list.parquet",
        row_group_size=3,
    )
    dataset = dataset_of(manifest_of_files([tmp_path / "list.parquet"]), targets={"lm": "tokens"}, shifted=True)
    for num_workers in (0, 2):
        rows, valid = {}, {}
        dataset.set_epoch(0)
        for batch in loader_of("streaming", dataset, num_workers):
            real = ~batch.is_padding
            for uid, row, count, is_real in zip(
                batch["uid"].tolist(), batch["tokens"].tolist(), batch.valid_tokens["lm"].tolist(), real, strict=True
            ):
                if is_real:
                    rows[uid], valid[uid] = row, count
        assert [rows[uid] for uid in range(6)] == tokens
        assert [valid[uid] for uid in range(6)] == [3, 0, 0, 1, 0, 2]


def test_case_c25_timestamps_outside_the_nanosecond_range(tmp_path):
    import datetime as dt

    instants = [dt.datetime(1200, 1, 1, 0, 0, 59), dt.datetime(2000, 1, 1), dt.datetime(9999, 12, 31, 2)]  # noqa: DTZ001
    table = pa.table({"uid": [0, 1, 2], "ts": pa.array(instants, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "part-0.parquet", use_deprecated_int96_timestamps=True)
    manifest = manifest_of_files([tmp_path / "part-0.parquet"])
    (batch,) = dataset_of(manifest, batch_size=3)
    assert dict(zip(batch["uid"].tolist(), batch["ts"], strict=True)) == dict(enumerate(instants))
    (batch,) = dataset_of(manifest, batch_size=3, columns=["uid"])
    assert sorted(batch["uid"].tolist()) == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ cases of dealing


@pytest.mark.parametrize(
    ("world_size", "tail", "num_rows", "num_padding"),
    [
        (4, "pad", [3, 3, 3, 3], 0),
        (4, "drop", [3, 3, 3, 3], 0),
        (4, "uneven", [3, 3, 3, 3], 0),
        (5, "pad", [3] * 5, 3),
        (5, "drop", [2] * 5, 0),
        (5, "uneven", [2, 2, 2, 3, 3], 0),
    ],
)
def test_case_c17_an_empty_shard_and_more_consumers_than_shards(tmp_path, world_size, tail, num_rows, num_padding):
    manifest = parquet_manifest(tmp_path, [7, 0, 5])
    ranks = seen_by_ranks(manifest, world_size, num_workers=2, batch_size=1, tail=tail)
    assert sorted(sum(map(len, batches)) for batches in ranks) == sorted(num_rows)
    seen = joined(map(real_ids, ranks))
    assert len(seen) == len(set(seen)) == sum(num_rows) - num_padding


def test_case_c30_workers_share_a_ranks_part(tmp_path):
    manifest = parquet_manifest(tmp_path, [20])
    assert sorted(joined(map(real_ids, seen_by_ranks(manifest, 1, num_workers=4)))) == list(range(20))
    two = seen_by_ranks(manifest, 2, num_workers=3, batch_size=2)
    assert [len(real_ids(batches)) for batches in two] == [10, 10]
    assert sorted(joined(map(real_ids, two))) == list(range(20))


def test_case_c30_a_trainer_that_splits_the_stream_itself_gets_it_whole(tmp_path):
    """The documented setting for such trainers: the stream is told that there is one rank."""
    manifest = parquet_manifest(tmp_path, [20])
    seen = []
    for rank in range(2):
        stream = list(dataset_of(manifest, batch_size=1))  # with Topology(rank=0, world_size=1) on each
        seen += real_ids(stream[rank::2])
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "tail", "num_batches", "num_samples"),
    [
        (1000, 128, "drop", 7, 896),
        (1000, 128, "uneven", 8, 1000),
        (1000, 128, "pad", 8, 1000),
        (46, 8, "drop", 5, 40),
        (46, 8, "uneven", 6, 46),
        (50, 8, "drop", 6, 48),
        (50, 8, "uneven", 7, 50),
    ],
)
def test_case_c32_len_and_the_last_batch(tmp_path, num_rows, batch_size, tail, num_batches, num_samples):
    manifest = parquet_manifest(tmp_path, [num_rows], 100)
    for num_workers in (0, 1, 10) if tail == "drop" else (0, 3):
        dataset = dataset_of(manifest, batch_size=batch_size, tail=tail)
        loader = loader_of("streaming", dataset, num_workers)
        assert len(loader) == len(dataset) == len(DataLoader(dataset, batch_size=None)) == num_batches
        batches = list(loader)
        assert len(batches) == num_batches
        assert len(set(real_ids(batches))) == len(real_ids(batches)) == num_samples
        assert sum(len(batch) < batch_size for batch in batches) == (tail == "uneven")
        assert dataset.plan.epoch(0).deal.num_dropped == num_rows - num_samples


@pytest.mark.parametrize(
    ("num_rows", "world_size", "tail", "rows_of_ranks", "num_real"),
    [
        (3, 4, "pad", [1] * 4, 3),
        (3, 4, "drop", [0] * 4, 0),
        (3, 4, "uneven", [0, 1, 1, 1], 3),
        (2, 64, "pad", [1] * 64, 2),
    ],
)
def test_case_c34_fewer_samples_than_ranks(tmp_path, num_rows, world_size, tail, rows_of_ranks, num_real):
    manifest = parquet_manifest(tmp_path, [num_rows])
    options = {"batch_size": 1, "tail": tail, "num_workers": 2 if world_size == 4 else 0}
    if tail == "drop":
        with pytest.warns(ShardStreamWarning, match="3 samples do not fill one global batch of 4"):
            ranks = seen_by_ranks(manifest, world_size, **options)
    else:
        ranks = seen_by_ranks(manifest, world_size, **options)
    assert sorted(sum(map(len, batches)) for batches in ranks) == rows_of_ranks
    assert len(joined(map(real_ids, ranks))) == len(set(joined(map(real_ids, ranks)))) == num_real


def test_case_c34_no_samples_at_all(tmp_path):
    with pytest.raises(ManifestError, match=r"there are no samples.*part-00000\.parquet"):
        parquet_manifest(tmp_path, [0])


@pytest.mark.parametrize("tail", ["drop", "uneven"])
def test_a_rank_without_a_batch_goes_to_the_next_epoch_with_the_others(tmp_path, tail):
    manifest = parquet_manifest(tmp_path, [3])
    options = {"rank": 3, "world_size": 4, "batch_size": 1, "tail": tail}
    with pytest.warns(ShardStreamWarning) if tail == "drop" else nullcontext():
        for kind in ("plain", "streaming"):
            dataset = dataset_of(manifest, **options)
            loader = loader_of(kind, dataset)
            for epoch in range(3):
                assert dataset.start.epoch == epoch
                assert list(loader) == []


@pytest.mark.parametrize(("tail", "num_padding"), [("pad", 2), ("uneven", 0)])
def test_case_c52_padding_does_not_count(tmp_path, tail, num_padding):
    """Ten samples on three ranks: accuracy 0.7 over 10 samples and 55 tokens."""
    correct = [1, 1, 1, 0, 1, 1, 0, 1, 0, 1]
    table = pa.table({"correct": correct, "tokens": [list(range(n + 1)) for n in range(10)]})
    pq.write_table(table, tmp_path / "part-00000.parquet")
    manifest = manifest_of_files([tmp_path / "part-00000.parquet"])
    options = {"targets": {"lm": "tokens"}, "shifted": True, "tail": tail, "batch_size": 1}
    batches = joined(seen_by_ranks(manifest, 3, **options))
    num_real = sum(int((~batch.is_padding).sum()) for batch in batches)
    right = sum(int(batch["correct"][~batch.is_padding].sum()) for batch in batches)
    assert (right / num_real, num_real) == (0.7, 10)
    assert sum(int(batch.valid_tokens["lm"].sum()) for batch in batches) == 55
    assert sum(int(batch.is_padding.sum()) for batch in batches) == num_padding


# ------------------------------------------------------------------------------------------------ processes


def ids_of_rank(rank, world_size, dataset, results, num_workers):
    """What a process shows that was handed a dataset made elsewhere, with its rank in the environment."""
    import os

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        loader = loader_of("plain", dataset, num_workers)
        results.put((rank, [uids(loader), uids(loader)] if num_workers == 0 else uids(loader)))
    except TopologyError as error:
        results.put((rank, str(error)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_dataset_handed_to_the_ranks_processes_is_each_ranks_own(corpus, method, monkeypatch):
    """As ``mp.spawn(train, args=(dataset,))`` does: neither the parent's rank nor a shared place may be taken over."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    dataset = StreamingDataset(corpus, batch_size=4, seed=2, columns=["uid"])
    assert dataset.plan.world_size == 1  # resolved in the parent, as a mere look at it does
    context = multiprocessing.get_context(method)
    results = context.Queue()
    processes = [context.Process(target=ids_of_rank, args=(rank, 2, dataset, results, 0)) for rank in range(2)]
    for process in processes:
        process.start()
    shown = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(20)
    for epoch in range(2):
        expected = [dataset_of(corpus, rank, 2, columns=["uid"]) for rank in range(2)]
        for rank, one in enumerate(expected):
            one.set_epoch(epoch)
            assert shown[rank][epoch] == uids(one)
    assert dataset.start.epoch == 0


def test_forked_workers_of_a_process_the_dataset_does_not_know_are_refused(corpus):
    dataset = StreamingDataset(corpus, batch_size=4, seed=2, columns=["uid"])
    _ = dataset.plan
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=ids_of_rank, args=(1, 2, dataset, results, 1))
    process.start()
    assert "made in one process and is read by the DataLoader workers of another" in results.get(timeout=60)[1]
    process.join(20)


def test_loader_options_that_the_dataset_answers_are_refused(corpus):
    dataset = dataset_of(corpus)
    for options in ({"batch_size": 4}, {"shuffle": True}, {"drop_last": True}, {"collate_fn": list}):
        with pytest.raises(PlanError, match=f"StreamingLoader takes no {next(iter(options))}"):
            StreamingLoader(dataset, **options)
    with pytest.raises(PlanError, match="in_order=False would make the order depend on timing"):
        StreamingLoader(dataset, in_order=False)
    with pytest.raises(PlanError, match="unknown on_break: expected restart or continue or next, found 'stop'"):
        StreamingLoader(dataset, on_break="stop")


# ------------------------------------------------------------------------------------------------ what reading costs


@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_a_dear_plan_is_warned_of_once_and_on_the_first_rank(corpus, kind):
    first, second = (dataset_of(corpus, rank, 2, shuffle="full") for rank in range(2))
    loader = loader_of(kind, first, 0)
    with pytest.warns(ShardStreamWarning, match="'full' opens each block about 5.5 times") as said:
        list(loader)
    assert len(said) == 1
    list(loader)
    list(loader_of(kind, second, 0))


def test_the_first_worker_of_a_plain_data_loader_says_what_reading_costs(corpus):
    loader = loader_of("plain", dataset_of(corpus, shuffle="full"), 2)
    with pytest.raises(ShardStreamWarning, match=r"worker process 0(?s:.*)'full' opens each block about 5.5 times"):
        list(loader)  # warnings are errors here, and come through from a worker


@pytest.mark.parametrize("keep", [None, dict], ids=["columns", "transform"])
@pytest.mark.parametrize(
    "column",
    [pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int32(), 2)), pa.array([1, None, 3])],
    ids=["pair", "number"],
)
def test_a_number_that_is_missing_is_an_error_that_names_shard_row_and_column(tmp_path, column, keep):
    """Case C28."""
    pq.write_table(pa.table({"uid": [0, 1, 2], "sparse": column}), tmp_path / "holes.parquet")
    dataset = dataset_of(manifest_of_files([tmp_path / "holes.parquet"]), shuffle=False, transform=keep)
    with pytest.raises(DecodeError, match=r"sample 1: column 'sparse' has no value.*holes\.parquet, row 1\]"):
        list(dataset)


def _sleeps_in_the_first_worker(sample):
    info = get_worker_info()
    if info is not None and info.id == 0:
        time.sleep(0.05)
    return sample


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="newer torch")
@pytest.mark.parametrize("in_order", [True, False])
def test_a_plain_data_loader_that_does_not_keep_the_order_is_refused(corpus, in_order):
    """Case C38: a cursor would skip the batches that come late."""
    dataset = dataset_of(corpus, transform=_sleeps_in_the_first_worker)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, in_order=in_order)
    with nullcontext() if in_order else pytest.raises(PlanError, match=r"window \d+ came after .* in_order=False"):
        uids(list(map(_touched, loader)))


def _touched(batch):
    assert len(batch["uid"]) == len(batch)
    return batch
