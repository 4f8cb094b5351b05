"""The batch contract: every reader delivers the same thing, ``{"ids", "lengths", "data"}``.

``ids`` int64[B], ``lengths`` int64[B], and ``data``, one flat tensor of int32 tokens (T) or uint8 bytes (I).
A case that is about the values as the library hands them out (a list of bytes) leaves ``data`` away and says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    Contract: TypeAlias = dict[str, Tensor]
else:
    Contract = dict


def collate_arrays(samples: Sequence[tuple[int, npt.NDArray[Any]]]) -> Contract:
    """Makes a batch of (id, 1-D array) pairs, with one copy: the concatenation."""
    import torch

    ids = torch.tensor([sample_id for sample_id, _ in samples], dtype=torch.int64)
    lengths = torch.tensor([len(values) for _, values in samples], dtype=torch.int64)
    return {"ids": ids, "lengths": lengths, "data": torch.from_numpy(np.concatenate([x for _, x in samples]))}


def collate_tensors(samples: Sequence[tuple[int, Tensor]]) -> Contract:
    """Makes a batch of (id, 1-D tensor) pairs."""
    import torch

    ids = torch.tensor([sample_id for sample_id, _ in samples], dtype=torch.int64)
    lengths = torch.tensor([values.numel() for _, values in samples], dtype=torch.int64)
    return {"ids": ids, "lengths": lengths, "data": torch.cat([values for _, values in samples])}


def values_of(data: bytes | memoryview, workload: str) -> npt.NDArray[Any]:
    """Returns a sample's bytes as values, without a copy."""
    return np.frombuffer(data, dtype=np.int32 if workload == "T" else np.uint8)


def collate_text_rows(rows: Sequence[dict[str, Any]]) -> Contract:
    """Makes a batch of rows with ``id`` and ``tokens`` (a tensor), which several peers hand to a collate function."""
    return collate_tensors([(row["id"], row["tokens"]) for row in rows])


def collate_image_rows(rows: Sequence[dict[str, Any]]) -> Contract:
    """Makes a batch of rows with ``id`` and ``image`` (bytes)."""
    return collate_arrays([(row["id"], values_of(row["image"], "I")) for row in rows])


def tar_sample(fields: dict[str, Any], workload: str) -> tuple[int, npt.NDArray[Any]]:
    """Returns id and values of a sample whose fields are a tar's members, by suffix."""
    payload = bytes(fields["bin" if workload == "T" else "jpg"])
    return json.loads(bytes(fields["json"]))["id"], values_of(payload, workload)


def check(batch: Contract) -> None:
    """Holds a batch to the contract.

    Raises:
        ValueError: If lengths and data do not fit, or ids are not int64.
    """
    if str(batch["ids"].dtype) != "torch.int64" or len(batch["ids"]) != len(batch["lengths"]):
        raise ValueError(f"ids must be int64[B], found {batch['ids'].dtype}[{len(batch['ids'])}]")
    if "data" in batch and int(batch["lengths"].sum()) != batch["data"].numel():
        raise ValueError(f"lengths sum up to {int(batch['lengths'].sum())}, but there are {batch['data'].numel()} data")
