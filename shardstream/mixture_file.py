"""A mixture in a file: YAML with sources, weights, and what changes when."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardstream.errors import PlanError
from shardstream.manifest import AllowUrl, Manifest
from shardstream.mixing import Mixture


def load_mixture(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, allow_url: AllowUrl = None
) -> Mixture:
    """Reads a mixture's YAML file; see ``mixture_of``.

    Raises:
        PlanError: If the file cannot be read, is no YAML, or says something impossible.
        ManifestError: If a manifest cannot be read.
    """
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError("the mixture cannot be read", url=str(path), found=str(error)) from None
    try:
        return mixture_of(settings, storage_options=storage_options, allow_url=allow_url)
    except PlanError as error:
        raise PlanError(str(error), url=str(path)) from error


def mixture_of(
    settings: Any, *, storage_options: Mapping[str, Any] | None = None, allow_url: AllowUrl = None
) -> Mixture:
    """Makes a mixture of plain values.

    Args:
        settings: ``sources``: name → ``manifest`` and ``weight``, perhaps ``packing`` (as ``Mixture`` takes it, where
            it is not as that of all); ``schedule``: a list of ``at`` (position) and
            ``weights`` (name → weight); ``stop_after``: positions, or the name of a source. Relative paths of manifests
            count from the working directory.
        storage_options: Given to fsspec to open the manifests.
        allow_url: Shards elsewhere that are accepted; see ``Manifest.load``.

    Raises:
        PlanError: If a key is missing or unknown, or a value is impossible.
        ManifestError: If a manifest cannot be read.
    """
    whole = _section("a mixture", settings, ("sources",), ("schedule", "stop_after"))
    sources, packing = {}, {}
    for name, given in _section("sources", whole["sources"], (), None).items():
        source = _section(f"source {name!r}", given, ("manifest", "weight"), ("packing",))
        if source.get("packing") is not None:
            packing[name] = source["packing"]
        manifest = Manifest.load(source["manifest"], storage_options=storage_options, allow_url=allow_url)
        sources[name] = (manifest, source["weight"])
    schedule = []
    for entry in whole.get("schedule") or ():
        change = _section("an entry of the schedule", entry, ("at", "weights"), ())
        schedule.append((change["at"], _section("weights", change["weights"], (), None)))
    return Mixture(sources, schedule, whole.get("stop_after"), packing)


def _section(what: str, given: Any, needed: tuple[str, ...], more: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns a section as a dict with the keys it must have, and no others than it may; None for any."""
    if not isinstance(given, Mapping):
        raise PlanError(f"{what} must be keys and values", found=repr(given)[:80])
    section = {str(key): value for key, value in given.items()}
    missing = [key for key in needed if key not in section]
    unknown = [] if more is None else [key for key in section if key not in (*needed, *more)]
    if missing or unknown:
        expected = ", ".join((*needed, *(f"perhaps {key}" for key in more or ())))
        raise PlanError(f"{what} has other keys", expected=expected, found=", ".join(section))
    return section
