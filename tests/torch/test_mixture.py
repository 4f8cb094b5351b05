"""Mixtures through the dataset and the loader: real shards, workers, topologies, packed and unpacked."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError, ShardStreamWarning
from shardstream.fetch import Reading
from shardstream.index import IndexSettings, build_manifest
from shardstream.mixing import Mixture
from shardstream.packing import Packing
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, pad_tokens, windows
from tests.support.corpora import manifest_of_files, parquet_manifest, tar_manifest, tokens_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]

G = 12


def shard(folder, name, columns):
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / name, row_group_size=6)
    return manifest_of_files([folder / name])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    web = parquet_manifest(folder / "web", [19, 23], tokens_column="tokens")
    uids = range(1000, 1025)
    code = shard(
        folder,
        "code.parquet",
        {
            "uid": pa.array(uids, pa.int64()),
            "tokens": pa.array([tokens_of(uid) for uid in uids], pa.large_list(pa.int32())),
            "stars": pa.array([uid % 7 for uid in uids], pa.int32()),
        },
    )
    return {"web": (web, 0.75), "code": (code, 0.25)}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Two sources of token lists, with their tokens counted."""
    folder = tmp_path_factory.mktemp("documents")
    made = {}
    for name, first, num in (("web", 1, 60), ("code", 5000, 40)):
        tokens = [np.arange(first + 10 * k, first + 10 * k + k % 9, dtype=np.int64) for k in range(num)]
        pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}), folder / f"{name}.parquet", 8)
        made[name] = manifest_of_files([folder / f"{name}.parquet"], tokens_column="tokens")
    return {"web": (made["web"], 2), "code": (made["code"], 1)}


def dataset_of(sources, *, rank=0, world_size=1, batch_size=None, accumulate=1, schedule=(), stop_after=None, **more):
    batch_size = G // world_size // accumulate if batch_size is None else batch_size
    return StreamingDataset(
        Mixture(sources, schedule, stop_after),
        batch_size=batch_size,
        accumulate=accumulate,
        seed=5,
        topology=Topology(rank, world_size),
        **more,
    )


def rows_of(batch):
    names = [batch.source_names[index] for index in batch.source_index.tolist()]
    return list(zip(names, batch["uid"].tolist(), batch["tokens"].tolist(), strict=True))


def windows_of(sources, num_windows, *, world_size, accumulate=1, num_workers=0, cursor=None, **more):
    """The rows of each window over all ranks, and the cursor behind the last one."""
    found, cursors = [[] for _ in range(num_windows)], set()
    for rank in range(world_size):
        loader = StreamingLoader(
            dataset_of(sources, rank=rank, world_size=world_size, accumulate=accumulate, **more),
            num_workers=num_workers,
        )
        if cursor is not None:
            loader.load_state_dict(cursor)
        for batch in islice(loader, num_windows * accumulate):
            found[batch.window_index] += rows_of(batch)
        cursors.add(batch.cursor)
    assert len(cursors) == 1
    return [sorted(window) for window in found], cursors.pop()


@pytest.mark.parametrize(
    ("world_size", "accumulate", "num_workers"),
    [(1, 1, 2), (2, 3, 0), (2, 1, 3), (3, 2, 1), (4, 1, 0), (6, 1, 0), (1, 12, 3)],
)
def test_every_window_is_the_same_for_every_topology(sources, world_size, accumulate, num_workers):
    expected, cursor = windows_of(sources, 8, world_size=1)
    found, other = windows_of(sources, 8, world_size=world_size, accumulate=accumulate, num_workers=num_workers)
    assert found == expected
    assert other == cursor
    for window in expected:
        assert [name for name, _, _ in window].count("code") == 3
        assert all(tokens == tokens_of(uid) for _, uid, tokens in window)


def test_a_mixture_may_be_given_as_its_file(sources, tmp_path):
    settings = {"sources": {}}
    for name, (manifest, weight) in sources.items():
        manifest.save(tmp_path / f"{name}.manifest.parquet")
        settings["sources"][name] = {"manifest": str(tmp_path / f"{name}.manifest.parquet"), "weight": weight}
    path = tmp_path / "mixture.yaml"
    path.write_text(json.dumps(settings))  # which is YAML, too
    read = StreamingDataset(path, batch_size=G, seed=5, topology=Topology(0, 1))
    assert rows_of(next(iter(read))) == rows_of(next(iter(dataset_of(sources))))


def test_a_resume_elsewhere_goes_on_with_the_same_windows(sources):
    expected, _ = windows_of(sources, 12, world_size=1)
    first, cursor = windows_of(sources, 4, world_size=2, num_workers=2)
    second, cursor = windows_of(sources, 3, world_size=3, accumulate=2, cursor=cursor.state_dict())
    third, _ = windows_of(sources, 5, world_size=4, cursor=cursor.to_json() and cursor)
    assert first + second + third == expected


def test_each_source_comes_exactly_once_a_pass(sources):
    found, _ = windows_of(sources, 25, world_size=1)
    uids = {name: [uid for window in found for n, uid, _ in window if n == name] for name in sources}
    assert sorted(uids["code"][:25]) == list(range(1000, 1025)) or len(uids["code"]) == 75
    assert sorted(uids["code"]) == sorted([*range(1000, 1025)] * 3)
    counts = np.bincount(uids["web"], minlength=42)
    assert len(counts) == 42
    assert counts.max() - counts.min() == 1


def test_batches_have_the_columns_that_all_sources_share(sources, tmp_path):
    batch = next(iter(dataset_of(sources)))
    assert (batch.keys(), batch.source_names) == (["uid", "tokens"], ("code", "web"))
    assert next(iter(dataset_of(sources, columns=["uid"]))).keys() == ["uid"]
    with pytest.raises(PlanError, match="source 'web' has no column 'stars'"):
        dataset_of(sources, columns=["stars"])
    other = shard(tmp_path, "other.parquet", {"else": [1, 2]})
    with pytest.raises(PlanError, match=r"no column in common.*code: uid, tokens, stars; other: else"):
        dataset_of({"code": sources["code"], "other": (other, 1)})
    wide = shard(tmp_path, "wide.parquet", {"uid": pa.array([1, 2], pa.int32())})
    with pytest.raises(PlanError, match=r"'uid' is not of one type.*int32 in wide"):
        dataset_of({"web": sources["web"], "wide": (wide, 1)})


def test_batches_keep_their_sources_wherever_they_go(sources):
    batch = next(iter(dataset_of(sources)))
    for other in (batch.to("cpu"), batch.pin_memory(), batch.replace({"x": batch["uid"]}), copy.deepcopy(batch)):
        assert other.source_names == ("code", "web")
        assert other.source_index.tolist() == batch.source_index.tolist()
    through = next(iter(DataLoader(dataset_of(sources), batch_size=None, num_workers=1)))
    assert rows_of(through) == rows_of(batch)
    assert rows_of(pickle.loads(pickle.dumps(batch))) == rows_of(batch)


class Seen:
    def __call__(self, sample):
        assert sample["__source__"] in sample["__url__"]
        return {"uid": sample["uid"], "seed": sample["__seed__"] % 2**31, "id": sample["__id__"]}


def test_transforms_are_told_the_source_and_get_its_own_seeds(sources):
    expected = None
    for num_workers in (0, 2):
        loader = StreamingLoader(dataset_of(sources, transform=Seen()), num_workers=num_workers)
        found = [tuple(column.tolist() for _, column in batch.items()) for batch in islice(loader, 30)]
        expected = expected or found
        assert found == expected
    seeds = [seed for _, batch, _ in expected for seed in batch]
    assert len(set(seeds)) == len(seeds)  # of two passes over a sample, too
    ids = next(iter(dataset_of(sources, transform=Seen()))).sample_ids
    assert ids.max() < 42


def test_tars_and_parquet_mix(tmp_path):
    tars, more = tar_manifest(tmp_path / "a", [9]), tar_manifest(tmp_path / "b", [5, 4], ".tar.gz")
    batch = next(iter(dataset_of({"a": (tars, 1), "b": (more, 1)})))
    assert sorted(batch.keys()) == ["__key__", "text", "uid"] or sorted(batch.keys()) == ["text", "uid"]
    assert len(batch["uid"]) == G


# ------------------------------------------------------------------------------------------------------------- packed


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_sources_share_one_sequence_length(documents, world_size, num_workers):
    sequences, ids = [], []
    for rank in range(world_size):
        dataset = dataset_of(documents, rank=rank, world_size=world_size, sequence_length=7, eos_id=0)
        for batch in islice(StreamingLoader(dataset, num_workers=num_workers), 12):
            assert batch["input_ids"].shape == (G // world_size, 7)
            for source, row in zip(batch.source_index.tolist(), batch["input_ids"].tolist(), strict=True):
                assert all(token == 0 or (token >= 5000) == (source == 0) for token in row)
                sequences.append((batch.window_index, row))
            ids += zip(batch.source_index.tolist(), batch.sample_ids.tolist(), strict=True)
            per_source = [batch.valid_tokens[f"lm/{name}"] for name in batch.source_names]
            assert torch.equal(sum(per_source), batch.valid_tokens["lm"])
    code = dataset.plan.plans[0].num_positions
    assert {number for source, number in ids if source == 0} == set(range(code))
    expected = [
        (batch.window_index, row)
        for batch in islice(dataset_of(documents, sequence_length=7, eos_id=0), 12)
        for row in batch["input_ids"].tolist()
    ]
    assert sorted(sequences) == sorted(expected)


@pytest.fixture(scope="module")
def with_chat(documents, tmp_path_factory):
    """Packed sources, and one whose documents are a sequence each, in another column, with targets of their own."""
    folder = tmp_path_factory.mktemp("chat")
    tokens = [list(range(9000 + 20 * k, 9000 + 20 * k + (5 * k) % 17)) for k in range(30)]
    masks = [[n % 2 for n in document] for document in tokens]
    pq.write_table(pa.table({"ids": tokens, "mask": masks}), folder / "chat.parquet", 8)
    settings = IndexSettings(pack=[7])
    chat = build_manifest(folder / "chat.parquet", tokens_column="ids", settings=settings, num_workers=0)
    return {**documents, "chat": (chat, 1)}, tokens


def chat_dataset(sources, rank=0, world_size=1, **more):
    how = {"chat": {"mode": "unpacked", "loss_mask_column": "mask", "eos_id": None}}
    mixture = Mixture(sources, packing=how)
    options = {"sequence_length": 7, "eos_id": 0, "batch_size": G // world_size, "seed": 5, **more}
    return StreamingDataset(mixture, topology=Topology(rank, world_size), **options)


def sequences_by_window(sources, num_windows, world_size=1, cursor=None, num_workers=0):
    found = {}
    for rank in range(world_size):
        loader = StreamingLoader(chat_dataset(sources, rank, world_size), num_workers=num_workers)
        if cursor is not None:
            loader.load_state_dict(cursor)
        for batch in islice(loader, num_windows):
            rows = zip(batch.source_index.tolist(), batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
            found.setdefault(batch.position, []).extend(rows)
    return {position: sorted(rows) for position, rows in found.items()}, batch.cursor


def test_packed_and_unpacked_sources_mix(with_chat):
    sources, tokens = with_chat
    whole, _ = sequences_by_window(sources, 16)
    first, cursor = sequences_by_window(sources, 5, world_size=2, num_workers=2)
    then, cursor = sequences_by_window(sources, 4, world_size=3, cursor=cursor.state_dict())
    last, _ = sequences_by_window(sources, 7, world_size=4, cursor=cursor)
    assert first | then | last == whole
    chat = [row for rows in whole.values() for row in rows if row[0] == 0]
    assert all(sum(row[0] == 0 for row in rows) == 3 for rows in whole.values())
    parts = [document[k : k + 8] for document in tokens for k in range(0, max(len(document) - 1, bool(document)), 7)]
    expected = {
        (
            (*part[:7], *[0] * (7 - len(part[:7]))),
            (*(n if n % 2 else -100 for n in part[1:]), *[-100] * (8 - len(part))),
        )
        for part in parts
    }
    assert len(chat) == 48 >= len(parts)  # so each of them came, and some twice
    assert {(tuple(inputs), tuple(labels)) for _, inputs, labels in chat} == expected


def test_targets_of_packed_and_unpacked_sources_are_heads_of_the_window(with_chat):
    dataset = chat_dataset(with_chat[0], accumulate=2, batch_size=G // 2)
    assert dataset.source_heads == ["lm/chat", "lm/code", "lm/web"]
    loader, counted = StreamingLoader(dataset), {}
    for batch in islice(StreamingLoader(chat_dataset(with_chat[0], accumulate=2, batch_size=G // 2)), 12):
        for head, targets in batch.valid_tokens.items():
            counted[batch.position, head] = counted.get((batch.position, head), 0) + int(targets.sum())
    for window in islice(windows(loader, heads=tuple(dataset.source_heads)), 6):
        assert window.targets == {head: counted[window.position, head] for head in dataset.source_heads}
        assert sum(window.targets.values()) == counted[window.position, "lm"]


def test_how_a_source_is_packed_is_the_cursors_and_belongs_to_sequences(with_chat):
    sources, _ = with_chat
    batch = next(iter(chat_dataset(sources)))
    other = StreamingDataset(Mixture(sources), batch_size=G, seed=5, sequence_length=7, topology=Topology(0, 1))
    with pytest.raises(CursorError, match=r"source 'chat': packing .*unpacked.* in the cursor, .*tokens.* here"):
        other.load_state_dict(batch.cursor)
    with pytest.raises(PlanError, match="are sequences, or none"):
        StreamingDataset(Mixture(sources, packing={"chat": "unpacked"}), batch_size=G, topology=Topology(0, 1))
    with pytest.raises(PlanError, match=r"'unpacked' needs the number of sequences.*--pack 9"):
        chat_dataset(sources, sequence_length=9)


def test_losses_of_each_source_have_a_denominator_of_their_own(documents):
    dataset = dataset_of(documents, sequence_length=7, accumulate=2)
    for window in islice(windows(StreamingLoader(dataset), heads=("lm/code", "lm/web")), 3):
        total, weight = 0, torch.ones((), requires_grad=True)
        for micro in window.micro_batches():
            targets = (micro["labels"] != -100).sum(1)
            sums = {
                f"lm/{name}": weight * (targets * (micro.source_index == index)).sum()
                for index, name in enumerate(micro.source_names)
            }
            total = total + window.loss(**sums)
        assert total.item() == pytest.approx(2.0)  # the mean of ones, for each source
        assert set(window.targets) == {"lm/code", "lm/web"}
    window = next(iter(windows(StreamingLoader(dataset))))
    assert set(window.targets) == {"lm"}
    with pytest.raises(PlanError, match="did you mean 'lm/web'"):
        next(iter(windows(StreamingLoader(dataset), heads=("lm/wbe",))))


def test_what_follows_from_positions_is_what_is_counted(documents):
    dataset = dataset_of(documents, sequence_length=7, accumulate=3)
    counted = {}
    for batch in islice(StreamingLoader(dataset), 90):
        window = counted.setdefault(batch.window_index, dict.fromkeys(batch.valid_tokens, 0))
        for head, targets in batch.valid_tokens.items():
            window[head] += int(targets.sum())
        if batch.is_last_in_window:
            assert dataset.constant_targets(batch.place) == window
    assert len({window["lm"] for window in counted.values()}) > 1  # the last sequence of a line has padding
    masked = dataset_of(documents, packing=Packing(7, mask_document_starts=True))
    assert masked.constant_targets(next(iter(masked)).place) is None


# ------------------------------------------------------------------------------------------------------ ends and edits


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("plain", [False, True])
def test_a_stream_that_stops_goes_on_where_it_stopped(sources, num_workers, plain):
    dataset = dataset_of(sources, stop_after=40, accumulate=2)
    loader = (
        DataLoader(dataset, batch_size=None, num_workers=num_workers)
        if plain
        else StreamingLoader(dataset, num_workers=num_workers)
    )
    assert len(loader) == 8
    batches = list(loader)
    assert len(batches) == 8
    assert batches[-1].cursor.position == 48
    assert (dataset.start.epoch, dataset.start.position) == (0, 48)
    assert list(loader) == []
    assert (dataset.start.epoch, dataset.start.position) == (0, 48)
    longer = StreamingLoader(dataset_of(sources, stop_after=72, accumulate=2))
    longer.load_state_dict(batches[-1].cursor)
    more = [row for batch in longer for row in rows_of(batch)]
    expected, _ = windows_of(sources, 6, world_size=1)
    assert sorted(more) == sorted(expected[4] + expected[5])


def test_a_schedule_entry_added_later_changes_only_what_comes(sources):
    expected, cursor = windows_of(sources, 5, world_size=1)
    schedule = [(60, {"code": 1})]
    with pytest.warns(ShardStreamWarning, match="changed ahead"):
        later, _ = windows_of(sources, 2, world_size=1, cursor=cursor, schedule=schedule)
    assert [{name for name, _, _ in window} for window in later] == [{"code"}, {"code"}]
    anew, _ = windows_of(sources, 7, world_size=1, schedule=schedule)
    assert anew == expected + later
    with pytest.raises(CursorError, match="weights from position 48 on"):
        windows_of(sources, 1, world_size=1, cursor=cursor, schedule=[(40, {"code": 1})])


def test_a_changed_global_batch_reaches_workers(sources):
    _, cursor = windows_of(sources, 5, world_size=1)
    dataset = dataset_of(sources, batch_size=9)
    loader = StreamingLoader(dataset, num_workers=2, persistent_workers=True)
    with pytest.warns(ShardStreamWarning, match="global batch"):
        loader.load_state_dict(cursor, allow_batch_change=True)
    in_workers = [rows_of(batch) for batch in islice(loader, 4)]
    other = dataset_of(sources, batch_size=9)
    with pytest.warns(ShardStreamWarning, match="global batch"):
        other.load_state_dict(cursor, allow_batch_change=True)
    assert in_workers == [rows_of(batch) for batch in islice(other, 4)]
    with pytest.raises(CursorError, match="at work already"):
        other.plan.with_pin(dataset_of(sources, batch_size=9).plan.pin)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "pad"}, "without an end"),
        ({"lanes": 4}, "follow its quotas"),
        ({"sequence_length": 8}, "source 'code'|token counts"),
    ],
)
def test_what_a_mixture_cannot_do_is_refused(sources, options, message):
    with pytest.raises(PlanError, match=message):
        dataset_of(sources, **options)


def test_a_mixture_has_neither_epochs_nor_a_length_without_a_stop(sources):
    dataset = dataset_of(sources)
    with pytest.raises(TypeError, match="no length"):
        len(dataset)
    dataset.set_epoch(0)
    with pytest.raises(PlanError, match="without epochs"):
        dataset.set_epoch(1)
    assert len(dataset_of(sources, stop_after="code")) == 9


def test_collate_sees_the_columns_alone(sources):
    dataset = dataset_of(sources, collate=pad_tokens("tokens", length=4), targets={"lm": "labels"}, shifted=True)
    batch = next(iter(dataset))
    assert "__source__" not in batch
    assert set(batch.valid_tokens) == {"lm", "lm/code", "lm/web"}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_are_opened_about_once_a_pass(tmp_path, world_size):
    sources = {
        "a": (parquet_manifest(tmp_path / "a", [120] * 12, 10), 3),
        "b": (parquet_manifest(tmp_path / "b", [60] * 8, 10), 1),
    }
    num_opened = 0
    for rank in range(world_size):
        dataset = dataset_of(sources, rank=rank, world_size=world_size, batch_size=24 // world_size, stop_after="b")
        assert len(dataset) == len(list(dataset)) == 80
        num_opened += dataset.stats.num_blocks_opened
    passes = dataset.plan.passes(dataset.plan.stop)
    assert num_opened <= 1.1 * (passes["a"] * 144 + passes["b"] * 48)


def test_a_gather_that_is_smaller_than_a_window_would_read_runs_again_and_again(tmp_path):
    sources = {
        "a": (parquet_manifest(tmp_path / "a", [120] * 12, 10), 3),
        "b": (parquet_manifest(tmp_path / "b", [99] * 8, 10), 1),
    }
    dataset = dataset_of(sources, batch_size=2, accumulate=21, stop_after="b", reading=Reading(gather_rows=4))
    assert len(list(dataset)) == 21 * 76
    passes = dataset.plan.passes(dataset.plan.stop)
    assert dataset.stats.num_blocks_opened <= 1.3 * (passes["a"] * 144 + passes["b"] * 80)


def test_a_stateful_data_loader_keeps_its_place_and_gives_a_cursor_for_elsewhere(sources):
    loader = StatefulDataLoader(dataset_of(sources, batch_size=6), batch_size=None, num_workers=2)
    before = list(islice(loader, 10))
    state = loader.state_dict()
    again = StatefulDataLoader(dataset_of(sources, batch_size=6), batch_size=None, num_workers=2)
    again.load_state_dict(state)
    after = [rows_of(batch) for batch in islice(again, 4)]
    expected = [rows_of(batch) for batch in islice(StreamingLoader(dataset_of(sources, batch_size=6)), 14)]
    assert [rows_of(batch) for batch in before] + after == expected
    cursor = Cursor.from_torchdata(state)
    assert (cursor.epoch, cursor.position) == (0, 60)
    elsewhere = [dataset_of(sources, rank=rank, world_size=2, batch_size=3) for rank in range(2)]
    for dataset in elsewhere:
        dataset.load_state_dict(cursor)
    found = [row for dataset in elsewhere for batch in islice(dataset, 4) for row in rows_of(batch)]
    assert sorted(found) == sorted(row for rows in after for row in rows)


def test_workers_that_are_spawned_read_the_same(sources):
    loader = StreamingLoader(dataset_of(sources), num_workers=1, multiprocessing_context="spawn")
    assert rows_of(next(iter(loader))) == rows_of(next(iter(dataset_of(sources))))
