"""What is fuzzed: each target takes bytes, and may fail with errors of the library's own tree only."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from shardstream.consumed import ConsumedLog, read_logs
from shardstream.cursor import Cursor
from shardstream.errors import ShardStreamError, shown_url
from shardstream.formats import IndexOptions, Shard, ShardIndex, format_of
from shardstream.index import expand_shards
from shardstream.ledger_file import read_lines
from shardstream.manifest import Manifest
from shardstream.manifest_file import DatasetInfo, ManifestWriter, ShardRow
from shardstream.mixture_file import load_mixture
from shardstream.plan import Plan
from shardstream.rounds import RoundsLog, read_rounds

CORPUS = Path(__file__).parents[2] / "tests" / "fuzz_corpus"
SEPARATOR = b"\n---\n"  # between files of one input


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        name: Its name, and that of its folder in the corpus.
        read: Reads an input; raises ``ShardStreamError`` or nothing.
        seeds: Makes good inputs.
    """

    name: str
    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]

    def corpus(self) -> list[bytes]:
        """Returns the good inputs, and those that were kept because they were interesting once."""
        return [*self.seeds(), *(path.read_bytes() for path in sorted((CORPUS / self.name).glob("*")))]

    def try_one(self, data: bytes) -> bool:
        """Reads an input; returns whether it was taken."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.read(data)
            except ShardStreamError as error:
                str(error).encode()  # a message can be printed whatever was in the file
                return False
        return True


@contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shardstream-fuzz-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


# -------------------------------------------------------------------------------------------------------------- shards


def _index_and_read(name: str, options: IndexOptions) -> Callable[[bytes], object]:
    """Indexes a shard and, if that goes well, reads all of it."""

    def read(data: bytes) -> int:
        with _file(data, name) as path:
            index = format_of(name).index_shard(str(path), options, {})
            manifest = _manifest_of(path, index)
            shard = Shard(manifest, 0)
            blocks = range(min(manifest.num_blocks, 8))
            return sum(rows.num_rows for block in blocks for rows in format_of(name).read_runs(shard, block, None))

    return read


def _manifest_of(path: Path, index: ShardIndex) -> Manifest:
    sink = io.BytesIO()
    writer = ManifestWriter(sink)
    numbers = (index.block_rows, index.block_run_rows, index.block_offset, index.block_num_bytes)
    about = (index.format, index.num_bytes, index.version_tag, index.digest)
    writer.add(ShardRow(path.name, *about, *numbers, lists=index.lists))
    writer.finish(DatasetInfo(str(path.parent), index.columns, index.arrow_schema))
    made = path.with_name("manifest")
    made.write_bytes(sink.getvalue())
    return Manifest.load(made)


def _parquets() -> list[bytes]:
    columns = {
        "x": [1, 2, 3, 4],
        "tokens": [[1, 2], None, [], [3]],
        "text": ["a", None, "c", "d"],
        "nested": [{"a": 1, "b": "x"}] * 4,
        "date": pa.array([1, 2, 3, 4], pa.timestamp("us", "UTC")),
        "kind": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
    }
    made = []
    for names, options in ((columns, {}), (["x"], {"compression": "zstd"}), (["tokens"], {"use_dictionary": False})):
        sink = io.BytesIO()
        pq.write_table(pa.table(columns).select(list(names)), sink, row_group_size=3, **options)
        made.append(sink.getvalue())
    return made


def _tars() -> list[bytes]:
    made = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=kind) as archive:
            for name in ("a/0001.jpg", "a/0001.txt", ("x" * 120 if kind != tarfile.USTAR_FORMAT else "y") + "ä.cls"):
                info = tarfile.TarInfo(name)
                info.size = 5
                archive.addfile(info, io.BytesIO(b"hello"))
        made.append(sink.getvalue())
    link = tarfile.TarInfo("b/1.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "../../etc/passwd"
    return [*made, link.tobuf() + bytes(1024)]


def _gzip_tars() -> list[bytes]:
    return [gzip.compress(tar, mtime=0) for tar in _tars()]


def _zstd_tars() -> list[bytes]:
    tar = _tars()[0]
    pieces = b"".join(zstandard.compress(tar[start : start + 3000]) for start in range(0, len(tar), 3000))
    skippable = b"\x50\x2a\x4d\x18\x02\x00\x00\x00hi"
    return [zstandard.compress(tar), skippable + pieces]


# ----------------------------------------------------------------------------------------------------------- manifests


def _read_manifest(data: bytes) -> object:
    with _file(data, "m") as path:
        manifest = Manifest.load(path)
        names = sorted(manifest.lists.names) if manifest.lists is not None else []
        for shard in range(min(manifest.num_shards, 4)):
            for name in names:
                assert manifest.lists is not None  # noqa: S101 - narrows the type
                manifest.lists.read(shard, [name])
        return manifest.fingerprint


def _manifests() -> list[bytes]:
    lists = {
        "token_lengths": np.arange(5, dtype=np.int32),
        "sample_keys": [b"a", b"\xff"],
        "member_field": ["jpg", "txt"],
        "footer": b"PAR1",
    }
    made = []
    for given in ({}, lists):
        sink, writer = io.BytesIO(), None
        writer = ManifestWriter(sink)
        for name in ("a.parquet", "ä/b.parquet"):
            rows, runs = np.array([[3, 2], [3, 1]], np.int32)
            offsets, sizes = np.array([[4, 90], [86, 50]], np.int64)
            writer.add(ShardRow(name, "parquet", 200, "200-1", "d" * 32, rows, runs, offsets, sizes, lists=given))
        writer.finish(DatasetInfo("/data", metadata={"ignore_index": -100}))
        made.append(sink.getvalue())
    return made


def _read_about(data: bytes) -> object:
    """A manifest whose file is whole and which says something odd of itself."""
    table = pq.read_table(io.BytesIO(_manifests()[0]))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"shardstream": data.replace(b"\0", b" ")})
    return _read_manifest(sink.getvalue())


def _abouts() -> list[bytes]:
    return [pq.read_metadata(io.BytesIO(data)).metadata[b"shardstream"] for data in _manifests()]


# ---------------------------------------------------------------------------------------------------------------- text


def _read_cursor(data: bytes) -> object:
    cursor = Cursor.from_json(data)
    return cursor.advanced(3, num_positions=100), Cursor.from_json(cursor.to_json())


def _cursor() -> Cursor:
    return Cursor(
        fingerprint="ab" * 16, seed=1, epoch=2, position=64, global_batch=32, shuffle=True, lanes=8, tail="pad"
    )


def _cursors() -> list[bytes]:
    mixed = {**_cursor().state_dict(), "packing": {"sequence_length": 8}, "mixture": {"eras": [[0, {"a": 1.0}]]}}
    return [_cursor().to_json().encode(), json.dumps(mixed).encode()]


def _read_worker_state(data: bytes) -> object:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return Cursor.from_torchdata(state)


def _worker_states() -> list[bytes]:
    worker = {"origin": _cursor().state_dict(), "next_index": 3, "accumulate": 2, "num_positions": 100}
    return [json.dumps({"_snapshot": {"w0": {**worker, "num_micro_batches": 9}}, "_steps_since_snapshot": 1}).encode()]


def _expand(data: bytes) -> object:
    """What a user may name, of which nothing exists."""
    text = data.decode("utf-8", "surrogateescape")
    shown_url(text)
    if "://" in text or "::" in text or text.startswith("@"):  # storage would be asked
        text = text.replace("://", ":/").replace("::", ":").lstrip("@")
    text = text.replace("..", ".") if "/.." in f"/{text}" else text  # the folder is left
    with tempfile.TemporaryDirectory(prefix="shardstream-fuzz-") as folder:
        return expand_shards(f"{folder}/{text}")


def _read_ledger(data: bytes) -> object:
    with tempfile.TemporaryDirectory(prefix="shardstream-fuzz-") as folder:
        parts = data.split(SEPARATOR)
        for rank, part in enumerate(parts[:4]):
            ledger = "" if rank < 2 else ".rounds"  # noqa: PLR2004 - two ranks of each kind
            (Path(folder) / f"rank-{rank % 2:05d}.attempt-0000{ledger}.jsonl").write_bytes(part)
        for read in (read_lines, read_logs, read_rounds):
            read(folder)
        return len(parts)


def _ledgers() -> list[bytes]:
    plan = Plan.make(Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=8), world_size=2, batch_size=2)
    with tempfile.TemporaryDirectory(prefix="shardstream-fuzz-") as folder:
        for rank in range(2):
            with ConsumedLog(folder, rank, 2, 0, plan.cursor(), plan) as log:
                log.window(epoch=0, position=0, ids=[rank, 4 + rank])
            rounds = RoundsLog(folder, rank, 2, 0)
            rounds.round(0, ["reduce 8 int64"], 1.5)
            rounds.times(0, 0, [(1.0, "window 0"), (1.5, "reduced")])
            rounds.desync(1, "ranks 0 and 1 differ", [["a"], ["b"]])
            rounds.end()
        names = [f"rank-{rank:05d}.attempt-0000{ledger}.jsonl" for ledger in ("", ".rounds") for rank in range(2)]
        return [SEPARATOR.join((Path(folder) / name).read_bytes() for name in names)]


def _read_mixture(data: bytes) -> object:
    with _file(data, "mixture.yaml") as path:
        return load_mixture(path).names


def _mixtures() -> list[bytes]:
    return [
        b"sources:\n  a: {manifest: /nowhere/m, weight: 2}\nschedule:\n  - {at: 5, weights: {a: 1}}\nstop_after: 9\n",
        b"sources: &a {b: {manifest: x, weight: 1, packing: whole}}\nstop_after: *a\n",
    ]


# ---------------------------------------------------------------------------------------------------------- all of them

_LISTS_OF = IndexOptions(tokens_column="tokens")
_TAR_TOKENS = IndexOptions(tokens_column="txt", tokens_dtype="uint8")


def _jsons() -> list[bytes]:
    return [b'{"x": 1, "tokens": [1, 2]}\n\n{"x": 2.5, "y": {"z": null}, "tokens": []}\n', b'{"x": 1}']


TARGETS = {
    target.name: target
    for target in (
        Target("manifest", _read_manifest, _manifests),
        Target("about", _read_about, _abouts),
        Target("cursor", _read_cursor, _cursors),
        Target("worker_state", _read_worker_state, _worker_states),
        Target("tar", _index_and_read("a.tar", _TAR_TOKENS), _tars),
        Target(
            "tar_gz", _index_and_read("a.tar.gz", IndexOptions()), lambda: [gzip.compress(t, mtime=0) for t in _tars()]
        ),
        Target("tar_zst", _index_and_read("a.tar.zst", IndexOptions()), _zstd_tars),
        Target("parquet", _index_and_read("a.parquet", _LISTS_OF), _parquets),
        Target("jsonl", _index_and_read("a.jsonl", _LISTS_OF), _jsons),
        Target("shards", _expand, lambda: [b"{a,b}-{000..003}.tar", b"x[1-3]*?/**/a.tar", b"%2e/{{a}..{b"]),
        Target("ledger", _read_ledger, _ledgers),
        Target("mixture", _read_mixture, _mixtures),
    )
}
