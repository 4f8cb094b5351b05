"""The log of what each rank trained on: JSON lines, one file a rank and attempt. Torch-free.

``rank-00003.attempt-0002.jsonl``: a ``start`` line (who, from which cursor, by which plan), a ``window`` line for each
window after it was trained on, and ``end`` if the run ended by itself. Kinds that a reader does not know it skips and
counts. A killed process leaves its last line cut; no other line may be.

An attempt begins at a cursor. What earlier attempts logged from there on was trained and then rolled back with the
crash: it does not count as consumed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError, ReadError
from shardstream.manifest import Manifest
from shardstream.packing import Packed, Packing
from shardstream.permutation import mix64
from shardstream.plan import Plan

LOG_VERSION = 1

_NAME = re.compile(r"rank-(?P<rank>\d{5,})\.attempt-(?P<attempt>\d{4,})\.jsonl")
_PLAN_FIELDS = ("seed", "batch_size", "accumulate", "lanes", "shuffle", "tail")


def id_checksum(ids: npt.ArrayLike) -> int:
    """Returns the sum of ``mix64(id + 1)`` modulo 2^64: the same for any order of the ids, another for other ids.

    Args:
        ids: Integers of any shape.

    Example:
        >>> id_checksum([1, 2]) == id_checksum([2, 1]) != id_checksum([1, 1])
        True
    """
    words = (np.asarray(ids, np.int64).ravel() + 1).astype(np.uint64)
    return int(mix64(words).sum(dtype=np.uint64))


def next_attempt(directory: str | os.PathLike[str]) -> int:
    """Returns the number for a new attempt: one more than the highest in the folder, 0 if there is none.

    One process must ask and tell the others, before any of them logs.

    Args:
        directory: Folder of the logs; it need not exist.
    """
    return 1 + max((int(found["attempt"]) for _, found in _files(directory)), default=-1)


def _files(directory: str | os.PathLike[str]) -> list[tuple[Path, re.Match[str]]]:
    folder = Path(directory)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(path, found) for path in paths if (found := _NAME.fullmatch(path.name))]


@final
class ConsumedLog:
    """Writes what one rank trained on; a context manager.

    The file is made with the first window and each line is handed to the system at once, so that SIGKILL loses at most
    the line being written. An existing file is never overwritten.

    Args:
        directory: Folder of the logs; made if missing.
        rank: This rank.
        world_size: Number of ranks.
        attempt: Number of this start of the job, the same on every rank: see ``next_attempt``.
        start: Where this attempt begins.
        plan: The plan that it follows.
        with_ids: Whether to log sample ids, or only their checksum.

    Example:
        >>> import tempfile
        >>> from shardstream.manifest import Manifest
        >>> plan = Plan.make(Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=2), batch_size=2)
        >>> folder = tempfile.TemporaryDirectory()
        >>> with folder, ConsumedLog(folder.name, 0, 1, next_attempt(folder.name), plan.cursor(), plan) as log:
        ...     log.window(epoch=0, position=0, ids=[1, 0])
        ...     print([path.name for path in Path(folder.name).iterdir()])
        ['rank-00000.attempt-0000.jsonl']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        world_size: int,
        attempt: int,
        start: Cursor,
        plan: Plan,
        *,
        with_ids: bool = True,
    ) -> None:
        self._path = Path(directory) / f"rank-{rank:05d}.attempt-{attempt:04d}.jsonl"
        self._with_ids = with_ids
        self._file: FileIO | None = None
        self._header = {
            "kind": "start",
            "version": LOG_VERSION,
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "cursor": start.state_dict(),
            "fingerprint": plan.manifest.fingerprint,
            "plan": {name: getattr(plan, name) for name in _PLAN_FIELDS},
        }

    def window(
        self,
        *,
        epoch: int,
        position: int,
        ids: npt.ArrayLike,
        num_padding: int = 0,
        masked_ids: Iterable[int] = (),
        sums: Mapping[str, float] | None = None,
    ) -> None:
        """Logs one window, after it was trained on.

        Args:
            epoch: Epoch in which the window begins.
            position: Position where it begins (``batch.position``).
            ids: int64[n], ids of this rank's real samples of it, in any order; no padding.
            num_padding: How many rows only filled its micro-batches.
            masked_ids: Samples that were dealt but could not be decoded or were rejected; they became padding.
            sums: What was summed per head, to be kept beside it; or None.

        Raises:
            ReadError: If another file of this attempt and rank exists.
        """
        numbers = np.asarray(ids, np.int64).ravel()
        line: dict[str, Any] = {"kind": "window", "epoch": epoch, "position": position, "num_samples": len(numbers)}
        line |= {"num_padding": num_padding, "checksum": f"{id_checksum(numbers):016x}"}
        if self._with_ids:
            line["ids"] = numbers.tolist()
        if masked := [int(k) for k in masked_ids]:
            line["masked_ids"] = masked
        if sums is not None:
            line["sums"] = dict(sums)
        self._write(line)

    def end(self) -> None:
        """Logs that the run ended by itself, and closes the file."""
        self._write({"kind": "end"})
        self.close()

    def close(self) -> None:
        """Closes the file without saying that the run ended."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> ConsumedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        lines = [line]
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            try:
                # Unbuffered: what was written is the system's, whatever becomes of this process.
                self._file = FileIO(os.open(self._path, flags, 0o644), "w")
            except FileExistsError:
                hint = "ask next_attempt() once, on one rank, and tell the others"
                raise ReadError("a log of this rank and attempt exists", url=str(self._path), hint=hint) from None
            lines = [self._header, line]
        self._file.write("".join(json.dumps(each) + "\n" for each in lines).encode())


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class LoggedWindow:
    """One window as a rank logged it; ``ids`` is None where only the checksum was."""

    epoch: int
    position: int
    num_samples: int
    num_padding: int
    checksum: str
    ids: tuple[int, ...] | None
    masked_ids: tuple[int, ...]


@dataclass(frozen=True)
class RankLog:
    """What one rank logged in one attempt.

    Attributes:
        path: The file.
        attempt: The attempt.
        rank: The rank.
        world_size: Number of ranks of the attempt.
        start: Where it began.
        fingerprint: Of the manifest.
        settings: Settings of the plan.
        windows: What it trained on, in order.
        has_ended: Whether it ended by itself.
        is_cut: Whether its last line is cut.
        num_unknown: Lines of kinds that are not known here.
    """

    path: Path
    attempt: int
    rank: int
    world_size: int
    start: Cursor
    fingerprint: str
    settings: Mapping[str, Any]
    windows: tuple[LoggedWindow, ...]
    has_ended: bool
    is_cut: bool
    num_unknown: int

    def plan(self, manifest: Manifest) -> Plan:
        """Returns the plan that the attempt followed.

        Raises:
            PlanError: If it packed sequences and the manifest has no token counts.
        """
        packing = self.start.packing
        packed = None if packing is None else Packed.of(manifest, Packing(**packing))
        settings = {name: self.settings[name] for name in _PLAN_FIELDS}
        return Plan(manifest, world_size=self.world_size, packed=packed, **settings)


def read_logs(directory: str | os.PathLike[str]) -> tuple[list[RankLog], list[Path]]:
    """Reads all logs of a folder.

    Args:
        directory: The folder.

    Returns:
        The logs, by attempt and rank; and files in which not even the first line is whole (killed at once).

    Raises:
        ReadError: If there is no log, or one is damaged other than by a cut last line.
    """
    logs, empty = [], []
    for path, _ in _files(directory):
        log = _read_log(path)
        if log is None:
            empty.append(path)
        else:
            logs.append(log)
    if not logs:
        expected = "rank-00000.attempt-0000.jsonl and so on"
        raise ReadError("no log of consumed samples", url=str(directory), expected=expected, found=f"{len(empty)} cut")
    return sorted(logs, key=lambda log: (log.attempt, log.rank)), empty


def _read_log(path: Path) -> RankLog | None:
    lines = path.read_bytes().split(b"\n")
    is_cut = lines.pop() != b""  # after the last newline there is nothing, unless the line was cut
    if not lines:
        return None
    entries = [_entry(path, row, line) for row, line in enumerate(lines)]
    head = entries[0]
    if head.get("kind") != "start":
        raise ReadError("a log does not begin with its start", url=str(path), found=head.get("kind"))
    version = head.get("version")
    if version != LOG_VERSION:
        hint = "upgrade shardstream" if isinstance(version, int) and version > LOG_VERSION else None
        raise ReadError("unknown version of a log", url=str(path), expected=LOG_VERSION, found=version, hint=hint)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in entries[1:]:
        by_kind.setdefault(str(entry.get("kind")), []).append(entry)
    windows, ends = by_kind.pop("window", []), by_kind.pop("end", [])
    try:
        return RankLog(
            path=path,
            attempt=int(head["attempt"]),
            rank=int(head["rank"]),
            world_size=int(head["world_size"]),
            start=Cursor.from_state_dict(head["cursor"]),
            fingerprint=str(head["fingerprint"]),
            settings={name: head["plan"][name] for name in _PLAN_FIELDS},
            windows=tuple(map(_window, windows)),
            has_ended=bool(ends),
            is_cut=is_cut,
            num_unknown=sum(map(len, by_kind.values())),
        )
    except (KeyError, TypeError, ValueError, CursorError, PlanError) as error:
        raise ReadError("a log has lines that are not understood", url=str(path), found=repr(error)[:200]) from None


def _entry(path: Path, row: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ReadError("a line of a log is damaged", url=str(path), row=row, found=str(error)[:200]) from None
    if not isinstance(entry, dict):
        raise ReadError("a line of a log is no JSON object", url=str(path), row=row, found=type(entry).__name__)
    return entry


def _window(entry: Mapping[str, Any]) -> LoggedWindow:
    ids = entry.get("ids")
    return LoggedWindow(
        epoch=int(entry["epoch"]),
        position=int(entry["position"]),
        num_samples=len(ids) if ids is not None else int(entry["num_samples"]),
        num_padding=int(entry["num_padding"]),
        checksum=str(entry["checksum"]),
        ids=None if ids is None else tuple(map(int, ids)),
        masked_ids=tuple(map(int, entry.get("masked_ids", ()))),
    )
