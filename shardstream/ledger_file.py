"""JSON lines that a rank writes while it trains: one file per rank, attempt and ledger, cut into parts. Torch-free.

``rank-00003.attempt-0002.jsonl`` holds numbers (``shardstream.consumed``), ``rank-00003.attempt-0002.rounds.jsonl``
communication (``shardstream.rounds``). A file that has grown goes on in a part, ``….part-0001.jsonl``; each part begins
with the same first line. Each line is handed to the system at once, so SIGKILL loses at most the line being written: a
killed process leaves its last line cut, and no other line may be.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, final

from shardstream.errors import PlanError, ReadError

_NAME = re.compile(
    r"rank-(?P<rank>\d{5,})\.attempt-(?P<attempt>\d{4,})(?:\.(?P<ledger>[a-z]+))?(?:\.part-(?P<part>\d{4,}))?\.jsonl"
)
_NUM_KEPT_PARTS = 4  # of which the total bound consists at least, so that dropping one never drops nearly all


@dataclass(frozen=True, order=True)
class _Part:
    """One file of a folder, ordered as they were written."""

    attempt: int
    rank: int
    number: int
    ledger: str
    path: Path


def _parts(directory: str | os.PathLike[str]) -> list[_Part]:
    folder = Path(directory)
    names = [(path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())]
    found = [(path, name) for path, name in names if name is not None]
    return sorted(
        _Part(int(name["attempt"]), int(name["rank"]), int(name["part"] or 0), name["ledger"] or "", path)
        for path, name in found
    )


def next_attempt(directory: str | os.PathLike[str]) -> int:
    """Returns the number for a new attempt: one more than the highest in the folder, 0 if there is none.

    One process must ask and tell the others, before any of them logs.

    Args:
        directory: Folder of the logs; it need not exist.
    """
    return 1 + max((part.attempt for part in _parts(directory)), default=-1)


@final
class RotatedLines:
    """Appends JSON lines to a rank's file, and to further parts of it as it grows.

    The file is made with the first line. An existing one is never overwritten.

    Args:
        directory: Folder; made if missing.
        rank: This rank.
        attempt: Number of this start of the job.
        header: First line of every part.
        ledger: What is logged; "" for numbers.
        rotate_num_bytes: A part that is as large is followed by another.
        keep_num_bytes: What the parts of this rank, attempt and ledger may take together: the oldest are deleted.
            None keeps all.

    Raises:
        PlanError: If a bound is not positive.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lines = RotatedLines(folder, 3, 0, {"kind": "start"}, rotate_num_bytes=80)
        ...     for number in range(4):
        ...         lines.write({"kind": "number", "number": number})
        ...     lines.close()
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['rank-00003.attempt-0000.jsonl', 'rank-00003.attempt-0000.part-0001.jsonl']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        attempt: int,
        header: Mapping[str, Any],
        *,
        ledger: str = "",
        rotate_num_bytes: int = 64 << 20,
        keep_num_bytes: int | None = None,
    ) -> None:
        for name, value in (("rotate_num_bytes", rotate_num_bytes), ("keep_num_bytes", keep_num_bytes)):
            if value is not None and value < 1:
                raise PlanError(f"{name} must be positive", found=value)
        self._folder, self._rank, self._attempt, self._header = Path(directory), rank, attempt, header
        self._ledger, self._keep_num_bytes = ledger, keep_num_bytes
        at_most = rotate_num_bytes if keep_num_bytes is None else max(1, keep_num_bytes // _NUM_KEPT_PARTS)
        self._rotate_num_bytes = min(rotate_num_bytes, at_most)
        self._file: FileIO | None = None
        self._num_parts = self._num_bytes = 0
        self._path = Path()
        self._closed: list[tuple[Path, int]] = []

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines.

        Raises:
            ReadError: If another file of this rank and attempt exists.
        """
        if self._file is None or self._num_bytes >= self._rotate_num_bytes:
            self._next_part()
            lines = (self._header, *lines)
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        assert self._file is not None  # noqa: S101 - narrows the type
        self._file.write(data)
        self._num_bytes += len(data)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _next_part(self) -> None:
        if self._file is not None:
            self._file.close()
            self._closed.append((self._path, self._num_bytes))
        self._folder.mkdir(parents=True, exist_ok=True)
        ledger = f".{self._ledger}" if self._ledger else ""
        part = f".part-{self._num_parts:04d}" if self._num_parts else ""
        path = self._folder / f"rank-{self._rank:05d}.attempt-{self._attempt:04d}{ledger}{part}.jsonl"
        try:
            # Unbuffered: what was written is the system's, whatever becomes of this process.
            self._file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644), "w")
        except FileExistsError:
            hint = "ask next_attempt() once, on one rank, and tell the others"
            raise ReadError("a log of this rank and attempt exists", url=str(path), hint=hint) from None
        self._num_parts, self._num_bytes = self._num_parts + 1, 0
        self._path = path
        if self._keep_num_bytes is not None:
            while sum(size for _, size in self._closed) > self._keep_num_bytes - self._rotate_num_bytes:
                self._closed.pop(0)[0].unlink(missing_ok=True)


@dataclass(frozen=True)
class LoggedLines:
    """What one rank logged in one attempt.

    Attributes:
        path: The file, or its oldest part that is left.
        attempt: The attempt.
        rank: The rank.
        head: The first line.
        entries: The other lines, each with its ``kind``.
        is_cut: Whether the last line is cut.
        num_dropped_parts: How many parts were dropped to keep the bound: what they held is not known.
    """

    path: Path
    attempt: int
    rank: int
    head: Mapping[str, Any]
    entries: tuple[Mapping[str, Any], ...]
    is_cut: bool
    num_dropped_parts: int


def read_lines(directory: str | os.PathLike[str], ledger: str = "") -> tuple[list[LoggedLines], list[Path]]:
    """Reads a ledger of all ranks and attempts.

    Args:
        directory: The folder.
        ledger: Which one; "" for numbers.

    Returns:
        What was logged, by attempt and rank; and files in which not even the first line is whole (killed at once).

    Raises:
        ReadError: If a file is damaged other than by a cut last line, or a part is missing between others.
    """
    logs, empty = [], []
    by_rank: dict[tuple[int, int], list[_Part]] = {}
    for part in _parts(directory):
        if part.ledger == ledger:
            by_rank.setdefault((part.attempt, part.rank), []).append(part)
    for parts in by_rank.values():
        log = _read_rank(parts)
        if log is None:
            empty.append(parts[0].path)
        else:
            logs.append(log)
    return logs, empty


def _read_rank(parts: list[_Part]) -> LoggedLines | None:
    entries: list[dict[str, Any]] = []
    head, is_cut = None, False
    for number, part in enumerate(parts, parts[0].number):
        url = str(part.path)
        if is_cut or part.number != number:
            found = f"{part.path.name} after a {'cut line' if is_cut else 'gap'}"
            raise ReadError("a part of a log is missing or cut", url=url, expected=f"part {number}", found=found)
        lines = part.path.read_bytes().split(b"\n")
        is_cut = lines.pop() != b""  # after the last newline there is nothing, unless the line was cut
        if not lines:
            is_cut = True
            continue
        first, *rest = (_entry(url, row, line) for row, line in enumerate(lines))
        if first.get("kind") != "start":
            raise ReadError("a log does not begin with its start", url=url, found=first.get("kind"))
        head = first if head is None else head
        entries += rest
    if head is None:
        return None
    first_part = parts[0]
    place = (first_part.path, first_part.attempt, first_part.rank)
    return LoggedLines(*place, head, tuple(entries), is_cut, num_dropped_parts=first_part.number)


def _entry(url: str, row: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ReadError("a line of a log is damaged", url=url, row=row, found=str(error)[:200]) from None
    if not isinstance(entry, dict):
        raise ReadError("a line of a log is no JSON object", url=url, row=row, found=type(entry).__name__)
    return entry
