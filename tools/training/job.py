"""What a rank of a training run holds: model, optimizer, data; and how it is saved and found again."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from shardstream.cursor import Cursor
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.mixture_file import mixture_of
from shardstream.packing import Packing
from shardstream.torch import Batch, StreamingDataset, StreamingLoader, Topology, pad_tokens
from shardstream.torch.ledger import Ledger
from tools.training.checkpoint import Checkpoints, restore_rng, rng_state, seed_rng
from tools.training.config import Config, Data
from tools.training.config import Optimizer as OptimizerConfig
from tools.training.model import Transformer


@dataclass(frozen=True)
class TextToTokens:
    """A transform: the bytes of a text are its tokens.

    Attributes:
        column: Column of ``str`` or ``bytes``.
    """

    column: str

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the sample with ``tokens``, ``uint8[num_bytes]``, alone."""
        text = sample[self.column]
        return {"tokens": np.frombuffer(bytearray(text.encode() if isinstance(text, str) else text), np.uint8)}


@final
class PatientLoader(StreamingLoader):
    """A loader whose workers live on when torchrun or a scheduler sends SIGTERM to all processes.

    Their rank still needs them to finish its window. They inherit a mask: to ignore the signal once they have begun
    would leave those helpless that are just beginning.
    """

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers() -> None:
    """Ends what workers are left when a rank fails; at its exit Python would wait for those that outlive SIGTERM."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would take their end for the failure
    for worker in multiprocessing.active_children():
        worker.kill()


def open_dataset(config: Config, topology: Topology) -> StreamingDataset:
    """Returns the documents of this rank, or sequences packed from them.

    Either way as ``input_ids`` and ``labels``, ``int64[b, context_length]``.

    Raises:
        ManifestError: If a manifest cannot be read.
        PlanError: If the world size does not fit the global batch, or the token column is of no use.
    """
    data = config.data
    source = Manifest.load(str(data.manifest)) if data.mixture is None else mixture_of(data.mixture)
    options: dict[str, Any] = {
        "batch_size": data.micro_batch(topology.world_size),
        "global_batch": data.global_batch,
        "seed": config.seed,
        "tail": data.tail,
        "topology": topology,
    }
    length = config.model.context_length
    if data.packing is not None:
        packing = Packing(length, data.tokens, data.eos_id, data.packing)
        return StreamingDataset(source, packing=packing, columns=["input_ids", "labels"], **options)
    manifests = [source] if isinstance(source, Manifest) else source.manifests
    is_list = all(_is_list(manifest, data) for manifest in manifests)
    return StreamingDataset(
        source,
        columns=[data.tokens],
        transform=None if is_list else TextToTokens(data.tokens),
        collate=pad_tokens(data.tokens if is_list else "tokens", length=length),
        targets={"lm": "labels"},
        shifted=True,
        **options,
    )


def _is_list(manifest: Manifest, data: Data) -> bool:
    kinds = {column.name: column.type for column in manifest.columns}
    kind = kinds.get(data.tokens)
    if kind is None:
        known = " or ".join(kinds)
        raise PlanError("data.tokens names no column", url=manifest.path, expected=known, found=data.tokens)
    return "list" in kind


def learning_rate_factor(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Returns what the learning rate is multiplied with: a linear warm-up, then a cosine down to a tenth.

    Example:
        >>> config = OptimizerConfig(num_warmup_steps=10)
        >>> [round(learning_rate_factor(step, 110, config), 2) for step in (0, 4, 9, 10, 60, 110)]
        [0.1, 0.5, 1.0, 1.0, 0.55, 0.1]
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * done)


@dataclass
class Job:
    """One rank's part of a run, which moves from step to step.

    Attributes:
        config: The settings.
        topology: Rank and world size.
        device: Where the model is.
        loader: Micro-batches of this rank.
        model: The model with its gradients averaged over ranks.
        optimizer: Of all parameters.
        scheduler: Of the learning rate.
        cursor: Where the next window begins.
        step: Windows trained on.
        attempt: Counts the starts of the run.
    """

    config: Config
    topology: Topology
    device: torch.device
    loader: StreamingLoader
    model: DistributedDataParallel
    optimizer: AdamW
    scheduler: LambdaLR
    cursor: Cursor
    step: int = 0
    attempt: int = 0

    @classmethod
    def start(cls, config: Config, topology: Topology) -> Job:
        """Makes the job as it is before its first step. The process group must be there.

        Raises:
            ShardStreamError: If the data cannot be used.
        """
        has_cuda = torch.cuda.is_available()
        device = torch.device("cuda", topology.local_rank or 0) if has_cuda else torch.device("cpu")
        if has_cuda:
            torch.cuda.set_device(device)
        dataset = open_dataset(config, topology)
        loader = PatientLoader(
            dataset,
            num_workers=config.data.num_workers,
            pin_memory=has_cuda,
            timeout=config.timeout_s if config.data.num_workers else 0,  # a worker that hangs ends the job, too
        )
        torch.manual_seed(config.seed)  # the same weights on every rank
        dtype = torch.float64 if config.precision == "float64" else torch.float32
        model = DistributedDataParallel(Transformer(config.model).to(device, dtype))
        seed_rng(config.seed, 0, topology.rank)  # from here on, dropout and the like of its own
        settings = config.optimizer
        optimizer = AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
        plan = dataset.plan
        num_steps = config.num_epochs * -(-plan.num_micro_batches(topology.rank, plan.cursor()) // plan.accumulate)
        scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, num_steps, settings))
        return cls(config, topology, device, loader, model, optimizer, scheduler, dataset.start)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints(self.config.run / "checkpoints", self.config.checkpoint.num_kept)

    def open_ledger(self) -> Ledger:
        """Returns the ledger of what this rank is trained on from here on, and numbers the attempt by it."""
        ledger = Ledger(self.config.run / "ledger", self.loader, ids=True, timeout_s=self.config.timeout_s)
        self.attempt = ledger.attempt
        return ledger

    def save(self) -> None:
        """Saves the run; every rank calls it after the same window, rank 0 writes."""
        # The ledger has logged this window before the optimizer stepped: the checkpoint never runs ahead.
        rng = [None] * self.topology.world_size if self.topology.rank == 0 else None
        dist.gather_object(rng_state(), rng)
        if self.topology.rank == 0:
            state = {
                "step": self.step,
                "cursor": self.cursor.state_dict(),
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "rng": rng,
            }
            self.checkpoints.save(self.step, state)

    def resume(self) -> bool:
        """Continues where the newest readable checkpoint was saved, at any world size; rank 0 chooses it for all.

        Returns:
            Whether there was one.

        Raises:
            ShardStreamError: If no checkpoint can be read, or it belongs to other data (CursorError).
        """
        chosen: list[Any] = [self.checkpoints.newest() if self.topology.rank == 0 else None]
        dist.broadcast_object_list(chosen)
        [path] = chosen
        if path is None:
            return False
        state = self.checkpoints.load(path)
        self.loader.load_state_dict(state["cursor"])
        self.step, self.cursor = state["step"], self.loader.streaming_dataset.start
        try:
            self.model.module.load_state_dict(state["model"])
        except RuntimeError as error:
            hint = "keep model.* as it was, or begin in another run folder"
            raise PlanError("the checkpoint is of another model", url=str(path), found=error, hint=hint) from None
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        rank, saved = self.topology.rank, state["rng"]
        if rank < len(saved):
            restore_rng(saved[rank])
        else:
            seed_rng(self.config.seed, self.step, rank)
        return True
