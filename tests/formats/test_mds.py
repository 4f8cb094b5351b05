from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardstream.columns import Dense, Slices
from shardstream.errors import DecodeError, ManifestError, ShardStreamWarning
from shardstream.formats import IndexOptions, Shard, format_of
from shardstream.formats.mds import MdsFormat
from shardstream.index import build_manifest
from tests.formats.conformance import FormatTests, Row, counts_of, indexed, read_all

PEERS = Path(__file__).parent / "peers"


def mds_bytes(columns: dict[str, tuple[str, int | None]], samples: list[list[bytes]]) -> bytes:
    """A shard as the format's description has it: count, offsets, columns, samples (sizes that vary, then values)."""
    config = json.dumps(
        {
            "column_names": list(columns),
            "column_encodings": [encoding for encoding, _ in columns.values()],
            "column_sizes": [size for _, size in columns.values()],
            "compression": None,
            "format": "mds",
        }
    ).encode()
    is_sized = [size is not None for _, size in columns.values()]
    bodies = []
    for values in samples:
        sizes = [len(value) for value, sized in zip(values, is_sized, strict=True) if not sized]
        bodies.append(np.array(sizes, "<u4").tobytes() + b"".join(values))
    offsets = np.cumsum([0, *map(len, bodies)]) + 4 + 4 * (len(bodies) + 1) + len(config)
    return b"".join([np.uint32(len(bodies)).tobytes(), offsets.astype("<u4").tobytes(), config, *bodies])


COLUMNS = {"text": ("str", None), "tokens": ("ndarray:uint16", None), "uid": ("int", 8), "xy": ("ndarray:float32:2", 8)}


class TestMds(FormatTests):
    suffix = ".mds"
    projection = ("uid", "tokens")

    def pack(self, data: bytes) -> bytes:
        return data

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows, samples = [], []
        for row in range(first_row, first_row + num_rows):
            tokens, xy = list(range(row, row + 1 + row % 300)), [row * 0.5, -1.0]
            rows.append({"text": "é" * (row % 4), "tokens": tokens, "uid": row, "xy": xy})
            length = len(tokens)
            head = bytes([1 << 2 | (length > 255), length % 256, *[length // 256] * (length > 255)])
            array = head + np.array(tokens, "<u2").tobytes()
            samples.append([rows[-1]["text"].encode(), array, np.int64(row).tobytes(), np.array(xy, "<f4").tobytes()])
        path.write_bytes(self.pack(mds_bytes(COLUMNS, samples)))
        return rows


class TestMdsZstd(TestMds):
    suffix = ".mds.zstd"

    def pack(self, data: bytes) -> bytes:
        return zstandard.compress(data)


# ------------------------------------------------------------------------- what mosaicml-streaming itself wrote


def peer_rows(num_rows: int = 12) -> list[Row]:
    return [
        {
            "uid": row,
            "small": -row,
            "score": row / 3,
            "text": "é" * (row % 4),
            "raw": bytes(range(row % 3)),
            "tokens": list(range(row, row + 1 + row % 5)),
            "vector": [float(row), -1.0],
            "matrix": [[row] * 3] * 2,
            "any": [[row] * (row + 1)] * 2,
            "meta": json.dumps({"row": row, "names": ["a", None]}),
            "big": 10**15 + row,
            "ratio": row / 7,
            "thing": {row},
        }
        for row in range(num_rows)
    ]


@pytest.mark.parametrize("folder", ["mds", "mds-zstd"])
def test_what_the_package_wrote_is_read(folder: str) -> None:
    with pytest.warns(ShardStreamWarning, match="'thing' is pickled: its values come as bytes"):
        manifest = build_manifest(PEERS / folder, num_workers=0)
    assert manifest.num_shards == 3
    rows = read_all(manifest)
    for row in rows:
        row["any"] = row["any"].tolist()
        row["thing"] = pickle.loads(row["thing"])
    assert rows == peer_rows()
    types = {column.name: column.type for column in manifest.columns}
    assert types["tokens"] == "list<item: int32>"
    assert types["any"] == "list<item: list<item: int16>>"
    assert types["matrix"] == "fixed_size_list<item: fixed_size_list<item: uint8>[3]>[2]"


def test_numbers_are_arrays_without_a_python_value() -> None:
    manifest = indexed(PEERS / "mds" / "shard.00000.mds")
    (run,) = format_of(".mds").read_runs(Shard(manifest, 0), 0, None)
    kinds = {name: (type(column), column.values.dtype, column.values.shape) for name, column in run.columns.items()
             if isinstance(column, Dense)}  # fmt: skip
    assert kinds["small"] == (Dense, np.int8, (run.num_rows,))
    assert kinds["matrix"] == (Dense, np.uint8, (run.num_rows, 2, 3))
    tokens = run.columns["tokens"]
    assert isinstance(tokens, Slices)
    assert tokens.values.dtype == np.int32
    assert tokens.values.flags.aligned


def test_tokens_and_targets_are_counted(tmp_path: Path) -> None:
    options = IndexOptions(tokens_column="tokens", targets={"lm": "tokens"}, ignore_index=4, run_num_bytes=300)
    for folder in ("mds", "mds-zstd"):
        (path,) = (PEERS / folder).glob("shard.00000.*")
        manifest = indexed(path, options=options)
        counts = counts_of(manifest, 0, "token_lengths", "targets.lm", "run_num_tokens")
        tokens = [row["tokens"] for row in peer_rows(manifest.num_samples)]
        assert counts["token_lengths"] == list(map(len, tokens))
        assert counts["targets.lm"] == [sum(token != 4 for token in row) for row in tokens]
        assert sum(counts["run_num_tokens"]) == sum(map(len, tokens))
        assert len(counts["run_num_tokens"]) > 1


# ---------------------------------------------------------------------------------------------- what is refused


def one(encoding: str, value: bytes, size: int | None = None) -> bytes:
    return mds_bytes({"x": (encoding, size)}, [[value]])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes"),
        (b"\x01", "ends at byte"),
        (b"\xff\xff\xff\x7f" * 4, "do not fit"),
        (one("str", b"a")[:-1], "samples end at byte"),
        (one("complex", b"a"), "unknown encoding.*complex"),
        (one("ndarray:complex64", b"a"), "unknown type.*complex64"),
        (one("int", b"a" * 4, 4), "'x' is int, but its size is another.*expected 8, found 4"),
        (b"\x01\0\0\0\x10\0\0\0\x0e\0\0\0    ", "do not follow each other"),
        (b"\x01\0\0\0\x10\0\0\0\x10\0\0\0[1, ", "JSON"),
    ],
)
def test_bad_shards_are_refused_by_name(raw: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.mds"
    path.write_bytes(raw)
    with pytest.raises(ManifestError, match=says) as raised:
        MdsFormat().index_shard(str(path), IndexOptions(), {})
    assert "bad.mds" in str(raised.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (one("str_float", b"{"), "'x': row 0 of the run: ValueError"),
        (one("str_int", b"9" * 20), "'x': a number does not fit 64 bits"),
        (one("str_int", b"1x"), "'x'.*ValueError"),
        (one("ndarray:int32", b"\x04\x01\1\0\0"), "no multiple of 4"),
        (one("ndarray:int32", b""), "'x'"),
        (mds_bytes({"x": ("str", None)}, [[b"abc"]])[:-7] + b"\x05\0\0\0abc", "'x' lies outside its sample"),
        (mds_bytes({"x": ("str", None)}, [[b"abc"]])[:-7] + b"\x01\0\0\0abc", "do not add up"),
        (one("list[png]", b"\0\0\0\0\x02\0\0\0\x01\0\0\0\x01\0\0\0a"), "do not add up"),
    ],
)
def test_values_that_cannot_be_decoded_name_column_and_shard(raw: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.mds"
    path.write_bytes(raw)
    with pytest.raises((DecodeError, ManifestError), match=says) as raised:
        read_all(indexed(path))
    assert "bad.mds" in str(raised.value)


def test_a_list_of_files_is_a_list_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.mds"
    path.write_bytes(one("list[png]", b"\0\0\0\0\x02\0\0\0\x01\0\0\0\x02\0\0\0abc"))
    assert read_all(indexed(path)) == [{"x": [b"a", b"bc"]}]
