"""Ranks that run out of data: ``UnevenInputs`` against one process, against padding, and against plain ``Join``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardstream.errors import PlanError
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, pad_tokens
from shardstream.torch.uneven import UnevenInputs
from shardstream.torch.windows import windows
from tests.support.corpora import parquet_manifest
from tests.support.processes import run_checks
from tests.support.training import (
    TokenModel,
    TwoHeads,
    fake_window,
    gradients_of,
    head_sums,
    relative_error,
    token_loss,
)

pytestmark = pytest.mark.distributed

# 14 documents on 3 ranks x 2: two whole windows, and one of 2 documents, for ranks 0 and 1 only.
NUM_WINDOWS = {0: 3, 1: 3, 2: 2}


def corpus(folder, **options):
    manifest = parquet_manifest(folder / f"rank{dist.get_rank()}", [9, 0, 5], 4)
    options = {"batch_size": 2, "seed": 3, "tail": "uneven", **options}
    return StreamingDataset(
        manifest, targets={"lm": "labels"}, shifted=True, collate=pad_tokens("tokens", shift=False), **options
    )


def adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def train(model, wrapped, driven, optimizer, scheduler):
    """One pass; returns the gradients of each window."""
    gradients = []
    for window in driven:
        for micro in window.micro_batches(wrapped):
            window.loss(lm=token_loss(wrapped, micro)).backward()
        gradients.append(gradients_of(model))
        if window.step(optimizer):
            scheduler.step()
        optimizer.zero_grad()
    return gradients


def alone(folder, num_passes):
    """The same passes in one process: whole windows, the tail as it is."""
    model = TokenModel()
    optimizer, scheduler = adamw(model)
    dataset = corpus(folder, batch_size=6, topology=Topology(0, 1))
    gradients = []
    for _ in range(num_passes):
        for batch in StreamingLoader(dataset):
            num_targets = int(batch.valid_tokens["lm"].sum())
            (token_loss(model, batch) / num_targets).backward()
            gradients.append(gradients_of(model))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, gradients


def two_passes_equal_one_process(rank, folder):
    """Gradients of every window, and parameters after the steps of the next pass: moments and schedule are equal."""
    for by_initial in (True, False):
        model = TokenModel()
        wrapped = DistributedDataParallel(model)
        optimizer, scheduler = adamw(model)
        loader, found = StreamingLoader(corpus(folder)), []
        for _ in range(2):
            with UnevenInputs(wrapped, optimizer, scheduler, divide_by_initial_world_size=by_initial) as uneven:
                found.append(train(model, wrapped, windows(loader, uneven=uneven), optimizer, scheduler))
        expected_model, expected = alone(folder, 2)
        assert [len(gradients) for gradients in found] == [NUM_WINDOWS[rank]] * 2
        for mine, theirs in zip(found, (expected[:3], expected[3:]), strict=True):
            for k, gradients in enumerate(mine):
                assert relative_error(gradients, theirs[k]) <= 1e-12
        assert relative_error(list(model.parameters()), list(expected_model.parameters())) <= 1e-12
        assert scheduler.last_epoch == 6


def padding_gives_the_same_without_any_of_it(rank, folder):
    model = TokenModel()
    wrapped = DistributedDataParallel(model)
    optimizer, scheduler = adamw(model)
    loader, found = StreamingLoader(corpus(folder, tail="pad")), []
    for _ in range(2):
        found += train(model, wrapped, windows(loader), optimizer, scheduler)
    expected_model, expected = alone(folder, 2)
    assert len(found) == 6
    assert all(relative_error(*pair) <= 1e-12 for pair in zip(found, expected, strict=True))
    assert relative_error(list(model.parameters()), list(expected_model.parameters())) <= 1e-12


def join_alone_diverges_at_the_next_step(rank, folder):
    """Why the state is shared: with plain Join parameters are equal on exit, and differ after one more step."""
    counts = {"lm": [[3], [4], [5]]}
    model = TwoHeads(counts)
    wrapped = DistributedDataParallel(model)
    optimizer, _ = adamw(model)
    with Join([wrapped]):
        for _ in range(2 + rank):
            head_sums(wrapped, fake_window(counts, rank)[0])["lm"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert spread(model) == 0
    head_sums(wrapped, fake_window(counts, rank)[0])["lm"].backward()
    optimizer.step()
    assert spread(model) > 1e-3


def spread(model):
    """Largest difference of a parameter from rank 0's."""
    first = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in first:
        dist.broadcast(parameter, 0)
    differences = [(a - b).abs().max() for a, b in zip(model.parameters(), first, strict=True)]
    largest = torch.stack(differences).max().detach()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def a_rank_without_any_window(rank, folder):
    """It has never stepped: its optimizer gets moments that it never had; and each rank a different number."""
    counts = {"aux": [[1], [2], [3]], "lm": [[3], [0], [5]]}
    model = TwoHeads(counts)
    wrapped = DistributedDataParallel(model)
    optimizer, scheduler = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    batches = [fake_window(counts, rank, window_index=k)[0] for k in range(rank)]  # 0, 1 and 2 windows
    with UnevenInputs(wrapped, optimizer, scheduler, scaler) as uneven:
        for window in windows(batches, heads=["aux", "lm"], uneven=uneven):
            for micro in window.micro_batches(wrapped):
                scaler.scale(window.loss(**head_sums(wrapped, micro))).backward()
            assert window.targets == (
                {"aux": 5, "lm": 5} if window.batches[0].window_index == 0 else {"aux": 3, "lm": 5}
            )
            window.step(optimizer, scaler)
            scheduler.step()
            optimizer.zero_grad()
    assert (scheduler.last_epoch, scaler.get_scale()) == (2, 16.0)
    assert spread(model) == 0
    for window in windows(fake_window(counts, rank)):
        for micro in window.micro_batches(wrapped):
            window.loss(**head_sums(wrapped, micro)).backward()
        window.step(optimizer)
    assert spread(model) == 0
    assert float(optimizer.state[next(model.parameters())]["step"]) == 3


def terms_that_are_means_already(rank, folder):
    """Over the ranks that still have data: the mean of 0, 1, 2, and once rank 0 ran out that of 1 and 2."""
    for by_initial in (True, False):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.ones_(model.weight)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        counts = {"lm": [[1], [1], [1]]}
        batches = [fake_window(counts, rank, window_index=k)[0] for k in range(1 + (rank > 0))]
        found = []
        with UnevenInputs(wrapped, optimizer, divide_by_initial_world_size=by_initial) as uneven:
            for window in windows(batches, heads=["lm"], uneven=uneven):
                for _ in window.micro_batches(wrapped):
                    window.mean_loss(wrapped(torch.full((1, 1), float(rank)).double()).sum()).backward()
                found.append(model.weight.grad.item())
                optimizer.zero_grad()
        assert found == pytest.approx([1.0, 1.5][: len(batches)], rel=1e-12)


def refusals(rank, folder):
    model = TwoHeads(["lm"])
    wrapped = DistributedDataParallel(model)
    optimizer, _ = adamw(model)
    uneven = UnevenInputs(wrapped, optimizer)
    with pytest.raises(PlanError, match=r"accumulate=1 only.*no_sync.*found accumulate=2.*tail='pad'"):
        windows(StreamingLoader(corpus(folder, accumulate=2)), uneven=uneven)
    with uneven, pytest.raises(PlanError, match="accumulate=1 only"):
        next(windows(fake_window({"lm": [[1, 1]] * 3}, rank), heads=["lm"], uneven=uneven))
    with pytest.raises(PlanError, match="outside of its context"):
        next(windows(fake_window({"lm": [[1]] * 3}, rank), heads=["lm"], uneven=uneven))
    with pytest.raises(PlanError, match="needs a DistributedDataParallel model"):
        UnevenInputs(model, optimizer)
    fully_shard(model)
    with pytest.raises(PlanError, match=r"FSDP.*'pad'.*'continue'"):
        UnevenInputs(model, optimizer)


THREE_RANKS = [
    two_passes_equal_one_process,
    padding_gives_the_same_without_any_of_it,
    join_alone_diverges_at_the_next_step,
    a_rank_without_any_window,
    terms_that_are_means_already,
    refusals,
]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    return run_checks(THREE_RANKS, 3, tmp_path_factory.mktemp("uneven"))


@pytest.mark.parametrize("name", [check.__name__ for check in THREE_RANKS])
def test_on_three_ranks(three_ranks, name):
    assert three_ranks[name] == [""] * 3, "\n".join(three_ranks[name])
