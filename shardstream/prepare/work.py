"""The work itself: tasks that any process can do, and the processes that do them."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from shardstream.errors import ReadError, ShardStreamError
from shardstream.executors import most_under_way
from shardstream.manifest import Int64Array, Manifest
from shardstream.permutation import full_places, full_positions
from shardstream.prepare.journal import DigestingFile, Journal, PartRecord
from shardstream.prepare.parts import Part
from shardstream.prepare.source import read_samples, sample_schema
from shardstream.prepare.spill import Spills
from shardstream.prepare.steps import Step
from shardstream.prepare.writers import Shape, writer_of
from shardstream.processes import interrupts_held, pool_of

_LOOK_S = 0.2  # how often progress is looked at


@dataclass(frozen=True)
class Job:
    """All that a task needs to know of the whole. It is pickled to the processes that work.

    Attributes:
        manifest: The input.
        journal: Of the output.
        shape: What output shards look like.
        step: What is done to samples.
        num_parts: How many output shards there are.
        seed: Of the shuffle, or None to keep the order.
        spills: Of the shuffle, or None.
        num_scatter_tasks: How many tasks spill.
    """

    manifest: Manifest
    journal: Journal
    shape: Shape
    step: Step
    num_parts: int
    seed: int | None = None
    spills: Spills | None = None
    num_scatter_tasks: int = 0

    def name_of(self, part: int) -> str:
        """Returns the file name of a part."""
        return f"{part:0{max(5, len(str(self.num_parts - 1)))}d}.{self.shape.format}"

    def sample_ids(self, first: int, end: int) -> Int64Array:
        """Returns which input samples are at positions ``first`` to ``end - 1`` of the output: int64[end - first]."""
        positions = np.arange(first, end)
        return positions if self.seed is None else full_positions(positions, self.manifest.num_samples, self.seed, 0)


class Done(NamedTuple):
    """What has been done since the last time."""

    num_samples: int = 0
    num_parts: int = 0
    num_bytes: int = 0


Tell = Callable[[Done], None]


class Act(Protocol):
    """Does a task: a function of a module, so that it can be pickled."""

    def __call__(self, job: Job, task: Any, tell: Tell, /) -> Any:
        """Does it."""
        ...


def write_parts(job: Job, parts: Sequence[Part], tell: Tell) -> list[PartRecord]:
    """Writes parts that follow each other.

    Raises:
        ReadError: If the input cannot be read, or the output not be written.
    """
    if job.spills is not None:
        spills = job.spills
        return [_write(job, part, spills.gather(job.num_scatter_tasks, part.first, part.end), tell) for part in parts]
    samples = _Samples(_read(job, parts[0].first, parts[-1].end))
    return [_write(job, part, map(job.step.apply, samples.take(part.end - part.first)), tell) for part in parts]


def scatter(job: Job, task: tuple[int, int, int], tell: Tell) -> None:
    """Spills the input samples of a task: its index, its first sample and its end."""
    index, first, end = task

    def placed() -> Iterator[tuple[pa.Table, Int64Array]]:
        sample = first
        for table in _read(job, first, end):
            ids = np.arange(sample, sample + table.num_rows)
            sample += table.num_rows
            yield job.step.apply(table), full_places(ids, job.manifest.num_samples, job.seed or 0, 0)
            tell(Done(table.num_rows))

    if job.spills is None:
        raise ValueError("only a shuffle scatters")
    job.spills.scatter(index, placed())


def schema_of(job: Job) -> pa.Schema:
    """Returns the schema of the output."""
    return job.step.schema(sample_schema(job.manifest, job.step.columns))


def _read(job: Job, first: int, end: int) -> Iterator[pa.Table]:
    return read_samples(job.manifest, first, end, job.step.columns, job.journal.storage_options)


def _write(job: Job, part: Part, tables: Iterable[pa.Table], tell: Tell) -> PartRecord:
    name, position = job.name_of(part.index), part.first
    with job.journal.writing(name) as file:
        digesting = DigestingFile(file)
        writer = writer_of(job.shape, schema_of(job), digesting)  # type: ignore[arg-type]
        try:
            for table in tables:
                writer.write(table, job.sample_ids(position, position + table.num_rows))
                position += table.num_rows
                tell(Done(table.num_rows))
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        if position != part.end:
            found = f"{position - part.first} samples"
            raise ReadError("a part is short", url=name, expected=f"{part.end - part.first} samples", found=found)
    num_samples = part.end - part.first
    record = PartRecord(part.index, name, num_samples, digesting.num_bytes, digesting.digest, writer.notes)
    job.journal.add(record)
    tell(Done(0, 1, record.num_bytes))
    return record


class _Samples:
    """Tables that are taken by number of rows."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, num_rows: int) -> Iterator[pa.Table]:
        """Yields the next rows."""
        while num_rows:
            table = self._rest if self._rest is not None else next(self._tables, None)
            if table is None:
                return
            taken = table.slice(0, num_rows)
            num_rows -= taken.num_rows
            self._rest = table.slice(taken.num_rows) if taken.num_rows < table.num_rows else None
            del table
            yield taken


# --------------------------------------------------------------------------------------------------- processes


def do_all(job: Job, act: Act, tasks: Sequence[Any], num_workers: int, executor: Executor | None, tell: Tell) -> None:
    """Does every task, in any order.

    Args:
        job: What all of them need.
        act: What does one.
        tasks: What is to be done.
        num_workers: Processes; 0 works in this one.
        executor: Used instead, if given; it is left running.
        tell: Is told what has been done.

    Raises:
        ShardStreamError: The first that a task raises; tasks under way are given up.
    """
    if executor is not None:
        limit = most_under_way(executor)
        _drain(lambda task: executor.submit(_do_quietly, act, job, task), tasks, limit, tell, None)
    elif num_workers == 0:
        for task in tasks:
            act(job, task, tell)
    elif tasks:
        news = multiprocessing.get_context("spawn").SimpleQueue()
        with pool_of(min(num_workers, len(tasks)), _begin, (job, news)) as pool:
            _drain(lambda task: pool.submit(_do, act, task), tasks, 2 * num_workers, tell, news)


def _drain(
    submit: Callable[[Any], Future[Done | None]], tasks: Sequence[Any], limit: int, tell: Tell, news: Any
) -> None:
    waiting = deque(tasks)
    under_way: set[Future[Done | None]] = set()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < limit:
                with interrupts_held():
                    under_way.add(submit(waiting.popleft()))
            done, under_way = wait(under_way, _LOOK_S, FIRST_COMPLETED)
            while news is not None and not news.empty():
                tell(news.get())
            for future in done:
                if (all_of_it := future.result()) is not None:
                    tell(all_of_it)
    except ShardStreamError:
        raise
    except Exception as error:  # each executor has errors of its own for a worker that was lost
        if news is not None and not isinstance(error, BrokenExecutor):
            raise
        what = "a process that was writing shards died"
        found = f"{type(error).__name__}: {error}"
        hint = "give it more memory or fewer workers, and run the command again: what is done stays done"
        raise ReadError(what, found=found, hint=hint) from error
    finally:
        for future in under_way:
            future.cancel()
        while news is not None and not news.empty():
            tell(news.get())


_here: list[Any] = []  # in a worker: the job, and where progress is told


def _begin(job: Job, news: Any) -> None:
    _here[:] = [job, news]


def _do(act: Act, task: Any) -> None:
    job, news = _here
    act(job, task, news.put)


def _do_quietly(act: Act, job: Job, task: Any) -> Done:
    """On an executor of which we know nothing: what was done is told at the end."""
    told: list[Done] = []
    act(job, task, told.append)
    return Done(*map(sum, zip(*told, strict=True))) if told else Done()
