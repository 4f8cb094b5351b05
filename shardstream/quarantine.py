"""The quarantine report: which samples were masked because they cannot be decoded, as JSON lines. Torch-free.

One file a rank, ``rank-00003.jsonl``, which a job that is started again goes on with. Lines are handed to the system
whole, so a killed process cuts the last line at most; what follows begins on a new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardstream.errors import ReadError


@dataclass(frozen=True)
class MaskedSample:
    """A sample that was dealt, and masked.

    Attributes:
        epoch: The epoch; 0 of a mixture, which has one.
        position: Its position in the epoch's order; of packed data that of the sequence in which it begins.
        sample_id: Its ordinal in the manifest.
        url: Its shard, without credentials.
        shard: Index of the shard in the manifest.
        block: Index of the block in the manifest.
        row: Row in the shard.
        reason: What is wrong with it.
        rank: The rank that it was dealt to.
        key: Its key, in tars; else None.
        source: Name of its source, in a mixture; else None.
    """

    epoch: int
    position: int
    sample_id: int
    url: str
    shard: int
    block: int
    row: int
    reason: str
    rank: int = 0
    key: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        key = "" if self.key is None else f", key {self.key!r}"
        return f"sample {self.sample_id} (block {self.block}, row {self.row}{key} of {self.url}): {self.reason}"


def write_masked(directory: str | os.PathLike[str], rank: int, masked: Sequence[MaskedSample]) -> Path:
    """Appends samples to a rank's file; folder and file are made if missing.

    Returns:
        The file.

    Raises:
        OSError: If it cannot be written.

    Example:
        >>> import tempfile
        >>> sample = MaskedSample(0, 17, 4, "a.tar", 0, 0, 4, "the image is cut", key="0004")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_masked(folder, 0, [sample]).name, read_quarantine(folder) == [sample]
        ('rank-00000.jsonl', True)
    """
    path = Path(directory) / f"rank-{rank:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(asdict(sample)) + "\n" for sample in masked).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # the last line was cut when a process was killed
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
    return path


def read_quarantine(directory: str | os.PathLike[str]) -> list[MaskedSample]:
    """Reads what all ranks masked, each sample once per epoch, in the order of epoch and position.

    A job that goes on from a cursor before its end masks again what it meets again: that is told once. So are samples
    of which several ranks with the same data told. Data sets that report to one folder are told apart by their shards.

    Args:
        directory: The folder.

    Raises:
        ReadError: If there is no report, or a line of it is damaged that no kill can have cut.
    """
    paths = sorted(Path(directory).glob("rank-*.jsonl"))
    if not paths:
        raise ReadError("no quarantine report", url=str(directory), expected="rank-00000.jsonl and so on")
    found: dict[tuple[object, ...], MaskedSample] = {}
    for path in paths:
        for row, line in enumerate(path.read_bytes().split(b"\n")):
            sample = _read(path, row, line)
            if sample is not None:
                found[sample.epoch, sample.position, sample.source or "", sample.sample_id, sample.url] = sample
    return [found[place] for place in sorted(found)]


_NAMES = {field.name for field in fields(MaskedSample)}


def _read(path: Path, row: int, line: bytes) -> MaskedSample | None:
    """A line's sample; None if the line is empty or was cut."""
    if not line:
        return None
    try:
        return _sample_of(json.loads(line))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        if not line.endswith(b"}"):
            return None
        raise ReadError("a line of the quarantine is damaged", url=str(path), row=row, found=repr(error)) from None


def _sample_of(values: Mapping[str, Any]) -> MaskedSample:
    sample = MaskedSample(**{name: value for name, value in values.items() if name in _NAMES})
    place = (sample.epoch, sample.position, sample.sample_id)
    names = (sample.source or "", sample.url)
    if not (all(isinstance(number, int) for number in place) and all(isinstance(name, str) for name in names)):
        raise TypeError("its place is not of whole numbers and a name")
    return sample
