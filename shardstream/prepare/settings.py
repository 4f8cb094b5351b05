"""How data is prepared, how far it is, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from shardstream.errors import PlanError
from shardstream.manifest import AllowUrl, Manifest
from shardstream.prepare.journal import PartRecord
from shardstream.prepare.pilot import Measured
from shardstream.prepare.writers import OUTPUT_FORMATS, Shape

SHARD_NUM_BYTES = 256 << 20
MEMORY_NUM_BYTES = 1 << 30


@dataclass(frozen=True)
class PrepareProgress:
    """How far it is.

    Attributes:
        phase: ``"reading"`` (the input is indexed), ``"scattering"`` (of a shuffle) or ``"writing"``.
        num_done: Samples done in this phase; in ``"reading"``, shards.
        num_all: Samples in all, or shards.
        num_parts_done: Output shards that are whole.
        num_parts: Output shards in all; 0 while that is not known.
        num_bytes: Written in this run.
    """

    phase: str
    num_done: int
    num_all: int
    num_parts_done: int = 0
    num_parts: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class PrepareSettings:
    """How the output looks, and how it is made.

    Attributes:
        format: ``"parquet"``, ``"tar"`` or ``"tar.zst"``; None: as the input, and Parquet for JSON lines.
        shard_num_bytes: Size of an output shard that is aimed at.
        block_num_bytes: Decoded size of a row group, or of a zstd frame.
        level: Level of zstd.
        key_column: For tars: the column that holds keys; None takes ``__key__``, or the sample ids where there is none.
        shuffle: Whether samples are shuffled, all with all.
        seed: Of the shuffle. The result is in the order that ``shuffle="full"`` has in epoch 0 with this seed.
        memory_num_bytes: What a process may take for a shuffle.
        spill_dir: Local folder for a shuffle; None: in the output or, for a remote one, in the temporary folder.
        num_workers: Processes; None takes one a core, 0 works in this one.
        executor: Used instead, if given; it is left running. A shuffle's spill folder must be shared by its machines.
        manifest: Where the manifest of the output is written; None: ``manifest.parquet`` in it.
        pack: With tokens: sequence lengths that the manifest counts sequences of; see ``build_manifest``.
        storage_options: Given to fsspec, for input and output.
        allow_url: Shards elsewhere that an input manifest may name; see ``Manifest.load``.
        progress: Called now and then.
    """

    format: str | None = None
    shard_num_bytes: int = SHARD_NUM_BYTES
    block_num_bytes: int = Shape.block_num_bytes
    level: int = Shape.level
    key_column: str | None = None
    shuffle: bool = False
    seed: int = 0
    memory_num_bytes: int = MEMORY_NUM_BYTES
    spill_dir: str | None = None
    num_workers: int | None = None
    executor: Executor | None = None
    manifest: str | None = None
    pack: Sequence[int] = ()
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    allow_url: AllowUrl = None
    progress: Callable[[PrepareProgress], None] | None = None

    def __post_init__(self) -> None:
        if self.format not in (None, *OUTPUT_FORMATS):
            raise PlanError("unknown output format", expected=", ".join(OUTPUT_FORMATS), found=repr(self.format))
        for name in ("shard_num_bytes", "block_num_bytes", "memory_num_bytes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1", found=getattr(self, name))


@dataclass(frozen=True)
class Outline:
    """What would be written.

    Attributes:
        output: The folder.
        format: Of the shards.
        num_samples: Samples, in and out.
        num_input_shards: Shards of the input.
        num_input_bytes: Their size.
        num_shards: Output shards.
        num_done: Of these, whole already.
        shard_num_samples: Samples of the smallest and the largest of them.
        measured: What was measured of a few blocks: about how large it gets.
        num_output_bytes: About how large the output gets.
        spill_num_bytes: Decoded size of what a shuffle spills, before compression; 0 without.
        schema: Columns of the output, and their types.
        tasks: How many tasks there are to share among processes.
    """

    output: str
    format: str
    num_samples: int
    num_input_shards: int
    num_input_bytes: int
    num_shards: int
    num_done: int
    shard_num_samples: tuple[int, int]
    measured: Measured
    num_output_bytes: int
    spill_num_bytes: int
    schema: Mapping[str, str]
    tasks: int


@dataclass(frozen=True)
class Prepared:
    """What was written.

    Attributes:
        manifest: Of the output, written to its file.
        input: Manifest of the input: sample ids are places in it. Kept in the output.
        parts: Records of the output shards.
        num_resumed: Shards that were whole before this run.
        origin: File that tells of each output shard which input samples it holds, in order.
        num_tokens: Tokens, or None if none were made.
    """

    manifest: Manifest
    input: Manifest
    parts: Sequence[PartRecord]
    num_resumed: int
    origin: str
    num_tokens: int | None
