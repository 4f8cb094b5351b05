"""Where the next pass of a dataset begins, and how the main process notices how far the consumer came.

A *start* is four int64 words (epoch, position, start of the window grid, lanes), written by the main process only. A
plain DataLoader tells nobody how far its consumer came, so a batch counts as consumed when the main process first
touches its data: the pass's last batch then moves the start to the next epoch, any other one to where the pass began.

Every worker of a pass must begin at the same start, also one that is late: it may begin when the pass's last batch has
been consumed already (a worker without a batch of its own, or a last batch that nobody touches). So a worker's first
pass begins at the start that was valid when its process was made. Later passes (persistent workers) read it from shared
memory, where the start before the last move is kept too, with the pass whose end moved it. No lock is needed: nothing
is written between the request for a pass and its first batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstream.errors import PlanError
from shardstream.torch.batch import Batch, Place, register_receiver
from shardstream.torch.budget import MaskedBudget


class PassId(NamedTuple):
    """Which pass a worker is at."""

    pool: int = 0
    """The same for all workers of a DataLoader's iterator; 0 in the main process."""
    number: int = 0
    """How many passes this pool began before."""


class Start(NamedTuple):
    """Where a pass begins."""

    epoch: int = 0
    position: int = 0
    grid_start: int = 0
    lanes: int = 0
    """0 as long as no cursor has pinned them."""


class Arrivals:
    """Notices a DataLoader that hands batches out as they come (``in_order=False``): a cursor would skip the late ones.

    A DataLoader that keeps the order has got every batch before the one that it hands out. So none may arrive for the
    first time after a later one of its pass was touched.
    """

    _NUM_KEPT = 4096  # far more than any DataLoader has under way

    def __init__(self) -> None:
        self._pass_id, self._touched = PassId(), (-1, -1)
        self._last: dict[tuple[int, int], None] = {}

    def arrived(self, place: Place) -> None:
        """Notes a batch that came from a worker.

        Raises:
            PlanError: If a later one of its pass was touched before.
        """
        if self._pass_id != place.pass_start[4:]:
            self._pass_id, self._touched = PassId(*place.pass_start[4:]), (-1, -1)
            self._last.clear()
        index = (place.window_index, place.micro_index)
        if index < self._touched and index not in self._last and not self._may_be_forgotten(index):
            raise PlanError(
                f"micro-batch {index[1]} of window {index[0]} came after a later one was used: the order depends on "
                "timing, and a cursor would skip samples",
                hint="leave in_order=False out of the DataLoader's options",
            )
        self._last[index] = None
        if len(self._last) > self._NUM_KEPT:
            del self._last[next(iter(self._last))]

    def _may_be_forgotten(self, index: tuple[int, int]) -> bool:
        return len(self._last) == self._NUM_KEPT and index < min(self._last)

    def touched(self, place: Place) -> None:
        """Notes that a batch is used."""
        if self._pass_id == place.pass_start[4:]:
            self._touched = max(self._touched, (place.window_index, place.micro_index))


class SharedStart:
    """The start of the next pass: shared with DataLoader workers, private to everything else.

    A copy (``deepcopy``, plain pickle) goes its own way; only what a DataLoader sends to its workers stays shared.

    Args:
        start: The start.
        budget: Is told of each batch that a plain DataLoader's user touches; None where nothing is masked.

    Attributes:
        home_pid: The process whose loaders read from here.
        num_seeks: How often somebody said where to go on.
        token: Carried by batches, so that they find their way back here (see ``register_receiver``).
    """

    def __init__(self, start: Start = Start(), budget: MaskedBudget | None = None) -> None:  # noqa: B008 - frozen
        # The start, the one before it, and the pass whose end made the difference.
        words = torch.tensor([*start, *start, *PassId()], dtype=torch.int64)
        self._words: Tensor = words.share_memory_()  # type: ignore[no-untyped-call]
        self._first = start  # in a worker: the start when its process was made
        self.home_pid, self.token = os.getpid(), register_receiver(self)
        self.num_seeks = 0
        self.budget = budget
        self._is_touched = False  # whether a batch of the pass under way was touched
        self._is_held = False
        self._begun, self._arrivals = PassId(), Arrivals()
        self._stays: tuple[int, ...] = ()  # the ``pass_start`` whose beginning was written last

    def read(self, begun: PassId = PassId()) -> Start:  # noqa: B008 - frozen
        """Returns the start: of a worker's pass, or as it is now."""
        if begun.pool and begun.number == 0:
            return self._first
        words = self._words.tolist()
        while words != (again := self._words.tolist()):  # not while it is written
            words = again
        ended = PassId(*words[8:])
        is_late = begun.pool and ended.pool == begun.pool and ended.number >= begun.number
        return Start(*words[4:8]) if is_late else Start(*words[:4])

    def begin(self, pool: int) -> PassId:
        """Returns the pass that a worker begins; its workers count alike."""
        number = self._begun.number + 1 if self._begun.pool == pool else 0
        self._begun = PassId(pool, number)
        return self._begun

    def write(self, epoch: int, position: int = 0, grid_start: int = 0, lanes: int | None = None) -> None:
        """Lets the next pass begin there. In the main process only."""
        now = self.read()
        self._write(Start(epoch, position, grid_start, now.lanes if lanes is None else lanes), now, PassId())

    def _write(self, start: Start, before: Start, ended: PassId) -> None:
        self._first, self._stays = start, ()
        self._words.numpy()[:] = (*start, *before, *ended)

    def seek(self, epoch: int, position: int = 0, grid_start: int = 0, lanes: int | None = None) -> None:
        """Does what ``write`` does, on somebody's word: batches that arrived before no longer move the start."""
        self.num_seeks += 1
        self.write(epoch, position, grid_start, lanes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While it is held, nothing that arrives moves the start.

        Persistent workers hand over what is left of a broken pass when the next one is asked for.
        """
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def arrived(self, batch: Batch) -> None:
        """Is called by each batch that reaches the main process (by ``Batch.__setstate__``, or by the pass itself).

        Raises:
            PlanError: If the DataLoader does not keep the order.
        """
        if self._is_held:
            return
        place, num_seeks = batch.place, self.num_seeks
        if place.window_index == 0 and place.micro_index == 0:
            self._is_touched = False  # the first batch of a pass
        if place.pass_start[4]:  # of a worker
            self._arrivals.arrived(place)
        num_rows, masked = len(batch), batch.masked  # not the batch: it would hold itself

        def touched() -> None:
            if self.budget is not None:
                self.budget.took(num_rows, masked)
            self._arrivals.touched(place)
            self.consumed(place, num_seeks)

        batch._on_touch = touched  # noqa: SLF001 - the hook is made for this
        if place.is_last_in_pass and not self._is_touched:
            self._move(place)  # a loop that touches nothing has seen the whole pass, too

    def consumed(self, place: Place, num_seeks: int | None = None) -> None:
        """Counts a batch as consumed.

        Args:
            place: Of the batch.
            num_seeks: What ``num_seeks`` was when the batch arrived; if it is another now, nothing is moved.
        """
        self._is_touched = True
        if num_seeks in (None, self.num_seeks):
            self._move(place)

    def _move(self, place: Place) -> None:
        if not place.is_last_in_pass and place.pass_start == self._stays:
            return  # most touches of batches change nothing
        began, pass_id = Start(*place.pass_start[:4]), PassId(*place.pass_start[4:])
        if place.is_last_in_pass and place.cursor.tail == "continue":  # a stream that stops goes on where it stopped
            following = began._replace(position=place.cursor.position, grid_start=place.cursor.grid_start)
            self._write(following, began, pass_id)
        elif place.is_last_in_pass:
            following = began._replace(epoch=max(place.cursor.epoch, began.epoch + 1), position=0, grid_start=0)
            self._write(following, began, pass_id)
        else:
            self._write(began, began, PassId())
            self._stays = place.pass_start

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self._words, "start": tuple(self.read()), "home_pid": self.home_pid, "token": self.token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(Start(*state["start"]))  # type: ignore[misc]
        if state["words"].is_shared():  # a DataLoader worker's view
            self._words, self.home_pid, self.token = state["words"], state["home_pid"], state["token"]
