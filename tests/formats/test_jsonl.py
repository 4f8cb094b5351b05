from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardstream.errors import DecodeError, ManifestError, ShardStreamWarning
from shardstream.formats import IndexOptions
from shardstream.index import build_manifest
from tests.formats.conformance import FormatTests, Row, counts_of, indexed, read_all
from tests.formats.tars import payload


class TestJsonLines(FormatTests):
    suffix = ".jsonl"
    projection = ("text", "id")

    def pack(self, data: bytes) -> bytes:
        return data

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows: list[Row] = [
            {
                "id": number,
                "text": payload(f"{number}", number * 3 % 100).hex() + " äöü\n",
                "score": None if number % 3 else number + 0.5,
                "tokens": [number] * (number % 4),
            }
            for number in range(first_row, first_row + num_rows)
        ]
        lines = [json.dumps(row, ensure_ascii=number % 2 == 0) for number, row in enumerate(rows)]
        path.write_bytes(self.pack("".join(line + "\n" for line in lines).encode()))
        return rows


class TestJsonLinesGz(TestJsonLines):
    suffix = ".jsonl.gz"

    def pack(self, data: bytes) -> bytes:
        return gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])


class TestJsonLinesZstSmallFrames(TestJsonLines):
    suffix = ".jsonl.zst"
    frame_num_bytes = 1000

    def pack(self, data: bytes) -> bytes:
        frames = [data[at : at + self.frame_num_bytes] for at in range(0, len(data), self.frame_num_bytes)]
        return b"".join(zstandard.compress(frame) for frame in frames or [b""])


class TestJsonLinesZstLargeFrames(TestJsonLinesZstSmallFrames):
    frame_num_bytes = 20_000

    def test_blocks_begin_at_frames(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        assert manifest.num_blocks > 1
        assert (manifest.block_rows > manifest.block_run_rows).any()
        assert (np.diff(manifest.block_offset) > 0).all()


def rows_in(path: Path, text: str | bytes) -> list[Row]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_all(indexed(path))


def test_blank_lines_crlf_byte_order_mark_and_a_last_line_without_end(tmp_path: Path) -> None:
    rows = rows_in(tmp_path / "a.jsonl", b'\xef\xbb\xbf\n{"x": 1}\r\n \r\n\n{"x": 2}\n{"x": 3}')
    assert rows == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_what_looks_like_a_time_stays_text_and_fields_may_be_missing(tmp_path: Path) -> None:
    lines = '{"d": "2020-01-01", "m": {"a": 1}}\n{"m": {"b": ["2021-01-01"]}, "n": 1}\n{"d": "no", "n": 0.5}\n'
    assert rows_in(tmp_path / "a.jsonl", lines) == [
        {"d": "2020-01-01", "m": {"a": 1, "b": None}, "n": None},
        {"d": None, "m": {"a": None, "b": ["2021-01-01"]}, "n": 1.0},
        {"d": "no", "m": None, "n": 0.5},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1}\n\n[1]\n', r"line 3 is no JSON object.*a\.jsonl|a\.jsonl.*line 3"),
        (b'{"a": 1}\n{"a":\n', "line 2 is not JSON"),
        (b'{"a": "\xff"}\n', "line 1 is not JSON"),
        (b'{"a": 1}{"a": 2}\n', "line 1 is not JSON"),
        (b'{"a": 1}\n \tnull\n', "line 2 is no JSON object"),
        (b'{"a": 1}\n{"a"\n: 2}{"a": 3}\n', "line 2 is not JSON"),
        (b'{"a": 1}\n{"a": "x"}\n', "changed from number to string"),
        (b'{"a": 12345678901234567890}\n', "12345678901234567890 does not fit"),
        (b'{"a": 9007199254740993}\n{"a": 1.5}\n', "9007199254740993 does not fit"),
        (b'{"a": 9007199254740993}\n{"a": 1.5}', "too large to go with"),  # the last line is parsed by itself
    ],
)
def test_a_bad_line_is_named(text: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=message):
        rows_in(tmp_path / "a.jsonl", text)


def test_numbers_that_another_shard_makes_round_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 9007199254740993}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 0.5}\n')
    with pytest.raises(DecodeError, match="9007199254740993"):
        read_all(build_manifest(tmp_path))


def test_a_cut_shard_cannot_be_indexed(tmp_path: Path) -> None:
    for name, data in (("a.jsonl.gz", gzip.compress(b"{}\n" * 999)), ("a.jsonl.zst", zstandard.compress(b"{}" * 99))):
        with pytest.raises(ManifestError, match="cut or damaged"):
            rows_in(tmp_path / name, data[:-9])


def test_shards_with_other_fields_make_one_schema(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "m": {"a": 1}}\n')
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.ndjson").write_text('{"x": 0.5, "y": "t", "m": {"b": "q"}}\n')
    with pytest.warns(ShardStreamWarning, match=r"b\.jsonl"):
        manifest = build_manifest(tmp_path)
    assert [(c.name, c.type, c.num_missing) for c in manifest.columns][:3] == [
        ("x", "double", 0),
        ("m", "struct<a: int64, b: string>", 0),
        ("y", "string", 1),
    ]
    assert read_all(manifest) == [
        {"x": 1.0, "m": {"a": 1, "b": None}, "y": None},
        {"x": 0.5, "m": {"a": None, "b": "q"}, "y": "t"},
    ]
    (tmp_path / "d.jsonl").write_text('{"x": "text"}\n')
    with pytest.raises(ManifestError, match=r"d\.jsonl.*types"):
        build_manifest(tmp_path)


def test_tokens_and_targets_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": [1, 2], "l": [1, -100]}\n{"t": [], "l": []}\n{"l": [3]}\n')
    manifest = indexed(path, options=IndexOptions(tokens_column="t", targets={"lm": "l"}))
    assert counts_of(manifest, 0, "token_lengths", "run_num_tokens", "run_num_documents", "targets.lm") == {
        "token_lengths": [2, 0, 0],
        "run_num_tokens": [2],
        "run_num_documents": [2],
        "targets.lm": [1, 0, 1],
    }
    with pytest.raises(ManifestError, match="no line has a field 'q'"):
        indexed(path, options=IndexOptions(tokens_column="q"))


def test_a_line_longer_than_a_piece(tmp_path: Path) -> None:
    rows = [{"x": "a" * (9 << 20)}, {"x": "b"}]
    assert rows_in(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))) == rows
