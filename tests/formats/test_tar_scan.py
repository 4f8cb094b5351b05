"""Archives that are cut, joined, padded or damaged."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import DecodeError, ManifestError, ShardChangedError
from tests.formats.conformance import indexed, read_all
from tests.formats.tars import index_of, payload, row, rows_in, tar_bytes, three_samples


def test_a_tar_cut_in_a_member_is_refused(tmp_path: Path) -> None:  # C07
    data, third, _ = three_samples()
    for end in (third + 512 + 700, third + 100, third + 512 + 1510, 100):
        with pytest.raises(ManifestError, match=r"cut.*cut_mid\.tar"):
            index_of(tmp_path / "cut_mid.tar", data[:end])


def test_a_tar_without_end_blocks_is_whole_and_warned_of(tmp_path: Path) -> None:  # C07, C09
    data, third, rows = three_samples()
    path = tmp_path / "cut_boundary.tar"
    assert index_of(path, data[:third]).warnings == ("no end-of-archive blocks: was it cut between two members?",)
    assert read_all(indexed(path)) == rows[:2]
    assert index_of(path, data[: third + 2048]).warnings != ()


@pytest.mark.parametrize("is_at_border", [True, False])
def test_a_cut_tar_in_the_place_of_the_indexed_one_is_refused(tmp_path: Path, *, is_at_border: bool) -> None:  # C07
    data, third, _ = three_samples()
    path = tmp_path / "full.tar"
    path.write_bytes(data)
    manifest = indexed(path)
    path.write_bytes(data[: third if is_at_border else third + 512 + 700])
    with pytest.raises(ShardChangedError, match=r"full\.tar"):
        read_all(manifest)


def test_joined_tars_are_read_whole(tmp_path: Path) -> None:  # C09
    data, _, rows = three_samples()
    more = tar_bytes([("9.jpg", b"nine")])
    for padding in (b"", b"\0" * 20480):
        path = tmp_path / "concat.tar"
        assert index_of(path, data + padding + more).warnings == ()
        assert read_all(indexed(path)) == [*rows, row("9", jpg=b"nine")]


def test_zero_padding_is_harmless(tmp_path: Path) -> None:  # C09
    data, _, rows = three_samples()
    for num_bytes in (20480, 20480 + 77):
        assert rows_in(tmp_path / "zeropad.tar", data + b"\0" * num_bytes) == rows


def test_garbage_is_refused_wherever_it_is(tmp_path: Path) -> None:  # C09
    data, third, _ = three_samples()
    garbage = (b"-- appended by a tool --\n" * 40)[:777]
    for spoiled in (data + garbage, data[:third] + garbage, data + b"\0" * 5120 + garbage[:100], garbage):
        with pytest.raises(ManifestError, match=r"something else follows.*garbage\.tar"):
            index_of(tmp_path / "garbage.tar", spoiled)


def test_a_corrupt_header_is_refused(tmp_path: Path) -> None:
    data, third, _ = three_samples()
    spoiled = bytearray(data)
    spoiled[third + 150] ^= 0x55
    with pytest.raises(ManifestError, match=rf"at byte {third} .*corrupt\.tar"):
        index_of(tmp_path / "corrupt.tar", bytes(spoiled))


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".tar", bytes), (".tar.gz", gzip.compress), (".tar.zst", zstandard.compress)]
)
@given(data=st.data())
@settings(max_examples=60)
def test_a_cut_anywhere_is_refused_or_warned_of(
    suffix: str, pack: Callable[[bytes], bytes], data: st.DataObject
) -> None:
    archive, _, rows = three_samples()
    packed = pack(archive)
    kept = data.draw(st.integers(1, len(packed) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"cut{suffix}"
        try:
            index = index_of(path, packed[:kept])
        except ManifestError as error:
            assert "cut" in str(error)  # noqa: PT017
            return
        read = read_all(indexed(path))
        assert suffix == ".tar"
        if read != rows:
            assert index.warnings
            *whole, last = read  # cut between its members, the last one is there in part
            assert whole == rows[: len(whole)]
            there = {name: value for name, value in last.items() if value is not None}
            assert there.items() <= rows[len(whole)].items()


def test_a_cut_between_the_members_of_a_sample_is_warned_of(tmp_path: Path) -> None:
    archive, _, rows = three_samples()
    assert index_of(tmp_path / "cut.tar", archive[:2048]).warnings
    [read] = read_all(indexed(tmp_path / "cut.tar"))
    assert read == {name: rows[0][name] for name in ("__key__", "jpg")}


@given(data=st.data())
@settings(max_examples=60)
def test_a_header_damaged_anywhere_is_refused(data: st.DataObject) -> None:
    archive, third, _ = three_samples()
    spoiled = bytearray(archive)
    header = data.draw(st.sampled_from([0, third]))
    spoiled[header + data.draw(st.integers(0, 511))] ^= data.draw(st.sampled_from([0x01, 0x10, 0x55]))
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ManifestError, match=r"damaged.*spoiled\.tar"):
        index_of(Path(folder) / "spoiled.tar", bytes(spoiled))


def test_empty_tars(tmp_path: Path) -> None:  # C16
    assert index_of(tmp_path / "empty.tar", b"\0" * 1024).block_rows.tolist() == []
    assert index_of(tmp_path / "empty.tar", b"\0" * 10240).warnings == ()
    for name in ("zero.tar", "zero.tar.gz", "zero.tar.zst"):
        with pytest.raises(ManifestError, match=rf"0 bytes.*{name}"):
            index_of(tmp_path / name, b"")


def test_an_empty_member_is_a_value_and_a_missing_one_is_not(tmp_path: Path) -> None:  # C16
    path = tmp_path / "hollow.tar"
    jpg = [payload("a", 8), payload("b", 8)]
    data = tar_bytes([("0001.jpg", jpg[0]), ("0001.txt", b""), ("0002.jpg", jpg[1])])
    index = index_of(path, data)
    assert [(column.name, column.num_missing) for column in index.columns] == [("jpg", 0), ("txt", 1)]
    manifest = indexed(path)
    assert read_all(manifest) == [row("0001", jpg=jpg[0], txt=b""), row("0002", jpg=jpg[1])]
    assert read_all(manifest, ["jpg"]) == [{"jpg": jpg[0]}, {"jpg": jpg[1]}]
    with pytest.raises(DecodeError, match=r"'0002' has no field 'txt' .*hollow\.tar, row 1"):
        read_all(manifest, ["jpg", "txt"])
