"""The cursor: one integer (plus what identifies the order) that says where all ranks are. JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardstream.errors import CursorError
from shardstream.permutation import ORDER_VERSION

CURSOR_VERSION = 1

_FREE = {
    "epoch",
    "position",
    "grid_start",
    "manifest",
}  # what may differ between a cursor and the plan it is loaded into
_BATCH = {"global_batch"}


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
        grid_start: Position where windows of this size began in this epoch: 0, unless the global batch was changed.
        packing: Settings of packed sequences, or None.
        world_size: Only for the tails ``"repeat"`` and ``"truncate"``, which are tied to it; else None.
        manifest: Where the manifest was, without credentials: to name shards that differ. Not compared.
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
    packing: Mapping[str, Any] | None = None
    world_size: int | None = None
    manifest: str | None = None
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
        if isinstance(version, int) and version > CURSOR_VERSION:
            hint = "upgrade shardstream"
            raise CursorError("the cursor is of a newer version", expected=CURSOR_VERSION, found=version, hint=hint)
        names = {f.name for f in fields(cls)}
        required = names - {"grid_start", "packing", "world_size", "manifest"}
        if missing := sorted(required - set(state)):
            raise CursorError(
                "a cursor lacks fields", expected=", ".join(missing), found=", ".join(map(str, list(state)[:20]))
            )
        if unknown := sorted(str(name) for name in set(state) - names):
            raise CursorError("a cursor has unknown fields", found=", ".join(unknown[:20]))
        cursor = cls(**state)
        cursor._check_types()
        return cursor

    @classmethod
    def from_torchdata(cls, state: Mapping[str, Any]) -> Cursor:
        """Extracts the cursor from the state of a torchdata ``StatefulDataLoader``.

        Such a state holds one worker state each. Here it is turned into the position of all ranks, so that it can be
        loaded at another world size, worker count or micro-batch: windows of which only a part was handed out are
        read again.

        Args:
            state: What ``StatefulDataLoader.state_dict()`` returned.

        Returns:
            The cursor of the last whole window that was handed out.

        Raises:
            CursorError: If no worker state of ours is in it.
        """
        workers = _worker_states(state)
        if not workers:
            hint = "give what StatefulDataLoader.state_dict() returned for a StreamingDataset"
            raise CursorError("no state of a StreamingDataset was found", found=sorted(map(str, state))[:20], hint=hint)
        origin = cls.from_state_dict(workers[0]["origin"])
        # A worker's next index is w, w + W, w + 2W ...; the smallest one is the first batch not handed out.
        index = min(int(worker["next_index"]) for worker in workers)
        windows = index // int(workers[0]["accumulate"])
        return origin.advanced(windows, num_positions=int(workers[0]["num_positions"]))

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
        if self.tail == "continue" and num_positions:
            epochs, position = divmod(position, num_positions)
            grid_start = self.grid_start if not epochs else position % self.global_batch
            return replace(self, epoch=self.epoch + epochs, position=position, grid_start=grid_start)
        fewest = {"drop": self.global_batch, "truncate": self.world_size or 1}.get(self.tail, 1)
        if num_positions - position < fewest:
            return replace(self, epoch=self.epoch + 1, position=0, grid_start=0)
        return replace(self, position=position)

    def _check_types(self) -> None:
        for name in ("seed", "epoch", "position", "global_batch", "lanes", "grid_start", "order_version", "version"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or (number < 0 and name != "seed"):
                raise CursorError(f"a cursor's {name} must be a whole number", found=repr(number)[:80])
        for name in ("fingerprint", "tail"):
            if not isinstance(getattr(self, name), str):
                raise CursorError(f"a cursor's {name} must be a text", found=repr(getattr(self, name))[:80])
        if not isinstance(self.shuffle, (bool, str)):
            raise CursorError("a cursor's shuffle must be true, false or a text", found=repr(self.shuffle)[:80])
        if self.packing is not None and not isinstance(self.packing, Mapping):
            raise CursorError("a cursor's packing must be a mapping", found=repr(self.packing)[:80])
        if self.global_batch < 1 or self.lanes < 1:
            raise CursorError(
                "a cursor's global_batch and lanes must be positive", found=(self.global_batch, self.lanes)
            )

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


def _worker_states(state: Any) -> list[Mapping[str, Any]]:
    """Finds our worker states in a StatefulDataLoader's state, wherever its version keeps them; ordered by path."""
    if not isinstance(state, Mapping):
        return []
    if "origin" in state and "next_index" in state:
        return [state]
    return [found for key in sorted(state, key=str) for found in _worker_states(state[key])]
