"""What is measured, and how: passes over a subject, in this process.

The rate of a pass counts from its first batch to its last, so that start-up is not in it: that is ``first_batch_s``.
Short passes are repeated, and their median counts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple, TypeAlias

from tools.bench.case import Case, Folders
from tools.bench.contract import Contract, check
from tools.bench.workloads import Workload

Metrics: TypeAlias = dict[str, float]

LEAST_S, MOST_S = 1.0, 4.0
_NUM_CHECKED = 8


class Subject(ABC):
    """What a case measures.

    Attributes:
        package: What has to be imported first; a case is skipped where it is not installed.
        lazy_packages: What it imports when it is first used; imported before as well, unless a case says ``cold``.
        is_peer: Whether it lives in the peers' environment.
        environment_name: Folder of an environment of its own, below the bench's root, or "".
    """

    package = "torch"
    lazy_packages: ClassVar[tuple[str, ...]] = ()
    is_peer = False
    environment_name = ""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders

    def variables(self, case: Case) -> Mapping[str, str]:
        """Returns environment variables to set before anything is imported."""
        del case
        return {}

    def prepare(self, load: Workload) -> None:
        """Writes what it reads, where that is not one of the common forms."""
        del load

    @abstractmethod
    def measure(self, case: Case) -> Metrics:
        """Returns numbers by name; a name ends with its unit."""

    def folder(self, workload: str, form: str) -> Path:
        """Returns where a form of a workload lies."""
        return self.folders.data / workload / form

    def files(self, workload: str, form: str) -> list[Path]:
        """Returns the shards of a form, in order.

        Raises:
            FileNotFoundError: If there are none.
        """
        files = sorted(self.folder(workload, form).glob(f"*.{form}"))
        if not files:
            raise FileNotFoundError(f"no {form} of workload {workload}: run `python -m tools.bench prepare` first")
        return files


class Reader(Subject):
    """A subject that delivers batches under the contract.

    Attributes:
        repeats: Whether a short pass is repeated; for those that can begin again in the same process.
    """

    repeats = False

    @abstractmethod
    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the batches of a rank's epoch; each iteration of it is a pass."""

    def measure(self, case: Case) -> Metrics:
        """Measures passes, and the time to the first batch."""
        began = time.perf_counter()
        batches = self.open(case)
        passes: list[_Pass] = []
        stop_s = float(case.options.get("stop_s", MOST_S))
        while not passes or (self.repeats and time.perf_counter() - began < min(LEAST_S, stop_s)):
            passes.append(_one_pass(batches, began if not passes else time.perf_counter(), stop_s))
        first_batch_s = passes[0].first_batch_s
        if stop_s == 0:
            return {"first_batch_s": first_batch_s}
        samples_per_s, values_per_s, values_per_cpu_s = (
            median(getattr(one, name) for one in passes)
            for name in ("samples_per_s", "values_per_s", "values_per_cpu_s")
        )
        return {
            "samples_per_s": samples_per_s,
            "values_per_s": values_per_s,
            "values_per_cpu_s": values_per_cpu_s,
            "first_batch_s": first_batch_s,
            "num_passes": len(passes),
        }


class _Pass(NamedTuple):
    first_batch_s: float
    samples_per_s: float
    values_per_s: float
    """Tokens or bytes."""
    values_per_cpu_s: float
    """Of this process's threads, workers not among them: what a busy machine tells best."""


def _one_pass(batches: Iterable[Contract], began: float, stop_s: float) -> _Pass:
    num_samples = num_first = num_values = 0
    first = now = began
    cpu_s = 0.0
    for index, batch in enumerate(batches):
        num_samples += len(batch["ids"])
        now = time.perf_counter()
        if index == 0:
            first, num_first, cpu_s = now, num_samples, time.process_time()
        else:
            num_values += _num_values(batch)
        if index < _NUM_CHECKED:
            check(batch)
        if now - first >= stop_s:
            break
    span_s, cpu_s = max(now - first, 1e-9), max(time.process_time() - cpu_s, 1e-9)
    return _Pass(first - began, (num_samples - num_first) / span_s, num_values / span_s, num_values / cpu_s)


def _num_values(batch: Contract) -> int:
    # Not the sum of the lengths, where there is another way: an operation of torch for each batch, which limits lack.
    data = batch.get("data")
    return int(batch["lengths"].sum()) if data is None else data.numel()


class Work(NamedTuple):
    """What one pass of a limit did."""

    num_samples: int
    num_bytes: int


class Limit(Subject):
    """What the machine can do at all: a pass of plain work with nothing around it."""

    @abstractmethod
    def work(self, case: Case) -> Work:
        """Does one pass."""

    def measure(self, case: Case) -> Metrics:
        """Measures passes after an unmeasured first one."""
        self.work(case)
        rates: list[tuple[float, float]] = []
        began = time.perf_counter()
        while not rates or time.perf_counter() - began < min(LEAST_S, float(case.options.get("stop_s", LEAST_S))):
            start = time.perf_counter()
            done = self.work(case)
            span_s = time.perf_counter() - start
            rates.append((done.num_samples / span_s, done.num_bytes / span_s))
        samples_per_s, bytes_per_s = (median(column) for column in zip(*rates, strict=True))
        return {"samples_per_s": samples_per_s, "bytes_per_s": bytes_per_s, "num_passes": len(rates)}
