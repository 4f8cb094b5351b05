"""Mixing: how many samples of each source every window holds, and which. Pure arithmetic.

position → window → source → the source's own position. Shares follow a table of windows, so how many of the first w
windows' positions a source got is looked up: nothing is counted, and nothing is drawn.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardstream.errors import PlanError
from shardstream.manifest import AllowUrl, Manifest
from shardstream.packing import Packing
from shardstream.permutation import Int64Array, key64

TABLE_POSITIONS = 65536  # shares are exact over at least so many positions
ENDLESS = 1 << 62  # positions of a mixture that nothing stops
_MOST_LANES, _FEWEST_LANES = 4096, 64  # as for one data set

ManifestLike: TypeAlias = "Manifest | str | os.PathLike[str]"


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several data sets as one endless stream: every global batch has a fixed number of samples of each.

    A source that ends starts over in another order; each by itself.

    Args:
        sources: Name → (manifest or where it lies, weight). Weights need not add up to 1. A source of weight 0 has no
            samples until the schedule says so.
        schedule: (position, name → weight): from that position on, rounded up to a window, these are the weights, and 0
            for sources that are not named.
        stop_after: Position after which the stream ends, rounded up to a window; or the name of a source, at whose end
            it does; or None.
        packing: Where sources are packed: name → how this one is packed otherwise than all are, a mode
            (``"unpacked"``) or settings of ``Packing`` (``{"mode": "unpacked", "column": "ids"}``). The sequence length
            is that of all.

    Attributes:
        sources: Name → (manifest, weight), sorted by name.

    Raises:
        PlanError: If a weight, position or name is impossible.
        ManifestError: If a manifest cannot be read.

    Example:
        >>> web = Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=50)
        >>> code = Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=30)
        >>> mixture = Mixture({"web": (web, 0.7), "code": (code, 0.3)}, schedule=[(100, {"code": 1})])
        >>> mixture.names, mixture.eras(8)
        (('code', 'web'), (Era(start=0, global_batch=8, weights=(0.3, 0.7)),
        Era(start=104, global_batch=8, weights=(1.0, 0.0))))
    """

    sources: Mapping[str, tuple[ManifestLike, float]]
    schedule: Sequence[tuple[int, Mapping[str, float]]] = ()
    stop_after: int | str | None = None
    packing: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    names: tuple[str, ...] = field(init=False)
    manifests: tuple[Manifest, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise PlanError("a mixture needs at least one source")
        names = tuple(sorted(self.sources))
        for name in names:
            given: Any = self.sources[name]
            if not isinstance(given, (tuple, list)) or len(given) != 2:  # noqa: PLR2004 - a pair
                raise PlanError(f"source {name!r} must be (manifest, weight)", found=repr(given)[:80])
        sources = {name: (_loaded(self.sources[name][0]), self.sources[name][1]) for name in names}
        schedule = [(_checked_position(at), dict(weights)) for at, weights in self.schedule]
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(schedule)):
            found = ", ".join(str(at) for at, _ in schedule)
            raise PlanError("the positions of a schedule must increase", found=found)
        for weights in ({name: weight for name, (_, weight) in sources.items()}, *(w for _, w in schedule)):
            _check_weights(weights, names)
        if isinstance(self.stop_after, str) and self.stop_after not in sources:
            raise PlanError("stop_after names no source", expected=" or ".join(names), found=repr(self.stop_after))
        if self.stop_after is not None and not isinstance(self.stop_after, str):
            _checked_position(self.stop_after)
        packing = {name: _packing_settings(name, given, names) for name, given in self.packing.items()}
        object.__setattr__(self, "packing", packing)
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "schedule", tuple(schedule))
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "manifests", tuple(manifest for manifest, _ in sources.values()))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        allow_url: AllowUrl = None,
    ) -> Mixture:
        """Reads a mixture from a YAML file: ``sources``, ``schedule`` and ``stop_after`` (see ``mixture_of``).

        Raises:
            PlanError: If the file cannot be read, or says something impossible.
            ManifestError: If a manifest cannot be read.
        """
        from shardstream.mixture_file import load_mixture

        return load_mixture(path, storage_options=storage_options, allow_url=allow_url)

    def packed(self, name: str, packing: Packing | None) -> Packing | None:
        """Returns how a source is packed.

        Args:
            name: The source.
            packing: How all are; None if samples are not packed.

        Raises:
            PlanError: If only some are.

        Example:
            >>> chat = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=9)
            >>> mixture = Mixture({"chat": (chat, 1)}, packing={"chat": "unpacked"})
            >>> mixture.packed("chat", Packing(2048, eos_id=0)).mode
            'unpacked'
        """
        if packing is None and self.packing:
            found = f"packing of {' and '.join(sorted(self.packing))}"
            hint = "give sequence_length=; sources that are not packed are rows of that length, with packing='unpacked'"
            raise PlanError("all sources of a mixture are sequences, or none", found=found, hint=hint)
        own: Any = self.packing.get(name, {})
        return None if packing is None else replace(packing, **own)

    def eras(self, *grid: int | tuple[int, int]) -> tuple[Era, ...]:
        """Returns the stretches of the stream in which nothing changes, first to last.

        Args:
            *grid: The global batch; or (position, global batch), beginning with position 0, where it was changed
                on the way: at each of these a new grid of windows begins.
        """
        parts = [(0, part) if isinstance(part, int) else part for part in grid]
        entries = [(0, {name: weight for name, (_, weight) in self.sources.items()}), *self.schedule]
        found: dict[int, Era] = {}
        for (begin, global_batch), (end, _) in pairwise([*parts, (ENDLESS, 0)]):
            for at, weights in [max((e for e in entries if e[0] <= begin), key=operator.itemgetter(0)), *entries]:
                start = begin + max(0, -(-(at - begin) // global_batch)) * global_batch
                if start < end and (at > begin or begin not in found):
                    found[start] = Era(start, global_batch, tuple(float(weights.get(name, 0)) for name in self.names))
        first, *rest = (found[start] for start in sorted(found))
        eras = [first]
        eras.extend(era for before, era in pairwise([first, *rest]) if not era.is_like(before))
        return tuple(eras)


def is_mixture(path: str | os.PathLike[str] | None) -> bool:
    """Returns whether a file is a mixture's, by its suffix.

    Example:
        >>> is_mixture("mixture.yaml"), is_mixture("corpus.manifest.parquet")
        (True, False)
    """
    return path is not None and os.fspath(path).endswith((".yaml", ".yml"))


class Era(NamedTuple):
    """A stretch of the stream with the same weights and the same global batch."""

    start: int
    """Position of its first window."""
    global_batch: int
    """G: samples of a window."""
    weights: tuple[float, ...]
    """One a source, in the order of names."""

    def is_like(self, other: Era) -> bool:
        """Whether shares and global batch are the same."""
        return self.global_batch == other.global_batch and shares(self.weights) == shares(other.weights)


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Returns weights as exact fractions of their sum, each taken for the decimal number that it is written as.

    Example:
        >>> shares([0.7, 0.3]) == shares([7, 3])
        True
    """
    exact = [Fraction(str(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def table_totals(weights: Sequence[float], num_positions: int) -> list[int]:
    """Returns how many of a table's positions each source gets: largest remainder, and at least one for any weight.

    Ties go to the source that comes first.

    Example:
        >>> table_totals([0.7, 0.3], 65536), table_totals([1, 1e-9], 65536)
        ([45875, 19661], [65535, 1])
    """
    exact = [share * num_positions for share in shares(weights)]
    totals = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: totals[k] - exact[k])
    for k in by_remainder[: num_positions - sum(totals)]:
        totals[k] += 1
    for k, weight in enumerate(weights):
        if weight > 0 and totals[k] == 0:
            totals[totals.index(max(totals))] -= 1
            totals[k] = 1
    return totals


@lru_cache(maxsize=16)
def window_table(weights: tuple[float, ...], global_batch: int) -> Int64Array:
    """Returns how many positions of the first windows are each source's: int64[ceil(65536 / G) + 1, num_sources].

    Window by window, the source that is furthest behind its share of all positions up to the window's end is served
    next; ties go to the source that comes first. In the last row shares are exact; then the table begins again.

    Args:
        weights: One a source.
        global_batch: G.

    Example:
        >>> window_table((0.7, 0.3), 8)[:4].tolist()
        [[0, 0], [6, 2], [11, 5], [17, 7]]
    """
    num_windows = -(-TABLE_POSITIONS // global_batch)
    num_positions = num_windows * global_batch
    # In units of 1 / num_positions of a sample: Python's whole numbers, so that no rounding decides.
    totals = table_totals(weights, num_positions)
    num_sources, behind, served = len(totals), [0] * len(totals), [0] * len(totals)
    table = [served]
    for _ in range(num_windows):
        behind = [left + total * global_batch for left, total in zip(behind, totals, strict=True)]
        # Most are served at once: nobody is ever more than a sample ahead, so this cannot be too much.
        many = [max(0, left // num_positions - (num_sources - 1)) for left in behind]
        behind = [left - num * num_positions for left, num in zip(behind, many, strict=True)]
        for _ in range(global_batch - sum(many)):
            source = behind.index(max(behind))
            many[source] += 1
            behind[source] -= num_positions
        served = [before + num for before, num in zip(served, many, strict=True)]
        table.append(served)
    result = np.array(table, np.int64)
    result.setflags(write=False)
    return result


def source_seed(seed: int, name: str) -> int:
    """Returns the seed of a source: its own, whatever other sources there are.

    Example:
        >>> source_seed(42, "web") == source_seed(42, "web") != source_seed(42, "code")
        True
    """
    word = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return key64(seed, 0, "source", int.from_bytes(word, "little"))


def source_lanes(quota: float, num_blocks: int) -> int:
    """Returns the lanes of a source that has ``quota`` samples in a window: no more than that, nor than blocks allow.

    Example:
        >>> source_lanes(358.4, 10_000), source_lanes(358.4, 100), source_lanes(0.3, 100)
        (358, 64, 1)
    """
    return max(1, min(int(quota), _MOST_LANES, max(_FEWEST_LANES, num_blocks // 4)))


class SourcePlaces(NamedTuple):
    """Where positions of a mixture lie: two int64 arrays of one length."""

    source: Int64Array
    """Index of the source."""
    position: Int64Array
    """Its own position, counted over all its passes."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Which positions of a mixture are whose.

    Inside a window the first positions are the first source's, then come the second's, and so on.

    Attributes:
        eras: Stretches of equal weights, the first from position 0 on.

    Example:
        >>> mixed = Shares((Era(0, 8, (0.7, 0.3)),))
        >>> mixed.counts(np.array([0, 8, 16])).tolist()
        [[0, 0], [6, 2], [11, 5]]
        >>> mixed.locate(np.array([5, 6, 7, 8])).position.tolist()
        [5, 0, 1, 6]
    """

    eras: tuple[Era, ...]

    @property
    def num_sources(self) -> int:
        """Number of sources."""
        return len(self.eras[0].weights)

    @cached_property
    def _era_start(self) -> Int64Array:
        return np.array([era.start for era in self.eras], np.int64)

    @cached_property
    def _before_era(self) -> Int64Array:
        """int64[num_eras, num_sources]: each source's positions before each era."""
        before = [np.zeros(self.num_sources, np.int64)]
        for era, following in pairwise(self.eras):
            num_windows = np.array([(following.start - era.start) // era.global_batch])
            before.append(before[-1] + _windows_counts(era, num_windows)[0])
        return np.array(before)

    def counts(self, starts: Int64Array) -> Int64Array:
        """Returns how many of the positions before a window are each source's: int64[n, num_sources].

        Args:
            starts: int64[n], positions where windows begin.
        """
        counts = np.empty((len(starts), self.num_sources), np.int64)
        era_index = np.searchsorted(self._era_start, starts, side="right") - 1
        for index in np.unique(era_index).tolist():
            there, era = era_index == index, self.eras[index]
            windows = (starts[there] - era.start) // era.global_batch
            counts[there] = self._before_era[index] + _windows_counts(era, windows)
        return counts

    def window_start(self, positions: Int64Array) -> Int64Array:
        """Returns where the windows begin that positions are in: int64[n]."""
        begin, global_batch = self._grid(positions)
        return positions - (positions - begin) % global_batch

    def global_batch(self, position: int) -> int:
        """Returns the size of windows at a position."""
        return int(self._grid(np.array([position]))[1][0])

    def locate(self, positions: Int64Array) -> SourcePlaces:
        """Returns source and the source's own position of positions."""
        starts, inverse = np.unique(self.window_start(positions), return_inverse=True)
        before = self.counts(starts)
        counts = self.counts(starts + self._grid(starts)[1]) - before
        last: Int64Array = np.cumsum(counts, axis=1)
        offset = positions - starts[inverse]
        source: Int64Array = (offset[:, None] >= last[inverse]).sum(axis=1)
        return SourcePlaces(source, offset + (before - last + counts)[inverse, source])

    def _grid(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where the eras of positions begin, and their global batches."""
        index = np.searchsorted(self._era_start, positions, side="right") - 1
        return self._era_start[index], np.array([era.global_batch for era in self.eras], np.int64)[index]

    def reach(self, source: int, count: int) -> int | None:
        """Returns the start of the first window before which a source has had that many positions; None if never."""
        for index, era in enumerate(self.eras):
            table = window_table(era.weights, era.global_batch)
            missing, per_table = count - int(self._before_era[index, source]), int(table[-1, source])
            if missing <= 0:
                return era.start
            if per_table == 0:
                continue
            num_tables = (missing - 1) // per_table
            rest = np.searchsorted(table[:, source], missing - num_tables * per_table)
            start = era.start + (num_tables * (len(table) - 1) + int(rest)) * era.global_batch
            if index + 1 == len(self.eras) or start <= self.eras[index + 1].start:
                return start
        return None


def _windows_counts(era: Era, num_windows: Int64Array) -> Int64Array:
    """int64[n, num_sources]: each source's positions of the first windows of an era."""
    table = window_table(era.weights, era.global_batch)
    num_tables, rest = np.divmod(num_windows, len(table) - 1)
    counts: Int64Array = num_tables[:, None] * table[-1] + table[rest]
    return counts


# ------------------------------------------------------------------------------------------------------------ checking


def _loaded(manifest: ManifestLike) -> Manifest:
    return manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)


def _checked_position(position: Any) -> int:
    try:
        number = operator.index(position)
    except TypeError:
        raise PlanError("a position of a mixture must be a whole number", found=repr(position)[:80]) from None
    if number < 0 or isinstance(position, bool):
        raise PlanError("a position of a mixture must not be negative", found=repr(position))
    return number


def _packing_settings(name: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    if name not in names:
        raise PlanError("packing of no source", expected=" or ".join(names), found=name)
    settings = {"mode": given} if isinstance(given, str) else given
    known = [field.name for field in fields(Packing) if field.name != "sequence_length"]
    if not isinstance(settings, Mapping) or not set(settings) <= set(known):
        hint = "the sequence length is that of all sources" if "sequence_length" in given else None
        expected = f"a mode, or some of {', '.join(known)}"
        raise PlanError(f"the packing of source {name!r} is not understood", expected=expected, found=given, hint=hint)
    Packing(1, **settings)  # checks them
    return dict(settings)


def _check_weights(weights: Mapping[str, float], names: Sequence[str]) -> None:
    if unknown := sorted(set(weights) - set(names)):
        hint = "name it among the sources, with weight 0"
        raise PlanError("weights of no source", expected=" or ".join(names), found=", ".join(unknown), hint=hint)
    for name, weight in weights.items():
        given: Any = weight
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < math.inf:
            raise PlanError(f"the weight of {name!r} must be a number from 0 on", found=repr(weight)[:80])
    if not any(weights.values()):
        raise PlanError("at least one source must have a weight above 0", found=dict(weights))
