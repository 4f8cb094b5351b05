"""A run from its input to its output: what is decided, what is done, what is counted at the end."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from shardstream import storage
from shardstream._version import __version__
from shardstream.errors import ManifestError, PlanError, ReadError, ShardStreamWarning
from shardstream.index import IndexSettings, build_manifest
from shardstream.manifest import Int64Array, Manifest
from shardstream.prepare.inputs import check_apart, default_format, find_input
from shardstream.prepare.journal import VERSION, Journal, PartRecord
from shardstream.prepare.parts import (
    Part,
    bucket_ends,
    cut_blocks_by_bytes,
    cut_by_bytes,
    cut_evenly,
    parts_of,
    tasks_of,
)
from shardstream.prepare.pilot import Measured, measure
from shardstream.prepare.settings import Prepared, PrepareProgress, PrepareSettings
from shardstream.prepare.spill import Spills
from shardstream.prepare.steps import Step
from shardstream.prepare.work import Done, Job, do_all, scatter, schema_of, write_parts
from shardstream.prepare.writers import Shape
from shardstream.processes import num_cores

_SHARE = 8  # of the memory a worker may take, what is held of decoded samples: they are copied as they are sorted
_NOTHING_MEASURED = Measured(0.0, 0.0)


@dataclass(frozen=True)
class Run:
    """A run from its inputs to its output."""

    settings: PrepareSettings
    job: Job
    ends: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    measured: Measured = _NOTHING_MEASURED

    @property
    def manifest(self) -> Manifest:
        """Of the input."""
        return self.job.manifest

    @property
    def journal(self) -> Journal:
        """Of the output."""
        return self.job.journal

    @classmethod
    def begin(
        cls,
        inputs: Sequence[str | os.PathLike[str]],
        output: str | os.PathLike[str],
        step: Step,
        settings: PrepareSettings,
    ) -> Run:
        """Finds and indexes the input; checks what can be checked before anything is written."""
        journal = Journal(storage.absolute(os.fspath(output)).rstrip("/"), settings.storage_options)
        check_apart(inputs, journal.output)
        journal.read_plan()  # a folder that cannot be used is refused before hours of indexing
        manifest = find_input(inputs, journal.output, settings)
        shape = Shape(
            settings.format or ("parquet" if step.tokens_column is not None else default_format(manifest)),
            settings.block_num_bytes,
            settings.level,
            settings.key_column,
        )
        if step.tokens_column is not None and shape.format != "parquet":
            raise PlanError("tokens are written as Parquet", found=shape.format, hint="leave the format out")
        seed = settings.seed if settings.shuffle else None
        job = Job(manifest, journal, shape, step, 1, seed)
        schema_of(job)  # columns that are not there are named before anything is written
        return cls(settings, job)

    def decided(self, *, is_dry: bool = False) -> Run:
        """Decides which samples go where or, if that was decided before, takes that."""
        plan = self.journal.read_plan()
        asked = self._asked()
        if plan is None:
            measured = measure(self.job)
            ends = self._ends(measured)
            plan = {
                "version": VERSION,
                "asked": asked,
                "measured": measured._asdict(),
                "ends": ends.tolist(),
                "made_with": {
                    "shardstream": __version__,
                    "pyarrow": pa.__version__,
                    "zstandard": zstandard.__version__,
                },
            }
            if not is_dry:
                self.manifest.save(
                    self.journal.url("input.manifest.parquet"),
                    overwrite=True,
                    storage_options=self.settings.storage_options,
                )
                self.journal.write_plan(plan)
        elif plan["asked"] != asked:
            raise _other(self.journal.output, plan["asked"], asked)
        measured, ends = Measured(**plan["measured"]), np.array(plan["ends"], np.int64)
        job = replace(self.job, num_parts=len(ends))
        if job.seed is not None:
            job = replace(job, spills=self._spills(measured, ends), num_scatter_tasks=len(self._scatters(measured)))
        return replace(self, job=job, ends=ends, measured=measured)

    def write(self) -> int:
        """Writes the parts that are not whole, and returns how many were."""
        done = self.journal.records()
        todo = [part for part in parts_of(self.ends) if part.index not in done]
        tasks: list[tuple[Part, ...]] = [(part,) for part in todo]
        if self.job.spills is None:
            tasks = [rest for task in tasks_of(self.manifest, self.ends) for rest in _rests(task, done)]
        elif todo:
            self._scatter(self.job.spills)
        teller = _Teller(self, "writing", sum(record.num_samples for record in done.values()), len(done))
        self._do_all(write_parts, tasks, teller)
        return len(done)

    def finish(self, num_resumed: int) -> Prepared:
        """Writes the manifest and where samples came from, after everything was counted again."""
        settings = self.settings
        records = self.journal.records()
        parts = [records[index] for index in sorted(records)]
        if [part.index for part in parts] != list(range(len(self.ends))):
            raise ReadError("shards vanished while others were written", url=self.journal.output)
        tokens = self.job.step.tokens_column
        path = settings.manifest or self.journal.part_url("manifest.parquet")
        manifest = build_manifest(
            [self.journal.part_url(part.name) for part in parts],
            path,
            storage_options=settings.storage_options,
            keep_order=True,
            tokens_column=tokens,
            num_workers=0 if settings.num_workers == 0 else None,
            overwrite=settings.manifest is None,
            settings=IndexSettings(
                executor=settings.executor, pack=settings.pack if tokens and settings.pack else None
            ),
        )
        counted = manifest.shard_num_samples.tolist()
        if counted != [part.num_samples for part in parts] or manifest.num_samples != self.manifest.num_samples:
            what, hint = "samples were lost", "this is a fault of shardstream: keep the input, and report it"
            expected, found = f"{self.manifest.num_samples} samples", f"{manifest.num_samples}"
            raise ManifestError(what, url=self.journal.output, expected=expected, found=found, hint=hint)
        origin = self._write_origin(parts)
        if self.job.spills is not None:
            self.job.spills.clear()
        _warn_of_notes(parts)
        num_tokens = None
        if tokens is not None and manifest.lists is not None:
            num_tokens = int(manifest.lists.read_all(["run_num_tokens"])["run_num_tokens"].sum())
        return Prepared(manifest, self.manifest, parts, num_resumed, origin, num_tokens)

    # ------------------------------------------------------------------------------------------- its parts

    def _asked(self) -> dict[str, Any]:
        """What decides the output, as JSON-able values."""
        settings = self.settings
        asked = {
            "input": self.manifest.fingerprint,
            "step": type(self.job.step).__name__,
            **{f"step {name}": value for name, value in self.job.step.about().items()},
            "format": self.job.shape.format,
            "shard size": settings.shard_num_bytes,
            "block size": settings.block_num_bytes,
            "level": settings.level,
            "key column": settings.key_column,
            "shuffle": settings.shuffle,
        }
        return asked | ({"seed": settings.seed, "memory": settings.memory_num_bytes} if settings.shuffle else {})

    def _ends(self, measured: Measured) -> Int64Array:
        num_bytes = measured.output_ratio * int(self.manifest.block_num_bytes.sum())
        num_parts = max(1, round(num_bytes / self.settings.shard_num_bytes))
        if self.job.seed is not None:
            return cut_evenly(self.manifest.num_samples, num_parts)
        return cut_by_bytes(self.manifest, num_parts)

    def _spills(self, measured: Measured, ends: Int64Array) -> Spills:
        most = self.settings.memory_num_bytes // _SHARE
        decoded = measured.decoded_num_bytes * self.manifest.num_samples
        num_buckets = max(1, -(-round(decoded) // len(ends) // most))
        # Named after what is asked for: spills of another shuffle, left by a killed run, must not be taken for these.
        name = f"shardstream-spill-{_short(json.dumps([self.journal.output, self._asked(), ends.tolist()]))}"
        base = self.settings.spill_dir or storage.local_path(self.journal.url()) or tempfile.gettempdir()
        folder = str(Path(base, name))
        return Spills(folder, bucket_ends(ends, num_buckets), most)

    def _scatters(self, measured: Measured) -> list[tuple[int, int, int]]:
        """Input samples of each task that spills: as much as is held before it is spilled."""
        most = self.settings.memory_num_bytes // _SHARE
        per_byte = measured.decoded_num_bytes * self.manifest.num_samples / int(self.manifest.block_num_bytes.sum())
        groups = cut_blocks_by_bytes(self.manifest, most / max(per_byte, 1e-9))
        return [(index, first, end) for index, (first, end) in enumerate(groups)]

    def _scatter(self, spills: Spills) -> None:
        all_tasks = self._scatters(self.measured)
        todo = [task for task in all_tasks if spills.num_scattered(task[0]) != task[2] - task[1]]
        num_before = self.manifest.num_samples - sum(end - first for _, first, end in todo)
        self._do_all(scatter, todo, _Teller(self, "scattering", num_before, 0))

    def _do_all(self, act: Any, tasks: Sequence[Any], teller: _Teller) -> None:
        num_workers = self.settings.num_workers
        if num_workers is None:
            num_workers = 0 if len(tasks) < 2 else num_cores()  # noqa: PLR2004 - one task needs no other process
        do_all(self.job, act, tasks, num_workers, self.settings.executor, teller)

    def _write_origin(self, parts: Sequence[PartRecord]) -> str:
        """Of each output shard the ids of its samples in order."""
        url = self.journal.url("origin.parquet")
        about = {"input_fingerprint": self.manifest.fingerprint, "seed": str(self.job.seed)}
        kind = pa.schema([("shard", pa.string()), ("sample_ids", pa.list_(pa.int64()))], metadata=about)
        with (
            storage.write_atomic(url, self.settings.storage_options) as file,
            pq.ParquetWriter(file, kind, compression="zstd", use_dictionary=["shard"]) as writer,
        ):
            for record, part in zip(parts, parts_of(self.ends), strict=True):
                ids = pa.array(self.job.sample_ids(part.first, part.end))
                offsets = pa.array([0, len(ids)], pa.int32())
                lists = pa.ListArray.from_arrays(offsets, ids)
                writer.write_table(pa.table([pa.array([record.name]), lists], schema=kind))
        return url


class _Teller:
    """Adds up what is done, and tells the caller of it."""

    def __init__(self, run: Run, phase: str, num_samples: int, num_parts: int) -> None:
        self._run, self._phase = run, phase
        self._num_samples, self._num_parts, self._num_bytes = num_samples, num_parts, 0
        self(Done())

    def __call__(self, done: Done) -> None:
        self._num_samples += done.num_samples
        self._num_parts += done.num_parts
        self._num_bytes += done.num_bytes
        tell = self._run.settings.progress
        if tell is not None:
            num_all, num_parts = self._run.manifest.num_samples, len(self._run.ends)
            tell(PrepareProgress(self._phase, self._num_samples, num_all, self._num_parts, num_parts, self._num_bytes))


def _rests(task: Sequence[Part], done: Mapping[int, PartRecord]) -> list[tuple[Part, ...]]:
    """What is left of a task: stretches of parts that are not whole."""
    return [tuple(parts) for is_done, parts in groupby(task, lambda part: part.index in done) if not is_done]


def _other(output: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> PlanError:
    """Names what is asked for that is not what the output was begun with."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    expected = ", ".join(f"{name} {before.get(name)}" for name in names)
    found = ", ".join(f"{name} {now.get(name)}" for name in names)
    hint = "ask for the same to go on, or name another folder"
    return PlanError("the output was begun with something else", url=output, expected=expected, found=found, hint=hint)


def _warn_of_notes(parts: Sequence[PartRecord]) -> None:
    notes: Counter[str] = Counter()
    for part in parts:
        notes.update(part.notes)
    if notes["keys_changed"]:
        text = (
            f"{notes['keys_changed']} samples had the key of another one in their shard: their sample id was put at "
            "its end"
        )
        warnings.warn(text, ShardStreamWarning, stacklevel=4)


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
