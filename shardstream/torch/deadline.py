"""A deadline for calls that have none of their own.

The store of a process group waits for its host's answer for ever: a quarter of an hour, in which TCP tries again, if a
cable was cut, and longer when the host's process was stopped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, final

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_LEAST_S = 10.0  # a host that is busy with other things is not gone


class NoAnswerError(Exception):
    """A call did not return in time; it still waits, in a thread that ends with the process."""


def within(timeout_s: float, ask: Callable[[], T]) -> T:
    """Returns what ``ask`` returns, or raises what it raises, if it does so in time.

    Args:
        timeout_s: How long to wait for it.
        ask: Runs in a thread of its own, so that Ctrl-C is heard meanwhile as well.

    Raises:
        NoAnswerError: If it has not returned in time.

    Example:
        >>> within(10.0, lambda: 6 * 7)
        42
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the answer is waited for
            answers.put((None, error))

    threading.Thread(target=run, name="shardstream-deadline", daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise NoAnswerError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def patience(timeout_s: float) -> float:
    """Returns how long to wait for what a host can answer at once: ten seconds at least."""
    return max(timeout_s, _LEAST_S)


@final
class PatientStore:
    """A store of ``torch.distributed`` whose every answer has a deadline.

    Args:
        store: The store.
        timeout_s: How long to wait for an answer that the host can give at once; at least ten seconds.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, patience(timeout_s)

    def prefixed(self, prefix: str) -> PatientStore:
        """Returns a view of it whose keys begin with ``prefix``."""
        return PatientStore(dist.PrefixStore(prefix, self._store), self._timeout_s)  # type: ignore[attr-defined]

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns the sum."""
        return within(self._timeout_s, lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        within(self._timeout_s, lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is known to be there."""
        return within(self._timeout_s, lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Tells whether all keys are there."""
        return within(self._timeout_s, lambda: self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        """Deletes a key."""
        return within(self._timeout_s, lambda: self._store.delete_key(key))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until all keys are there.

        Raises:
            RuntimeError: Of the store's own kind, if they do not come in time.
            NoAnswerError: If the host does not even say so.
        """
        within(timeout.total_seconds() + self._timeout_s, lambda: self._store.wait(keys, timeout))
