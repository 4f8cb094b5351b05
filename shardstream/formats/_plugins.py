"""Formats of other packages: found by entry points, looked for only when no format of ours has a name's ending.

An entry point of the group ``shardstream.formats`` is named as shards end, without the first dot, and points to a class
that is a ``Format``.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from shardstream.errors import ManifestError

if TYPE_CHECKING:
    from shardstream.formats import Format

GROUP = "shardstream.formats"


@functools.cache
def plugin_suffixes() -> tuple[str, ...]:
    """Returns the endings that plug-ins claim, the longest first; none of them is loaded."""
    return tuple(sorted({f".{point.name.lower()}" for point in entry_points(group=GROUP)}, key=lambda s: (-len(s), s)))


def plugin_format(suffix: str, url: str) -> Format:
    """Returns the format of an ending that ``plugin_suffixes`` names.

    Args:
        suffix: The ending.
        url: The shard, for messages.

    Raises:
        ManifestError: If the plug-in cannot be loaded, is no format, or another one claims the same ending.
    """
    points = {point.value: point for point in entry_points(group=GROUP) if f".{point.name.lower()}" == suffix}
    names = ", ".join(sorted(map(_shown, points.values())))
    if len(points) > 1:
        what = f"several plug-ins claim shards that end in {suffix}"
        raise ManifestError(what, url=url, found=names, hint="uninstall all but one")
    try:
        made: Format = next(iter(points.values())).load()()
    except Exception as error:
        what = f"the plug-in for shards that end in {suffix} cannot be loaded"
        found, hint = f"{type(error).__name__}: {error}, of {names}", "update it, or uninstall it"
        raise ManifestError(what, url=url, found=found, hint=hint) from error
    missing = [name for name in ("index_shard", "ranges_of", "read_runs") if not callable(getattr(made, name, None))]
    if missing:
        what = f"the plug-in for shards that end in {suffix} is no format"
        raise ManifestError(what, url=url, found=f"no {', '.join(missing)} in {names}", hint="see docs/formats.md")
    return made


def _shown(point: EntryPoint) -> str:
    return f"{point.value} ({point.dist.name if point.dist is not None else 'unknown package'})"
