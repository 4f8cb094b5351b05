"""A DataLoader worker ends with the process that started it, whenever that dies.

torch's own watchdog asks now and then who the parent is, and first when the worker is ready: one whose parent was
killed before takes its new parent for the one it had, and waits for ever for work.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

_is_watched = False


def end_with_parent() -> None:
    """Lets this process end at once when its parent has ended; in a process that has none, nothing happens."""
    global _is_watched  # noqa: PLW0603 - a process has one parent
    parent = multiprocessing.parent_process()
    if parent is None or _is_watched:
        return

    def watch() -> None:
        parent.join()  # returns at once if it is gone already
        os._exit(1)

    threading.Thread(target=watch, name="shardstream-parent", daemon=True).start()
    _is_watched = True
