"""Listing the members of a tar stream with ``tarfile``, and proving that nothing was passed over.

``tarfile`` stops without a word at a header that is cut or corrupt, at garbage, and at the end mark of the first of
several joined archives. So where it stops is looked at: zeros up to the end of the stream are the end, another archive
may follow zeros, and anything else is an error.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardstream.errors import ManifestError
from shardstream.formats._decompress import ForwardFile

MAX_HEADER_NUM_BYTES = 1 << 20  # of a PAX header or a long name: tarfile would read gigabytes if one says so

_MOST_NUM_BYTES = 1 << 62
_BLOCK = 512
_TARFILE_ERRORS = (tarfile.TarError, ValueError, OverflowError, LookupError, RecursionError)  # what bad headers raise
_IGNORED = re.compile(r"(?:^|/)(?:\._[^/]*|\.DS_Store|__[^/]*__(?:/.*)?)$")
_RESERVED = re.compile(r"__.*__")
_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<field>[^/]+)", re.DOTALL)


def splits_into(name: str) -> tuple[str, str] | None:
    """Returns key and field of a member of this name, or None if it is no part of a sample.

    Example:
        >>> splits_into("train.v1/0001.seg.PNG"), splits_into("train/._0001.jpg")
        (('train.v1/0001', 'seg.png'), None)
    """
    while name.startswith("./"):
        name = name[2:]
    parts = _NAME.fullmatch(name)
    if parts is None or _IGNORED.search(name):
        return None
    suffix = parts["field"].lower()
    return None if not suffix.isprintable() or _RESERVED.fullmatch(suffix) else (parts["key"], suffix)


@dataclass(frozen=True)
class Member:
    """A regular file in a tar: its name, and where its data is in the decoded stream."""

    name: str
    offset: int
    num_bytes: int


@dataclass
class Findings:
    """What listing noticed apart from the members."""

    num_ignored: int = 0
    first_ignored: str = ""
    warnings: list[str] = field(default_factory=list)


def scan_members(stream: ForwardFile, url: str, findings: Findings) -> Iterator[Member]:
    """Yields the regular files of a tar stream, those of joined archives included.

    Args:
        stream: The decoded tar, at its first byte.
        url: The shard, for errors.
        findings: Filled while listing.

    Raises:
        ManifestError: If the tar is empty (0 bytes), cut, corrupt, or followed by anything but zeros or another tar, or
            if it holds a link, a device or a sparse file.
    """
    has_end = False
    while True:
        try:
            with tarfile.TarFile(fileobj=stream, encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[arg-type]
                for info in archive:
                    archive.members = []  # type: ignore[attr-defined]  # or it keeps them all
                    has_end = False
                    yield from _members(info, url, findings)
        except _TARFILE_ERRORS as error:
            if stream.tell() == 0:
                hint = "write it again, or leave it out"
                raise ManifestError("the shard is empty (0 bytes)", url=url, hint=hint) from error
            raise _damaged(url, stream.tell(), error) from error
        if any(stream.last):
            raise _damaged(url, stream.tell() - len(stream.last), "neither a header nor zeros")
        has_end = has_end or len(stream.last) == _BLOCK
        if not _skip_zeros(stream):
            break
    if not has_end:
        findings.warnings.append("no end-of-archive blocks: was it cut between two members?")
    if findings.num_ignored:
        findings.warnings.append(
            f"{findings.num_ignored} members are no samples (._*, .DS_Store, __*__, or no suffix), "
            f"the first is '{shown_name(findings.first_ignored)}'"
        )


def _skip_zeros(stream: ForwardFile) -> bool:
    """Moves to the first block that is not all zeros; False at the end of the stream."""
    while piece := stream.read(MAX_HEADER_NUM_BYTES):
        if piece.count(0) < len(piece):
            num_zeros = len(piece) - len(piece.lstrip(b"\0"))
            stream.push_back()
            stream.read(num_zeros // _BLOCK * _BLOCK)
            return True
    return False


def _members(info: tarfile.TarInfo, url: str, findings: Findings) -> Iterator[Member]:
    """The member if it belongs to a sample."""
    if info.isdir():
        return
    name = info.name
    while name.startswith("./"):
        name = name[2:]
    if _IGNORED.search(name) or not _NAME.fullmatch(name):
        findings.first_ignored = findings.first_ignored or name
        findings.num_ignored += 1
    elif info.issparse() or not info.isreg():
        kind = "a sparse file" if info.issparse() else "a link" if info.issym() or info.islnk() else "a device"
        what = f"member '{shown_name(name)}' is {kind}, which holds no data"
        raise ManifestError(what, url=url, hint="pack regular files (GNU tar: --dereference --hard-dereference)")
    elif not 0 <= info.size < _MOST_NUM_BYTES:
        raise _damaged(url, info.offset, f"member '{shown_name(name)}' of {info.size} bytes")
    else:
        yield Member(name, info.offset_data, info.size)


def _damaged(url: str, offset: int, found: object) -> ManifestError:
    what = f"the tar is cut or damaged, or something else follows it, at byte {offset} of the decoded stream"
    return ManifestError(what, url=url, found=found, hint="fetch or write it again")


def shown_name(name: str) -> str:
    r"""Returns a member's name as it can be printed: bytes that are not UTF-8 become escapes.

    Example:
        >>> shown_name("a\udcff.jpg")
        'a\\xff.jpg'
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True, eq=False)
class MemberTable:
    """The samples of a tar: n samples, m members, in the order of the archive.

    Attributes:
        keys: Key of each sample, as the bytes in the tar.
        num_members: int32[n].
        fields: Field of each member: its suffix, in lower case.
        offsets: int64[m], where each member's data is in the decoded stream.
        num_bytes: int64[m].
        digest: 32 hex digits over names, sizes and offsets.
    """

    keys: list[bytes]
    num_members: npt.NDArray[np.int32]
    fields: list[str]
    offsets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    digest: str


def group_members(members: Iterable[Member], url: str) -> MemberTable:
    """Groups members into samples by WebDataset's rule: directory and base name up to its first dot are the key.

    Args:
        members: In the order of the archive.
        url: The shard, for errors.

    Raises:
        ManifestError: If a suffix comes twice in a sample, or a key in two separate places.

    Example:
        >>> table = group_members([Member("v1.0/a.JPG", 512, 3), Member("v1.0/a.seg.png", 1536, 4)], "x.tar")
        >>> table.keys, table.num_members.tolist(), table.fields
        ([b'v1.0/a'], [2], ['jpg', 'seg.png'])
    """
    hasher = hashlib.blake2b(digest_size=16)
    keys: dict[bytes, int] = {}  # key to number of members, in order
    current: bytes | None = None
    in_sample: set[str] = set()
    fields: list[str] = []
    places: list[tuple[int, int]] = []
    for member in members:
        name = member.name.encode("utf-8", "surrogateescape")
        hasher.update(struct.pack("<qqq", len(name), member.num_bytes, member.offset) + name)
        parts = _NAME.fullmatch(member.name)
        if parts is None:
            raise ValueError(f"{member.name!r} has no suffix: scan_members would not have yielded it")
        key, suffix = parts["key"].encode("utf-8", "surrogateescape"), parts["field"].lower()
        if key != current:
            if key in keys:
                _raise_twice(url, member.name, "its key was in the shard before, apart from here")
            current, in_sample = key, set()
        if suffix in in_sample:
            _raise_twice(url, member.name, f"its sample has a {suffix!r} already")
        if not suffix.isprintable() or _RESERVED.fullmatch(suffix):
            what = f"the suffix of member '{shown_name(member.name)}' cannot name a field"
            raise ManifestError(what, url=url, expected="text that is not __…__, which the library's own columns are")
        in_sample.add(suffix)
        keys[key] = keys.get(key, 0) + 1
        fields.append(sys.intern(suffix))
        places.append((member.offset, member.num_bytes))
    numbers = np.array(places, np.int64).reshape(-1, 2)
    return MemberTable(
        keys=list(keys),
        num_members=np.array(list(keys.values()), np.int32),
        fields=fields,
        offsets=np.ascontiguousarray(numbers[:, 0]),
        num_bytes=np.ascontiguousarray(numbers[:, 1]),
        digest=hasher.hexdigest(),
    )


def _raise_twice(url: str, name: str, found: str) -> None:
    hint = "write each sample once, its members next to each other (GNU tar: --sort=name)"
    raise ManifestError(f"member '{shown_name(name)}' is one too many", url=url, found=found, hint=hint)
