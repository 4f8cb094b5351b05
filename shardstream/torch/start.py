"""Where the next pass of a dataset begins, and how the main process notices how far the consumer came.

A *start* is four int64 words in shared memory (epoch, position, start of the window grid, lanes), written by the main
process only, read by workers when they begin to iterate. No lock is needed: while workers read the words, the main
process waits for their first batch.

A plain DataLoader tells nobody how far its consumer came, so a batch counts as consumed when the main process first
touches its data: the pass's last batch then moves the start to the next epoch, any other one to where the pass began.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardstream.torch.batch import Batch, Place, register_receiver


class SharedStart:
    """The start of the next pass: shared with DataLoader workers, private to everything else.

    A copy (``deepcopy``, plain pickle) goes its own way; only what a DataLoader sends to its workers stays shared.

    Args:
        words: int64[4]: epoch, position, start of the window grid, lanes (0 as long as no cursor has pinned them).

    Attributes:
        home_pid: The process whose loaders read from here.
        num_seeks: How often somebody said where to go on.
        token: Carried by batches, so that they find their way back here (see ``register_receiver``).
    """

    def __init__(self, words: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        self._words: Tensor = torch.tensor(words, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.home_pid, self.token = os.getpid(), register_receiver(self)
        self.num_seeks = 0
        self._is_touched = False  # whether a batch of the pass under way was touched
        self._is_held = False

    def read(self) -> tuple[int, int, int, int]:
        """Returns epoch, position, start of the window grid, and lanes."""
        epoch, position, grid_start, lanes = self._words.tolist()
        return epoch, position, grid_start, lanes

    def write(self, epoch: int, position: int = 0, grid_start: int = 0, lanes: int | None = None) -> None:
        """Lets the next pass begin there. In the main process only."""
        kept = self.read()[3] if lanes is None else lanes
        self._words.copy_(torch.tensor([epoch, position, grid_start, kept]))

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
        """Is called by each batch that reaches the main process (by ``Batch.__setstate__``, or by the pass itself)."""
        if self._is_held:
            return
        place, num_seeks = batch.place, self.num_seeks
        if place.window_index == 0 and place.micro_index == 0:
            self._is_touched = False  # the first batch of a pass
        batch._on_touch = lambda: self.consumed(place, num_seeks)  # noqa: SLF001 - the hook is made for this
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
        epoch, _, _, lanes = place.pass_start
        if place.is_last_in_pass:
            self.write(max(place.cursor.epoch, epoch + 1), lanes=lanes)
        else:
            self.write(*place.pass_start)

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self._words, "home_pid": self.home_pid, "token": self.token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        words: Tensor = state["words"]
        self.__init__(tuple(words.tolist()))  # type: ignore[misc]
        if words.is_shared():  # type: ignore[no-untyped-call]  # a DataLoader worker's view
            self._words, self.home_pid, self.token = words, state["home_pid"], state["token"]
