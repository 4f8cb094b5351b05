"""A pilot: a few runs of the input are written to memory, to learn about how large the output gets."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np

from shardstream.prepare.source import read_samples
from shardstream.prepare.work import Job, schema_of
from shardstream.prepare.writers import writer_of

_NUM_BLOCKS = 8


class Measured(NamedTuple):
    """What was measured."""

    output_ratio: float
    """Bytes of output for a byte of the blocks of the input."""
    decoded_num_bytes: float
    """Bytes of a sample in memory, as it is written."""


def measure(job: Job) -> Measured:
    """Writes the first run of some blocks, evenly spread over the input, to memory.

    Raises:
        PlanError: If the output format cannot hold these columns.
        ReadError: If the input cannot be read.
    """
    manifest, file = job.manifest, io.BytesIO()
    schema = schema_of(job)
    writer = writer_of(job.shape, schema, file)
    num_samples = num_decoded = 0
    num_read = 0.0
    for block in np.unique(np.linspace(0, manifest.num_blocks - 1, _NUM_BLOCKS).astype(np.int64)).tolist():
        first, rows = int(manifest.block_start[block]), int(manifest.block_rows[block])
        end = first + min(rows, int(manifest.block_run_rows[block]))
        for table in read_samples(manifest, first, end, job.step.columns, job.journal.storage_options):
            made = job.step.apply(table)
            writer.write(made, np.arange(first, first + made.num_rows))
            num_decoded += made.nbytes
        num_samples += end - first
        num_read += int(manifest.block_num_bytes[block]) * (end - first) / rows
    writer.close()
    return Measured(len(file.getvalue()) / max(num_read, 1.0), num_decoded / num_samples)
