"""From what was found of single shards to one manifest: the plan, the shared schema, every fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shardstream import storage
from shardstream.checksums import ALGORITHM
from shardstream.errors import ManifestError
from shardstream.fitting import TOKENS_DTYPES, sequence_counts_name
from shardstream.formats import IndexOptions
from shardstream.index._expand import some
from shardstream.index._look import Fault, Finding, Look, Unchanged
from shardstream.index._schemas import SchemaUnion
from shardstream.manifest import Manifest
from shardstream.manifest_file import DatasetInfo, ManifestWriter, ShardRow, shard_row

_OF_MANIFESTS = frozenset({"url", "version_tag", "block_run_rows"})  # columns that tell a manifest from a shard


@dataclass(frozen=True)
class IndexProgress:
    """How far indexing is.

    Attributes:
        num_done: Shards looked at.
        num_shards: Shards in all.
        num_samples: Samples in those looked at.
        num_bytes: Their size.
    """

    num_done: int
    num_shards: int
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class IndexPlan:
    """Which shards make the manifest, in its order, and which of them are known from an older one."""

    urls: Sequence[str]
    root: str
    names: Sequence[str]
    tasks: Sequence[Look]
    looked: IndexOptions
    old: Manifest | None
    old_places: Mapping[str, int]

    @classmethod
    def make(
        cls,
        urls: list[str],
        old: Manifest | None,
        looked: IndexOptions,
        storage_options: dict[str, Any],
        *,
        allow_vanished: bool,
    ) -> IndexPlan:
        """Puts the shards in order: those of the old manifest in their places, then the new ones.

        Raises:
            ManifestError: If shards of the old manifest are not named any more.
        """
        places = {} if old is None else {old.url(shard): shard for shard in range(old.num_shards)}
        named = set(urls)
        vanished = [url for url in places if url not in named]
        if vanished and not allow_vanished:
            hint = (
                "name them as well; or leave them out with allow_vanished=True (--allow-vanished): then the ids of "
                "samples after them change"
            )
            raise ManifestError("shards of the old manifest are not named any more", found=some(vanished), hint=hint)
        urls = [url for url in places if url in named] + [url for url in urls if url not in places]
        root, names = storage.common_root(urls)
        if old is not None and old.root and all(storage.path_below(url, old.root) for url in urls):
            root, names = old.root, [url[len(old.root) + 1 :] for url in urls]  # urls and fingerprint stay
        same = old is not None and index_options(old) == looked and _has_counts(old, looked)
        tags = {url: old.version_tags[shard] for url, shard in places.items()} if old is not None and same else {}
        tasks = [Look(url, looked, storage_options, tags.get(url)) for url in urls]
        return cls(urls, root, names, tasks, looked, old, places)


class Collected:
    """What was found so far.

    Args:
        plan: The shards, in the order in which findings will come.
        num_samples: URL → number of samples that the data set says a shard has, where it does.
    """

    def __init__(self, plan: IndexPlan, num_samples: Mapping[str, int] | None = None) -> None:
        self._plan, self._told = plan, num_samples or {}
        self._schema = SchemaUnion()
        self._kept: list[int] = []
        self._faults: list[str] = []
        self._num_done = self._num_samples = self._num_bytes = 0
        self.warnings: list[tuple[str, str]] = []

    @property
    def progress(self) -> IndexProgress:
        """How far it is."""
        return IndexProgress(self._num_done, len(self._plan.urls), self._num_samples, self._num_bytes)

    def add(self, finding: Finding, writer: ManifestWriter) -> None:
        """Takes in the next shard of the plan; after a bad one nothing more is written, but all are looked at."""
        url, name = self._plan.urls[self._num_done], self._plan.names[self._num_done]
        self._num_done += 1
        try:
            row = self._row(url, name, finding)
        except ManifestError as error:
            self._faults.append(str(error))
            return
        self._num_samples += row.num_samples
        self._num_bytes += row.num_bytes
        if not self._faults:
            writer.add(row)

    def finish(self) -> DatasetInfo:
        """Returns what holds for all shards.

        Raises:
            ManifestError: If a shard was bad, or there are no samples.
        """
        plan, looked = self._plan, self._plan.looked
        if self._faults:
            listed = "".join(f"\n  - {fault}" for fault in self._faults)
            raise ManifestError(f"{len(self._faults)} of {len(plan.urls)} shards cannot be used:{listed}")
        if self._num_samples == 0:
            found = f"0 samples in {len(plan.urls)} shards: {some(plan.urls)}"
            raise ManifestError("there are no samples", found=found, hint="check which shards are meant")
        if plan.old is not None and self._kept:
            self._schema.count_kept(plan.old, self._kept)
        return DatasetInfo(
            root=plan.root,
            columns=self._schema.columns,
            arrow_schema=self._schema.arrow_schema,
            tokens_column=looked.tokens_column,
            metadata={
                "targets": dict(looked.targets),
                "ignore_index": looked.ignore_index,
                **({"pack": list(looked.pack)} if looked.pack else {}),
                **({"tokens_dtype": looked.tokens_dtype} if looked.tokens_dtype else {}),
                **({"checksum": ALGORITHM} if looked.checksum else {}),
            },
        )

    def _row(self, url: str, name: str, finding: Finding) -> ShardRow:
        if isinstance(finding, Fault):
            raise ManifestError(finding.reason)
        if isinstance(finding, Unchanged):
            return self._row_of_old(url, name)
        if {column.name for column in finding.columns} >= _OF_MANIFESTS:
            hint = "use it alone, or leave it out: folders and patterns leave out what is named *.manifest.parquet"
            raise ManifestError("this is a shardstream manifest, not a shard", url=url, hint=hint)
        told, num_samples = self._told.get(url), int(finding.block_rows.sum())
        if told not in (None, num_samples):
            what, hint = "the shard has not the samples that its data set lists", "fetch it, or write the list, again"
            raise ManifestError(what, url=url, expected=told, found=num_samples, hint=hint)
        self._schema.add(url, finding)
        self.warnings += [(text, url) for text in finding.warnings]
        names = (field.name for field in fields(ShardRow) if field.name != "url")
        return ShardRow(url=name, **{field: getattr(finding, field) for field in names})

    def _row_of_old(self, url: str, name: str) -> ShardRow:
        old, place = self._plan.old, self._plan.old_places[url]
        assert old is not None  # noqa: S101 - only what an old manifest knows can be unchanged
        if not self._kept:
            self._schema.add_types_of(old)
        self._kept.append(place)
        return replace(shard_row(old, place), url=name)


def _has_counts(old: Manifest, looked: IndexOptions) -> bool:
    """Whether a manifest has all that is counted today; an older version may have counted less."""
    names = {sequence_counts_name(length, has_eos=False, mode="unpacked") for length in looked.pack}
    return old.lists is None or names <= old.lists.names


def index_options(
    old: Manifest | None,
    tokens_column: str | None = None,
    targets: Mapping[str, str] | None = None,
    ignore_index: int | None = None,
    pack: Sequence[int] | None = None,
    tokens_dtype: str | None = None,
    *,
    checksum: bool | None = None,
) -> IndexOptions:
    """Returns what indexing looks at; what is not said is as in the old manifest.

    Raises:
        ManifestError: If sequences or a type of tokens are named, but no tokens, or impossible ones.
    """
    before = {} if old is None else old.metadata
    looked = IndexOptions(
        tokens_column=tokens_column or (None if old is None else old.tokens_column),
        targets=dict(before.get("targets", {}) if targets is None else targets),
        ignore_index=before.get("ignore_index", -100) if ignore_index is None else ignore_index,
        pack=tuple(sorted(set(before.get("pack", ()) if pack is None else pack))),
        tokens_dtype=tokens_dtype or before.get("tokens_dtype"),
        checksum=before.get("checksum") == ALGORITHM if checksum is None else checksum,
    )
    if looked.tokens_column is None and (looked.pack or looked.tokens_dtype):
        raise ManifestError("pack and tokens_dtype say how tokens are counted", hint="name the tokens_column, too")
    if looked.pack and looked.pack[0] < 1:
        raise ManifestError("a sequence has at least one token", expected="pack >= 1", found=looked.pack[0])
    if looked.tokens_dtype is not None and looked.tokens_dtype not in TOKENS_DTYPES:
        expected = ", ".join(TOKENS_DTYPES)
        raise ManifestError("unknown tokens_dtype", expected=expected, found=repr(looked.tokens_dtype))
    return looked
