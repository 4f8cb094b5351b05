"""A part of a local file that is mapped, and open: few large values of it cost less to read than their pages to map."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

from shardstream import storage
from shardstream.errors import ReadError
from shardstream.formats._shards import naming_damage

_MOST_OPEN = 128  # files of a process, of the 256 to 1,024 that systems allow


class OpenFile:
    """A file that is open as long as somebody holds this."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self.number).atexit = False  # a last batch may be made later


# By what they are, not by name: a file may be replaced while somebody holds the one before.
_files: WeakValueDictionary[tuple[int, int], OpenFile] = WeakValueDictionary()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def open_file(path: str) -> OpenFile | None:
    """Returns a file, shared with whoever has it open; None if this process has too many open for another one.

    Raises:
        OSError: If the file cannot be opened.
    """
    file = _files.get(_identity(Path(path).stat()))
    if file is None and len(_files) < _MOST_OPEN:
        file = OpenFile(path)
        file = _files.setdefault(_identity(os.fstat(file.number)), file)
    return file


@final
class FileRegion:
    """Bytes of a local file; see ``columns.ByteSource``. The file is open as long as somebody holds any.

    Args:
        values: Its mapping.
        file: The file.
        start: Where in it they begin.
        url: How messages call it.
        block: The block they are of.
    """

    def __init__(self, values: npt.NDArray[np.uint8], file: OpenFile, start: int, url: str, block: int) -> None:
        self.values, self._file, self._start, self._url, self._block = values, file, start, url, block

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes from ``begin`` to ``end``.

        Raises:
            ReadError: If the file has become shorter, or cannot be read.
        """
        num_bytes, at = end - begin, self._start + begin
        try:
            data = storage.read_at(self._file.number, at, num_bytes)
        except OSError:
            with naming_damage(self._url, self._block):
                raise
        if len(data) < num_bytes:
            raise ReadError(
                "the shard was cut while it was read",
                url=self._url,
                block=self._block,
                expected=f"{num_bytes} bytes at {at}",
                found=len(data),
                hint="write shards under another name, and rename them when they are whole",
            )
        return data
