"""Closing what has threads of its own, wherever it happens that a forgotten generator is closed."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable


def close_apart(close: Callable[[], None], *, timeout_s: float) -> bool:
    """Calls ``close`` in a thread of its own, and waits for it for so long at most.

    The garbage collector closes a generator that was dropped in a reference cycle in whatever thread it runs, at
    whatever allocation: in one of the generator's own threads, in one that is just starting, in the middle of a pool's
    ``submit``. What closes may need the locks that are held there, or wait for who needs them. In a thread of its own
    it holds none; and whoever waits for it in such a place goes on after a while, which lets it go on, too.

    Args:
        close: What is to be done. Its errors are a thread's, for ``threading.excepthook``; but they are raised where no
            thread can begin.
        timeout_s: The longest wait; 0 for none.

    Returns:
        Whether it is done.

    Example:
        >>> closed = []
        >>> close_apart(lambda: closed.append("pool"), timeout_s=10), closed
        (True, ['pool'])
    """
    is_done = threading.Event()

    def act() -> None:
        try:
            close()
        finally:
            is_done.set()

    def begin() -> None:
        # Of a bare thread that waits for others ``threading`` would keep a dummy for ever.
        try:
            threading.Thread(target=act, name="shardstream-close", daemon=True).start()
        except RuntimeError:
            act()

    if sys.is_finalizing():  # its threads have ended, and no other one would begin
        close()
        return True
    try:
        # To start a ``Thread`` takes locks, too, so that is left to a bare one, which takes none.
        _thread.start_new_thread(begin, ())
    except RuntimeError:  # there can be no more of them
        act()
    return is_done.wait(timeout_s)
