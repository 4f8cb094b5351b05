"""Preparing data: any shards written again as shards that stream well, shuffled or tokenised on the way.

Source → step → parts → writer → journal: samples are read by the formats (``source``), changed one by one (``steps``),
written as output shards that were decided beforehand (``parts``, ``writers``), each of which is recorded when it is
whole (``journal``). So a run that was killed goes on, and its result is the same, byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from shardstream.errors import shown_url
from shardstream.prepare.parts import tasks_of
from shardstream.prepare.run import Run
from shardstream.prepare.settings import Outline, Prepared, PrepareProgress, PrepareSettings
from shardstream.prepare.steps import Copy, Step, Tokenize
from shardstream.prepare.work import schema_of

__all__ = [
    "Copy",
    "Outline",
    "PrepareProgress",
    "PrepareSettings",
    "Prepared",
    "Step",
    "Tokenize",
    "outline",
    "prepare",
]


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    step: Step | None = None,
    settings: PrepareSettings | None = None,
) -> Prepared:
    r"""Writes shards again as shards that stream well. A run that was interrupted goes on where it was.

    The result depends on input, step and settings alone, not on the number of workers nor on how often it was begun.
    With processes (``num_workers`` other than 0) a script must call it under ``if __name__ == "__main__":``.

    Args:
        inputs: Shards as ``build_manifest`` takes them, of one format; or a manifest.
        output: Folder, local or an fsspec URL: new, empty, or begun by the same call.
        step: What is done to samples; default: ``Copy()``.
        settings: How.

    Returns:
        What was written: every sample of the input, once, which is counted again at the end.

    Raises:
        PlanError: If the output holds something else, the step or the format cannot take these columns.
        ManifestError: If inputs are missing, bad, or do not fit together.
        ReadError: If data cannot be read or written.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
        >>> done = prepare([folder / "a.jsonl"], folder / "out", settings=PrepareSettings(num_workers=0))
        >>> done.manifest.urls, done.manifest.num_samples
        (['00000.parquet'], 2)
    """
    run = Run.begin(inputs, output, step or Copy(), settings or PrepareSettings())
    with run.journal.locked():
        run = run.decided()
        return run.finish(run.write())


def outline(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    step: Step | None = None,
    settings: PrepareSettings | None = None,
) -> Outline:
    """Returns what ``prepare`` would write; writes nothing. Its arguments and errors are those of ``prepare``."""
    run = Run.begin(inputs, output, step or Copy(), settings or PrepareSettings()).decided(is_dry=True)
    manifest, sizes = run.manifest, np.diff(run.ends, prepend=0)
    is_shuffled = run.job.spills is not None
    return Outline(
        output=shown_url(run.journal.output),
        format=run.job.shape.format,
        num_samples=manifest.num_samples,
        num_input_shards=manifest.num_shards,
        num_input_bytes=int(manifest.num_bytes.sum()),
        num_shards=len(run.ends),
        num_done=len(run.journal.records()),
        shard_num_samples=(int(sizes.min()), int(sizes.max())),
        measured=run.measured,
        num_output_bytes=round(run.measured.output_ratio * int(manifest.block_num_bytes.sum())),
        spill_num_bytes=round(run.measured.decoded_num_bytes * manifest.num_samples) if is_shuffled else 0,
        schema={column.name: str(column.type) for column in schema_of(run.job)},
        tasks=len(run.ends) if is_shuffled else len(tasks_of(manifest, run.ends)),
    )
