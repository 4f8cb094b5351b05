"""What is done to samples on their way: nothing, or made tokens of. One row in, one row out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from shardstream.errors import DecodeError, ManifestError, PlanError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS_COLUMN = "tokens"
LENGTH_COLUMN = "num_tokens"
_MOST_UINT16 = 1 << 16
_TEXT_NUM_BYTES = 1 << 20  # tokenised at a time: the library's own results take tens of times as much


class Step(Protocol):
    """Turns tables into tables of as many rows. Steps are pickled to the processes that do them."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns that are read, or None for all."""
        ...

    @property
    def tokens_column(self) -> str | None:
        """Column of token lists that is made, or None."""
        ...

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Returns the schema of what is made of tables with this one."""
        ...

    def apply(self, table: pa.Table) -> pa.Table:
        """Returns what is made of a table."""
        ...

    def about(self) -> dict[str, Any]:
        """Returns as JSON-able values what decides what is made."""
        ...


@dataclass(frozen=True)
class Copy:
    """Leaves samples as they are.

    Attributes:
        columns: Names of the columns that are kept, or None for all.
    """

    columns: Sequence[str] | None = None

    @property
    def tokens_column(self) -> str | None:
        """None: tokens are not known."""
        return None

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Returns the same schema."""
        return schema

    def apply(self, table: pa.Table) -> pa.Table:
        """Returns the same table."""
        return table

    def about(self) -> dict[str, Any]:
        """Returns which columns are kept."""
        return {"columns": None if self.columns is None else list(self.columns)}


@dataclass(frozen=True)
class Tokenize:
    """Makes a list of token ids of a text column, and its length; a row without text has no list.

    The file's own truncation and padding are switched off: nothing is cut, nothing is filled.

    Attributes:
        tokenizer: Path of a ``tokenizer.json``.
        digest: Of that file's bytes, so that a run goes on with the same one only.
        text_column: Text as string or UTF-8 bytes.
        keep: Other columns that are kept.
        eos_id: Token put after every document, or None.
        dtype: ``"uint16"`` or ``"int32"``.
        with_special: Whether the tokenizer's post-processor adds its special tokens.
    """

    tokenizer: str
    digest: str
    text_column: str
    keep: tuple[str, ...] = ()
    eos_id: int | None = None
    dtype: str = "int32"
    with_special: bool = False

    @classmethod
    def make(
        cls,
        tokenizer: str,
        text_column: str,
        *,
        keep: Sequence[str] = (),
        eos: str | None = None,
        dtype: str = "auto",
        with_special: bool = False,
    ) -> Tokenize:
        """Reads the tokenizer and makes the choices that depend on it.

        Args:
            tokenizer: Path of a ``tokenizer.json``.
            text_column: The column of text.
            keep: Other columns that are kept.
            eos: Text of the token put after every document, or None.
            dtype: ``"auto"`` (uint16 if every id fits), ``"uint16"`` or ``"int32"``.
            with_special: See the class.

        Raises:
            PlanError: If the package is missing, the file is no tokenizer, has no such token or more than fits, or
                columns are named twice or as the ones that are made.
        """
        try:
            data = Path(tokenizer).read_bytes()
        except OSError as error:
            raise PlanError("the tokenizer cannot be read", url=tokenizer, found=error) from error
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        loaded = _loaded(tokenizer, digest)
        eos_id = None if eos is None else loaded.token_to_id(eos)
        if eos is not None and eos_id is None:
            hint = "name a token of its vocabulary, such as '<|endoftext|>'"
            raise PlanError(f"the tokenizer has no token {eos!r}", url=tokenizer, hint=hint)
        largest = max(loaded.get_vocab(with_added_tokens=True).values(), default=0)
        if dtype == "auto":
            dtype = "uint16" if largest < _MOST_UINT16 else "int32"
        if dtype == "uint16" and largest >= _MOST_UINT16:
            raise PlanError("the tokenizer's ids do not fit uint16", url=tokenizer, found=largest, hint="take int32")
        made = {TOKENS_COLUMN, LENGTH_COLUMN}
        if len(set(keep)) < len(keep) or made & set(keep):
            expected = f"each once, and none named {' or '.join(sorted(made))}"
            raise PlanError("columns to keep", expected=expected, found=", ".join(keep))
        return cls(tokenizer, digest, text_column, tuple(keep), eos_id, dtype, with_special)

    @property
    def columns(self) -> Sequence[str] | None:
        """The text and what is kept."""
        return list(dict.fromkeys([self.text_column, *self.keep]))

    @property
    def tokens_column(self) -> str | None:
        """``"tokens"``."""
        return TOKENS_COLUMN

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Returns tokens, their number, and what is kept.

        Raises:
            ManifestError: If the column holds no text.
        """
        kind = schema.field(self.text_column).type
        of = pa.types
        if not any(is_kind(kind) for is_kind in (of.is_string, of.is_large_string, of.is_binary, of.is_large_binary)):
            what = f"column {self.text_column!r} holds no text"
            raise ManifestError(what, expected="string or UTF-8 bytes", found=kind, hint="name another --text-column")
        tokens = pa.list_(pa.field("element", pa.type_for_alias(self.dtype), nullable=False))
        kept = [schema.field(name) for name in self.keep]
        return pa.schema([(TOKENS_COLUMN, tokens), (LENGTH_COLUMN, pa.int32()), *kept])

    def apply(self, table: pa.Table) -> pa.Table:
        """Returns the tokens of a table's texts.

        Raises:
            DecodeError: If bytes are not UTF-8.
        """
        lists = [self._encode(texts) for texts in _batches(_texts(self.text_column, table))]
        lengths = np.array([-1 if ids is None else len(ids) for part in lists for ids in part], np.int64)
        values = [np.asarray(ids, self.dtype) for part in lists for ids in part if ids]
        offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))]).astype(np.int32)
        schema = self.schema(table.schema)
        tokens = pa.ListArray.from_arrays(
            pa.array(offsets),
            pa.array(np.concatenate(values) if values else np.zeros(0, self.dtype)),
            type=schema.field(TOKENS_COLUMN).type,
            mask=pa.array(lengths < 0),
        )
        counts = pa.array(np.maximum(lengths, 0).astype(np.int32))
        return pa.table([tokens, counts, *(table.column(name) for name in self.keep)], schema=schema)

    def about(self) -> dict[str, Any]:
        """Returns all but the file's place."""
        return {
            "tokenizer": self.digest,
            "text_column": self.text_column,
            "keep": list(self.keep),
            "eos_id": self.eos_id,
            "dtype": self.dtype,
            "with_special": self.with_special,
        }

    def _encode(self, texts: list[str | None]) -> list[list[int] | None]:
        tokenizer = _loaded(self.tokenizer, self.digest)
        encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # 0.20: without offsets
        found = iter(encode([text for text in texts if text is not None], add_special_tokens=self.with_special))
        end = [] if self.eos_id is None else [self.eos_id]
        return [None if text is None else next(found).ids + end for text in texts]


@lru_cache(maxsize=2)
def _loaded(path: str, digest: str) -> Tokenizer:
    """The tokenizer, once a process.

    Raises:
        PlanError: If it cannot be loaded, or is not the one it was.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise PlanError("tokenizing needs a package", hint="pip install 'shardstream[tokenize]'") from error
    data = Path(path).read_bytes()
    if hashlib.blake2b(data, digest_size=16).hexdigest() != digest:
        raise PlanError("the tokenizer was changed while it was in use", url=path, hint="start again")
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare exceptions
        raise PlanError("this is no tokenizer.json", url=path, found=str(error)[:200]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _texts(name: str, table: pa.Table) -> list[str | None]:
    column = table.column(name)
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        try:
            return [None if value is None else value.decode() for value in column.to_pylist()]
        except UnicodeDecodeError as error:
            raise DecodeError(f"column {name!r} holds bytes that are not UTF-8", found=error.reason) from error
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        raise DecodeError(f"column {name!r} holds text that is not UTF-8", found=error.reason) from error


def _batches(texts: list[str | None]) -> Iterator[list[str | None]]:
    """Texts of about a megabyte together.

    Example:
        >>> [len(batch) for batch in _batches(["a" * (1 << 19)] * 3)]
        [2, 1]
    """
    batch: list[str | None] = []
    num_letters = 0
    for text in texts:
        batch.append(text)
        num_letters += len(text or "")
        if num_letters >= _TEXT_NUM_BYTES:
            yield batch
            batch, num_letters = [], 0
    if batch:
        yield batch
