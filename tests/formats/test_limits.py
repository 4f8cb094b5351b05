"""Hostile shards: sizes that lie, headers without end, streams that decode to far more than they are, links."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from shardstream.errors import ManifestError
from shardstream.formats import IndexOptions, Shard, format_of
from shardstream.formats._block_bytes import bytes_of_runs
from shardstream.formats._decompress import ZstdStream
from shardstream.index import build_manifest


def indexed(path):
    return format_of(str(path)).index_shard(str(path), IndexOptions(), {})


def peak_of_refusal(path):
    """Bytes that Python held at most until the shard was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError):
            indexed(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tar_with(path, size, kind=tarfile.REGTYPE, name="a.txt", data=b"", **attributes):
    info = tarfile.TarInfo(name)
    info.type = kind
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:512]))
    path.write_bytes(bytes(header) + data + bytes(-len(data) % 512) + bytes(1024))
    return path


@pytest.mark.parametrize(
    "size",
    [
        b"\x80" + (2**63 - 1).to_bytes(11, "big"),
        b"\x80" + (2**63).to_bytes(11, "big"),
        b"\x80" + (2**80).to_bytes(11, "big"),
        b"\xff" + (2**88 - 512).to_bytes(11, "big"),  # minus 512
        b"77777777777\0",
    ],
)
@pytest.mark.parametrize("name", ["a.tar", "a.tar.zst"])
def test_members_of_sizes_that_cannot_be(tmp_path, size, name):
    path = tar_with(tmp_path / "plain.tar", size, data=b"hello")
    raw = path.read_bytes()
    path = tmp_path / name
    path.write_bytes(raw if name == "a.tar" else zstandard.compress(raw))
    assert peak_of_refusal(path) < 32 << 20


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [8 << 20, 8**11 - 1])
def test_headers_without_end_are_not_read(tmp_path, kind, size):
    path = tar_with(tmp_path / "a.tar", size, kind)
    with path.open("ab") as file:
        file.truncate(16 << 20)  # a hole: as if all of the header were there
    assert peak_of_refusal(path) < 8 << 20


def test_a_trap_of_zstd_is_refused_before_it_decodes_to_much(tmp_path):
    """1 GiB in 100 KB."""
    path = tmp_path / "a.tar.zst"
    path.write_bytes(zstandard.compress(bytes(1 << 26)) * 16)
    assert peak_of_refusal(path) < 600 << 20
    with pytest.raises(ManifestError, match=r"2,000 times.*a\.tar\.zst|a\.tar\.zst.*2,000 times"):
        indexed(path)


def test_a_trap_that_a_manifest_describes_is_refused_before_memory_is_taken(tmp_path):
    """Its writer may have made the manifest, too: there the shard is one block, of so many bytes."""
    path = tmp_path / "a.tar.zst"
    path.write_bytes(zstandard.compress(tar_with(tmp_path / "a.tar", 5, data=b"hello").read_bytes()))
    manifest = build_manifest(path, num_workers=0)
    with (
        closing(bytes_of_runs(Shard(manifest, 0, {}), 0, [(0, 1 << 40)], 0, str)) as runs,
        pytest.raises(zstandard.ZstdError, match="2,000 times its size: a trap"),
    ):
        next(runs)


def test_what_compresses_well_is_no_trap():
    stream = ZstdStream(io.BytesIO(zstandard.compress(bytes(32 << 20))))
    assert sum(len(part) for part in iter(lambda: stream.read(1 << 20), b"")) == 32 << 20


@pytest.mark.parametrize("window_log", [27, 31])
def test_a_window_is_no_more_than_is_decoded(tmp_path, window_log):
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    tar = tar_with(tmp_path / "a.tar", 5, data=b"hello").read_bytes()
    path = tmp_path / "b.tar.zst"
    path.write_bytes(made.compress(tar) + made.flush())
    assert indexed(path).block_rows.tolist() == [1]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["../../etc/passwd", "/etc/passwd", "b.txt"])
def test_links_lead_nowhere(tmp_path, kind, target):
    """Not out of the archive, and not inside of it: they are refused by name, whatever they point to."""
    with pytest.raises(ManifestError, match=r"'a\.txt' is a link"):
        indexed(tar_with(tmp_path / "a.tar", 0, kind, linkname=target))


def test_names_that_lead_out_of_the_archive_are_names(tmp_path):
    """Nothing is ever extracted: a name is a key, and no path."""
    tar_with(tmp_path / "a.tar", 5, name="../../etc/passwd.txt", data=b"hello")
    manifest = build_manifest(tmp_path / "a.tar", tmp_path / "m", num_workers=0)
    assert manifest.lists.read(0, ["sample_keys"])["sample_keys"] == [b"../../etc/passwd"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.tar", "m"]
    assert not Path("etc").exists()
