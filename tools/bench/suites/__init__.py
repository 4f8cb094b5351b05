"""The suites: which cases are run, and under which names. Targets refer to them by those names."""

from __future__ import annotations

from collections.abc import Callable

from tools.bench.case import Case
from tools.bench.suites.throughput import throughput

SUITES: dict[str, Callable[[], list[Case]]] = {"throughput": throughput}
