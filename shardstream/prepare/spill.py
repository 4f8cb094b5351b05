"""The shuffle in bounded memory: samples are scattered into buckets on a local disk, each of which is sorted by itself.

A *spill* is two files: samples sorted by position and cut by bucket, each cut compressed by itself; and where the cuts
are. A bucket's samples are read from every spill, so memory holds one bucket and disk the data once.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import zstandard

from shardstream.errors import ReadError
from shardstream.manifest import Int64Array

POSITION = "__position__"
_LEVEL = 1
_OURS = re.compile(r"\d+(-\d+)?\.(data|index|done)(\.[0-9a-f]{8}\.unfinished)?")


@dataclass(frozen=True)
class Spills:
    """The spills of a shuffle.

    Attributes:
        folder: A local folder.
        ends: int64[buckets], the position at which each bucket ends.
        num_bytes: Of decoded samples that are held before they are spilled.
    """

    folder: str
    ends: Int64Array
    num_bytes: int

    def scatter(self, task: int, tables: Iterable[tuple[pa.Table, Int64Array]]) -> int:
        """Spills the samples of a task, and writes down that it is done.

        Args:
            task: Its index.
            tables: Samples, and the position of each.

        Returns:
            How many samples there were.

        Raises:
            ReadError: If the disk is full or fails.
        """
        held: list[pa.Table] = []
        num_held_bytes = num_samples = num_spills = 0
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            for table, positions in tables:
                held.append(table.append_column(POSITION, pa.array(positions)))
                num_samples += len(positions)
                num_held_bytes += table.nbytes
                if num_held_bytes >= self.num_bytes:
                    self._spill(task, num_spills, held)
                    held, num_held_bytes, num_spills = [], 0, num_spills + 1
            if held:
                self._spill(task, num_spills, held)
                num_spills += 1
            _write(self._record(task), json.dumps({"num_spills": num_spills, "num_samples": num_samples}).encode())
        except OSError as error:
            hint = "name a folder with more room (--spill-dir)"
            raise ReadError("cannot write to the spill folder", url=self.folder, found=error, hint=hint) from error
        return num_samples

    def num_scattered(self, task: int) -> int | None:
        """Returns how many samples a task spilled, or None if it is not done."""
        try:
            return int(json.loads(self._record(task).read_bytes())["num_samples"])
        except (OSError, ValueError, KeyError):
            return None

    def gather(self, num_tasks: int, first: int, end: int) -> Iterator[pa.Table]:
        """Yields the samples at positions ``first`` to ``end - 1`` in order, bucket by bucket.

        Raises:
            ReadError: If a spill is damaged or gone, or a sample is missing.
        """
        spills = [(task, spill) for task in range(num_tasks) for spill in range(self._num_spills(task))]
        begin = int(np.searchsorted(self.ends, first, side="right"))
        for bucket in range(begin, int(np.searchsorted(self.ends, end, side="left")) + 1):
            lowest = int(self.ends[bucket - 1]) if bucket else 0
            highest = int(self.ends[bucket])
            try:
                parts = list(self._bucket(spills, bucket))
            except (OSError, ValueError, zstandard.ZstdError, pa.ArrowException) as error:
                hint = "delete the spill folder, and run the command again"
                raise ReadError("a spill cannot be read", url=self.folder, found=error, hint=hint) from error
            table = pa.Table.from_batches(parts)
            del parts
            positions = table.column(POSITION).to_numpy()
            order = np.argsort(positions)
            if not np.array_equal(positions[order], np.arange(lowest, highest)):
                found = f"{len(positions)} samples"
                what, hint = "samples are missing in a spill", "delete the spill folder, and run the command again"
                raise ReadError(what, url=self.folder, expected=f"{highest - lowest}", found=found, hint=hint)
            yield table.drop_columns([POSITION]).take(pa.array(order))

    def clear(self) -> None:
        """Deletes the spills, and the folder if nothing else is in it."""
        folder = Path(self.folder)
        for path in folder.iterdir() if folder.is_dir() else ():
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _num_spills(self, task: int) -> int:
        try:
            return int(json.loads(self._record(task).read_bytes())["num_spills"])
        except (OSError, ValueError, KeyError) as error:
            raise ReadError("a spill is gone", url=self.folder, found=error, hint="run the command again") from error

    def _bucket(self, spills: list[tuple[int, int]], bucket: int) -> Iterator[pa.RecordBatch]:
        for task, spill in spills:
            with self._path(task, spill, "index").open("rb") as file:
                file.seek(8 * bucket)
                start, end = np.frombuffer(file.read(16), np.int64).tolist()
            if start == end:
                continue
            with self._path(task, spill, "data").open("rb") as file:
                file.seek(start)
                data = zstandard.decompress(file.read(end - start))
            with pa.ipc.open_stream(data) as stream:
                yield from stream

    def _spill(self, task: int, number: int, held: list[pa.Table]) -> None:
        table = pa.concat_tables(held)
        held.clear()
        order = pc.sort_indices(table.column(POSITION))
        table = table.take(order).combine_chunks()
        cuts = np.searchsorted(table.column(POSITION).to_numpy(), np.concatenate([[0], self.ends]), side="left")
        offsets = np.zeros(len(self.ends) + 1, np.int64)
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        unfinished = _unfinished(self._path(task, number, "data"))
        with unfinished.open("wb") as file:
            for bucket, (begin, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
                if begin < end:
                    file.write(compressor.compress(_stream_of(table.slice(begin, end - begin))))
                offsets[bucket + 1] = file.tell()
        unfinished.replace(self._path(task, number, "data"))
        _write(self._path(task, number, "index"), offsets.tobytes())

    def _path(self, task: int, spill: int, kind: str) -> Path:
        return Path(self.folder, f"{task}-{spill}.{kind}")

    def _record(self, task: int) -> Path:
        return Path(self.folder, f"{task}.done")


def _stream_of(table: pa.Table) -> Any:
    """A table as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _unfinished(path: Path) -> Path:
    """Another name each time: an engine that gave a worker up may let two do the same."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")


def _write(path: Path, data: bytes) -> None:
    unfinished = _unfinished(path)
    unfinished.write_bytes(data)
    unfinished.replace(path)
