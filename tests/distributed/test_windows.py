"""Gradients and parameters of real gloo processes against one process on the whole window."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstream.errors import DesyncError, PlanError, TopologyError
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, pad_tokens
from shardstream.torch.windows import windows
from tests.support.corpora import parquet_manifest
from tests.support.processes import run_checks
from tests.support.training import (
    BOUNDS,
    TokenModel,
    TwoHeads,
    check,
    fake_window,
    gradients_of,
    head_sums,
    reference,
    relative_error,
    right,
    step_with,
    token_loss,
    whole_window,
)

pytestmark = pytest.mark.distributed

# Valid targets of a head: one row a rank, one number a micro-batch.
COUNTS = {
    "2/0/5": {"lm": [[2], [0], [5]]},
    "3/0/11, two heads": {"aux": [[0, 4], [1, 0], [0, 2]], "lm": [[1, 2], [0, 0], [9, 2]]},
    "no target of one head": {"aux": [[0], [0], [0]], "lm": [[3], [0], [1]]},
    "accumulate 4": {
        "aux": [[1, 2, 0, 3], [4, 0, 0, 1], [2, 2, 1, 6]],
        "lm": [[5, 6, 1, 0], [0, 0, 0, 0], [8, 1, 2, 3]],
    },
}


# Each of these is somebody's loop. One window is one call: (sum of a head in this micro-batch, what is known) -> loss.
def rank_means(window, micro, sums):
    mine = {head: sum(int(batch.valid_tokens[head].sum()) for batch in window.batches) for head in sums}
    return sum(value / max(mine[head], 1) for head, value in sums.items())


def micro_batch_means(window, micro, sums):
    values = [value / max(int(micro.valid_tokens[head].sum()), 1) for head, value in sums.items()]
    return sum(values) / len(window.batches)


def one_shared_n(window, micro, sums):
    return sum(sums.values()) * dist.get_world_size() / sum(window.targets.values())


def no_factor(window, micro, sums):
    return sum(value / max(window.targets[head], 1) for head, value in sums.items())


WRONG = {
    "2/0/5": [rank_means, micro_batch_means, no_factor],
    "3/0/11, two heads": [rank_means, micro_batch_means, one_shared_n, no_factor],
    "accumulate 4": [rank_means, micro_batch_means, one_shared_n, no_factor],
}


# ---------------------------------------------------------------------------------------------------- three ranks


def ddp_equals_one_process(rank, folder):
    for counts in COUNTS.values():
        for dtype in BOUNDS:
            model, batches = TwoHeads(counts, dtype), fake_window(counts, rank, dtype)
            check(step_with(model, batches, right, wrapped=DistributedDataParallel(model)), counts, dtype)


def wrong_formulas_fail_the_same_check(rank, folder):
    for name, formulas in WRONG.items():
        counts = COUNTS[name]
        for formula in formulas:
            model, batches = TwoHeads(counts, torch.float64), fake_window(counts, rank, torch.float64)
            gradients, _ = step_with(model, batches, formula, wrapped=DistributedDataParallel(model))
            error = relative_error(gradients, reference(counts, torch.float64)[0])
            assert error >= 0.1, (name, formula.__name__, error)


def weighted_heads(rank, folder):
    counts = COUNTS["3/0/11, two heads"]
    model, batches = TwoHeads(counts), fake_window(counts, rank)

    def weighted(window, micro, sums):
        return window.loss(lm=sums["lm"], aux=(sums["aux"], 0.25))

    found, _ = step_with(model, batches, weighted, wrapped=DistributedDataParallel(model))
    alone = TwoHeads(counts)
    sums = head_sums(alone, whole_window(counts))
    (sums["lm"] / 14 + 0.25 * sums["aux"] / 7).backward()
    assert relative_error(found, gradients_of(alone)) <= 1e-12


def real_data_with_a_padded_tail(rank, folder):
    """14 documents of 0 to 4 tokens on 3 ranks x 2 x 2: a whole window, then one micro-batch with 4 rows of padding."""
    dataset = streaming_dataset(folder, accumulate=2)
    whole = iter(streaming_dataset(folder, batch_size=12, topology=Topology(0, 1)))
    model = TokenModel()
    wrapped, loader, seen = DistributedDataParallel(model), StreamingLoader(dataset), []
    for window in windows(loader):
        start = loader.state_dict()
        for micro in window.micro_batches(wrapped):
            window.loss(lm=token_loss(wrapped, micro)).backward()
        alone, batch = copy.deepcopy(model), next(whole)
        alone.zero_grad()
        num_targets = int(batch.valid_tokens["lm"].sum())
        (token_loss(alone, batch) / num_targets).backward()
        assert window.targets == {"lm": num_targets}
        assert relative_error(gradients_of(model), gradients_of(alone)) <= 1e-12
        seen.append((len(window.batches), window.num_micro_batches, window.num_samples))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        wrapped.zero_grad()
        assert (start["epoch"], start["position"]) == (0, window.position)
        assert loader.state_dict() == window.cursor.state_dict()
    assert seen == [(2, 6, 12), (1, 3, 2)]
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def streaming_dataset(folder, **options):
    manifest = parquet_manifest(Path(folder) / f"rank{dist.get_rank()}", [9, 0, 5], 4)
    options = {"batch_size": 2, "seed": 3, "collate": pad_tokens("tokens", shift=False), **options}
    return StreamingDataset(manifest, targets={"lm": "labels"}, shifted=True, ignore_index=-100, **options)


def refusals_before_any_collective(rank, folder):
    with pytest.raises(TopologyError, match="rank 0 of 1"):
        windows(streaming_dataset(folder, topology=Topology(0, 1)))
    with pytest.raises(PlanError, match="uneven"):
        windows(streaming_dataset(folder, tail="uneven"))
    with pytest.raises(PlanError, match="did you mean 'lm'"):
        windows(streaming_dataset(folder), heads=["lmm"])


def counts_of_2_to_the_31_and_more(rank, folder):
    batches = fake_window(COUNTS["2/0/5"], rank)
    batches[0].valid_tokens["lm"] = torch.tensor([2**31, 2**40 + rank])
    [window] = windows(batches)
    assert window.targets == {"lm": 3 * 2**31 + 3 * 2**40 + 3}
    assert window.scale == {"lm": 3 / (3 * 2**31 + 3 * 2**40 + 3)}


def a_window_without_targets_is_skipped_alike(rank, folder):
    """Then one with targets: the scaler, too, goes on."""
    nothing, something = {"lm": [[0], [0], [0]]}, COUNTS["2/0/5"]
    model = TwoHeads(nothing, torch.float32)
    wrapped, before = DistributedDataParallel(model), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stepped = []
    for window in windows([*fake_window(nothing, rank, torch.float32), *fake_window(something, rank, torch.float32)]):
        for micro in window.micro_batches(wrapped):
            loss = window.loss(lm=head_sums(wrapped, micro)["lm"])
            scaler.scale(loss).backward()
        if not window.has_targets:
            assert float(loss.detach()) == 0.0
            assert all(not gradient.any() for gradient in gradients_of(model))
        stepped.append(window.step(optimizer, scaler))
        optimizer.zero_grad()
        if len(stepped) == 1:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert stepped == [False, True]
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def a_mean_over_no_targets_is_an_exact_zero(rank, folder):
    """A user's mean is nan on the rank without targets: what it gives back is 0, and so are its gradients."""
    counts = COUNTS["2/0/5"]
    model = TwoHeads(counts)
    wrapped = DistributedDataParallel(model)
    [window] = windows(fake_window(counts, rank))
    for micro in window.micro_batches(wrapped):
        logits, labels = wrapped(micro["x"])["lm"].flatten(0, 1), micro["lm"].flatten()
        mean = F.cross_entropy(logits, labels, ignore_index=-100)
        assert bool(mean.isnan()) == (rank == 1)
        window.loss(lm=mean * (labels != -100).sum()).backward()
    assert relative_error(gradients_of(model), reference(counts, torch.float64)[0]) <= 1e-12


def terms_that_are_means_already(rank, folder):
    """2 micro-batches on each of 3 ranks: the mean of six."""
    counts = COUNTS["3/0/11, two heads"]
    model = nn.Linear(1, 1, bias=False).double()
    wrapped = DistributedDataParallel(model)
    [window] = windows(fake_window(counts, rank))
    for micro in window.micro_batches(wrapped):
        value = torch.full((1, 1), float(10 * rank + micro.micro_index)).double()
        window.mean_loss(wrapped(value).sum()).backward()
    assert model.weight.grad.item() == pytest.approx((0 + 1 + 10 + 11 + 20 + 21) / 6, rel=1e-12)


def constant_counts_need_no_communication(rank, folder):
    class Packed:
        dataset = None

        def constant_targets(self, place):
            return {"lm": 24} if place.window_index == 0 else None

    packed = Packed()
    packed.dataset = packed
    counts = {"lm": [[8], [8], [8]]}
    Packed.__iter__ = lambda self: iter(
        [*fake_window(counts, rank), *fake_window(COUNTS["2/0/5"], rank, window_index=1)]
    )
    driven = windows(packed, heads=["lm"])
    with Collectives() as collectives:
        first = next(driven)
    assert (first.targets, first.num_samples, first.num_micro_batches) == ({"lm": 24}, 9, 3)
    assert len(collectives) == 1  # of the window ahead, which is not constant
    assert next(driven).targets == {"lm": 7}


class Collectives:
    """Counts the collectives that are issued through ``torch.distributed``."""

    def __enter__(self):
        self.issued, self.all_reduce = [], dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: self.issued.append(args) or self.all_reduce(*args, **kwargs)
        return self.issued

    def __exit__(self, *_):
        dist.all_reduce = self.all_reduce


THREE_RANKS = [
    ddp_equals_one_process,
    wrong_formulas_fail_the_same_check,
    weighted_heads,
    real_data_with_a_padded_tail,
    refusals_before_any_collective,
    counts_of_2_to_the_31_and_more,
    a_window_without_targets_is_skipped_alike,
    a_mean_over_no_targets_is_an_exact_zero,
    terms_that_are_means_already,
    constant_counts_need_no_communication,
]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    return run_checks(THREE_RANKS, 3, str(tmp_path_factory.mktemp("three")))


@pytest.mark.parametrize("name", [check.__name__ for check in THREE_RANKS])
def test_on_three_ranks(three_ranks, name):
    assert three_ranks[name] == [""] * 3, "\n".join(three_ranks[name])


# ---------------------------------------------------------------------------------------------------- two ranks


def c48_global_mean(rank, folder):
    """Valid tokens (3, 1) and (8, 4), loss sums (6, 5) and (8, 2): 21 / 16."""
    counts = {"lm": [[3, 1], [8, 4]]}
    loss_sums = [[6.0, 5.0], [8.0, 2.0]][rank]
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    wrapped = DistributedDataParallel(model)
    [window] = windows(fake_window(counts, rank))
    assert window.targets == {"lm": 16}
    assert window.scale == {"lm": 2 / 16}
    for micro in window.micro_batches(wrapped):
        loss_sum = wrapped(torch.tensor([[loss_sums[micro.micro_index]]]).double()).sum()
        window.loss(lm=loss_sum).backward()
    assert model.weight.grad.item() == pytest.approx(21 / 16, rel=1e-12)


def c50_synchronised_in_short_windows_too(rank, folder):
    """Two ranks with window gradients 4.0 and 7.0 end with 5.5 on both, for 2 micro-batches and for 1."""
    counts = {"lm": [[4, 4], [4, 4]]}
    short = {"lm": [[4], [4]]}
    model = nn.Linear(1, 1, bias=False).double()
    wrapped = DistributedDataParallel(model)
    flags = []
    for window in windows([*fake_window(counts, rank), *fake_window(counts, rank), *fake_window(short, rank)]):
        for micro in window.micro_batches(wrapped):
            flags.append(micro.is_last_in_window)
            assert wrapped.require_backward_grad_sync == micro.is_last_in_window
            value = torch.full((1, 1), [4.0, 7.0][rank]).double()
            (wrapped(value).sum() / len(window.batches)).backward()
        assert model.weight.grad.item() == pytest.approx(5.5, rel=1e-12)
        wrapped.zero_grad()
    assert [index for index, flag in enumerate(flags) if flag] == [1, 3, 4]


def counts_are_issued_one_window_ahead(rank, folder):
    counts = {"lm": [[2], [3]]}
    batches = [batch for k in range(3) for batch in fake_window(counts, rank, window_index=k)]
    with Collectives() as collectives:
        issued = [len(collectives) for _ in windows(batches)]
    assert issued == [2, 3, 3]


def a_head_that_is_missing_is_named(rank, folder):
    """Before anything is communicated for it: no other rank need take part in this check."""
    counts = COUNTS["3/0/11, two heads"]
    model = TwoHeads(counts)
    [window] = windows(fake_window({head: rows[:2] for head, rows in counts.items()}, rank))
    for micro in window.micro_batches(model):
        sums = head_sums(model, micro)
        with pytest.raises(DesyncError, match=rf"head 'aux' has no loss on rank {rank}"):
            window.loss(lm=sums["lm"])
        with pytest.raises(DesyncError, match=rf"head 'aux' is not in the graph on rank {rank}"):
            window.loss(lm=sums["lm"], aux=torch.zeros(()))
        with pytest.raises(PlanError, match=r"no head 'axu'.*did you mean 'aux'"):
            window.loss(lm=sums["lm"], axu=sums["aux"])
        window.loss(**sums)


def a_micro_batch_passed_over_is_noticed(rank, folder):
    counts = {"lm": [[1, 1, 1], [1, 1, 1]]}
    model = TwoHeads(counts)
    [window] = windows(fake_window(counts, rank))
    with pytest.raises(DesyncError, match=f"rank {rank} went past a micro-batch"):
        go_past_the_second(window, model)


def go_past_the_second(window, model):
    for micro in window.micro_batches(model):
        if micro.micro_index != 1:
            window.loss(**head_sums(model, micro)).backward()


def loops_that_were_left_alike_stay_in_step(rank, folder):
    batches = [batch for k in range(3) for batch in fake_window({"lm": [[k + 2], [k + 3]]}, rank, window_index=k)]
    assert next(windows(batches)).targets == {"lm": 5}  # the second window is counted, too, and never asked for
    assert [window.targets["lm"] for window in windows(batches)] == [5, 7, 9]


def ranks_at_different_windows_all_learn_of_it(rank, folder):
    """Rank 0 left its loop one window before rank 1: sums of different windows would pair without a word."""
    batches = [batch for k in range(4) for batch in fake_window({"lm": [[1], [1]]}, rank, window_index=k)]
    driven = windows(batches[rank:])
    with pytest.raises(DesyncError, match=rf"different windows: expected window {rank} at .* as on this rank"):
        next(driven)


def a_rank_that_does_not_come(rank, folder):
    counts = {"lm": [[1], [1]]}
    driven = windows(fake_window(counts, rank) if rank == 0 else [], timeout_s=1.0)
    if rank == 0:
        with pytest.raises(DesyncError, match=r"targets of window 0 at position 0 .*within 1 s"):
            next(driven)


TWO_RANKS = [
    c48_global_mean,
    c50_synchronised_in_short_windows_too,
    counts_are_issued_one_window_ahead,
    a_head_that_is_missing_is_named,
    a_micro_batch_passed_over_is_noticed,
    loops_that_were_left_alike_stay_in_step,
    ranks_at_different_windows_all_learn_of_it,
    a_rank_that_does_not_come,
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_checks(TWO_RANKS, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("name", [check.__name__ for check in TWO_RANKS])
def test_on_two_ranks(two_ranks, name):
    assert two_ranks[name] == [""] * 2, "\n".join(two_ranks[name])
