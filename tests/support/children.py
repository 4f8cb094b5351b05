"""Child processes, by any start method."""

from __future__ import annotations

import multiprocessing


def told_by_two(method, target, *arguments):
    """Returns what two children put into a queue, which ``target`` is called with after ``arguments``."""
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    children = [context.Process(target=target, args=(*arguments, queue)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    return [queue.get(), queue.get()]
