"""Makes a small text corpus of what every machine has: the source files of the Python standard library.

Or, with ``--source descriptions``, the descriptions of the packages that are installed. One document per file, its
bytes the tokens. Written as Parquet shards, tar shards (WebDataset) and ``.tar.zst`` shards of the same documents, each
kind in a folder of its own. Deterministic for one interpreter and seed.

    python tools/make_corpus.py build/corpus --num-shards 8 --max-document-bytes 1024
"""

from __future__ import annotations

import io
import json
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from shardstream.permutation import key64, keyed_permutation

FEWEST_GROUP_ROWS = 64
MOST_GROUP_ROWS = 1000
SCHEMA = pa.schema([("id", pa.int64()), ("path", pa.string()), ("tokens", pa.list_(pa.int32()))])

# Name → where its files lie (a key of ``sysconfig.get_paths``), and which they are.
SOURCES = {"stdlib": ("stdlib", "*.py"), "descriptions": ("purelib", "*.dist-info/METADATA")}

_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One source file.

    Attributes:
        id: Place of the file in the sorted list of all of them: the same whichever part of the list is taken.
        path: Path below the library's folder, with forward slashes.
        data: The file's bytes, cut where that was asked for; empty for an empty file.
    """

    id: int
    path: str
    data: bytes


# ------------------------------------------------------------------------------------------------------------ choosing


def list_sources(library: Path, pattern: str = "*.py") -> list[str]:
    """Returns the paths of all such files below ``library``, sorted; installed packages and caches are left out."""
    paths = (path.relative_to(library) for path in library.rglob(pattern))
    return sorted(path.as_posix() for path in paths if _NOT_SOURCES.isdisjoint(path.parts))


def choose_ids(num_sources: int, num_documents: int | None, seed: int) -> list[int]:
    """Chooses which files become documents.

    Args:
        num_sources: Number of files there are.
        num_documents: How many to take, or None for all.
        seed: Decides which.

    Returns:
        Their ids, ascending; all there are where fewer exist than were asked for.

    Example:
        >>> choose_ids(5, None, seed=0), len(choose_ids(1000, 10, seed=0))
        ([0, 1, 2, 3, 4], 10)
    """
    chosen = keyed_permutation(num_sources, key64(seed, 0, "corpus"))[:num_documents]
    return [int(i) for i in np.sort(chosen)]


def split_unevenly(num_documents: int, num_shards: int, seed: int) -> list[int]:
    """Splits documents over shards of different sizes; the largest holds up to twice as many as the smallest.

    Returns:
        The number of documents of each shard; their sum is ``num_documents``.

    Example:
        >>> split_unevenly(1000, 4, seed=0)
        [227, 318, 273, 182]
    """
    weights = num_shards + keyed_permutation(num_shards, key64(seed, 0, "shards"))
    ends = np.cumsum(weights) * num_documents // weights.sum()
    return [int(n) for n in np.diff(ends, prepend=0)]


def group_sizes(num_rows: int, shard: int, seed: int) -> list[int]:
    """Cuts the rows of a shard into groups of 64 to 1,000; a shard of fewer than 64 rows is one group.

    Example:
        >>> group_sizes(40, shard=0, seed=0), group_sizes(0, shard=0, seed=0)
        ([40], [])
    """
    sizes: list[int] = []
    while num_rows:
        spread = MOST_GROUP_ROWS - FEWEST_GROUP_ROWS + 1
        size = FEWEST_GROUP_ROWS + key64(seed, 0, "groups", shard, len(sizes)) % spread
        if num_rows - size < FEWEST_GROUP_ROWS:  # a rest that is too small for a group of its own
            size = num_rows if num_rows <= MOST_GROUP_ROWS else num_rows - FEWEST_GROUP_ROWS
        sizes.append(size)
        num_rows -= size
    return sizes


def group_documents(documents: Sequence[Document], num_shards: int, seed: int) -> list[list[Sequence[Document]]]:
    """Lays the documents out, in their order: a list of shards, each a list of groups, each some documents."""
    rest = iter(documents)
    shards = enumerate(split_unevenly(len(documents), num_shards, seed))
    return [[_take(rest, size) for size in group_sizes(num_rows, shard, seed)] for shard, num_rows in shards]


def _take(documents: Iterator[Document], count: int) -> list[Document]:
    return [next(documents) for _ in range(count)]


def read_documents(
    library: Path, ids: Iterable[int], max_document_bytes: int | None, pattern: str = "*.py"
) -> list[Document]:
    """Reads the chosen files, each up to ``max_document_bytes`` bytes (None: whole)."""
    sources = list_sources(library, pattern)
    return [Document(i, sources[i], (library / sources[i]).read_bytes()[:max_document_bytes]) for i in ids]


# ------------------------------------------------------------------------------------------------------------- writing


def to_table(documents: Sequence[Document]) -> pa.Table:
    """Returns documents as a table of ``SCHEMA``: the tokens of a document are its bytes as int32."""
    offsets = np.cumsum([0, *(len(document.data) for document in documents)], dtype=np.int32)
    values = np.frombuffer(b"".join(document.data for document in documents), np.uint8).astype(np.int32)
    ids = [document.id for document in documents]
    paths = [document.path for document in documents]
    return pa.table([ids, paths, pa.ListArray.from_arrays(offsets, values)], schema=SCHEMA)


def write_parquet(file: IO[bytes], groups: Iterable[Sequence[Document]]) -> None:
    """Writes a Parquet shard, one row group for each group; without groups it has a schema and no rows."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for documents in groups:
            writer.write_table(to_table(documents), row_group_size=MOST_GROUP_ROWS)


def write_tar(file: IO[bytes], groups: Iterable[Sequence[Document]]) -> None:
    """Writes a WebDataset shard: ``<id>.txt`` with the bytes and ``<id>.json`` with id and path of each document."""
    _write_members(file, groups, lambda: None)


def write_tar_zst(file: IO[bytes], groups: Iterable[Sequence[Document]]) -> None:
    """Writes a compressed WebDataset shard, one zstd frame for each group, so that readers can enter at any of them."""
    with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
        _write_members(stream, groups, lambda: stream.flush(zstandard.FLUSH_FRAME))


def _write_members(file: Any, groups: Iterable[Sequence[Document]], end_group: Callable[[], object]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for documents in groups:
            for document in documents:
                about = json.dumps({"id": document.id, "path": document.path}).encode()
                for suffix, data in (("txt", document.data), ("json", about)):
                    member = tarfile.TarInfo(f"{document.id:06d}.{suffix}")  # no owner, no time: the same every run
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
            end_group()


FORMATS: dict[str, Callable[[IO[bytes], Iterable[Sequence[Document]]], None]] = {
    "parquet": write_parquet,
    "tar": write_tar,
    "tar.zst": write_tar_zst,
}


def write_format(folder: Path, name: str, shards: Sequence[Iterable[Sequence[Document]]]) -> tuple[int, int]:
    """Writes all shards of one format as ``folder/shard-00000.<name>`` and so on.

    Returns:
        The number of shards and of bytes written.
    """
    folder.mkdir(parents=True)
    num_bytes = 0
    for index, groups in enumerate(shards):
        path = folder / f"shard-{index:05d}.{name}"
        with path.open("xb") as file:
            FORMATS[name](file, groups)
        num_bytes += path.stat().st_size
    return len(shards), num_bytes


def _parse_formats(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    names = value.split(",")
    if unknown := sorted(set(names) - set(FORMATS)):
        raise click.BadParameter(f"expected some of {', '.join(FORMATS)}; found {', '.join(unknown)}")
    return list(dict.fromkeys(names))


@click.command()
@click.argument("outdir", type=click.Path(path_type=Path, file_okay=False))
@click.option("--num-shards", type=click.IntRange(1), default=8, show_default=True, help="Shards with documents.")
@click.option("--formats", callback=_parse_formats, default="parquet,tar,tar.zst", show_default=True)
@click.option("--max-document-bytes", type=click.IntRange(1), help="Cut longer files here.  [default: whole files]")
@click.option("--num-documents", type=click.IntRange(1), help="Take this many files.  [default: all]")
@click.option("--source", type=click.Choice(list(SOURCES)), default="stdlib", show_default=True, help="Whose files.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Which files, and how they lie.")
def main(
    outdir: Path,
    num_shards: int,
    formats: list[str],
    max_document_bytes: int | None,
    num_documents: int | None,
    source: str,
    seed: int,
) -> None:
    """Writes the Python standard library's source files as shards: OUTDIR/parquet, OUTDIR/tar and OUTDIR/tar.zst.

    With --source descriptions, the descriptions (METADATA) of installed packages instead.

    The Parquet shards come with one more, in their middle, that has no rows.
    """
    if taken := [name for name in formats if (outdir / name).exists()]:
        raise click.UsageError(f"{outdir / taken[0]} exists: old shards would mix with new ones; remove it first")
    folder, pattern = SOURCES[source]
    library = Path(sysconfig.get_paths()[folder])
    ids = choose_ids(len(list_sources(library, pattern)), num_documents, seed)
    documents = read_documents(library, ids, max_document_bytes, pattern)
    shards = group_documents(documents, num_shards, seed)
    for name in formats:
        empty: list[list[Sequence[Document]]] = [[]] if name == "parquet" else []
        middle = len(shards) // 2
        written, num_bytes = write_format(outdir / name, name, [*shards[:middle], *empty, *shards[middle:]])
        click.echo(f"{name}: {written} shards, {len(documents):,} documents, {num_bytes:,} bytes in {outdir / name}")


if __name__ == "__main__":
    main()
