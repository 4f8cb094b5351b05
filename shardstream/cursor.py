"""The cursor: one integer (plus what identifies the order) that says where all ranks are. JSON, no pickle."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shardstream.errors import CursorError, ShardStreamWarning
from shardstream.permutation import ORDER_VERSION

CURSOR_VERSION = 1

# What may differ between a cursor and the plan it is loaded into.
_FREE = {"epoch", "position", "grid_start", "manifest", "shards"}
_BATCH = {"global_batch"}
_WHOLE_NUMBERS = {  # and the least they may be
    "seed": None,
    "epoch": 0,
    "position": 0,
    "global_batch": 1,
    "lanes": 1,
    "grid_start": 0,
    "order_version": 1,
    "version": 1,
}


@dataclass(frozen=True)
class Cursor:
    """Where a run is: the same on every rank, valid at any world size, worker count, micro-batch and accumulation.

    Attributes:
        fingerprint: Of the manifest.
        seed: The job's seed.
        epoch: Epoch of the next window.
        position: Position in that epoch where the next window begins: what *all* ranks have consumed of it.
        global_batch: Samples of a window.
        shuffle: True, False, ``"full"`` or ``"torch"``.
        lanes: Lanes of the order.
        tail: What happens to the last, partial window of an epoch.
        grid_start: Position where windows of this size began in this epoch: 0, unless the global batch was changed or
            the tail is ``"continue"``, whose windows reach over from the epoch before.
        packing: Settings of packed sequences, or None.
        mixture: Sources, weights and schedule of a mixture (``MixturePlan.identity``), or None.
        world_size: Only for the tails ``"repeat"`` and ``"truncate"``, which are tied to it; else None.
        manifest: Where the manifest was, without credentials: to name shards that differ. Not compared.
        shards: A mark of 8 hex digits a shard (``Manifest.shard_marks``), end to end, where there are at most 64: to
            name shards that differ when that manifest is gone, or never was a file. Not compared.
        order_version: Version of the order's arithmetic.
        version: Version of this value's layout.

    Example:
        >>> cursor = Cursor(
        ...     fingerprint="ab", seed=1, epoch=0, position=64, global_batch=32, shuffle=True, lanes=8, tail="pad"
        ... )
        >>> Cursor.from_state_dict(cursor.state_dict()) == cursor
        True
    """

    fingerprint: str
    seed: int
    epoch: int
    position: int
    global_batch: int
    shuffle: bool | str
    lanes: int
    tail: str
    grid_start: int = 0
    packing: Mapping[str, Any] | None = field(default=None, hash=False)
    mixture: Mapping[str, Any] | None = field(default=None, hash=False)
    world_size: int | None = None
    manifest: str | None = None
    shards: str | None = None
    order_version: int = ORDER_VERSION
    version: int = CURSOR_VERSION

    def state_dict(self) -> dict[str, Any]:
        """Returns a plain dict of JSON values, about 1 KB: for ``torch.save``, JSON or any checkpoint."""
        return asdict(self)

    def to_json(self) -> str:
        """Returns the state as one line of JSON."""
        return json.dumps(self.state_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Cursor:
        """Reads what ``to_json`` wrote.

        Raises:
            CursorError: If it is not a cursor.
        """
        try:
            state = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CursorError("a cursor is not valid JSON", found=str(error)[:200]) from None
        return cls.from_state_dict(state)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any] | Cursor) -> Cursor:
        """Reads what ``state_dict`` returned, checking every field.

        Raises:
            CursorError: If fields are missing, unknown, of a wrong type, or of a newer version.
        """
        if isinstance(state, Cursor):
            return state
        if not isinstance(state, Mapping):
            raise CursorError("a cursor must be a mapping", found=type(state).__name__)
        if "origin" in state and "fingerprint" not in state:
            hint = "use Cursor.from_torchdata(state), or save batch.cursor"
            raise CursorError("this is the state of a torchdata StatefulDataLoader worker, not a cursor", hint=hint)
        version = state.get("version")
        if isinstance(version, (int, float)) and version > CURSOR_VERSION:
            hint = "upgrade shardstream"
            raise CursorError("the cursor is of a newer version", expected=CURSOR_VERSION, found=version, hint=hint)
        names = {f.name for f in fields(cls)}
        required = names - {"grid_start", "packing", "mixture", "world_size", "manifest", "shards"}
        if missing := sorted(required - set(state)):
            found = ", ".join(map(str, list(state)[:20])) or "none"
            raise CursorError("a cursor lacks fields", expected=", ".join(missing), found=found)
        if unknown := sorted(str(name) for name in set(state) - names):
            raise CursorError("a cursor has unknown fields", found=", ".join(unknown[:20]))
        cursor = cls(**state)
        cursor._check_types()
        return cursor

    @classmethod
    def from_torchdata(cls, state: Mapping[str, Any]) -> Cursor:
        """Extracts the cursor from the state of a torchdata ``StatefulDataLoader``.

        Such a state holds one state a worker. Here they are turned into the position of all ranks, so that it can be
        loaded at another world size, worker count or micro-batch: a window of which only a part was handed out is
        read again.

        Args:
            state: What ``StatefulDataLoader.state_dict()`` returned, or anything that holds it. A worker's state has
                ``origin`` (the cursor where its pass began), ``next_index`` (its own next micro-batch),
                ``accumulate``, ``num_positions`` and, as far as it knows, ``num_micro_batches`` (of its rank, from
                the origin to the end of the epoch).

        Returns:
            The cursor behind the last whole window that was handed out.

        Raises:
            CursorError: If no worker state of ours is in it, or they do not belong together.
        """
        workers = _holding(state, "origin", "next_index")
        if not workers:
            hint = "give what StatefulDataLoader.state_dict() returned for a StreamingDataset"
            raise CursorError(
                "no state of a StreamingDataset was found", found=", ".join(map(str, dict(state)))[:200], hint=hint
            )
        origins = [cls.from_state_dict(worker["origin"]) for worker in workers]
        origin = origins[0]
        if any(other != origin for other in origins):
            found = ", ".join(f"epoch {other.epoch} from position {other.position} on" for other in origins)
            raise CursorError("the workers of a StatefulDataLoader are not in the same pass", found=found)
        # A worker's next index is w, w + W, w + 2W ...; the smallest one is the first batch not handed out. The states
        # may be older than the whole (snapshot_every_n_steps), which then counts the batches since.
        index = min(_whole_number(worker, "next_index", 0) for worker in workers)
        index += sum(
            _whole_number(loader, "_steps_since_snapshot", 0) for loader in _holding(state, "_steps_since_snapshot")
        )
        num_positions = _whole_number(workers[0], "num_positions", 1)
        num_windows = index // _whole_number(workers[0], "accumulate", 1)
        if (
            origin.tail != "continue"
            and workers[0].get("num_micro_batches") is not None
            and index >= _whole_number(workers[0], "num_micro_batches", 0)
        ):  # the end of the epoch, whose last window may have fewer micro-batches than the others
            num_windows = -(-(num_positions - origin.position) // origin.global_batch)
        return origin.advanced(num_windows, num_positions=num_positions)

    def advanced(self, num_windows: int, *, num_positions: int) -> Cursor:
        """Returns the cursor after some more windows.

        Args:
            num_windows: How many.
            num_positions: Positions of an epoch.

        Example:
            >>> cursor = Cursor(
            ...     fingerprint="ab", seed=1, epoch=0, position=0, global_batch=32, shuffle=True, lanes=8, tail="pad"
            ... )
            >>> cursor.advanced(3, num_positions=100).position, cursor.advanced(4, num_positions=100).epoch
            (96, 1)
        """
        position = self.position + num_windows * self.global_batch
        return self.moved(self.epoch, position, self.grid_start, num_positions=num_positions)

    def moved(self, epoch: int, position: int, grid_start: int, *, num_positions: int) -> Cursor:
        """Returns the cursor where windows up to a position are done; behind an epoch's last one the next begins.

        Args:
            epoch: The epoch that the position counts from.
            position: Where the last window ended; it may lie behind the end of the epoch.
            grid_start: Position where windows of this size began in it.
            num_positions: N, positions of an epoch.
        """
        if self.tail == "continue" and num_positions:
            epochs, position = divmod(position, num_positions)
            return self.at(epoch + epochs, position, position % self.global_batch)
        fewest = {"drop": self.global_batch, "truncate": self.world_size or 1}.get(self.tail, 1)
        if num_positions - position < fewest:
            return self.at(epoch + 1)
        return self.at(epoch, position, grid_start)

    def at(self, epoch: int, position: int = 0, grid_start: int = 0) -> Cursor:
        """Returns the cursor of another place of the same run.

        Args:
            epoch: The epoch.
            position: Position in it where the next window begins.
            grid_start: Position where windows of this size began in it.
        """
        other = object.__new__(type(self))  # every batch has one: dataclasses.replace costs five times as much
        other.__dict__.update(self.__dict__, epoch=epoch, position=position, grid_start=grid_start)
        return other

    def _check_types(self) -> None:
        state = self.__dict__
        for name, least in _WHOLE_NUMBERS.items():
            _whole_number(state, name, least)
        if self.world_size is not None:
            _whole_number(state, "world_size", 1)
        for name in ("fingerprint", "tail", "manifest", "shards"):
            is_optional = name in ("manifest", "shards")
            if not isinstance(state[name], str) and not (is_optional and state[name] is None):
                raise CursorError(f"a cursor's {name} must be a text", found=repr(state[name])[:80])
        if not isinstance(self.shuffle, (bool, str)):
            raise CursorError("a cursor's shuffle must be true, false or a text", found=repr(self.shuffle)[:80])
        for name in ("packing", "mixture"):
            if state[name] is not None and not isinstance(state[name], Mapping):
                raise CursorError(f"a cursor's {name} must be a mapping", found=repr(state[name])[:80])

    def differences(self, plan: Cursor, *, allow_batch_change: bool = False) -> list[str]:
        """Lists what differs between this cursor and the one that a plan starts with, apart from the place itself.

        Args:
            plan: The start of the plan that this cursor is to be loaded into.
            allow_batch_change: Whether another global batch is accepted.

        Returns:
            One text a field: ``"seed: 1 in the cursor, 2 here"``.
        """
        ignored = _FREE | (_BATCH if allow_batch_change else set())
        names = [f.name for f in fields(self) if f.name not in ignored]
        pairs = [(name, getattr(self, name), getattr(plan, name)) for name in names]
        return [f"{name}: {mine!r} in the cursor, {theirs!r} here" for name, mine, theirs in pairs if mine != theirs]


def warn_of_batch_change(cursor: Cursor, global_batch: int) -> None:
    """Warns, in the name of the caller's caller, of a global batch that is another one from the cursor on."""
    warnings.warn(
        f"the global batch changes from {cursor.global_batch} to {global_batch} samples at position "
        f"{cursor.position} of epoch {cursor.epoch}: learning rate and warm-up, which were set for the old "
        "one, are another problem now; to keep it, change accumulate with the world size",
        ShardStreamWarning,
        stacklevel=4,
    )


def way_out(different: list[str]) -> str:
    """Returns what to do about the differences between a cursor and a plan."""
    names = {text.split(":", 1)[0] for text in different}
    ways = []
    if "fingerprint" in names:
        ways.append("resume with the manifest the run began with")
    if "global_batch" in names:
        ways.append("keep the global batch (change accumulate with the world size), or pass allow_batch_change=True")
    if "order_version" in names:
        ways.append("use a release of shardstream that has the cursor's order_version")
    if rest := sorted(names - {"fingerprint", "global_batch", "order_version"}):
        ways.append(f"set {', '.join(rest)} as in the cursor")
    return ", and ".join(ways) + "; or start a new run without the cursor"


def _whole_number(state: Mapping[str, Any], name: str, least: int | None) -> int:
    number = state.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
        expected = "a whole number" if least is None else f"a whole number from {least} on"
        raise CursorError(f"a cursor's {name} is wrong", expected=expected, found=repr(number)[:80])
    return number


def _holding(state: Any, *names: str) -> list[Mapping[str, Any]]:
    """Finds the mappings that have all these names, wherever torchdata's version keeps them; ordered by path."""
    if not isinstance(state, Mapping):
        return []
    if all(name in state for name in names):
        return [state]
    return [found for key in sorted(state, key=str) for found in _holding(state[key], *names)]
