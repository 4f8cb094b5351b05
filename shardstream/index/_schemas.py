"""One schema for all shards: columns matched by name, types unified; for tar the union of fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from shardstream.errors import ManifestError
from shardstream.formats import ShardIndex
from shardstream.formats._arrow import plain_type
from shardstream.manifest import ColumnSchema, Manifest

_VARIANTS: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType], ...] = (
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_large_list_view)
_WIDENING = (pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating)


class SchemaUnion:
    """The schema of the shards seen so far. The first shard's column order counts.

    Example:
        >>> union = SchemaUnion()
        >>> union.columns, union.num_samples
        ((), 0)
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._family = ""
        self._first = ""
        self._has_types = False  # whether shards of this family have an Arrow schema
        self._types: dict[str, pa.DataType] = {}
        self._num_present: Counter[str] = Counter()
        self._unknown: set[str] = set()  # columns of which some shard does not tell how many values are missing

    @property
    def columns(self) -> tuple[ColumnSchema, ...]:
        """The sample schema; of a field that a shard does not have, all its samples miss it."""
        return tuple(
            ColumnSchema(
                name,
                str(kind) if self._has_types else "bytes",
                -1 if name in self._unknown else self.num_samples - self._num_present[name],
            )
            for name, kind in self._types.items()
        )

    @property
    def arrow_schema(self) -> bytes:
        """Serialised Arrow schema, or b"" for tar."""
        return pa.schema(self._types).serialize().to_pybytes() if self._has_types else b""

    def add(self, url: str, index: ShardIndex) -> None:
        """Takes in a shard.

        Raises:
            ManifestError: If it does not fit those before it; it is left out then.
        """
        self._join(url, index.format)
        self._has_types = bool(index.arrow_schema)
        if self._family == "jsonl":
            self._add_json(url, pa.ipc.read_schema(pa.py_buffer(index.arrow_schema)))
        elif self._has_types:
            self._add_arrow(url, pa.ipc.read_schema(pa.py_buffer(index.arrow_schema)))
        else:
            self._add_fields(index.columns)
        self._count(index.columns, int(index.block_rows.sum()))

    def add_types_of(self, old: Manifest) -> None:
        """Takes in the schema of an older manifest of which shards are kept.

        Raises:
            ManifestError: If it does not fit the shards before.
        """
        url = old.path or old.url(0)
        self._join(url, old.formats[0])
        self._has_types = bool(old.arrow_schema)
        if self._family == "jsonl":
            self._add_json(url, pa.ipc.read_schema(pa.py_buffer(old.arrow_schema)))
        elif self._has_types:
            self._add_arrow(url, pa.ipc.read_schema(pa.py_buffer(old.arrow_schema)))
        else:
            self._add_fields(old.columns)

    def count_kept(self, old: Manifest, kept: Sequence[int]) -> None:
        """Counts the samples of the shards that are kept; which values they miss is known only of all together."""
        is_whole = len(kept) == old.num_shards
        columns = old.columns if is_whole else [replace(column, num_missing=-1) for column in old.columns]
        self._count(columns, int(old.shard_num_samples[np.asarray(kept)].sum()))

    def _join(self, url: str, format_name: str) -> None:
        family = format_name.partition(".")[0]
        self._family, self._first = self._family or family, self._first or url
        if family != self._family:
            hint = "make one manifest of each"
            raise ManifestError("formats cannot be mixed", url=url, expected=self._family, found=family, hint=hint)

    def _add_fields(self, columns: Sequence[ColumnSchema]) -> None:
        self._types.update({column.name: pa.binary() for column in columns if column.name not in self._types})

    def _count(self, columns: Sequence[ColumnSchema], num_samples: int) -> None:
        self.num_samples += num_samples
        for column in columns:
            self._num_present[column.name] += num_samples - column.num_missing
        self._unknown.update(column.name for column in columns if column.num_missing < 0)

    def _add_json(self, url: str, schema: pa.Schema) -> None:
        """Of JSON any field may be missing anywhere, in structs, too."""
        try:
            unified = pa.unify_schemas([pa.schema(self._types), schema], promote_options="permissive")
        except pa.ArrowException as error:
            what, hint = f"the shard's types are not those of {self._first}", "give each field one type everywhere"
            raise ManifestError(what, url=url, found=error, hint=hint) from error
        self._types = {column.name: column.type for column in unified}

    def _add_arrow(self, url: str, schema: pa.Schema) -> None:
        types = {field.name: whole_type(field.type) for field in schema}
        if not self._types:
            self._types = types
            return
        if types.keys() != self._types.keys():
            lost, new = sorted(self._types.keys() - types.keys()), sorted(types.keys() - self._types.keys())
            found = " and ".join([f"no {', '.join(lost)}"] * bool(lost) + [f"also {', '.join(new)}"] * bool(new))
            raise ManifestError(
                f"the shard's columns are not those of {self._first}",
                url=url,
                expected=", ".join(self._types),
                found=found,
                hint="write all shards with the same columns",
            )
        unified = {name: unify(kind, types[name]) for name, kind in self._types.items()}
        for name, kind in unified.items():
            if kind is None:
                what = f"column {name!r} has another type than in the shards before"
                hint = "write it with one type everywhere"
                raise ManifestError(what, url=url, expected=self._types[name], found=types[name], hint=hint)
        self._types = unified


def whole_type(kind: pa.DataType) -> pa.DataType:
    """Returns the plain type of a layout variant: large and view types, dictionaries and extensions at any depth.

    Example:
        >>> whole_type(pa.large_list(pa.dictionary(pa.int8(), pa.large_string())))
        ListType(list<item: string>)
    """
    of = pa.types
    kind = plain_type(kind)
    if of.is_run_end_encoded(kind):
        return whole_type(kind.value_type)
    if any(is_kind(kind) for is_kind in _LISTS):
        return pa.list_(whole_type(kind.value_type))
    if of.is_fixed_size_list(kind):
        return pa.list_(whole_type(kind.value_type), kind.list_size)
    if of.is_struct(kind):
        return pa.struct([(field.name, whole_type(field.type)) for field in kind])
    if of.is_map(kind):
        return pa.map_(whole_type(kind.key_type), whole_type(kind.item_type))
    return next((plain for is_kind, plain in _VARIANTS if is_kind(kind)), kind)


def unify(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Returns the type that holds the values of both without loss, or None. Both as ``whole_type`` gives them.

    Null goes with everything; integers of one signedness and floats take the wider one; so do the values of lists
    and the fields of structs.

    Example:
        >>> (
        ...     unify(pa.list_(pa.int32()), pa.list_(pa.int64())),
        ...     unify(pa.null(), pa.string()),
        ...     unify(pa.int8(), pa.uint8()),
        ... )
        (ListType(list<item: int64>), DataType(string), None)
    """
    of = pa.types
    if one.equals(other) or of.is_null(other):
        return one
    if of.is_null(one):
        return other
    if any(is_kind(one) and is_kind(other) for is_kind in _WIDENING):
        return max(one, other, key=lambda kind: kind.bit_width)
    if (of.is_list(one) and of.is_list(other)) or (
        of.is_fixed_size_list(one) and of.is_fixed_size_list(other) and one.list_size == other.list_size
    ):
        value = unify(one.value_type, other.value_type)
        return None if value is None else pa.list_(value, one.list_size if of.is_fixed_size_list(one) else -1)
    if of.is_struct(one) and of.is_struct(other) and {f.name for f in one} == {f.name for f in other}:
        fields = {field.name: unify(field.type, other.field(field.name).type) for field in one}
        return None if None in fields.values() else pa.struct(list(fields.items()))
    return None
