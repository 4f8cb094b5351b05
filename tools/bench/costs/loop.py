"""What it costs a training loop to know its denominators: on real gloo processes, with a small model under DDP."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from tools.bench.adapters.shardstream_reader import ShardstreamReader
from tools.bench.case import Case, Folders
from tools.bench.measuring import Metrics, Subject

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from shardstream.torch import Batch, StreamingDataset

_ACCUMULATE, _VOCABULARY, _WIDTH, _NUM_TOKENS = 2, 512, 64, 512
_NUM_WARM, _NUM_WINDOWS = 5, 60


class Loop(Subject):
    """Option ``mode``: "none" (a wrong loop, without denominators), "blocking", "overlapped" or "constant"."""

    package = "shardstream.torch"

    def measure(self, case: Case) -> Metrics:
        """Trains some windows on ``world_size`` processes; the slowest rank's time counts."""
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (case, self.folders, f"{folder}/store", queue)
            ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(case.world_size)]
            for process in ranks:
                process.start()
            told = [queue.get(timeout=120) for _ in ranks]
            for process in ranks:
                process.join(10)
        if failures := [each for each in told if isinstance(each, str)]:
            raise RuntimeError("; ".join(failures))
        seconds = max(told)
        num_windows = int(case.options.get("num_windows", _NUM_WINDOWS))
        return {"windows_per_s": num_windows / seconds, "seconds": seconds / num_windows}


def _rank(rank: int, case: Case, folders: Folders, store: str, queue: Any) -> None:
    """One rank: puts its seconds into the queue, or what went wrong."""
    try:
        queue.put(_seconds(rank, case, folders, store))
    except Exception as error:  # noqa: BLE001 - the parent tells
        queue.put(f"rank {rank}: {type(error).__name__}: {error}")


def _seconds(rank: int, case: Case, folders: Folders, store: str) -> float:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=60)
    url = f"file://{store}"
    dist.init_process_group("gloo", url, rank=rank, world_size=case.world_size, timeout=timeout)
    layers = (torch.nn.Embedding(_VOCABULARY, _WIDTH), torch.nn.Linear(_WIDTH, _VOCABULARY))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dataset = _dataset(case, rank, folders)
    steps = _STEPS[case.options["mode"]](dataset, model)
    began = time.perf_counter()
    for index in range(_NUM_WARM + int(case.options.get("num_windows", _NUM_WINDOWS))):
        if index == _NUM_WARM:
            dist.barrier()
            began = time.perf_counter()
        next(steps)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    dist.barrier()
    return seconds


def _dataset(case: Case, rank: int, folders: Folders) -> StreamingDataset:
    from shardstream.torch import StreamingDataset, Topology

    return StreamingDataset(
        ShardstreamReader(folders).manifest("T/parquet"),
        batch_size=4,
        accumulate=_ACCUMULATE,
        tail="continue",
        targets={"lm": _num_targets},
        topology=Topology(rank, case.world_size),
    )


def _num_targets(columns: Mapping[str, Any]) -> Tensor:
    lengths: Tensor = columns["tokens"].lengths
    return (lengths - 1).clamp(min=0)


def _loss_sum(model: DistributedDataParallel, batch: Batch) -> Tensor:
    from torch.nn.functional import cross_entropy

    tokens = batch["tokens"].values[: _NUM_TOKENS + 1].long() % _VOCABULARY
    return cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")


def _train(model: DistributedDataParallel, window: list[Batch], denominator: float) -> None:
    import torch

    for index, batch in enumerate(window):
        with model.no_sync() if index < len(window) - 1 else nullcontext():
            torch.autograd.backward(_loss_sum(model, batch) / denominator)


def _uncounted(dataset: StreamingDataset, model: DistributedDataParallel) -> Iterator[None]:
    batches = iter(dataset)
    while window := list(islice(batches, _ACCUMULATE)):
        _train(model, window, _NUM_TOKENS)
        yield


def _blocking(dataset: StreamingDataset, model: DistributedDataParallel) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    batches = iter(dataset)
    while window := list(islice(batches, _ACCUMULATE)):
        count = torch.stack([batch.valid_tokens["lm"].sum() for batch in window]).sum()
        dist.all_reduce(count)
        _train(model, window, float(count) / dist.get_world_size())
        yield


def _overlapped(dataset: StreamingDataset, model: DistributedDataParallel) -> Iterator[None]:
    import torch

    from shardstream.torch import windows

    for window in windows(dataset, heads=("lm",)):
        for batch in window.micro_batches(model):
            torch.autograd.backward(window.loss(lm=_loss_sum(model, batch)))
        yield


def _constant(dataset: StreamingDataset, model: DistributedDataParallel) -> Iterator[None]:
    num_targets = dataset.plan.global_batch * _NUM_TOKENS
    vars(dataset)["constant_targets"] = lambda _: {"lm": num_targets}  # as packed sequences without masks have it
    yield from _overlapped(dataset, model)


_STEPS: dict[str, Callable[[StreamingDataset, DistributedDataParallel], Iterator[None]]] = {
    "none": _uncounted,
    "blocking": _blocking,
    "overlapped": _overlapped,
    "constant": _constant,
}
