"""Counting tokens when shards are indexed: documents, sequences of whole documents, raw tokens in tars."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.errors import ManifestError
from shardstream.fitting import num_best_fit
from shardstream.index import IndexSettings, build_manifest
from shardstream.manifest import Manifest
from tests.formats.tars import tar_bytes
from tests.support.token_files import LISTS, token_manifest

LENGTHS = [3, 0, None, 17, 1, 2, 40, None, 5, 0, 11, 4, 6, 1, 1, 90, 2, 8]


@pytest.mark.parametrize("kind", [*LISTS, "tar<uint16>", "tar<int64>"])
def test_counts_of_runs(tmp_path, kind):
    manifest = token_manifest(tmp_path, LENGTHS, kind, run_num_bytes=2048 if kind.startswith("tar") else 40, pack=[7])
    names = ["token_lengths", "run_num_tokens", "run_num_documents"]
    names += [f"{kind}.7{eos}" for kind in ("sequences", "parts") for eos in ("", "+eos")]
    counts = manifest.lists.read_all(names)
    assert counts["token_lengths"].tolist() == [length or 0 for length in LENGTHS]
    ends = np.cumsum(manifest.block_rows)
    cuts = [
        range(end - rows, end, step)
        for end, rows, step in zip(ends, manifest.block_rows, manifest.block_run_rows, strict=True)
    ]
    begins = [begin for block in cuts for begin in block]
    runs = [LENGTHS[begin:end] for begin, end in zip(begins, [*begins[1:], len(LENGTHS)], strict=True)]
    assert len(runs) > 3
    assert counts["run_num_tokens"].tolist() == [sum(length or 0 for length in run) for run in runs]
    assert counts["run_num_documents"].tolist() == [sum(length is not None for length in run) for run in runs]
    for eos, end in ((0, ""), (1, "+eos")):
        documents = [np.array([length + eos for length in run if length is not None], np.int64) for run in runs]
        assert counts[f"sequences.7{end}"].tolist() == [num_best_fit(run, 7) for run in documents]
        parts = [sum(1 if length <= 8 else -(-(length - 1) // 7) for length in run if length) for run in documents]
        assert counts[f"parts.7{end}"].tolist() == parts


def test_lists_of_a_fixed_size_are_counted_by_the_footer(tmp_path, monkeypatch):
    """Where no list is null; then nothing is decoded."""
    counts, names = [], ["token_lengths", "run_num_tokens", "run_num_documents", "parts.7+eos"]
    for folder, lengths in (("all", [9] * 23), ("nulls", [9] * 11 + [None] + [9] * 11)):
        manifest = token_manifest(tmp_path / folder, lengths, "fixed-size list", pack=[7])
        counts.append(manifest.lists.read_all(names))
    assert counts[0]["run_num_tokens"].sum() == counts[1]["run_num_tokens"].sum() + 9 == 23 * 9
    assert counts[1]["token_lengths"].tolist() == [9] * 11 + [0] + [9] * 11
    monkeypatch.delattr("shardstream.formats.parquet.opened")
    again = token_manifest(tmp_path / "all", [9] * 23, "fixed-size list", pack=[7]).lists.read_all(names)
    assert {name: found.tolist() for name, found in again.items()} == {n: c.tolist() for n, c in counts[0].items()}
    with pytest.raises(NameError):
        token_manifest(tmp_path / "nulls", [9] * 11 + [None] + [9] * 11, "fixed-size list")


def test_a_manifest_file_keeps_the_counts_and_an_update_goes_on_with_them(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"tokens": [[1, 2], [3]]}), folder / "a.parquet")
    settings = IndexSettings(pack=[4, 2, 4])
    build_manifest(folder, tmp_path / "old", tokens_column="tokens", num_workers=0, settings=settings)
    pq.write_table(pa.table({"tokens": [[1, 2, 3, 4]]}), folder / "b.parquet")
    build_manifest(folder, tmp_path / "new", update=tmp_path / "old", num_workers=0)
    new = Manifest.load(tmp_path / "new")
    assert new.metadata["pack"] == [2, 4]
    assert new.lists.read_all(["sequences.2", "run_num_tokens"])["sequences.2"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_column": "x"}, "--tokens-dtype"),
        ({"tokens_column": "y", "settings": IndexSettings(tokens_dtype="uint16")}, "no sample has a field 'y'.*x"),
        ({"tokens_column": "x", "settings": IndexSettings(tokens_dtype="uint16")}, "sample 'b' are no uint16.*found 3"),
        ({"tokens_column": "x", "settings": IndexSettings(tokens_dtype="text")}, "unknown tokens_dtype"),
        ({"settings": IndexSettings(pack=[4])}, "name the tokens_column"),
        ({"tokens_column": "x", "settings": IndexSettings(pack=[0])}, "pack >= 1"),
    ],
)
def test_tars_whose_tokens_cannot_be_counted_are_refused(tmp_path, options, message):
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.x", b"1234"), ("b.x", b"123")]))
    with pytest.raises(ManifestError, match=message):
        build_manifest(tmp_path / "a.tar", num_workers=0, **options)


def test_parquet_needs_no_type_of_tokens(tmp_path):
    pq.write_table(pa.table({"x": [[1]]}), tmp_path / "a.parquet")
    with pytest.raises(ManifestError, match="raw bytes in tars"):
        build_manifest(tmp_path, tokens_column="x", num_workers=0, settings=IndexSettings(tokens_dtype="uint16"))


def test_the_command(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.x", b"1234"), ("a.txt", b"t"), ("b.txt", b"no tokens")]))
    arguments = ["--tokens-column", "x", "--tokens-dtype", "uint16", "--pack", "2", "--pack", "8"]
    done = CliRunner().invoke(main, ["index", str(tmp_path / "a.tar"), "-o", str(tmp_path / "m"), *arguments])
    assert done.exit_code == 0, done.output
    totals = json.loads(CliRunner().invoke(main, ["inspect", str(tmp_path / "m"), "--json"]).stdout)["totals"]
    assert (totals["num_tokens"], totals["num_documents"], totals["num_without_tokens"]) == (2, 1, 1)
    manifest = Manifest.load(tmp_path / "m")
    assert manifest.metadata["tokens_dtype"] == "uint16"
    assert manifest.lists.names >= {"sequences.2", "sequences.8+eos"}
