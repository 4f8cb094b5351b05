"""The log of what each rank was about to do together with the others: communication, as JSON lines. Torch-free.

``rank-00003.attempt-0002.rounds.jsonl``: a ``start`` line, a ``round`` line *before* each step that all ranks take
together (so a process that hangs has logged what it waits in), ``times`` of each window, ``desync`` if ranks differed,
and ``end``. Rounds must be equal on all ranks, unlike the numbers, which are each rank's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

from shardstream.errors import ReadError, listed
from shardstream.ledger_file import LoggedLines, RotatedLines, read_lines

ROUNDS_VERSION = 1

_LEDGER = "rounds"


@final
class RoundsLog:
    """Writes what one rank was about to do.

    Args:
        directory: Folder of the logs; made if missing.
        rank: This rank.
        world_size: Number of ranks.
        attempt: Number of this start of the job, the same on every rank.
        rotate_num_bytes: A file that is as large is followed by another part.
        keep_num_bytes: What this rank's parts may take together; None keeps all.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        world_size: int,
        attempt: int,
        *,
        rotate_num_bytes: int = 64 << 20,
        keep_num_bytes: int | None = None,
    ) -> None:
        header = {"kind": "start", "version": ROUNDS_VERSION, "attempt": attempt, "rank": rank}
        self._lines = RotatedLines(
            directory,
            rank,
            attempt,
            {**header, "world_size": world_size},
            ledger=_LEDGER,
            rotate_num_bytes=rotate_num_bytes,
            keep_num_bytes=keep_num_bytes,
        )

    def round(self, number: int, events: Sequence[str], time_s: float) -> None:
        """Logs a round before it is run.

        Args:
            number: Counts the rounds of the attempt.
            events: What this rank did since the round before, and last what it is about to do.
            time_s: Now, in seconds since 1970.
        """
        self._lines.write({"kind": "round", "round": number, "time_s": round(time_s, 6), "events": list(events)})

    def times(self, epoch: int, position: int, events: Sequence[tuple[float, str]]) -> None:
        """Logs what happened when in a window.

        Args:
            epoch: Epoch in which the window begins.
            position: Position where it begins.
            events: Seconds since 1970, and what happened then.
        """
        timed = [[round(time_s, 6), text] for time_s, text in events]
        self._lines.write({"kind": "times", "epoch": epoch, "position": position, "events": timed})

    def desync(self, number: int, text: str, tail: Sequence[Sequence[str]]) -> None:
        """Logs that ranks differed.

        Args:
            number: The round.
            text: Where they first differed.
            tail: The events of the last rounds of this rank.
        """
        self._lines.write({"kind": "desync", "round": number, "text": text, "tail": [list(each) for each in tail]})

    def end(self) -> None:
        """Logs that the run ended by itself, and closes the file."""
        self._lines.write({"kind": "end"})
        self.close()

    def close(self) -> None:
        """Closes the file without saying that the run ended."""
        self._lines.close()


@dataclass(frozen=True)
class RankRounds:
    """What one rank was about to do in one attempt.

    Attributes:
        path: The file.
        attempt: The attempt.
        rank: The rank.
        world_size: Number of ranks of the attempt.
        rounds: Round → events.
        times: (epoch, position) of a window → seconds since 1970, and what happened then.
        desyncs: Where ranks differed, in words.
        has_ended: Whether it ended by itself.
        is_cut: Whether its last line is cut.
        num_dropped_parts: Parts that were dropped to keep a bound.
    """

    path: Path
    attempt: int
    rank: int
    world_size: int
    rounds: Mapping[int, tuple[str, ...]]
    times: Mapping[tuple[int, int], tuple[tuple[float, str], ...]]
    desyncs: tuple[str, ...]
    has_ended: bool
    is_cut: bool
    num_dropped_parts: int


def read_rounds(directory: str | os.PathLike[str]) -> list[RankRounds]:
    """Reads what all ranks were about to do.

    Args:
        directory: The folder.

    Returns:
        By attempt and rank; empty if there are none.

    Raises:
        ReadError: If a file is damaged other than by a cut last line, or of another version.
    """
    return sorted(map(_read, read_lines(directory, _LEDGER)[0]), key=lambda each: (each.attempt, each.rank))


def _read(lines: LoggedLines) -> RankRounds:
    head, url, version = lines.head, str(lines.path), lines.head.get("version")
    if version != ROUNDS_VERSION:
        raise ReadError("unknown version of a log of rounds", url=url, expected=ROUNDS_VERSION, found=version)
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for entry in lines.entries:
        by_kind.setdefault(str(entry.get("kind")), []).append(entry)
    rounds, times, desyncs = (by_kind.get(kind, []) for kind in ("round", "times", "desync"))
    try:
        return RankRounds(
            path=lines.path,
            attempt=int(head["attempt"]),
            rank=int(head["rank"]),
            world_size=int(head["world_size"]),
            rounds={int(entry["round"]): tuple(map(str, entry["events"])) for entry in rounds},
            times={
                (int(entry["epoch"]), int(entry["position"])): tuple((float(t), str(e)) for t, e in entry["events"])
                for entry in times
            },
            desyncs=tuple(str(entry["text"]) for entry in desyncs),
            has_ended="end" in by_kind,
            is_cut=lines.is_cut,
            num_dropped_parts=lines.num_dropped_parts,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReadError("a log has lines that are not understood", url=url, found=repr(error)[:200]) from None


def first_difference(events: Mapping[int, Sequence[str]]) -> str | None:
    """Returns in words where ranks first did different things; None where they did the same.

    Args:
        events: Rank → what it did and is about to do, in order.

    Example:
        >>> print(first_difference({0: ["loss", "sum a"], 1: ["loss", "sum b"], 2: ["loss", "sum a"]}))
        after 'loss', ranks 0, 2: sum a; rank 1: sum b
    """
    for index, at_index in enumerate(zip_longest(*events.values(), fillvalue="nothing more")):
        by_event: dict[str, list[int]] = {}
        for rank, event in zip(events, at_index, strict=True):
            by_event.setdefault(event, []).append(rank)
        if len(by_event) > 1:
            before = next(iter(events.values()))[index - 1] if index else None
            texts = [f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {event}" for event, ranks in by_event.items()]
            return (f"after {before!r}, " if before is not None else "") + "; ".join(texts)
    return None
