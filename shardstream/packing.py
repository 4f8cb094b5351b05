"""Packing: documents laid end to end are a line of tokens, and sequences are cut from it. Pure arithmetic.

position → lane → sequence → tokens of the line → runs. The line holds the blocks in the epoch's order, a block's runs
in file order, and in a run the documents in the order of the run's permutation: the order of samples in another unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shardstream.errors import ManifestError, PlanError
from shardstream.fitting import TOKENS_DTYPES, sequence_counts_name
from shardstream.manifest import Manifest
from shardstream.order import EpochOrder, Lanes, Positions
from shardstream.permutation import Int64Array

PackingMode: TypeAlias = Literal["tokens", "whole", "unpacked"]

_NO_COUNTS = "index the shards again with `shardstream index --tokens-column {column}{more}`"
_NO_TOKENS = (
    "how many tokens there are must be known beforehand: write text as a column of token lists first "
    "(`shardstream tokenize`)"
)


@dataclass(frozen=True)
class Packing:
    """How documents become sequences of one length.

    A document is a row that holds a list of tokens. An empty list is a document without tokens; a null is none.

    Attributes:
        sequence_length: T: inputs, and targets, of a sequence.
        column: Column of token lists, or field of raw token bytes in a tar.
        eos_id: Token that is put after every document, empty ones included; None for none.
        mode: ``"tokens"``: sequence q holds the tokens q·T .. q·T + T of the line. ``"whole"``: no document is cut
            unless it is longer than a sequence; each run is packed by itself, best fit decreasing. ``"unpacked"``: a
            sequence holds one document, or a part of one that is longer, and padding: beside packed sources.
        pad_id: Fills ``input_ids`` where a sequence has no token.
        mask_document_starts: The first token of a document is no target. Only in ``"tokens"`` mode it ever is.
        loss_mask_column: Column with one number a token, 0 where it is no target; None for none.
        tokens_dtype: Of raw token bytes: ``"uint16"``, ``"uint32"`` or a signed one; the manifest's by default.

    Raises:
        PlanError: If a setting is impossible.

    Example:
        >>> Packing(2048, eos_id=0).identity()
        {'sequence_length': 2048, 'column': 'tokens', 'eos_id': 0, 'mode': 'tokens', 'tokens_dtype': None}
    """

    sequence_length: int
    column: str = "tokens"
    eos_id: int | None = None
    mode: PackingMode = "tokens"
    pad_id: int = 0
    mask_document_starts: bool = False
    loss_mask_column: str | None = None
    tokens_dtype: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sequence_length, bool) or not isinstance(self.sequence_length, int):
            found = repr(self.sequence_length)
            raise PlanError("sequence_length must be a whole number", found=found)
        if self.sequence_length < 1:
            raise PlanError(
                "a sequence has at least one token", expected="sequence_length >= 1", found=self.sequence_length
            )
        if self.mode not in get_args(PackingMode):
            raise PlanError("unknown packing", expected="'tokens', 'whole' or 'unpacked'", found=repr(self.mode))
        for name, token in (("eos_id", self.eos_id), ("pad_id", self.pad_id)):
            if token is not None and token < 0:
                raise PlanError(f"{name} must be a token", expected="0 or more", found=token)
        if self.tokens_dtype is not None and (self.tokens_dtype not in TOKENS_DTYPES):
            expected = ", ".join(TOKENS_DTYPES)
            raise PlanError("unknown tokens_dtype", expected=expected, found=repr(self.tokens_dtype))

    @property
    def is_line(self) -> bool:
        """Whether sequences are cut from the line of tokens, across documents and runs; otherwise each run has its own.

        Example:
            >>> [Packing(8, mode=mode).is_line for mode in ("tokens", "whole", "unpacked")]
            [True, False, False]
        """
        return self.mode == "tokens"

    @property
    def has_constant_targets(self) -> bool:
        """Whether every token but the line's first is a target, so that counts follow from positions alone."""
        return self.is_line and not self.mask_document_starts and self.loss_mask_column is None

    def identity(self) -> dict[str, Any]:
        """Returns what decides which tokens a sequence holds, as JSON values: for the cursor."""
        names = ("sequence_length", "column", "eos_id", "mode", "tokens_dtype")
        return {name: getattr(self, name) for name in names}


def num_runs(manifest: Manifest) -> Int64Array:
    """Returns the number of runs of each block: int64[num_blocks]."""
    return -(-manifest.block_rows.astype(np.int64) // manifest.block_run_rows)


class Pieces(NamedTuple):
    """What sequences are made of: consecutive places of runs, one entry a piece, sequence by sequence, in order."""

    sequence: Int64Array
    """int64[num_pieces]: index in the sequences asked for."""
    block: Int64Array
    """int64[num_pieces]: index of the block in the manifest."""
    run: Int64Array
    """int64[num_pieces]: index of the run in the block."""
    begin: Int64Array
    """int64[num_pieces]: first token in the run; where runs have their own sequences, the index of one of them."""
    end: Int64Array
    """int64[num_pieces]: behind the last one."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A data set as packed sequences. Make one with ``Packed.of``.

    Attributes:
        packing: How.
        run_lengths: int64[num_runs], tokens of each run with the ends of its documents, in manifest order; its
            sequences where runs have their own.
    """

    packing: Packing
    run_lengths: Int64Array

    @classmethod
    def of(cls, manifest: Manifest, packing: Packing) -> Packed:
        """Reads what a manifest knows of its runs' tokens: two numbers a run, in one go.

        Raises:
            PlanError: If the manifest counted another column, type or sequences; it names the way out.
            ManifestError: If the counts are damaged.
        """
        lists, more = manifest.lists, "" if packing.is_line else f" --pack {packing.sequence_length}"
        hint = _NO_COUNTS.format(column=packing.column, more=more)
        if manifest.tokens_column != packing.column or lists is None or "run_num_tokens" not in lists.names:
            found = "no token counts" if manifest.tokens_column is None else f"counts of {manifest.tokens_column!r}"
            raise PlanError(
                "packing needs the manifest's token counts",
                expected=f"counts of {packing.column!r}",
                found=found,
                hint=f"{hint}; {_NO_TOKENS}",
            )
        dtype = manifest.metadata.get("tokens_dtype")
        if packing.tokens_dtype not in (None, dtype):
            raise PlanError("tokens were counted as another type", expected=dtype, found=packing.tokens_dtype)
        packing = replace(packing, tokens_dtype=dtype)
        has_eos = packing.eos_id is not None
        if not packing.is_line:
            names = [sequence_counts_name(packing.sequence_length, has_eos=has_eos, mode=packing.mode)]
            if names[0] not in lists.names:
                counted = sorted(name for name in lists.names if name.startswith(names[0].split(".")[0] + "."))
                raise PlanError(
                    f"packing={packing.mode!r} needs the number of sequences of each run",
                    expected=names[0],
                    found=", ".join(counted) or "none",
                    hint=hint,
                )
        else:
            names = ["run_num_tokens", *["run_num_documents"] * has_eos]
        counts = lists.read_all(names)
        for name, values in counts.items():
            expected = int(num_runs(manifest).sum())
            if len(values) != expected:
                raise ManifestError(
                    f"the manifest's {name} do not fit its runs",
                    url=manifest.path,
                    expected=expected,
                    found=len(values),
                )
        return cls(packing, np.asarray(sum(counts.values()), np.int64))

    @cached_property
    def num_places(self) -> int:
        """Z, the tokens of an epoch; its sequences where runs have their own."""
        return int(self.run_lengths.sum())

    @property
    def num_sequences(self) -> int:
        """N: ceil((Z - 1) / T) under every tail, because sequences overlap by one token; 0 without two tokens."""
        if not self.packing.is_line:
            return self.num_places
        return max(0, -(-(self.num_places - 1) // self.packing.sequence_length))

    def __getstate__(self) -> dict[str, object]:
        return {"packing": self.packing, "run_lengths": self.run_lengths}


@dataclass(frozen=True, eq=False)
class PackedOrder:
    """The order of one epoch's sequences: which tokens stand at each position 0..N-1.

    Args:
        samples: The order of the samples: of its blocks, and of the documents of a run.
        packed: How documents are packed.

    Raises:
        PlanError: If the order has no line of blocks.
    """

    samples: EpochOrder
    packed: Packed

    def __post_init__(self) -> None:
        if isinstance(self.samples.shuffle, str):
            hint = "use shuffle=True"
            raise PlanError(
                "packed documents are read block by block", found=f"shuffle={self.samples.shuffle!r}", hint=hint
            )

    @property
    def num_positions(self) -> int:
        """N: the number of sequences."""
        return self.packed.num_sequences

    @property
    def manifest(self) -> Manifest:
        """The data set."""
        return self.samples.manifest

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.samples.lanes

    @property
    def shuffle(self) -> bool | str:
        """True or False."""
        return self.samples.shuffle

    @cached_property
    def lane_cut(self) -> Lanes:
        """The lanes over sequences, with phases where a block has more than one run."""
        samples = self.samples
        if samples.shuffle is True and samples.manifest.has_long_blocks:
            return Lanes.keyed(self.num_positions, samples.lanes, seed=samples.seed, epoch=samples.epoch)
        return Lanes(self.num_positions, samples.lanes)

    def sample_ids(self, positions: Positions) -> Int64Array:
        """Returns the place on the line of the sequence at each position: int64[n], a bijection of 0..N-1.

        Args:
            positions: Integers in [0, N), in any order.

        Raises:
            PlanError: If a position lies outside the epoch.
        """
        places: Int64Array = np.asarray(positions, np.int64)
        if places.size and not 0 <= places.min() <= places.max() < self.num_positions:
            expected, found = f"0..{self.num_positions - 1}", f"{places.min()}..{places.max()}"
            raise PlanError("a position lies outside the epoch", expected=expected, found=found)
        return self.lane_cut.line_index(places)

    @cached_property
    def block_first_run(self) -> Int64Array:
        """int64[num_blocks + 1]: index of each block's first run, runs numbered as in the manifest."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(num_runs(self.manifest))))

    @cached_property
    def line_runs(self) -> npt.NDArray[np.int32]:
        """int32: the runs that hold anything, numbered as in the manifest, in the order in which the line has them."""
        blocks, first = self.samples.line_blocks, self.block_first_run
        sizes = np.diff(first)[blocks]
        begin = np.cumsum(sizes) - sizes
        runs = np.repeat(first[blocks] - begin, sizes) + np.arange(int(sizes.sum()))
        return runs[self.packed.run_lengths[runs] > 0].astype(np.int32)

    @cached_property
    def run_start(self) -> Int64Array:
        """int64[len(line_runs) + 1]: where on the line each of ``line_runs`` begins; the last entry is Z."""
        lengths = self.packed.run_lengths[self.line_runs]
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))

    def run_length(self, block: int, run: int) -> int:
        """Returns the tokens of a run, ends of documents included; its sequences where runs have their own."""
        return int(self.packed.run_lengths[self.block_first_run[block] + run])

    @cached_property
    def line_start(self) -> Int64Array:
        """int64[num_blocks + 1]: the first sequence that begins in each block of the line, or behind it."""
        by_block = np.add.reduceat(self.packed.run_lengths, self.block_first_run[:-1])[self.samples.line_blocks]
        start: Int64Array = np.concatenate((np.zeros(1, np.int64), np.cumsum(by_block)))
        if not self.packed.packing.is_line:
            return start
        return np.minimum(-(-start // self.packed.packing.sequence_length), self.num_positions)

    @property
    def line_blocks(self) -> Int64Array:
        """int64[num_blocks]: the blocks in the order in which the line holds them."""
        return self.samples.line_blocks

    def pieces(self, sequence_ids: Int64Array) -> Pieces:
        """Returns the pieces of runs that sequences are made of.

        Args:
            sequence_ids: int64[n], places on the line.

        Returns:
            The pieces. In ``"tokens"`` mode those of a sequence have T + 1 tokens together (the last sequence of the
            line may have fewer); where runs have their own sequences, one is one piece.
        """
        start, length = self.run_start, self.packed.packing.sequence_length
        if not self.packed.packing.is_line:
            begin, end = sequence_ids, sequence_ids + 1
        else:
            begin = sequence_ids * length
            end = np.minimum(begin + length + 1, start[-1])
        first = np.searchsorted(start, begin, side="right") - 1
        sizes = np.searchsorted(start, end, side="left") - first
        sequence = np.repeat(np.arange(len(begin)), sizes)
        slot = np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(sequence))
        runs = self.line_runs[slot].astype(np.int64)
        block = np.searchsorted(self.block_first_run, runs, side="right") - 1
        return Pieces(
            sequence,
            block,
            runs - self.block_first_run[block],
            np.maximum(begin[sequence], start[slot]) - start[slot],
            np.minimum(end[sequence], start[slot + 1]) - start[slot],
        )
