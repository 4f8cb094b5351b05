"""From rows in memory to the columns of a batch; from samples that a transform returned to the same; valid targets.

Two paths lead to a batch. Without a transform, whole columns become tensors at once (``columns_to_torch``). With one,
rows become samples (``rows_to_samples``), and what the transform returns is put together again (``collate_samples``);
a transform that changes nothing gives the batch that no transform gives.

torch knows uint16, uint32 and uint64 only in part (no ``index_select``, no masked assignment), but it stores, indexes
and converts them; columns keep these dtypes rather than grow, and target columns become int64 (``mask_padding``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardstream.columns import Column, Dense, Rows, Slices, python_values
from shardstream.errors import DecodeError, PlanError
from shardstream.torch.ragged import Ragged

TorchColumn: TypeAlias = Tensor | Ragged | list[Any]
Numbers: TypeAlias = npt.NDArray[Any]


def columns_to_torch(rows: Rows) -> dict[str, TorchColumn]:
    """Turns columns into what a batch holds, without a step of Python per row for numbers.

    Numbers become ``tensor[b]``, lists of a fixed size ``tensor[b, k]``, lists of numbers ``Ragged``, text a list of
    ``str``, binary a list of ``bytes``, anything else a list; all keep their dtype. Rows without a value are None in
    lists, and ``is_null`` in ``Ragged``. Tensors share the memory of ``rows`` where that is writable.

    Raises:
        DecodeError: A column of numbers has rows without a value (a tensor cannot say so), or text is not UTF-8.

    Example:
        >>> columns_to_torch(Rows(2, {"label": Dense(np.array([3, 4]))}))
        {'label': tensor([3, 4])}
    """
    return {name: _column_to_torch(name, column) for name, column in rows.columns.items()}


def _column_to_torch(name: str, column: Column) -> TorchColumn:
    if isinstance(column, Dense) and column.values.dtype.kind in _FAMILIES:
        _refuse_nulls(name, column.nulls)
        return _tensor(column.values)
    if isinstance(column, Slices) and column.kind == "list":
        values, offsets = _packed(column)
        nulls = None if column.nulls is None else torch.from_numpy(np.array(column.nulls))
        return Ragged(_tensor(values), torch.from_numpy(offsets), nulls)
    return python_values(name, column)


def rows_to_samples(rows: Rows) -> list[dict[str, Any]]:
    """Turns columns into one dict per row, for transforms.

    Numbers become Python numbers, lists of numbers numpy arrays (views), text ``str``, binary ``bytes``; anything else
    stays as it is. Rows without a value are None.

    Raises:
        DecodeError: Text is not UTF-8.

    Example:
        >>> rows_to_samples(Rows(2, {"label": Dense(np.array([3, 4]))}))
        [{'label': 3}, {'label': 4}]
    """
    names = list(rows.columns)
    lists = [python_values(name, rows.columns[name]) for name in names]
    return [{name: values[row] for name, values in zip(names, lists, strict=True)} for row in range(rows.num_rows)]


def _packed(column: Slices) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """The values one row after the other, and int64[b + 1] offsets; a view where they lie like that already."""
    offsets = np.concatenate(([0], np.cumsum(column.lengths, dtype=np.int64)))
    if len(column) == 0:
        return column.values[:0], offsets
    if np.array_equal(column.starts - column.starts[0], offsets[:-1]):
        first = int(column.starts[0])
        return column.values[first : first + int(offsets[-1])], offsets
    source = np.repeat(column.starts - offsets[:-1], column.lengths) + np.arange(offsets[-1])
    return column.values[source], offsets


def _tensor(values: Numbers) -> Tensor:
    """The array as a tensor that shares its memory, or a copy where torch could not use it."""
    if not values.flags.writeable or not values.dtype.isnative or any(stride < 0 for stride in values.strides):
        values = values.astype(values.dtype.newbyteorder("="))
    return torch.from_numpy(values)


def _refuse_nulls(name: str, nulls: npt.NDArray[np.bool_] | Sequence[bool] | None) -> None:
    if nulls is None or not np.any(nulls):
        return
    first = int(np.argmax(nulls))
    raise DecodeError(
        f"column {name!r} has no value in {int(np.sum(nulls))} of {len(nulls)} rows of this batch (first: {first})",
        expected="numbers without nulls, since a tensor cannot hold them",
        hint=f"fill them in transform=, or leave {name!r} out with columns=",
    )


def collate_samples(
    samples: Sequence[Mapping[str, Any]], source: Mapping[str, Column] | None = None
) -> dict[str, TorchColumn]:
    """Puts samples together: the default collation after a transform.

    Numbers become ``tensor[b]`` (int64, float64 or bool), arrays and tensors of one shape ``tensor[b, ...]``, those of
    one dimension and different lengths ``Ragged``; anything else a list.

    Args:
        samples: What the transform returned, one dict per row.
        source: The columns the samples were made of. Where a transform keeps the kind of a value, its column comes
            out as it would without transform: lists stay ``Ragged`` though all have one length in this batch, numbers
            keep their dtype.

    Raises:
        DecodeError: A sample lacks a key that others have, or a number is None in some of them.

    Example:
        >>> collate_samples([{"x": 1, "name": "a"}, {"x": 2, "name": "b"}])
        {'x': tensor([1, 2]), 'name': ['a', 'b']}
    """
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    for row, sample in enumerate(samples):
        missing = [name for name in names if name not in sample]
        if missing:
            who = next((f"{key} {sample[key]!r}" for key in ("__id__", "__key__") if key in sample), f"row {row}")
            raise DecodeError(
                f"the sample with {who} lacks {missing}, which other samples of its batch have",
                expected=names,
                found=list(sample),
                hint="let transform= return the same keys for every sample, or give collate=",
            )
    return {name: _stacked(name, [sample[name] for sample in samples], (source or {}).get(name)) for name in names}


def _stacked(name: str, values: list[Any], source: Column | None) -> TorchColumn:
    present = [value for value in values if value is not None]
    if not present and isinstance(source, Dense) and source.values.dtype.kind in _FAMILIES:
        _refuse_nulls(name, [True] * len(values))  # as in a batch in which others have one
    if present and all(isinstance(value, int | float | np.integer | np.floating | np.bool_) for value in present):
        _refuse_nulls(name, [value is None for value in values])
        return _stacked_numbers(values, source)
    if not present or not all(isinstance(value, Tensor | np.ndarray) for value in present):
        return values
    if isinstance(source, Dense) and source.values.dtype.kind in _FAMILIES:  # lists of a fixed size
        _refuse_nulls(name, [value is None for value in values])
    arrays = [_tensor(value) if isinstance(value, np.ndarray) else value for value in present]
    is_list = isinstance(source, Slices) and source.kind == "list"
    is_flat = all(array.ndim == 1 for array in arrays)
    if len(present) == len(values) and not (is_list and is_flat) and len({array.shape for array in arrays}) == 1:
        return torch.stack(arrays)
    if not is_flat:
        return values
    lengths = [0 if value is None else len(value) for value in values]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
    nulls = torch.tensor([value is None for value in values])
    keeps_nulls = isinstance(source, Slices) and source.nulls is not None
    return Ragged(torch.cat(arrays), offsets, nulls if keeps_nulls or bool(nulls.any()) else None)


def _stacked_numbers(values: list[Any], source: Column | None) -> TorchColumn:
    families = {_family(value) for value in values}
    dtypes: list[npt.DTypeLike] = [np.int64, np.uint64]
    if families != {"iu"}:
        dtypes = [np.bool_] if families == {"b"} else [np.float64]
    if isinstance(source, Dense) and source.values.ndim == 1 and families == {_FAMILIES.get(source.values.dtype.kind)}:
        dtypes = [source.values.dtype, *dtypes]
    for dtype in dtypes:
        try:
            return torch.from_numpy(np.array(values, dtype=dtype))
        except OverflowError:
            continue
    return values


_FAMILIES = {"b": "b", "i": "iu", "u": "iu", "f": "f"}


def _family(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "b"
    return "iu" if isinstance(value, int | np.integer) else "f"


def count_valid(column: TorchColumn, ignore_index: int, *, shifted: bool) -> Tensor:
    """Counts the targets of each row that a loss counts: entries that are not ``ignore_index``.

    Args:
        column: ``Ragged`` or ``tensor[b, ...]`` of label sequences, or ``tensor[b]`` of one label a row.
        ignore_index: The label that does not count.
        shifted: True if the labels stand where the loss compares them (position t holds the target of position t).
            False if the model shifts them itself: then the first entry of each sequence is never a target, and
            ``labels[:, 1:]`` is counted. One label a row is counted as it is.

    Returns:
        ``int64[b]``; 0 for empty rows and rows without a value.

    Raises:
        PlanError: The column holds no numbers.

    Example:
        >>> labels = torch.tensor([[7, 7, -100], [-100, 7, 7]])
        >>> count_valid(labels, -100, shifted=True), count_valid(labels, -100, shifted=False)
        (tensor([2, 2]), tensor([1, 2]))
    """
    if isinstance(column, Ragged):
        before = torch.zeros(len(column.values) + 1, dtype=torch.int64, device=column.values.device)
        torch.cumsum(_counts(column.values, ignore_index), 0, out=before[1:])
        starts, stops = column.offsets[:-1], column.offsets[1:]
        return before[stops] - before[starts if shifted else torch.minimum(starts + 1, stops)]
    if not isinstance(column, Tensor):
        raise PlanError(
            "targets must be numbers", expected="a tensor or Ragged column", found=type(column).__name__, hint=_TARGETS
        )
    if column.ndim == 1:
        return _counts(column, ignore_index).to(torch.int64)
    counted = column if shifted else column[:, 1:]
    is_counted = _counts(counted, ignore_index).flatten(1)
    if is_counted.is_cpu:  # torch would use all its threads for this, which on busy cores takes milliseconds
        return torch.from_numpy(np.count_nonzero(is_counted.numpy(), axis=1))
    return is_counted.sum(1)


_TARGETS = "name a column of numbers in targets=, or a callable of the batch that returns int64[b]"


def _counts(values: Tensor, ignore_index: int) -> Tensor:
    """``bool``: True where a value counts."""
    if not _can_hold(values.dtype, ignore_index):  # torch would wrap: in uint16, 65436 == -100
        return torch.ones(values.shape, dtype=torch.bool, device=values.device)
    return values != ignore_index


def _can_hold(dtype: torch.dtype, value: int) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return dtype != torch.bool and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def mask_padding(column: TorchColumn, is_padding: Tensor, ignore_index: int) -> TorchColumn:
    """Returns a target column in which no entry of a padding row counts.

    Labels of a dtype that cannot hold ``ignore_index`` (uint16, bool, …) become int64, in every batch, with padding
    rows or without.

    Args:
        column: ``Ragged`` or ``tensor[b, ...]``.
        is_padding: ``bool[b]``.
        ignore_index: The label that does not count.

    Returns:
        The column itself where nothing has to change, otherwise a new one; the input is left as it is.

    Raises:
        PlanError: The column holds no numbers.

    Example:
        >>> mask_padding(torch.tensor([3, 4]), torch.tensor([False, True]), -100)
        tensor([   3, -100])
    """
    if not isinstance(column, Tensor | Ragged):
        raise PlanError("targets must be numbers", found=type(column).__name__, hint=_TARGETS)
    values = column.values if isinstance(column, Ragged) else column
    if not _can_hold(values.dtype, ignore_index):
        values = values.to(torch.int64)
    if bool(is_padding.any()):
        if isinstance(column, Ragged):
            rows = torch.repeat_interleave(is_padding, column.lengths)
        else:
            rows = is_padding.view(-1, *[1] * (values.ndim - 1))
        values = torch.where(rows, torch.full((), ignore_index, dtype=values.dtype), values)
    return Ragged(values, column.offsets, column.is_null) if isinstance(column, Ragged) else values


@dataclass(frozen=True)
class PadTokens:
    """Makes ``input_ids`` and ``labels`` of a token column; made by ``pad_tokens``, which explains the fields."""

    column: str
    pad_id: int
    length: int | None
    ignore_index: int
    labels: str | None
    shift: bool
    side: Literal["right", "left"]

    takes_columns = True  # a collate callable of whole columns, not of a list of samples

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns with ``input_ids`` and ``labels`` in place of those they are made of."""
        tokens = _as_ragged(self.column, columns)
        width = self.length if self.length is not None else max(1, int(tokens.lengths.max()) if len(tokens) else 0)
        filled = tokens.filled_mask(width, self.side)
        targets = tokens if self.labels is None else _as_ragged(self.labels, columns)
        if not torch.equal(targets.lengths, tokens.lengths):
            row = int(torch.argmax((targets.lengths != tokens.lengths).to(torch.int64)))
            raise DecodeError(
                f"columns {self.column!r} and {self.labels!r} differ in length in row {row} of this batch",
                expected=int(tokens.lengths[row]),
                found=int(targets.lengths[row]),
                hint="labels need one entry per token",
            )
        labels = targets.to(dtype=torch.int64).padded(self.ignore_index, width, self.side)
        # A target needs a token before it; left-padded, the first token of a row stands behind padding.
        following = torch.where(filled[:, :-1], labels[:, 1:], self.ignore_index)
        labels = torch.full_like(labels, self.ignore_index) if self.shift else labels
        (labels[:, :-1] if self.shift else labels[:, 1:])[:] = following
        kept = {name: column for name, column in columns.items() if name not in (self.column, self.labels)}
        input_ids = tokens.to(dtype=torch.int64).padded(self.pad_id, width, self.side)
        return {**kept, "input_ids": input_ids, "labels": labels}


def pad_tokens(
    column: str = "tokens",
    *,
    pad_id: int = 0,
    length: int | None = None,
    ignore_index: int = -100,
    labels: str | None = None,
    shift: bool = True,
    side: Literal["right", "left"] = "right",
) -> PadTokens:
    """Returns a ``collate=`` that turns a column of token lists into ``input_ids`` and ``labels``, ``int64[b, n]``.

    Args:
        column: Name of the token column; it is replaced by ``input_ids``.
        pad_id: Fills ``input_ids``.
        length: n; longer rows are cut. Default: the longest row of the batch, at least 1.
        ignore_index: Fills ``labels``: padding is no target, and neither is anything of empty rows.
        labels: Name of a column with one label per token; default: the tokens themselves.
        shift: True for labels that stand where the loss compares them: position t holds the label of token t + 1, and
            a row's last token has none. Declare the targets with ``shifted=True`` then. False for models that shift
            themselves; declare ``shifted=False``.
        side: Where the padding goes, "right" or "left".

    Returns:
        A picklable callable of the columns (``takes_columns`` is True). It raises ``DecodeError`` if there is no such
        column, if it holds no lists of numbers, or if labels and tokens differ in length.

    Raises:
        PlanError: ``length`` is less than 1, or ``side`` is neither "right" nor "left".

    Example:
        >>> tokens = Ragged(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 3, 4]))
        >>> pad_tokens()({"tokens": tokens})["labels"]
        tensor([[   6,    7, -100],
                [-100, -100, -100]])
    """
    if length is not None and length < 1:
        raise PlanError("pad_tokens cannot make rows without tokens", expected="length >= 1", found=length)
    if side not in ("right", "left"):
        raise PlanError("pad_tokens does not know this side", expected="'right' or 'left'", found=repr(side))
    return PadTokens(column, pad_id, length, ignore_index, labels, shift, side)


def _as_ragged(name: str, columns: Mapping[str, Any]) -> Ragged:
    column = columns.get(name)
    if isinstance(column, Tensor) and column.ndim > 1:
        column = column.flatten(1)
        return Ragged(column.flatten(), torch.arange(len(column) + 1) * column.shape[1])
    if not isinstance(column, Ragged):
        found = f"columns {list(columns)}" if column is None else type(column).__name__
        hint = "give pad_tokens the name of a column of token lists, and read it (columns=)"
        raise DecodeError(f"column {name!r} holds no lists of tokens", expected="Ragged", found=found, hint=hint)
    return column
