"""What a mixture's cursor says of the past, and what of it a plan must not have otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardstream.cursor import Cursor
from shardstream.errors import CursorError
from shardstream.mixing import Era, Shares, shares
from shardstream.plan import Plan

_ByName: TypeAlias = "dict[str, Fraction]"


class _Change(NamedTuple):
    start: int
    shares: _ByName


@dataclass(frozen=True, eq=False)
class Past:
    """The mixture that a cursor was saved in. Make one with ``Past.read``.

    Attributes:
        cursor: The cursor.
        sources: Name → ``fingerprint``, ``lanes``, ``packing``, ``manifest``.
        names: Of the sources, sorted.
        eras: With weights in the order of ``names``.
    """

    cursor: Cursor
    sources: Mapping[str, Mapping[str, Any]]
    names: tuple[str, ...]
    eras: tuple[Era, ...]

    @classmethod
    def read(cls, cursor: Cursor) -> Past:
        """Reads a cursor's mixture.

        Raises:
            CursorError: If there is none, or it is not what ``MixturePlan.identity`` returned.
        """
        if cursor.mixture is None:
            raise CursorError("the cursor is of one data set, not of a mixture", hint="start a new run without it")
        try:
            sources = {str(name): dict(source) for name, source in cursor.mixture["sources"].items()}
            names = tuple(sorted(sources))
            eras = tuple(
                Era(int(start), int(size), tuple(float(weights.get(name, 0)) for name in names))
                for start, size, weights in cursor.mixture["schedule"]
            )
            for source in sources.values():
                _ = source["fingerprint"], int(source["lanes"]), source["packing"], source["manifest"]
            _ = [shares(era.weights) for era in eras], eras[0]
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
            found = f"{type(error).__name__}: {error}"
            raise CursorError("a cursor's mixture is damaged", found=found) from None
        return cls(cursor, sources, names, eras)

    def grid(self, global_batch: int) -> tuple[tuple[int, int], ...]:
        """Returns (position, global batch) where windows of a new size began, with ``global_batch`` from here on."""
        changes: list[tuple[int, int]] = []
        here = [(self.cursor.position, global_batch)]
        for start, size in [(era.start, era.global_batch) for era in self.eras if era.start < here[0][0]] + here:
            if not changes or size != changes[-1][1]:
                changes.append((start, size))
        return tuple(changes)

    @property
    def served(self) -> tuple[str, ...]:
        """The sources that have given a sample before the cursor."""
        past = Shares(self.eras)
        counts = past.counts(past.window_start(np.array([self.cursor.position])))[0].tolist()
        return tuple(name for name, num in zip(self.names, counts, strict=True) if num)

    def pinned(self, plans: Mapping[str, Plan]) -> tuple[Plan, ...]:
        """Returns the sources' plans with the cursor's lanes, where an order has begun."""
        pins = {name: int(self.sources[name]["lanes"]) for name in self.served}
        return tuple(plan.with_pin(pins.get(name, 0)) for name, plan in plans.items())

    def differences(self, plans: Mapping[str, Plan], eras: tuple[Era, ...]) -> list[str]:
        """Lists what of the past a plan has otherwise: sources that were read, and their weights until the cursor.

        Args:
            plans: The sources' plans by name, sorted.
            eras: With weights in the same order.
        """
        texts = []
        for name in self.served:
            if name not in plans:
                texts.append(f"source {name!r}: in the cursor, gone here")
            else:
                texts += _source_differences(name, self.sources[name], plans[name], self.cursor)
        position = self.cursor.position
        mine = [change for change in _changes(tuple(plans), eras) if change.start < position]
        theirs = [change for change in _changes(self.names, self.eras) if change.start < position]
        return texts + [f"weights {text}" for text in _first_difference(theirs, mine)]

    def changes_ahead(self, names: tuple[str, ...], eras: tuple[Era, ...]) -> str:
        """Says, for a warning, what a plan has otherwise from the cursor on; empty if nothing."""
        position = self.cursor.position
        mine = [change for change in _changes(names, eras) if change.start >= position]
        theirs = [change for change in _changes(self.names, self.eras) if change.start >= position]
        return "".join(_first_difference(theirs, mine))


def _source_differences(name: str, source: Mapping[str, Any], plan: Plan, cursor: Cursor) -> Iterator[str]:
    if source["fingerprint"] != plan.fingerprint:
        before = replace(cursor, fingerprint=str(source["fingerprint"]), manifest=source["manifest"])
        yield f"source {name!r}: another manifest{plan.differing_shards(before)}"
    packing = None if plan.packed is None else plan.packed.packing.identity()
    if source["packing"] != packing:
        yield f"source {name!r}: packing {source['packing']!r} in the cursor, {packing!r} here"


def _changes(names: tuple[str, ...], eras: tuple[Era, ...]) -> list[_Change]:
    """Where shares change, whatever the global batch."""
    changes: list[_Change] = []
    for era in eras:
        by_name = {name: share for name, share in zip(names, shares(era.weights), strict=True) if share}
        if not changes or changes[-1].shares != by_name:
            changes.append(_Change(era.start, by_name))
    return changes


def _first_difference(theirs: list[_Change], mine: list[_Change]) -> Iterator[str]:
    for before, now in zip_longest(theirs, mine):
        if before != now:
            start = min(change.start for change in (before, now) if change is not None)
            shown = [
                _shown(change) if change is not None and change.start == start else "no change"
                for change in (before, now)
            ]
            yield f"from position {start} on: {shown[0]} in the cursor, {shown[1]} here"
            return


def _shown(change: _Change) -> str:
    return " + ".join(f"{float(share):.4g} {name}" for name, share in sorted(change.shares.items()))
