"""Formats of other packages: a package with an entry point is put on the path, as an installed one would be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardstream import formats
from shardstream.errors import ManifestError
from shardstream.formats import _plugins, format_of, is_shard_name
from shardstream.index import build_manifest, expand_shards
from shardstream.testing import FormatTests, Row, read_all

PLUGIN = '''
"""Lines of numbers: a whole format in one file."""

import hashlib
from pathlib import Path

import numpy as np

from shardstream import storage
from shardstream.columns import Dense, Rows
from shardstream.errors import DecodeError, ManifestError, ReadError, ShardChangedError
from shardstream.formats import ShardIndex
from shardstream.manifest import ColumnSchema


class Numbers:
    def index_shard(self, url, options, storage_options):
        info = storage.stat(url, storage_options)
        rows = info.num_bytes // 8
        if info.num_bytes % 8:
            raise ManifestError("the shard is cut", url=url)
        data = storage.read_range(url, 0, info.num_bytes, storage_options)
        blocks = [rows] if rows else []
        return ShardIndex(
            format="numbers",
            num_bytes=info.num_bytes,
            version_tag=info.version_tag,
            digest=hashlib.blake2b(data, digest_size=16).hexdigest(),
            block_rows=np.array(blocks, np.int32),
            block_run_rows=np.array([min(100, rows)] * len(blocks), np.int32),
            block_offset=np.zeros(len(blocks), np.int64),
            block_num_bytes=np.array([info.num_bytes] * len(blocks), np.int64),
            columns=(ColumnSchema("n", "int32"), ColumnSchema("m", "int32")),
        )

    def ranges_of(self, shard, block, columns, first_run=0):
        return []

    def read_runs(self, shard, block, columns, first_run=0):
        names = ["n", "m"] if columns is None else list(columns)
        if not {"n", "m"}.issuperset(names):
            raise DecodeError(f"no such column: {names}", url=shard.url)
        num_bytes = storage.stat(shard.url, shard.storage_options).num_bytes
        data = storage.read_range(shard.url, 0, num_bytes, shard.storage_options)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        manifest = shard.manifest
        if digest != manifest.digests[shard.index]:
            was = f"{manifest.num_bytes[shard.index]} bytes, digest {manifest.digests[shard.index]}"
            found = f"{num_bytes} bytes, digest {digest}"
            raise ShardChangedError("the shard changed", url=shard.url, expected=was, found=found)
        pairs = np.frombuffer(data, "<i4").reshape(-1, 2)
        step = int(manifest.block_run_rows[block])
        for first in range(first_run * step, len(pairs), step):
            run = pairs[first : first + step]
            columns_ = {name: Dense(run[:, ["n", "m"].index(name)]) for name in names}
            yield Rows(len(run), columns_, run.nbytes)
'''


def install(folder: Path, name: str, entries: dict[str, str], source: str = PLUGIN) -> None:
    """What pip leaves of a package that has a module and entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{suffix} = {value}" for suffix, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[shardstream.formats]", *lines]) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path; what was found there is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    modules = set(sys.modules)
    _plugins.plugin_suffixes.cache_clear()
    yield folder
    _plugins.plugin_suffixes.cache_clear()
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", "") and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.usefixtures("site")
class TestNumbers(FormatTests):
    """A plug-in passes the tests that are published for plug-ins."""

    suffix = ".numbers"
    projection = ("m", "n")

    @pytest.fixture(autouse=True)
    def _installed(self, site):
        install(site, "numbers_plugin", {"numbers": "numbers_plugin:Numbers"})

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows = range(first_row, first_row + num_rows)
        path.write_bytes(b"".join(row.to_bytes(4, "little") + (2 * row).to_bytes(4, "little") for row in rows))
        return [{"n": row, "m": 2 * row} for row in rows]


def test_folders_are_searched_for_a_plug_ins_shards(site, tmp_path):
    install(site, "numbers_plugin", {"numbers": "numbers_plugin:Numbers"})
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.numbers").write_bytes(bytes(range(16)))
    (data / "notes.txt").write_text("no shard")
    assert [Path(url).name for url in expand_shards(data)] == ["a.numbers"]
    manifest = build_manifest(data, tmp_path / "m.manifest.parquet", num_workers=0)
    assert manifest.formats == ["numbers"]
    assert len(read_all(manifest)) == 2


def test_plug_ins_are_not_looked_for_while_endings_are_known(monkeypatch):
    monkeypatch.setattr(_plugins, "entry_points", lambda **_: pytest.fail("looked for plug-ins"))
    assert format_of("a.parquet").__class__.__name__ == "ParquetFormat"


def test_a_known_format_cannot_be_replaced(site):
    install(site, "evil_plugin", {"parquet": "evil_plugin:Numbers"})
    assert format_of("a.parquet").__class__.__name__ == "ParquetFormat"


@pytest.mark.parametrize(
    ("source", "value", "says"),
    [
        ("import nothere_at_all", "broken_plugin:Numbers", r"cannot be loaded.*nothere_at_all.*broken_plugin"),
        (PLUGIN, "broken_plugin:Missing", r"cannot be loaded.*Missing"),
        ("raise SystemError('no')", "broken_plugin:Numbers", r"cannot be loaded.*SystemError"),
        ("class Numbers: index_shard = print", "broken_plugin:Numbers", r"is no format.*no ranges_of, read_runs"),
        ("class Numbers:\n  def __init__(self, x): ...", "broken_plugin:Numbers", r"cannot be loaded.*TypeError"),
    ],
)
def test_a_broken_plug_in_is_named_and_harms_no_other_format(site, tmp_path, source, value, says):
    install(site, "broken_plugin", {"numbers": value}, source)
    assert is_shard_name("a.numbers")
    with pytest.raises(ManifestError, match=says) as raised:
        format_of("a.numbers")
    assert "a.numbers" in str(raised.value)
    assert format_of("a.tar").__class__.__name__ == "TarFormat"


def test_two_plug_ins_for_one_ending_are_refused(site):
    install(site, "one_plugin", {"numbers": "one_plugin:Numbers"})
    install(site, "two_plugin", {"numbers": "two_plugin:Numbers"})
    with pytest.raises(ManifestError, match=r"several plug-ins.*one_plugin.*two_plugin"):
        format_of("a.numbers")


def test_an_unknown_ending_lists_the_known_ones(site):
    install(site, "numbers_plugin", {"numbers": "numbers_plugin:Numbers"})
    with pytest.raises(ManifestError, match=r"no format.*\.mds.*\.numbers.*\.parquet"):
        format_of("a.xyz")
    assert not is_shard_name("pytorch_model.bin")
    assert formats.format_of("chunk-0-0.bin").__class__.__name__ == "LitDataFormat"
