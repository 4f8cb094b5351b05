"""Writes: a file appears whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from shardstream.errors import ReadError
from shardstream.storage._locations import local_path
from shardstream.storage._systems import Options, naming, retried


@contextlib.contextmanager
def write_atomic(url: str, storage_options: Options | None = None) -> Iterator[BinaryIO]:
    """Gives a file to write (and read back); what was written appears under ``url`` when the block ends, or not at all.

    Locally it is written beside its place under a temporary name, synced and renamed. For an object store it is kept
    in a local temporary file and put with one call.

    Raises:
        ReadError: If it cannot be written.
    """
    path = local_path(url)
    if path is None:
        with tempfile.NamedTemporaryFile(prefix="shardstream-") as file:
            yield cast("BinaryIO", file)
            file.flush()
            retried(url, storage_options, lambda fs, inner, limits: fs.put_file(file.name, inner, **limits), "write")
        return
    place = Path(path).absolute()
    if not place.parent.is_dir():
        hint = "make the folder first, or check the path"
        raise ReadError("cannot write the file", url=url, found=f"no folder {place.parent}", hint=hint)
    if place.is_dir():
        raise ReadError("cannot write the file", url=url, found="a folder of that name", hint="name a file in it")
    temporary = place.with_name(f".shardstream-{secrets.token_hex(8)}.tmp")
    with naming(url, "write"):  # the mode is that of any new file, as the user's umask has it
        number = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(number, "w+b") as file:
            yield cast("BinaryIO", file)
            file.flush()
            os.fsync(number)
        with naming(url, "write"):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(temporary.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
