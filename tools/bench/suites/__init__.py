"""The suites: which cases are run, and under which names. Targets refer to them by those names."""

from __future__ import annotations

from collections.abc import Callable

from tools.bench.case import Case
from tools.bench.suites.growth import orders, scale
from tools.bench.suites.loop import denominators, store
from tools.bench.suites.memory import memory, memory_large
from tools.bench.suites.packed import packed
from tools.bench.suites.start import first_batch
from tools.bench.suites.throughput import throughput

SUITES: dict[str, Callable[[], list[Case]]] = {
    "throughput": throughput,
    "packed": packed,
    "first-batch": first_batch,
    "memory": memory,
    "memory-large": memory_large,
    "store": store,
    "denominators": denominators,
    "scale": scale,
    "orders": orders,
}
EVERYDAY = ("throughput", "packed", "first-batch", "memory", "store", "denominators")
GROWTH = ("scale", "orders")
