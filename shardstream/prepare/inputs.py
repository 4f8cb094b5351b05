"""The input of a run: what the user named, found and indexed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from shardstream import storage
from shardstream.errors import PlanError, ShardStreamWarning, shown_url
from shardstream.index import IndexSettings, build_manifest
from shardstream.manifest import Manifest
from shardstream.manifest_file import is_manifest, load_manifest
from shardstream.prepare.settings import PrepareProgress, PrepareSettings

_MANIFEST_NAMES = (".manifest.parquet", "/manifest.parquet")


def check_apart(inputs: Sequence[str | os.PathLike[str]], output: str) -> None:
    """Refuses an output in a folder that is an input: its shards would be found there by the next run.

    Args:
        inputs: As given.
        output: Absolute location of the folder that will be written.

    Raises:
        PlanError: If it is.
    """
    for place in (storage.absolute(os.fspath(name)).rstrip("/") for name in inputs):
        if storage.path_below(output, place) is not None:
            hint = "name a folder beside it"
            raise PlanError("the output lies in an input folder", url=output, found=shown_url(place), hint=hint)


def find_input(inputs: Sequence[str | os.PathLike[str]], output: str, settings: PrepareSettings) -> Manifest:
    """Returns the manifest of the input.

    Args:
        inputs: Shards as ``build_manifest`` takes them, or a manifest.
        output: Absolute location of the folder that will be written.
        settings: How.

    Raises:
        PlanError: If the output lies among the inputs.
        ManifestError: If inputs cannot be used, or a manifest names shards elsewhere that are not allowed.
    """
    names = [os.fspath(name) for name in inputs]
    options = dict(settings.storage_options)
    if len(names) == 1 and (names[0].endswith(_MANIFEST_NAMES) or is_manifest(names[0])):
        manifest = load_manifest(names[0], storage_options=options, allow_url=settings.allow_url)
    else:
        tell = settings.progress

        def show(done: Any) -> None:
            if tell is not None:
                tell(PrepareProgress("reading", done.num_done, done.num_shards))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardStreamWarning)  # of what makes it dear to stream: it is written anew
            manifest = build_manifest(
                names,
                storage_options=options,
                num_workers=settings.num_workers,
                settings=IndexSettings(executor=settings.executor, progress=show),
            )
    inside = [url for url in map(manifest.url, range(manifest.num_shards)) if storage.path_below(url, output)]
    if inside:
        raise PlanError("the output lies among the inputs", url=output, found=inside[0], hint="name another folder")
    return manifest


def default_format(manifest: Manifest) -> str:
    """Returns the output format that is nearest to the input's."""
    name = manifest.formats[0]
    return "tar.zst" if name in ("tar.zst", "tar.gz") else "tar" if name == "tar" else "parquet"
