from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardstream.columns import Scattered
from shardstream.errors import DecodeError, ManifestError, ReadError
from shardstream.formats import IndexOptions, Shard, _file_region
from shardstream.formats.tar import NO_WAY_IN, TarFormat
from shardstream.gathering import gather
from tests.formats.conformance import FormatTests, Row, indexed, python_rows, read_all
from tests.formats.tars import index_of, payload, row, rows_in, tar_bytes, three_samples
from tests.support.corpora import manifest_of_files


def sample_members(num_samples: int, first: int = 0) -> tuple[list[tuple[str, bytes]], list[Row]]:
    """Samples of two or three members of sizes that vary, none included."""
    members, rows = [], []
    for number in range(first, first + num_samples):
        values = {"bin": payload(f"{number}", number * 7 % 400), "cls": b"%d" % number}
        if number % 3 == 0:
            values["seg.png"] = b"x" * (number % 5)
        members += [(f"folder.v1/{number:05d}.{name}", value) for name, value in values.items()]
        rows.append(row(f"folder.v1/{number:05d}", fields=("bin", "cls", "seg.png"), **values))
    return members, rows


class TestTar(FormatTests):
    suffix = ".tar"
    projection = ("cls", "__key__")

    def pack(self, data: bytes) -> bytes:
        return data

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        members, rows = sample_members(num_rows, first_row)
        path.write_bytes(self.pack(tar_bytes(members)))
        return rows


class TestTarGz(TestTar):
    suffix = ".tar.gz"

    def pack(self, data: bytes) -> bytes:
        return gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])


class TestTarZstOneFrame(TestTar):
    suffix = ".tar.zst"

    def pack(self, data: bytes) -> bytes:
        return zstandard.compress(data)


class TestTarZstSmallFrames(TestTar):
    suffix = ".tar.zst"
    frame_num_bytes = 1000

    def pack(self, data: bytes) -> bytes:
        frames = [data[at : at + self.frame_num_bytes] for at in range(0, len(data), self.frame_num_bytes)]
        return b"".join(zstandard.compress(frame) for frame in frames)

    def test_it_has_several_blocks(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        assert self.manifest(url).num_blocks > 5


class TestTarZstLargeFrames(TestTarZstSmallFrames):
    frame_num_bytes = 30_000

    def test_no_frame_is_decoded_for_two_blocks_but_at_a_border(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        assert (manifest.block_rows > manifest.block_run_rows).any()
        assert (np.diff(manifest.block_offset) > 0).all()


# ---------------------------------------------------------------------------------------------- grouping


def test_the_key_is_folder_and_base_name_up_to_its_first_dot(tmp_path: Path) -> None:  # C01
    members = [
        ("train.v1/0001.jpg", b"a"),
        ("train.v1/0001.txt", b"one"),
        ("train.v1/0002.jpg", b"b"),
        ("22.0/1.1.png", b"c"),
        ("22.0/1.json", b"{}"),
        ("a/x.JPG", b"d"),
        ("b/x.jpg", b"e"),
    ]
    fields = ("1.png", "jpg", "json", "txt")
    assert rows_in(tmp_path / "a.tar", tar_bytes(members)) == [
        row("train.v1/0001", fields=fields, jpg=b"a", txt=b"one"),
        row("train.v1/0002", fields=fields, jpg=b"b"),
        row("22.0/1", fields=fields, **{"1.png": b"c", "json": b"{}"}),
        row("a/x", fields=fields, jpg=b"d"),
        row("b/x", fields=fields, jpg=b"e"),
    ]


def test_folders_are_no_samples_and_dot_slash_is_dropped(tmp_path: Path) -> None:  # C03
    members = [
        ("./", None),
        ("./sub/", None),
        ("./sub/1.jpg", b"a"),
        ("./frames.v1/", None),
        ("././frames.v1/2.jpg", b"b"),
    ]
    rows = rows_in(tmp_path / "a.tar", tar_bytes(members, tarfile.GNU_FORMAT))
    assert rows == [row("sub/1", fields=["jpg"], jpg=b"a"), row("frames.v1/2", fields=["jpg"], jpg=b"b")]


def test_other_systems_files_are_ignored_at_any_depth_and_counted(tmp_path: Path) -> None:
    names = [
        "._a.jpg",
        "x/._a.jpg",
        "x/.DS_Store",
        "__MACOSX/._a.jpg",
        "__meta__",
        "x/__info__",
        "__all__/a.jpg",
        "README",
    ]
    members = [(name, b"no") for name in names] + [("__init__.py", b"yes"), ("x/a__.b__", b"yes")]
    path = tmp_path / "a.tar"
    index = index_of(path, tar_bytes(members))
    assert index.lists["sample_keys"] == [b"__init__", b"x/a__"]
    assert index.warnings == ("8 members are no samples (._*, .DS_Store, __*__, or no suffix), the first is '._a.jpg'",)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["base.jpg", "base.json", "base.jpg"], "base.jpg"),
        (["a.jpg", "a.JPG"], "a.JPG"),
        (["a.jpg", "b.jpg", "a.txt"], "a.txt"),
    ],
)
def test_a_member_too_many_is_refused_by_name(tmp_path: Path, names: list[str], says: str) -> None:  # C05
    data = tar_bytes([(name, payload(str(n), 30)) for n, name in enumerate(names)])
    with pytest.raises(ManifestError, match=rf"'{says}'.*dup\.tar"):
        index_of(tmp_path / "dup.tar", data)


def test_one_key_in_two_shards_is_two_samples(tmp_path: Path) -> None:  # C05
    urls = []
    for folder in "pq":
        urls.append(tmp_path / folder / "0.tar")
        index_of(urls[-1], tar_bytes([("img.jpg", payload(folder, 10)), ("img.txt", folder.encode())]))
    assert read_all(indexed(*urls)) == [row("img", jpg=payload(name, 10), txt=name.encode()) for name in "pq"]


def test_a_link_is_refused_by_name(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        file = io.BytesIO()
        with tarfile.TarFile(fileobj=file, mode="w") as archive:
            info = tarfile.TarInfo("b.jpg")
            info.type, info.linkname = kind, "a.jpg"
            archive.addfile(info)
        with pytest.raises(ManifestError, match=r"'b\.jpg' is a link.*links\.tar"):
            index_of(tmp_path / "links.tar", file.getvalue())


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_offsets_are_those_of_the_data_in_every_header_format(tmp_path: Path, kind: int) -> None:  # C11
    base = "d" * 60 + "/" + "e" * 60 + "/" + "f" * 25
    members = [
        (f"{base}1.jpg", payload("a", 600)),
        (f"{base}2.jpg", payload("b", 10)),
        ("short.jpg", payload("c", 513)),
    ]
    about = {"pax_headers": {"comment": "whole archive"}} if kind == tarfile.PAX_FORMAT else {}
    data = tar_bytes(members, kind, **about)
    path = tmp_path / "a.tar"
    index = index_of(path, data)
    assert index.lists["member_offset"].tolist() == [data.index(value) for _, value in members]
    assert read_all(indexed(path)) == [row(name[:-4], fields=["jpg"], jpg=value) for name, value in members]


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    name = b"caf\xe9/1.jpg".decode("utf-8", "surrogateescape")
    path = tmp_path / "a.tar"
    index = index_of(path, tar_bytes([(name, b"x")]))
    assert index.lists["sample_keys"] == [b"caf\xe9/1"]
    assert read_all(indexed(path)) == [row(name[:-4], fields=["jpg"], jpg=b"x")]
    with pytest.raises(DecodeError, match=r"'caf\\xe9/1' has no field 'txt'"):
        read_all(indexed(path), ["txt"])


@pytest.mark.parametrize(("name", "shown"), [(b"1.j\xffg", r"1\.j\\xffg"), (b"1.__key__", "1.__key__")])
def test_a_suffix_that_can_name_no_field_is_refused(tmp_path: Path, name: bytes, shown: str) -> None:
    with pytest.raises(ManifestError, match=rf"'{shown}' cannot name a field .*a\.tar"):
        index_of(tmp_path / "a.tar", tar_bytes([(name.decode("utf-8", "surrogateescape"), b"x")]))


# -------------------------------------------------------------------------------------------- compression


def test_gzip_of_several_members_is_read_whole(tmp_path: Path) -> None:  # C13
    data, _, rows = three_samples()
    packed = gzip.compress(data[:700]) + gzip.compress(data[700:3000]) + gzip.compress(data[3000:])
    assert rows_in(tmp_path / "multi.tar.gz", packed) == rows
    assert rows_in(tmp_path / "padded.tgz", packed + b"\0" * 512) == rows


@pytest.mark.parametrize("num_bytes", [1, 6, 40, 500])
def test_cut_compressed_tars_are_refused(tmp_path: Path, num_bytes: int) -> None:  # C13
    data, _, _ = three_samples()
    for name, packed in (
        ("cut.tar.gz", gzip.compress(data[:3000]) + gzip.compress(data[3000:])),
        ("cut.tar.zst", zstandard.compress(data[:3000]) + zstandard.compress(data[3000:])),
    ):
        with pytest.raises(ManifestError, match=rf"cut or damaged.*{name}"):
            index_of(tmp_path / name, packed[:-num_bytes])


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tar.zst"])
def test_what_is_not_compressed_is_refused(tmp_path: Path, name: str) -> None:
    for data in (b"<html>403</html>", three_samples()[0]):
        with pytest.raises(ManifestError, match=rf"damaged.*{name}"):
            index_of(tmp_path / name, data)


def test_skippable_frames_sizeless_frames_and_long_windows(tmp_path: Path) -> None:
    data, _, rows = three_samples()
    note = struct.pack("<II", 0x184D2A5E, 70000) + b"n" * 70000
    sizeless = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    long_window = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True, write_content_size=False)
    parts = [
        note,
        sizeless.compress(data[:1000]),
        note,
        zstandard.compress(b""),
        zstandard.ZstdCompressor(compression_params=long_window).compress(data[1000:]),
        note,
    ]
    assert rows_in(tmp_path / "a.tar.zst", b"".join(parts)) == rows
    assert rows_in(tmp_path / "a.tar.zstd", b"".join(parts)) == rows
    with pytest.raises(ManifestError, match=r"skippable.*a\.tar\.zst"):
        index_of(tmp_path / "a.tar.zst", b"".join(parts)[:-1])


def test_one_frame_and_gzip_are_one_block_and_warned_of(tmp_path: Path) -> None:
    data = tar_bytes([(f"{n}.bin", payload(f"{n}", 1000)) for n in range(100)])
    for name, packed in (("a.tar.gz", gzip.compress(data)), ("a.tar.zst", zstandard.compress(data))):
        index = index_of(tmp_path / name, packed, run_num_bytes=20_000)
        assert index.block_rows.tolist() == [100]
        assert 10 <= index.block_run_rows[0] <= 20
        assert index.block_num_bytes.tolist() == [len(packed)]
        assert index.warnings == (NO_WAY_IN,)


def test_a_block_of_a_plain_tar_is_whole_samples_and_one_run(tmp_path: Path) -> None:
    sizes = [1000, 1000, 1000, 50_000, 10, 10]
    data = tar_bytes([(f"{n}.bin", payload(f"{n}", size)) for n, size in enumerate(sizes)])
    index = index_of(tmp_path / "a.tar", data, run_num_bytes=4096)
    assert index.block_rows.tolist() == [3, 1, 2]
    assert index.block_run_rows.tolist() == [3, 1, 2]
    assert index.warnings == ()


def test_reading_a_plain_tar_copies_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([("a.x", b"one"), ("a.y", b"two"), ("b.x", b"three"), ("b.y", b"")]))
    (run,) = TarFormat().read_runs(Shard(indexed(path), 0), 0, None)
    x, y = run.columns["x"], run.columns["y"]
    assert np.shares_memory(x.values, y.values)  # type: ignore[union-attr]
    assert not x.values.flags.owndata  # type: ignore[union-attr]


def test_bytes_of_a_frame_that_was_damaged_later_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(three_samples()[0])
    path.write_bytes(packed)
    manifest = indexed(path)
    shard = Shard(manifest, 0)
    assert len(python_rows(TarFormat().read_runs(shard, 0, None))) == 3
    path.write_bytes(packed[:50] + b"\xaa" * 200 + packed[250:])
    with pytest.raises(DecodeError, match=r"a\.tar\.zst, block 0"):
        list(TarFormat().read_runs(shard, 0, None))


def test_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"Parquet.*a\.tar"):
        index_of(tmp_path / "a.tar", tar_bytes([("a.x", b"")]), targets={"lm": "x"})


def test_a_large_archive_is_indexed_without_keeping_its_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    index = index_of(path, tar_bytes((f"{n:06d}.x", b"") for n in range(3000)))
    assert index.block_rows.sum() == 3000
    assert path.stat().st_size == index.num_bytes


def test_a_damaged_frame_is_an_error_of_its_block_only(tmp_path: Path) -> None:
    path, compressor = tmp_path / "a.tar.zst", zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    names = [[f"{n}.{field}" for n in (first, first + 1) for field in ("jpg", "txt")] for first in (1, 3, 5)]
    parts = [tar_bytes([(name, payload(name, 700)) for name in part], has_end=part == names[-1]) for part in names]
    frames = [compressor.compress(part) for part in parts]
    path.write_bytes(b"".join(frames))
    manifest = indexed(path, options=IndexOptions(run_num_bytes=4000))
    assert manifest.block_rows.tolist() == manifest.block_run_rows.tolist() == [2, 2, 2]
    rows = read_all(manifest)
    assert [row["txt"] for row in rows] == [payload(f"{n}.txt", 700) for n in range(1, 7)]
    damaged = bytearray(b"".join(frames))
    damaged[len(frames[0]) - 1] ^= 1  # of its checksum
    path.write_bytes(damaged)
    shard = Shard(manifest, 0)
    with pytest.raises(DecodeError, match=r"a\.tar\.zst, block 0"):
        list(TarFormat().read_runs(shard, 0, None))
    assert python_rows(run for block in (1, 2) for run in TarFormat().read_runs(shard, block, None)) == rows[2:]


def test_bytes_of_large_fields_are_read_from_the_file(tmp_path: Path) -> None:
    path, values = tmp_path / "a.tar", [payload(f"{n}.jpg", 20_000 + n) for n in range(3)]
    path.write_bytes(
        tar_bytes([(f"{n}.{kind}", v) for n in range(3) for kind, v in (("cls", b"7"), ("jpg", values[n]))])
    )
    shard = Shard(indexed(path), 0)
    (run,) = TarFormat().read_runs(shard, 0, None)
    assert [row["jpg"] for row in python_rows([run])] == values
    columns = gather([run, run], np.array([1, 0]), np.array([2, 0]), dtypes={"cls": np.dtype(np.uint8)}).columns
    numbers = gather([run], np.array([0]), np.array([2]), dtypes={"jpg": np.dtype(np.uint8)}).columns["jpg"]
    assert isinstance(columns["jpg"].values, Scattered)
    assert list(columns["jpg"].values) == [values[2], values[0]]
    assert numbers.values.tobytes() == values[2]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ReadError, match=r"was cut while it was read \[.*a\.tar, block 0\]: expected 20002 bytes at"):
        list(columns["jpg"].values)


def test_files_of_large_fields_are_open_once_closed_with_their_runs_and_not_too_many(tmp_path, monkeypatch):
    urls = [tmp_path / f"{name}.tar" for name in "abc"]
    for path in urls:
        path.write_bytes(tar_bytes([("1.jpg", payload("1.jpg", 20_000))]))
    manifest = manifest_of_files(urls)
    monkeypatch.setattr(_file_region, "_MOST_OPEN", len(_file_region._files) + 2)
    runs = [next(TarFormat().read_runs(Shard(manifest, k), k, ["jpg"])) for k in (0, 1, 2, 1)]
    assert [len(python_rows([run])[0]["jpg"]) for run in runs] == [20_000] * 4
    sources = [run.columns["jpg"].source for run in runs]
    assert [source is None for source in sources] == [False, False, True, False]
    numbers = [source._file.number for source in sources if source is not None]
    assert numbers[1] == numbers[2] != numbers[0]
    del runs, sources
    for number in numbers[:2]:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(number)


def test_a_tar_that_was_replaced_is_read_though_somebody_holds_the_one_before(tmp_path):
    path = tmp_path / "a.tar"

    def write(letter):
        with tarfile.open(tmp_path / "new", "w") as file:
            member = tarfile.TarInfo("0.bin")
            member.size = 40_000
            file.addfile(member, io.BytesIO(letter * member.size))
        (tmp_path / "new").rename(path)

    def read():
        (run,) = TarFormat().read_runs(Shard(indexed(path), 0), 0, ["bin"])
        return gather([run], np.zeros(1, np.int64), np.zeros(1, np.int64)).columns["bin"].values

    write(b"A")
    before = read()
    write(b"B")
    assert next(iter(read()))[:1] == b"B"
    assert next(iter(before))[:1] == b"A"
