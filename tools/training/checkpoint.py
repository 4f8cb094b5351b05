"""Checkpoints on disk: written whole or not at all, the newest readable one found again, the last few kept."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardstream.errors import ShardStreamError, ShardStreamWarning
from shardstream.permutation import key64

_PREFIX, _SUFFIX = "step-", ".pt"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run. One process writes (rank 0); all may read.

    Attributes:
        folder: Where they lie; made when the first one is saved.
        num_kept: How many of the newest are kept.
    """

    folder: Path
    num_kept: int

    def paths(self) -> list[Path]:
        """Returns the checkpoints there are, oldest first."""
        return sorted(self.folder.glob(f"{_PREFIX}*{_SUFFIX}"))

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint and removes those that are too many.

        It is on the disk under its name when this returns; whatever happens before, no reader ever sees a part of it.

        Args:
            step: Optimizer steps done.
            state: Tensors and plain values, so that it can be read with ``weights_only=True``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_PREFIX}{step:010d}{_SUFFIX}"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(self.folder)
        stale = [*self.paths()[: -self.num_kept], *self.folder.glob("*.tmp")]
        for each in stale:
            each.unlink()
        return path

    def newest(self) -> Path | None:
        """Returns the newest checkpoint that can be read, or None if there is none at all.

        One that cannot be read is set aside under another name, with a warning, and the one before is taken.

        Raises:
            ShardStreamError: If there are checkpoints and none can be read: starting anew would hide the loss.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                self.load(path)
            except Exception as error:  # noqa: BLE001 - torch raises a dozen kinds for a damaged file
                aside = path.with_suffix(".unreadable")
                path.replace(aside)
                what = f"checkpoint {path} cannot be read, the one before is taken; it is kept as {aside.name}"
                warnings.warn(f"{what} ({_first_line(error)})", ShardStreamWarning, stacklevel=2)
            else:
                return path
        if paths:
            hint = "restore one, or begin again in another run folder"
            raise ShardStreamError("no checkpoint can be read", url=str(self.folder), found=len(paths), hint=hint)
        return None

    @staticmethod
    def load(path: Path) -> dict[str, Any]:
        """Reads a checkpoint, all tensors on the CPU; nothing in it can run code."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# -------------------------------------------------------------------------------------------------- random generators


def rng_state() -> dict[str, Any]:
    """Returns the state of this process's random generators: torch, CUDA, numpy, Python; tensors and plain values."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - libraries draw from the global generator
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "python": random.getstate(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Sets this process's random generators to what ``rng_state`` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy_state = dict(state["numpy"])
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})  # noqa: NPY002 - as above
    random.setstate(state["python"])


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Seeds the random generators of a rank that has no saved state: each rank and step gets streams of its own."""
    key = key64(seed, 0, "rank", step, rank)
    torch.manual_seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002 - as above
    random.seed(key)
