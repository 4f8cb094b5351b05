"""Where the messages of an Arrow IPC stream or file are, without reading their bodies.

pyarrow reads a message with its body, or not at all; of a large file in a store that would be all of it. What is needed
of the metadata (a flatbuffer, as Arrow's ``Message.fbs`` lays it down) are three numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

ReadAt = Callable[[int, int], bytes]

FILE_MARK = b"ARROW1"
_EMBEDDED_MARK = b"LDARW01\0"
_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF
_READ_NUM_BYTES = 4096  # the metadata of most messages is smaller
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


class Message(NamedTuple):
    """A message: where it begins and ends in the file, and for a record batch its rows."""

    start: int
    end: int
    num_rows: int
    is_compressed: bool
    metadata: bytes


@dataclass(frozen=True)
class Messages:
    """The messages of a file, in order.

    Attributes:
        schema: The schema's.
        dictionaries: Those of dictionaries.
        batches: Those of record batches.
        is_file: Whether it is the file format, else a stream.
        has_end: Whether its end is marked.
    """

    schema: Message
    dictionaries: tuple[Message, ...]
    batches: tuple[Message, ...]
    is_file: bool
    has_end: bool


def embedded_span(read_at: ReadAt, num_bytes: int) -> tuple[int, int] | None:
    """Returns where the Arrow IPC is that LitData appends to a chunk (then its size and a mark), or None.

    Args:
        read_at: Reads the bytes from .. to of the file.
        num_bytes: Size of the file.
    """
    tail = read_at(max(0, num_bytes - 12), num_bytes)
    if len(tail) < 12 or tail[4:] != _EMBEDDED_MARK:  # noqa: PLR2004 - size and mark
        return None
    end = num_bytes - 12
    return max(0, end - int.from_bytes(tail[:4], "little")), end


def scan_messages(read_at: ReadAt, start: int, num_bytes: int) -> Messages:
    """Finds the messages.

    Args:
        read_at: Reads the bytes from .. to of the file.
        start: Where the Arrow IPC begins in the file.
        num_bytes: Where it ends.

    Raises:
        EOFError: If it is cut.
        ValueError: If it is no Arrow IPC.
    """
    is_file = read_at(start, min(start + 8, num_bytes))[:6] == FILE_MARK
    if is_file and read_at(max(start, num_bytes - 6), num_bytes) != FILE_MARK:
        raise EOFError("its end is missing")
    position, kinds = (
        start + 8 if is_file else start,
        dict[int, list[Message]]({_SCHEMA: [], _DICTIONARY: [], _BATCH: []}),
    )
    has_end = False
    while position < num_bytes:
        kind, message = _message(read_at, position, num_bytes)
        position = message.end
        if not message.metadata:
            has_end = True
            break
        if kind not in kinds or bool(kinds[_SCHEMA]) == (kind == _SCHEMA):
            raise ValueError(f"a message of kind {kind} at byte {message.start} is out of place")
        kinds[kind].append(message)
    if not kinds[_SCHEMA]:
        raise ValueError("it has no schema")
    return Messages(kinds[_SCHEMA][0], tuple(kinds[_DICTIONARY]), tuple(kinds[_BATCH]), is_file, has_end)


def _message(read_at: ReadAt, start: int, num_bytes: int) -> tuple[int, Message]:
    """The kind of a message, and where it is; one without metadata is the end."""
    raw = read_at(start, min(start + _READ_NUM_BYTES, num_bytes))
    if len(raw) < 4:  # noqa: PLR2004 - a size
        raise EOFError(f"it is cut at byte {start}")
    mark, size = _PREFIX.unpack(raw[:8].ljust(8, b"\0"))
    begin = 8 if mark == _CONTINUATION else 4  # files before Arrow 0.15 have no mark
    size = size if mark == _CONTINUATION else mark
    if size == 0:
        return 0, Message(start, start + begin, 0, False, b"")  # noqa: FBT003 - see its fields
    if size < 0 or start + begin + size > num_bytes:
        raise EOFError(f"a message at byte {start} is cut")
    metadata = raw[begin : begin + size]
    if len(metadata) < size:
        metadata += read_at(start + begin + len(metadata), start + begin + size)
    try:
        kind, body_num_bytes, num_rows, is_compressed = _described(metadata)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the message at byte {start} cannot be read") from error
    end = start + begin + size + body_num_bytes
    if body_num_bytes < 0 or num_rows < 0 or end > num_bytes:
        raise EOFError(f"the body of the message at byte {start} is cut")
    return kind, Message(start, end, num_rows, is_compressed, metadata)


def _described(metadata: bytes) -> tuple[int, int, int, bool]:
    """Kind, size of the body, and for a record batch the number of rows and whether the body is compressed."""

    def place(table: int, field: int) -> int:
        """Where a field of a table is; 0 if it is left out."""
        fields = table - struct.unpack_from("<i", metadata, table)[0]
        at = 4 + 2 * field
        is_there = at < struct.unpack_from("<H", metadata, fields)[0]
        offset = struct.unpack_from("<H", metadata, fields + at)[0] if is_there else 0
        return table + offset if offset else 0

    message = struct.unpack_from("<I", metadata)[0]
    kind, header, body = (place(message, field) for field in (1, 2, 3))
    kind = metadata[kind] if kind else 0
    body_num_bytes = struct.unpack_from("<q", metadata, body)[0] if body else 0
    if kind != _BATCH:
        return kind, body_num_bytes, 0, False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    length, compression = place(batch, 0), place(batch, 3)
    return kind, body_num_bytes, struct.unpack_from("<q", metadata, length)[0] if length else 0, bool(compression)
