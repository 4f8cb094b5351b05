"""The journal of an output: what was decided, and which parts are whole. It lies in a hidden folder of the output.

A part is written under another name and renamed; then its record is written. So after a kill at any moment a part with
a record is whole, and one without is written again. Nothing but records tells what is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardstream import storage
from shardstream.errors import PlanError, ReadError, shown_url

HIDDEN = ".shardstream"
VERSION = 1
_NUM_THREADS = 16


@dataclass(frozen=True)
class PartRecord:
    """What is known of a whole part.

    Attributes:
        index: Of the part.
        name: Of its file.
        num_samples: Samples in it.
        num_bytes: Size of the file.
        digest: blake2b of the file, 32 hex digits.
        notes: What its writer noticed, and of how many samples.
    """

    index: int
    name: str
    num_samples: int
    num_bytes: int
    digest: str
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Journal:
    """The files beside an output.

    Attributes:
        output: Folder of the output, an absolute location without a slash at its end.
        storage_options: Given to fsspec.
    """

    output: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def url(self, *names: str) -> str:
        """Returns the location of a file of the journal."""
        return "/".join([self.output, HIDDEN, *names])

    def part_url(self, name: str) -> str:
        """Returns the location of a part."""
        return f"{self.output}/{name}"

    def read_plan(self) -> dict[str, Any] | None:
        """Returns what was decided, or None if nothing was.

        Raises:
            PlanError: If the output holds files of something else, or the journal cannot be read.
        """
        if storage.kind_of(self.url("plan.json"), self.storage_options) is None:
            self._check_empty()
            return None
        plan = self._read("plan.json")
        if plan.get("version") != VERSION:
            what, hint = "the output was begun by another version of shardstream", "name another folder"
            raise PlanError(what, url=self.output, expected=VERSION, found=plan.get("version"), hint=hint)
        return plan

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Writes down what was decided."""
        self._write(plan, "plan.json")

    def records(self) -> dict[int, PartRecord]:
        """Returns the records of whole parts by index; one whose file is gone or of another size is not whole."""
        folder = self.url("parts")
        if storage.kind_of(folder, self.storage_options) is None:
            return {}
        names = [url.rpartition("/")[2] for url in storage.list_files(folder, self.storage_options)]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            found = pool.map(self._record, sorted(name for name in names if name.endswith(".json")))
            return {record.index: record for record in found if record is not None}

    def add(self, record: PartRecord) -> None:
        """Writes down that a part is whole."""
        self._write(asdict(record), "parts", f"{record.index}.json")

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Gives a file to write a part to; it appears under its name when the block ends, or not at all."""
        path = storage.local_path(self.part_url(name))
        if path is None:
            with storage.write_atomic(self.part_url(name), self.storage_options) as file:
                yield file
            return
        # Another name each time: an engine that gave a worker up may let two write the same.
        unfinished = Path(self._local("writing"), f"{name}.{secrets.token_hex(8)}")
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise ReadError("cannot write the file", url=path, found=error, hint="is the disk full?") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run out of a local output, and clears away what a killed one left half written.

        Raises:
            PlanError: If another run is writing there.
        """
        if storage.local_path(self.output) is None:
            yield
            return
        folder = Path(self._local())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = Path(folder, "lock").open("w")  # noqa: SIM115 - closed below
        except OSError as error:
            raise PlanError("cannot write to the output", url=self.output, found=error) from error
        with file:  # the lock ends with the process, however it ends
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                what, hint = "another run is writing to this output", "wait for it, or name another folder"
                raise PlanError(what, url=self.output, hint=hint) from error
            self._clear("writing")
            yield

    def _clear(self, name: str) -> None:
        folder = Path(self._local(name))
        for path in folder.iterdir() if folder.is_dir() else ():
            path.unlink(missing_ok=True)

    def _local(self, *names: str) -> str:
        return cast("str", storage.local_path(self.url(*names)))

    def _check_empty(self) -> None:
        kind = storage.kind_of(self.output, self.storage_options)
        if kind == "file":
            raise PlanError("the output is a file", url=self.output, hint="name a folder")
        found = storage.list_files(self.output, self.storage_options) if kind else []
        if found:
            what = "the output is not empty, and what is in it was not begun by this command"
            shown = shown_url(min(found))
            raise PlanError(what, url=self.output, found=shown, hint="name another folder, or empty it")

    def _record(self, name: str) -> PartRecord | None:
        try:
            record = PartRecord(**self._read("parts", name))
            info = storage.stat(self.part_url(record.name), self.storage_options)
        except (ReadError, TypeError):
            return None
        return record if info.num_bytes == record.num_bytes else None

    def _read(self, *names: str) -> dict[str, Any]:
        url = self.url(*names)
        with storage.open_source(url, self.storage_options) as file:
            data = file.read()
        try:
            return cast("dict[str, Any]", json.loads(data))
        except ValueError as error:
            raise PlanError("the journal of the output is damaged", url=url, hint="name another folder") from error

    def _write(self, value: Mapping[str, Any], *names: str) -> None:
        url = self.url(*names)
        path = storage.local_path(url)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with storage.write_atomic(url, self.storage_options) as file:
            file.write(json.dumps(value, indent=1).encode())


class DigestingFile(io.RawIOBase):
    """A file that is written front to back and digests what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file, self._hasher = file, hashlib.blake2b(digest_size=16)
        self.num_bytes = 0

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any) -> int:
        """Writes all of it."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hasher.update(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Returns how many bytes were written."""
        return self.num_bytes

    @property
    def digest(self) -> str:
        """32 hex digits of what was written so far."""
        return self._hasher.hexdigest()
