from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tools import make_corpus
from tools.make_corpus import Document, choose_ids, group_documents, group_sizes, list_sources, split_unevenly

SCRIPT = make_corpus.__file__


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [Document(i, f"lib/{i}.py", bytes([i % 256]) * (i % 7)) for i in range(700)]  # every seventh is empty


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The real thing, once: part of this interpreter's library through the command line."""
    outdir = tmp_path_factory.mktemp("corpus")
    output = _run(outdir, "--num-documents", "600", "--num-shards", "3", "--max-document-bytes", "256", "--seed", "5")
    return outdir, output


def _run(outdir: Path, *options: str) -> str:
    command = [sys.executable, SCRIPT, str(outdir), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _members(tar: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def _frames(data: bytes) -> list[bytes]:
    frames = []
    while data:
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        frames.append(decompressor.decompress(data))
        assert decompressor.eof
        data = decompressor.unused_data
    return frames


@given(num_documents=st.integers(0, 5000), num_shards=st.integers(1, 40), seed=st.integers(0, 2**64))
def test_shards_hold_every_document_and_differ_by_at_most_a_factor_of_two(num_documents, num_shards, seed):
    sizes = split_unevenly(num_documents, num_shards, seed)
    assert len(sizes) == num_shards
    assert sum(sizes) == num_documents
    assert max(sizes) <= 2 * (min(sizes) + 2)


@given(num_rows=st.integers(0, 5000), shard=st.integers(0, 100), seed=st.integers(0, 2**64))
def test_groups_hold_64_to_1000_rows(num_rows, shard, seed):
    sizes = group_sizes(num_rows, shard, seed)
    assert sum(sizes) == num_rows
    if num_rows >= 64:
        assert all(64 <= size <= 1000 for size in sizes)
    else:
        assert len(sizes) == (num_rows > 0)


def test_ids_are_places_in_the_whole_list():
    chosen = choose_ids(1000, 100, seed=3)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 100
    assert set(choose_ids(1000, 50, seed=3)) < set(chosen)
    assert choose_ids(1000, 100, seed=4) != chosen
    assert choose_ids(7, 100, seed=3) == list(range(7))


def test_groups_keep_the_documents_in_order(documents):
    shards = group_documents(documents, num_shards=3, seed=1)
    assert [document for groups in shards for group in groups for document in group] == documents
    assert len({sum(map(len, groups)) for groups in shards}) == 3


def test_installed_packages_and_caches_are_not_sources(tmp_path):
    for path in ("b.py", "a/z.py", "a/__init__.py", "a/data.txt", "site-packages/x.py", "a/__pycache__/y.py"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert list_sources(tmp_path) == ["a/__init__.py", "a/z.py", "b.py"]


def test_tokens_are_the_bytes_and_empty_files_stay(documents):
    table = make_corpus.to_table(documents)
    assert table.schema.equals(make_corpus.SCHEMA)
    assert [bytes(tokens) for tokens in table["tokens"].to_pylist()] == [document.data for document in documents]
    assert table["tokens"].null_count == 0


def test_parquet_shards(corpus):
    outdir, _ = corpus
    paths = sorted((outdir / "parquet").iterdir())
    files = [pq.ParquetFile(path).metadata for path in paths]
    assert len(files) == 4
    assert [file.num_rows for file in files].index(0) == 1
    groups = [file.row_group(i).num_rows for file in files for i in range(file.num_row_groups)]
    assert all(64 <= rows <= 1000 for rows in groups)
    assert sum(groups) == 600


def test_all_formats_hold_the_same_documents(corpus):
    outdir, _ = corpus
    rows = pq.ParquetDataset(outdir / "parquet").read().to_pylist()
    expected: dict[str, bytes] = {}
    for row in rows:
        expected[f"{row['id']:06d}.txt"] = bytes(row["tokens"])
        expected[f"{row['id']:06d}.json"] = json.dumps({"id": row["id"], "path": row["path"]}).encode()
    plain = [path.read_bytes() for path in sorted((outdir / "tar").iterdir())]
    compressed = [path.read_bytes() for path in sorted((outdir / "tar.zst").iterdir())]
    assert {name: data for tar in plain for name, data in _members(tar).items()} == expected
    assert [b"".join(_frames(data)) for data in compressed] == plain
    assert any(len(row["tokens"]) == 256 for row in rows)


def test_every_frame_begins_with_a_whole_sample(corpus):
    outdir, _ = corpus
    for path in sorted((outdir / "tar.zst").iterdir()):
        *groups, end = _frames(path.read_bytes())
        assert groups
        assert not end.strip(b"\0")  # what closes the archive
        for frame in groups:
            names = list(_members(frame))
            assert names[0].endswith(".txt")
            assert names[-1].endswith(".json")


def test_ids_and_paths_name_real_sources(corpus):
    outdir, _ = corpus
    library = Path(make_corpus.sysconfig.get_paths()["stdlib"])
    sources = list_sources(library)
    rows = pq.ParquetDataset(outdir / "parquet").read().to_pylist()
    assert [row["path"] for row in rows] == [sources[row["id"]] for row in rows]
    assert all(bytes(row["tokens"]) == (library / row["path"]).read_bytes()[:256] for row in rows)


def test_prints_a_line_for_each_format(corpus):
    outdir, output = corpus
    lines = output.splitlines()
    assert [line.split(":")[0] for line in lines] == ["parquet", "tar", "tar.zst"]
    num_bytes = sum(path.stat().st_size for path in (outdir / "tar").iterdir())
    assert lines[1] == f"tar: 3 shards, 600 documents, {num_bytes:,} bytes in {outdir / 'tar'}"


def test_two_runs_write_the_same_bytes(corpus, tmp_path):
    outdir, _ = corpus
    _run(tmp_path, "--num-documents", "600", "--num-shards", "3", "--max-document-bytes", "256", "--seed", "5")
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("shard-*"))
    assert len(written) == 4 + 3 + 3
    assert all((tmp_path / path).read_bytes() == (outdir / path).read_bytes() for path in written)


@pytest.mark.parametrize("options", [[], ["--formats", "csv"], ["--num-shards", "0"]])
def test_refuses_old_shards_and_wrong_options(corpus, options):
    outdir, _ = corpus
    command = [sys.executable, SCRIPT, str(outdir), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert ("exists" if not options else "Invalid value") in done.stderr
