from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pytest
import zstandard

from shardstream.columns import Slices
from shardstream.errors import ManifestError, ShardChangedError, ShardStreamWarning
from shardstream.formats import IndexOptions, Shard, format_of
from shardstream.index import build_manifest
from tests.formats.conformance import FormatTests, Row, counts_of, indexed, read_all

PEERS = Path(__file__).parent / "peers"


def leaf() -> dict[str, object]:
    return {"type": None, "context": None, "children_spec": []}


def chunk_bytes(samples: list[list[bytes]], *, is_bare: bool = False) -> bytes:
    """A chunk as the format's description has it: count, offsets, samples (the sizes of all values, the values)."""
    heads = [b"" if is_bare else np.array(list(map(len, values)), "<u4").tobytes() for values in samples]
    bodies = [head + b"".join(values) for head, values in zip(heads, samples, strict=True)]
    offsets = np.cumsum([0, *map(len, bodies)]) + 4 + 4 * (len(bodies) + 1)
    return b"".join([np.uint32(len(bodies)).tobytes(), offsets.astype("<u4").tobytes(), *bodies])


def write_index(path: Path, num_samples: int, fields: dict[str, str], **config: object) -> None:
    """Adds a chunk to the index beside it."""
    index = path.parent / "index.json"
    chunks = json.loads(index.read_text())["chunks"] if index.exists() else []
    chunks = [chunk for chunk in chunks if chunk["filename"] != path.name]
    chunks.append({"chunk_bytes": path.stat().st_size, "chunk_size": num_samples, "dim": None, "filename": path.name})
    spec = {"type": "builtins.dict", "context": json.dumps(list(fields)), "children_spec": [leaf() for _ in fields]}
    told = {"compression": None, "data_format": list(fields.values()), "data_spec": json.dumps([1, spec]), **config}
    index.write_text(json.dumps({"chunks": chunks, "config": told}))


class TestLitData(FormatTests):
    suffix = ".bin"
    projection = ("tokens", "uid")

    def pack(self, data: bytes) -> bytes:
        return data

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows, samples = [], []
        for row in range(first_row, first_row + num_rows):
            rows.append({"uid": row, "text": "é" * (row % 4), "tokens": list(range(row, row + row % 30))})
            tokens = np.array(rows[-1]["tokens"], "<i4").tobytes()
            samples.append([np.int64(row).tobytes(), rows[-1]["text"].encode(), tokens])
        path.write_bytes(self.pack(chunk_bytes(samples)))
        write_index(path, num_rows, {"uid": "int", "text": "str", "tokens": "no_header_tensor:16"})
        return rows


class TestLitDataZstd(TestLitData):
    suffix = ".zstd.bin"

    def pack(self, data: bytes) -> bytes:
        return zstandard.compress(data)


# ------------------------------------------------------------------------------------- what litdata itself wrote


@pytest.mark.parametrize("folder", ["litdata", "litdata-zstd"])
def test_what_the_package_wrote_is_read(folder: str) -> None:
    with pytest.warns(ShardStreamWarning, match="'thing' is stored as pickle: its values come as bytes"):
        manifest = build_manifest(PEERS / folder, num_workers=0)
    rows = read_all(manifest)
    assert manifest.num_shards == 2
    assert all(row["matrix"].dtype == np.int16 and row["matrix"].shape == (2, row["uid"] % 3) for row in rows)
    for row in rows:
        row["matrix"], row["box"], row["thing"] = (
            row["matrix"].tolist(),
            row["box"].tolist(),
            pickle.loads(row["thing"]),
        )
    assert rows == [
        {
            "uid": row,
            "text": "é" * (row % 4),
            "score": row / 3,
            "flag": bool(row % 2),
            "array": list(range(row % 5)),
            "tensor": list(range(row % 3)),
            "raw": bytes(range(row % 3)),
            "matrix": [[row] * (row % 3)] * 2,
            "box": [[float(row)] * 2] * 2,
            "thing": {row},
        }
        for row in range(12)
    ]


def test_token_chunks_are_documents_without_a_copy() -> None:
    manifest = build_manifest(PEERS / "litdata-tokens", num_workers=0, tokens_column="value")
    documents = [list(range(row, row + row % 4)) for row in range(1, 10)]
    assert [row["value"] for row in read_all(manifest)] == documents
    assert counts_of(manifest, 0, "token_lengths") == {"token_lengths": list(map(len, documents))}
    (run,) = format_of(".litdata").read_runs(Shard(manifest, 0), 0, None)
    column = run.columns["value"]
    assert isinstance(column, Slices)
    assert column.values.dtype == np.int32
    assert not column.values.flags.owndata


@pytest.mark.parametrize("is_remote", [False, True])
def test_rows_with_lists_are_an_arrow_table_inside_the_chunk(is_remote):
    root = PEERS / "litdata-rows"
    if is_remote:
        root, memory = f"memory://{uuid4().hex}", fsspec.filesystem("memory")
        for file in (PEERS / "litdata-rows").iterdir():
            memory.pipe_file(f"{root}/{file.name}", file.read_bytes())
    manifest = build_manifest(root, num_workers=0, tokens_column="tokens")
    assert manifest.formats == ["litdata.arrow"]
    assert read_all(manifest) == [{"uid": row, "tokens": list(range(row))} for row in range(5)]
    assert counts_of(manifest, 0, "token_lengths") == {"token_lengths": [0, 1, 2, 3, 4]}
    shard = Shard(manifest, 0)
    (run,) = format_of(".litdata.arrow").read_runs(shard, 0, None)
    assert all(column.values.flags.aligned for column in run.columns.values())


def test_tuples_and_nested_samples_are_named_by_their_path() -> None:
    manifest = build_manifest(PEERS / "litdata-tuple", num_workers=0)
    assert read_all(manifest)[3] == {"0": 3, "1.0": "a", "1.1.b": 0.5}


# ---------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"compressed by batch.*write them without"):
        build_manifest(PEERS / "litdata-framed", num_workers=0)


@pytest.mark.parametrize(
    ("fields", "config", "says"),
    [
        ({"x": "int"}, {"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"x": "int"}, {"compression": "gzip"}, "compressed with gzip"),
        ({"x": "int"}, {"item_loader": "MyLoader"}, "made for MyLoader"),
        ({"x": "my_serializer"}, {}, "'x' is stored in an unknown way.*my_serializer"),
        ({"x": "no_header_tensor:10"}, {}, "'x' has numbers of a type that cannot be read"),
    ],
)
def test_refused(fields: dict[str, str], config: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "chunk-0-0.bin"
    path.write_bytes(chunk_bytes([[b"12345678"]]))
    write_index(path, 1, fields, **config)
    with pytest.raises(ManifestError, match=says):
        build_manifest(tmp_path, num_workers=0)


def test_a_chunk_needs_its_index(tmp_path: Path) -> None:
    path = tmp_path / "chunk-0-0.bin"
    path.write_bytes(chunk_bytes([[b"12345678"]]))
    with pytest.raises(ManifestError, match=r"no shards found"):
        build_manifest(tmp_path, num_workers=0)
    with pytest.raises(ManifestError, match=r"index\.json"):
        build_manifest(path, num_workers=0)
    write_index(path, 2, {"x": "int"})
    with pytest.raises(ManifestError, match=r"different numbers of samples.*expected 2, found 1"):
        build_manifest(tmp_path, num_workers=0)


def test_reading_asks_the_manifest_not_the_index(tmp_path: Path) -> None:
    for file in (PEERS / "litdata-tuple").iterdir():
        shutil.copy(file, tmp_path)
    manifest = indexed(tmp_path / "chunk-0-0.bin", options=IndexOptions())
    (tmp_path / "index.json").write_text((tmp_path / "index.json").read_text().replace('"str"', '"bytes"'))
    assert read_all(manifest)[0]["1.0"] == "a"


def test_a_rewritten_index_is_noticed_where_a_chunk_changed_too(tmp_path: Path) -> None:
    for file in (PEERS / "litdata-tuple").iterdir():
        shutil.copy(file, tmp_path)
    path = tmp_path / "chunk-0-0.bin"
    manifest = indexed(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ShardChangedError, match="not the one that was indexed"):
        read_all(manifest)
