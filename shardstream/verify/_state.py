"""What an interrupted verification had found good: a file of JSON lines, one per shard, written as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from shardstream.errors import ManifestError

_KIND = "shardstream verify 1"


class VerifyState:
    """The shards found good so far, and the file that they are noted in.

    Args:
        good: Indices of shards.
        file: Where more are noted, or None.

    Attributes:
        good: Indices of shards.
    """

    def __init__(self, good: set[int], file: TextIO | None) -> None:
        self.good, self._file = good, file

    @classmethod
    @contextmanager
    def opened(cls, path: str | os.PathLike[str] | None, about: Mapping[str, Any]) -> Iterator[VerifyState]:
        """Opens a state to go on with, or begins one.

        Args:
            path: The file, or None to note nothing.
            about: What is verified; JSON-able. A state goes on only with the same.

        Raises:
            ManifestError: If the file is something else, of something else, or cannot be written.
        """
        if path is None:
            yield cls(set(), None)
            return
        place, head = Path(path), {"kind": _KIND, **about}
        with _naming(place):
            good = _good(place, head)
            file = place.open("a" if good is not None else "w", encoding="utf-8")
        with file:
            state = cls(good or set(), file)
            state._write("" if good is not None else json.dumps(head))  # a line that was cut is ended
            yield state

    def add(self, shard: int) -> None:
        """Notes a shard that is good."""
        self._write(json.dumps({"good": shard}))

    def finish(self) -> None:
        """Notes that all were checked: the next run begins anew."""
        self._write(json.dumps({"finished": True}))

    def _write(self, line: str) -> None:
        if self._file is not None:
            with _naming(Path(self._file.name)):
                self._file.write(line + "\n")
                self._file.flush()


@contextmanager
def _naming(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = "the state of the verification cannot be written"
        raise ManifestError(what, url=str(place), found=error) from error


def _good(place: Path, head: Mapping[str, Any]) -> set[int] | None:
    """The shards that a file to go on with names; None to begin a new one."""
    if not place.exists() or not place.stat().st_size:
        return None
    lines = place.read_text("utf-8", "replace").splitlines()
    told: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError):  # the last line may be cut, and an empty one follows it
            value = json.loads(line)
            told += [value] if isinstance(value, dict) else []
    if not told or told[0].get("kind") != _KIND:
        hint = "choose another name, or remove it yourself"
        raise ManifestError("this is no state of a verification, and will not be replaced", url=str(place), hint=hint)
    if any(entry.get("finished") for entry in told):
        return None
    differs = [
        f"{name} {told[0].get(name)} instead of {value}" for name, value in head.items() if told[0].get(name) != value
    ]
    if differs:
        hint = "go on with the same manifest, sample and seed, or choose another name"
        raise ManifestError("the state is of another verification", url=str(place), found=", ".join(differs), hint=hint)
    return {entry["good"] for entry in told[1:] if isinstance(entry.get("good"), int)}
