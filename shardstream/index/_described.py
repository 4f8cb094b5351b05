"""Data sets that say which files they have: MDS, LitData, Hugging Face ``save_to_disk``, and wids indexes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardstream import storage
from shardstream.errors import ManifestError
from shardstream.formats.litdata import checked_index

_MOST_NUM_BYTES = 1 << 30  # of a description; what is larger is data


@dataclass(frozen=True)
class Described:
    """The shards of a data set.

    Attributes:
        urls: Absolute locations, in the data set's order.
        num_samples: URL → number of samples, where the data set says it.
    """

    urls: list[str] = field(default_factory=list)
    num_samples: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """A description, and what is beside it."""

    url: str
    told: Any
    names: Collection[str] | None
    storage_options: Mapping[str, Any] = field(repr=False)

    def at(self, name: str) -> str:
        """The location of a file that lies in the description's folder, or deeper.

        Raises:
            ManifestError: If it lies elsewhere.
        """
        url = _beside(self.url, name)
        if ".." in name.split("/") or storage.path_below(url, storage.folder_of(self.url)) is None:
            what = "the data set names a file outside of its folder"
            raise ManifestError(what, url=self.url, found=name, hint="name the shards themselves")
        return url


def is_description(url: str) -> bool:
    """Whether a file of this name describes a data set wherever a folder holds it.

    Example:
        >>> is_description("s3://bucket/train/index.json"), is_description("data/labels.json")
        (True, False)
    """
    return _name(url) in _OF_NAME


def describe(
    url: str, storage_options: Mapping[str, Any] | None = None, names: Collection[str] | None = None
) -> Described | None:
    """Reads what may describe a data set.

    Args:
        url: Absolute location of a JSON file.
        storage_options: Given to fsspec.
        names: Absolute locations of all files in its folder, if they are known.

    Returns:
        The shards, or None if it is some other JSON.

    Raises:
        ManifestError: If it describes a data set that cannot be read.
        ReadError: If storage failed.
    """
    options = dict(storage_options or {})
    info = storage.stat(url, options)
    if info.num_bytes > _MOST_NUM_BYTES:
        return None
    raw = storage.read_range(url, 0, info.num_bytes, options)
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):  # nested deeper than any description
        return None
    if not isinstance(told, dict):
        return None
    kind = _OF_NAME.get(_name(url), _wids)
    try:
        found = kind(_Place(url, told, names, options))
        return found if found is not None or kind is _wids else _wids(_Place(url, told, names, options))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        what = "the description of a data set cannot be read"
        raise ManifestError(what, url=url, found=f"{type(error).__name__}: {error}") from error


def _index_json(place: _Place) -> Described | None:
    if isinstance(place.told.get("shards"), list) and "version" in place.told:
        return _mds(place)
    if isinstance(place.told.get("chunks"), list) and isinstance(place.told.get("config"), dict):
        chunks = checked_index(json.dumps(place.told).encode(), place.url)["chunks"]
        urls = [place.at(chunk["filename"]) for chunk in chunks]
        return Described(urls, {url: chunk["chunk_size"] for url, chunk in zip(urls, chunks, strict=True)})
    return None


def _mds(place: _Place) -> Described:
    urls, num_samples = [], {}
    for shard in place.told["shards"]:
        if shard["format"] != "mds":
            hint = "name the files themselves if they are JSON lines, or write it again as MDS"
            raise ManifestError("these shards are not MDS", url=place.url, found=shard["format"], hint=hint)
        raw, zipped = place.at(shard["raw_data"]["basename"]), shard.get("zip_data")
        url = raw if zipped is None or _is_there(raw, place.names) else place.at(zipped["basename"])
        if url != raw and not url.endswith((".zst", ".zstd")):
            hint = "decompress the shards, or write them with zstd"
            raise ManifestError("shards are compressed in another way", url=url, expected="zstd", hint=hint)
        urls.append(url)
        num_samples[url] = shard["samples"]
    return Described(urls, num_samples)


def _is_there(url: str, names: Collection[str] | None) -> bool:
    """Whether a file is there: as listed, or, of local ones, as a look says. A store keeps the compressed ones only."""
    if names is not None:
        return url in names
    return storage.local_path(url) is not None and storage.kind_of(url) is not None


def _saved_to_disk(place: _Place) -> Described | None:
    files = place.told.get("_data_files")
    if not isinstance(files, list):
        return None
    if place.told.get("_indices_data_files") or place.told.get("_indices_files"):
        what = "the data set is a selection that was saved as row numbers, beside all rows"
        hint = "save it again: flatten_indices().save_to_disk(...)"
        raise ManifestError(what, url=place.url, hint=hint)
    return Described([place.at(file["filename"]) for file in files])


def _splits(place: _Place) -> Described | None:
    splits = place.told.get("splits")
    if not isinstance(splits, list):
        return None
    what, hint = "the folder holds several splits", "name one of them: a manifest of all would mix training and test"
    raise ManifestError(what, url=place.url, found=", ".join(map(str, splits)), hint=hint)


def _wids(place: _Place) -> Described | None:
    told = place.told
    if "wids_version" not in told:
        return None
    if told["wids_version"] != 1:
        raise ManifestError("wids index of an unknown version", url=place.url, expected=1, found=told["wids_version"])
    listed = [(told.get("base", ""), shard) for shard in told.get("shardlist", [])]
    for part in told.get("datasets", []):
        base = part.get("base", "")
        if "source_url" in part:
            source = _beside(place.url, part["source_url"])
            _check_named(place, source)
            info = storage.stat(source, place.storage_options)
            part = json.loads(storage.read_range(source, 0, info.num_bytes, place.storage_options))  # noqa: PLW2901
            base = part.get("base", storage.folder_of(source) + "/")
        listed += [(base, shard) for shard in part["shardlist"]]
    found = Described()
    for base, shard in listed:
        url = _beside(_beside(place.url, base.rstrip("/")) + "/" if base else place.url, shard["url"])
        _check_named(place, url)
        found.urls.append(url)
        if (count := found.num_samples.setdefault(url, shard["nsamples"])) != shard["nsamples"]:
            expected, counts = "one number of samples", f"{count} and {shard['nsamples']}"
            raise ManifestError("a shard is listed twice", url=url, expected=expected, found=counts)
    if not found.urls:
        raise ManifestError("the wids index lists no shards", url=place.url)
    return found


def _check_named(place: _Place, url: str) -> None:
    """Refuses what lies elsewhere where nobody named the index: it was found in a folder."""
    if place.names is not None and (storage.path_below(url, storage.folder_of(place.url)) is None or "/../" in url):
        what, hint = "a wids index names a file outside of its folder", "name the index itself, if you trust it"
        raise ManifestError(what, url=place.url, found=url, hint=hint)


_OF_NAME: Mapping[str, Callable[[_Place], Described | None]] = {
    "index.json": _index_json,
    "state.json": _saved_to_disk,
    "dataset_dict.json": _splits,
}


def _name(url: str) -> str:
    return url.split("?", 1)[0].rpartition("/")[2]


def _beside(url: str, name: str) -> str:
    """The location of a name that is seen from the file at ``url``; absolute ones stay."""
    if storage.local_path(name) is None or name.startswith("/"):
        return storage.absolute(name)
    return storage.absolute(f"{storage.folder_of(url)}/{name.removeprefix('./')}")
