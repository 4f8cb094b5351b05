"""The error tree. Every error says what, where, what was expected and found, and what to do next.

ShardStreamError
├─ ManifestError ─ ShardChangedError     ├─ TopologyError
├─ PlanError                             ├─ ReadError ─ DecodeError
├─ CursorError                           └─ DesyncError
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# user@, user:password@ up to the last @ of the host part, and passwords that hold slashes, as S3's secrets do: then a
# colon that begins neither a port nor the next link of an fsspec chain ("zip://a::https://...") gives them away.
_CREDENTIALS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/\s]*@|[^/@:\s]*:(?!:|\d+(?:/|$))(?:(?!://)[^@\s])*@)"
)
_QUERY = re.compile(r"(?P<url>[A-Za-z][A-Za-z0-9+.-]*://[^\s?]*)\?(?!\.\.\.)\S*")


def shown_url(url: str) -> str:
    """Returns ``url`` as it may be shown in a message, a log or a file: without user, password and query.

    Args:
        url: A local path or any fsspec URL, or a text that holds some.

    Returns:
        The same text; of a URL the user information and the query (where signed URLs carry their signature) are cut.

    Example:
        >>> shown_url("s3://key:secret@bucket/a.parquet")
        's3://bucket/a.parquet'
        >>> shown_url("https://host/a.tar?X-Amz-Signature=abc")
        'https://host/a.tar?...'
        >>> shown_url("/data/really?.parquet")
        '/data/really?.parquet'
    """
    return _QUERY.sub(r"\g<url>?...", _CREDENTIALS.sub(r"\g<scheme>", url))


def _printable(text: str) -> str:
    """Names that are not UTF-8 become escapes, so that a message can be printed, logged and sent anywhere."""
    return text.encode("utf-8", "backslashreplace").decode()


def listed(numbers: Sequence[object], num_shown: int = 16) -> str:
    """Returns numbers as text for a message: the first of them, and of the rest how many there are.

    Example:
        >>> listed([0, 2, 5], num_shown=2)
        '0, 2 and 1 more'
    """
    more = f" and {len(numbers) - num_shown} more" if len(numbers) > num_shown else ""
    return ", ".join(map(str, numbers[:num_shown])) + more


class ShardStreamError(Exception):
    """Base of all errors that shardstream raises on purpose.

    The message is one text, composed from its parts, so that an error crosses process borders (a DataLoader worker
    rebuilds it from the text alone) without losing anything. URLs in any part are shown without credentials.

    Args:
        what: What is wrong, as a sentence without a full stop.
        url: The shard or file it is about.
        block: Index of the block in the manifest.
        row: Row in the shard.
        expected: What should have been there.
        found: What was there.
        hint: What to do next.

    Example:
        >>> print(
        ...     ShardStreamError(
        ...         "the shard is cut", url="a.tar", expected="512 bytes", found="100", hint="fetch it again"
        ...     )
        ... )
        the shard is cut [a.tar]: expected 512 bytes, found 100; fetch it again
    """

    def __init__(
        self,
        what: str = "",
        *,
        url: str | None = None,
        block: int | None = None,
        row: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        place = [shown_url(url)] if url is not None else []
        place += [f"block {block}"] if block is not None else []
        place += [f"row {row}"] if row is not None else []
        facts = [f"expected {shown_url(str(expected))}"] if expected is not None else []
        facts += [f"found {shown_url(str(found))}"] if found is not None else []
        text = shown_url(what) + (f" [{', '.join(place)}]" if place else "")
        text += (": " + ", ".join(facts)) if facts else ""
        super().__init__(_printable(text + (f"; {shown_url(hint)}" if hint else "")))


class ManifestError(ShardStreamError):
    """A manifest or a shard cannot be used: unreadable, of a wrong kind, or not what was asked for."""


class ShardChangedError(ManifestError):
    """A shard is not the one that was indexed."""


class PlanError(ShardStreamError):
    """Settings that do not fit together: batch sizes, tails, lanes, topology."""


class CursorError(ShardStreamError):
    """A cursor does not belong to this plan."""


class TopologyError(ShardStreamError):
    """Rank and world size are unknown, contradictory or impossible."""


class ReadError(ShardStreamError):
    """Data could not be read from storage."""


class DecodeError(ReadError):
    """Data was read but cannot be decoded."""


class DesyncError(ShardStreamError):
    """Ranks did not do the same thing at the same step."""


class ShardStreamWarning(UserWarning):
    """Something works, but not as a user would want it to."""
