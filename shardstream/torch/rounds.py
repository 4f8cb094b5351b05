"""Rounds: before ranks do something together, each says what; all learn of a difference before anything is run.

A round is one small sum on a group of the library's own. Rounds are matched by their number, so a rank that took
another branch meets the others in whatever round comes next for it, says something else there, and all of them know.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn, final

import torch.distributed as dist

from shardstream.errors import DesyncError, TopologyError, shown_url
from shardstream.rounds import RoundsLog, first_difference
from shardstream.torch.counts import RankSums
from shardstream.torch.meeting import agree

# Until ranks that are there have said so, once another did not come. Where connections were closed, all notice at
# once; otherwise each has a deadline of its own.
_GRACE_S, _GRACE_WHEN_CLOSED_S = 10.0, 2.0
_NUM_TAIL = 16


@final
class Rounds:
    """This rank's side of the rounds.

    Args:
        sums: Sums over the ranks; None if nothing is to be communicated, only logged.
        log: Where rounds are logged, or None.
    """

    def __init__(self, sums: RankSums | None, log: RoundsLog | None) -> None:
        self._sums, self._log = sums, log
        self._events: list[str] = []
        self._tail: deque[tuple[str, ...]] = deque(maxlen=_NUM_TAIL)
        self._number = -1
        self.has_failed = False

    @property
    def is_behind(self) -> bool:
        """Whether something was noted that the other ranks have not been asked about."""
        return bool(self._events)

    def note(self, event: str) -> None:
        """Notes what this rank did: the next round is about it, too."""
        self._events.append(shown_url(event))

    def ask(self, event: str) -> None:
        """Waits until all ranks have come to their next round, and compares what they did and are about to do.

        Args:
            event: What this rank is about to do.

        Raises:
            DesyncError: If ranks differ; every rank raises it. Or if a rank does not come before the deadline.
        """
        self.note(event)
        events = self._begin_round()
        if self._sums is None or self._sums.world_size == 1:
            return
        started = time.monotonic()
        try:
            _, is_same = self._sums.issue([], self._text(events)).settle()
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            most_s = _GRACE_S if waited_s >= self._sums.timeout_s else _GRACE_WHEN_CLOSED_S
            missing = self._who_is_missing(events, min(most_s, self._sums.timeout_s))
            self._fail(missing, f"{str(error).splitlines()[0]} after {waited_s:.1f} s", error)
        if not is_same:
            self._fail(first_difference(self._gathered(events)) or "events of equal text", None, None)

    def last_word(self, event: str, timeout_s: float) -> None:
        """Tells the others, if they come to a round in time, why this rank will come to no other.

        Args:
            event: What happened.
            timeout_s: How long to wait for them.
        """
        if self.has_failed:
            return
        self.note(event)
        events, self.has_failed = self._begin_round(), True
        if self._sums is None or self._sums.world_size == 1:
            return
        try:
            _, is_same = self._sums.issue([], self._text(events)).settle(timeout_s)
            if not is_same:
                self._gathered(events)
        except (RuntimeError, ValueError):
            return  # they did not come, or the group is gone: what this rank fails with matters more

    def sums(self, vector: Sequence[int], what: str) -> list[int]:
        """Returns the sums of numbers over the ranks, in a round of their own.

        Args:
            vector: Numbers of this rank, as many on every rank.
            what: What they are of.

        Raises:
            DesyncError: As ``ask``.
        """
        self.ask(what)
        if self._sums is None:
            return list(vector)
        return self._sums.issue(vector, what).wait()

    def _begin_round(self) -> tuple[str, ...]:
        self._number += 1
        events = tuple(self._events)
        self._events.clear()
        self._tail.append(events)
        if self._log is not None:
            self._log.round(self._number, events, time.time())
        return events

    def _text(self, events: Sequence[str]) -> str:
        return "\n".join([f"round {self._number}", *events])

    def _gathered(self, events: Sequence[str]) -> Mapping[int, Sequence[str]]:
        """What each rank said in this round; all of them come here, as the sum told all of them."""
        assert self._sums is not None  # noqa: S101 - narrows the type
        said: list[Sequence[str]] = [()] * self._sums.world_size
        try:
            dist.all_gather_object(said, list(events), group=self._sums.group)
        except RuntimeError as error:
            self._fail("ranks differ, and one was gone before it could say in what", None, error)
        return dict(enumerate(said))

    def _who_is_missing(self, events: Sequence[str], grace_s: float) -> str:
        """Asks through the store who is there; nobody needs to answer."""
        assert self._sums is not None  # noqa: S101 - narrows the type
        topic = f"round {self._number}"
        try:
            found = agree(topic, list(events), _difference, group=self._sums.group, timeout_s=grace_s)
        except TopologyError as error:
            return f"about to {events[-1]!r}: {error}"
        except dist.DistError as error:
            return f"about to {events[-1]!r}: the store is gone, too ({str(error).splitlines()[0]})"
        return found or f"about to {events[-1]!r} on every rank, but not in time"

    def _fail(self, difference: str, found: str | None, cause: Exception | None) -> NoReturn:
        self.has_failed = True
        if self._log is not None:
            self._log.desync(self._number, difference, list(self._tail))
        raise DesyncError(
            f"ranks are not in step (round {self._number}): {difference}",
            expected=None if found is None else "all ranks to come",
            found=found,
            hint="no rank has gone on from here; the rounds of each rank are in the ledger's rank-*.rounds.jsonl",
        ) from cause


def _difference(offers: Mapping[int, Sequence[str]]) -> str | None:
    return first_difference(offers)
