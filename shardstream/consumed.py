"""The log of what each rank trained on: numbers, as JSON lines. Torch-free.

``rank-00003.attempt-0002.jsonl``: a ``start`` line (who, from which cursor, by which plan), a ``window`` line for each
window once its samples are in the gradients, ``sums`` of its losses, an ``epoch`` line for each epoch that was proved
while the run went on, and ``end`` if it ended by itself. Kinds that a reader does not know it skips and counts.

An attempt begins at a cursor. What earlier attempts logged from there on was trained and then rolled back with the
crash: it does not count as consumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError, ReadError
from shardstream.ledger_file import LoggedLines, RotatedLines, next_attempt, read_lines
from shardstream.manifest import Manifest
from shardstream.mixture_plan import AnyPlan
from shardstream.packing import Packed, Packing
from shardstream.permutation import mix64
from shardstream.plan import Plan

__all__ = ["LOG_VERSION", "ConsumedLog", "LoggedWindow", "RankLog", "id_checksum", "next_attempt", "read_logs"]

LOG_VERSION = 1

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


@final
class ConsumedLog:
    """Writes what one rank trained on; a context manager.

    The file is made with the first window. An existing one is never overwritten.

    Args:
        directory: Folder of the logs; made if missing.
        rank: This rank.
        world_size: Number of ranks.
        attempt: Number of this start of the job, the same on every rank: see ``next_attempt``.
        start: Where this attempt begins.
        plan: The plan that it follows.
        with_ids: Whether to log sample ids, or only their checksum.
        rotate_num_bytes: A file that is as large is followed by another part.
        keep_num_bytes: What this rank's parts may take together; None keeps all. What is dropped is no longer proved.

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
        plan: AnyPlan,
        *,
        with_ids: bool = True,
        rotate_num_bytes: int = 64 << 20,
        keep_num_bytes: int | None = None,
    ) -> None:
        self._with_ids = with_ids
        header = {
            "kind": "start",
            "version": LOG_VERSION,
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "cursor": start.state_dict(),
            "fingerprint": plan.fingerprint,
            "plan": {name: getattr(plan, name) for name in _PLAN_FIELDS},
        }
        bounds = {"rotate_num_bytes": rotate_num_bytes, "keep_num_bytes": keep_num_bytes}
        self._lines = RotatedLines(directory, rank, attempt, header, **bounds)  # type: ignore[arg-type]

    def window(
        self,
        *,
        epoch: int,
        position: int,
        ids: npt.ArrayLike,
        num_padding: int = 0,
        masked_ids: Iterable[int] = (),
        targets: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Logs one window, once its samples are in the gradients, and before a checkpoint that is behind it.

        Args:
            epoch: Epoch in which the window begins.
            position: Position where it begins (``batch.position``).
            ids: int64[n], ids of this rank's real samples of it, in any order; no padding.
            num_padding: How many rows only filled its micro-batches.
            masked_ids: Samples that were dealt but could not be decoded or were rejected; they became padding.
            targets: Head name → valid targets of the window over all ranks, and this rank's part of them.

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
        if targets is not None:
            line["targets"] = {head: list(counts) for head, counts in targets.items()}
        self._lines.write(line)

    def sums(self, *, epoch: int, position: int, sums: Mapping[str, float]) -> None:
        """Logs what this rank's losses summed to in a window, which a device may tell later than the rest.

        Args:
            epoch: Epoch in which the window begins.
            position: Position where it begins.
            sums: Head name → sum of the losses over this rank's targets.
        """
        self._lines.write({"kind": "sums", "epoch": epoch, "position": position, "sums": dict(sums)})

    def epoch(self, epoch: int, *, position: int, num_samples: int, checksum: int) -> None:
        """Logs that an epoch was proved over all ranks.

        Args:
            epoch: The epoch.
            position: Position from which on it was proved: 0, unless the attempt began in it.
            num_samples: Samples of all ranks.
            checksum: Their ``id_checksum``.
        """
        line = {"kind": "epoch", "epoch": epoch, "position": position, "num_samples": num_samples}
        self._lines.write({**line, "checksum": f"{checksum:016x}"})

    def end(self) -> None:
        """Logs that the run ended by itself, and closes the file."""
        self._lines.write({"kind": "end"})
        self.close()

    def close(self) -> None:
        """Closes the file without saying that the run ended."""
        self._lines.close()

    def __enter__(self) -> ConsumedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.close()


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class LoggedWindow:
    """One window as a rank logged it; ``ids`` is None where only the checksum was.

    ``targets`` are those of all ranks and of this one, by head; ``sums`` are this rank's losses, where they are known.
    """

    epoch: int
    position: int
    num_samples: int
    num_padding: int
    checksum: str
    ids: tuple[int, ...] | None
    masked_ids: tuple[int, ...]
    targets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)


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
        num_dropped_parts: Parts that were dropped to keep a bound; what they held is not known.
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
    num_dropped_parts: int = 0

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
    lines, empty = read_lines(directory)
    logs = [_read_log(each) for each in lines]
    if not logs:
        expected = "rank-00000.attempt-0000.jsonl and so on"
        found = f"{len(empty)} cut" if empty else "none" if Path(directory).is_dir() else "no such folder"
        hint = "name the folder that Ledger wrote to"
        raise ReadError("no log of consumed samples", url=str(directory), expected=expected, found=found, hint=hint)
    return sorted(logs, key=lambda log: (log.attempt, log.rank)), empty


def _read_log(lines: LoggedLines) -> RankLog:
    head, url = lines.head, str(lines.path)
    version = head.get("version")
    if version != LOG_VERSION:
        hint = "upgrade shardstream" if isinstance(version, int) and version > LOG_VERSION else None
        raise ReadError("unknown version of a log", url=url, expected=LOG_VERSION, found=version, hint=hint)
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for entry in lines.entries:
        by_kind.setdefault(str(entry.get("kind")), []).append(entry)
    windows, sums, _, ends = (by_kind.pop(kind, []) for kind in ("window", "sums", "epoch", "end"))
    try:
        sums_at = {(entry["epoch"], entry["position"]): dict(entry["sums"]) for entry in sums}
        return RankLog(
            path=lines.path,
            attempt=int(head["attempt"]),
            rank=int(head["rank"]),
            world_size=int(head["world_size"]),
            start=Cursor.from_state_dict(head["cursor"]),
            fingerprint=str(head["fingerprint"]),
            settings={name: head["plan"][name] for name in _PLAN_FIELDS},
            windows=tuple(_window(entry, sums_at) for entry in windows),
            has_ended=bool(ends),
            is_cut=lines.is_cut,
            num_unknown=sum(map(len, by_kind.values())),
            num_dropped_parts=lines.num_dropped_parts,
        )
    except (AttributeError, KeyError, TypeError, ValueError, CursorError, PlanError) as error:
        raise ReadError("a log has lines that are not understood", url=url, found=repr(error)[:200]) from None


def _window(entry: Mapping[str, Any], sums_at: Mapping[tuple[int, int], Mapping[str, float]]) -> LoggedWindow:
    ids, place = entry.get("ids"), (int(entry["epoch"]), int(entry["position"]))
    return LoggedWindow(
        epoch=place[0],
        position=place[1],
        num_samples=len(ids) if ids is not None else int(entry["num_samples"]),
        num_padding=int(entry["num_padding"]),
        checksum=str(entry["checksum"]),
        ids=None if ids is None else tuple(map(int, ids)),
        masked_ids=tuple(map(int, entry.get("masked_ids", ()))),
        targets={head: (int(total), int(mine)) for head, (total, mine) in entry.get("targets", {}).items()},
        sums=sums_at.get(place, {}),
    )
