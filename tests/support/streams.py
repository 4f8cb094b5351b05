"""What a stream of batches shows, and the loaders that tests try."""

from __future__ import annotations

from itertools import chain

from torch.utils.data import DataLoader

from shardstream.torch import StreamingLoader


def uids(batches) -> list[list[int]]:
    """The ``uid`` of every row of every batch, padding included; touches the batches."""
    return [batch["uid"].tolist() for batch in batches]


def real_ids(batches) -> list[int]:
    """The sample ids of all rows that are not padding."""
    return list(chain.from_iterable(batch.sample_ids[~batch.is_padding].tolist() for batch in batches))


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def loader_of(kind, dataset, num_workers=0, method="fork", *, persistent=False, **options):
    """A plain DataLoader (``kind="plain"``) or a StreamingLoader (``"streaming"``)."""
    if num_workers:
        options |= {"multiprocessing_context": method, "persistent_workers": persistent}
    options["num_workers"] = num_workers
    return DataLoader(dataset, batch_size=None, **options) if kind == "plain" else StreamingLoader(dataset, **options)
