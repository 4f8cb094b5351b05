"""Every way to wrap a model: DDP, a communication hook, FSDP2, HSDP, a mesh with tensor-parallel peers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardstream.errors import DesyncError, PlanError, TopologyError
from shardstream.torch.counts import RankSums
from shardstream.torch.groups import own_group
from shardstream.torch.windows import windows
from tests.support.processes import run_checks
from tests.support.training import (
    BOUNDS,
    TwoHeads,
    check,
    fake_window,
    head_sums,
    reference,
    relative_error,
    right,
    step_with,
)

pytestmark = pytest.mark.distributed


def fsdp2_equals_one_process(rank):
    counts = {"aux": [[0, 4], [1, 0]], "lm": [[1, 2], [0, 0]]}
    for sync in ("each", "last", None):
        for dtype in BOUNDS:
            model = TwoHeads(counts, dtype)
            for head in model.heads.values():
                fully_shard(head)
            fully_shard(model)
            found = step_with(model, fake_window(counts, rank, dtype), right, options={"sync": sync})
            check([[tensor.full_tensor() for tensor in tensors] for tensors in found], counts, dtype)


def a_communication_hook_that_sums(rank):
    counts = {"lm": [[3, 1], [0, 7]]}
    for gradients, factor in (("sum", 1.0), ("mean", 2.0)):
        model = TwoHeads(counts)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, summing_hook)
        found, _ = step_with(model, fake_window(counts, rank), right, options={"gradients": gradients}, wrapped=wrapped)
        expected = [factor * gradient for gradient in reference(counts, torch.float64)[0]]
        assert relative_error(found, expected) <= 1e-12


def summing_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def what_ddp_cannot_do_is_refused(rank):
    counts = {"lm": [[1, 1], [1, 1]]}
    wrapped = DistributedDataParallel(TwoHeads(counts), static_graph=True)
    [window] = windows(fake_window(counts, rank))
    with pytest.raises(PlanError, match="static_graph"):
        window.micro_batches(wrapped)
    [window] = windows(fake_window(counts, rank), gradients="sum", sync="each")
    with pytest.raises(PlanError, match="again after each micro-batch"):
        window.micro_batches(DistributedDataParallel(TwoHeads(counts)))


def ddp_may_synchronise_each_micro_batch(rank):
    counts = {"aux": [[0, 4], [1, 0]], "lm": [[1, 2], [0, 0]]}
    model = TwoHeads(counts)
    wrapped = DistributedDataParallel(model)
    check(
        step_with(model, fake_window(counts, rank), right, options={"sync": "each"}, wrapped=wrapped),
        counts,
        torch.float64,
    )


def synchronisation_is_restored(rank):
    counts = {"lm": [[1, 1, 1], [1, 1, 1]]}
    model = TwoHeads(counts)
    wrapped = DistributedDataParallel(model)
    [window] = windows(fake_window(counts, rank))
    for _ in window.micro_batches(wrapped):
        break
    assert wrapped.require_backward_grad_sync
    with pytest.raises(KeyError, match="no such column"):
        look_for_a_column(window, wrapped)
    assert wrapped.require_backward_grad_sync
    driven = windows(fake_window(counts, rank))
    kept = next(driven).micro_batches(wrapped)
    next(kept)
    assert not wrapped.require_backward_grad_sync
    driven.close()
    assert wrapped.require_backward_grad_sync


def look_for_a_column(window, wrapped):
    for micro in window.micro_batches(wrapped):
        assert not wrapped.require_backward_grad_sync
        micro["no such column"]


def backward_that_comes_too_late(rank):
    """All losses first, then all backwards: DDP would sum some gradients and not others, without a word."""
    counts = {"lm": [[2, 3], [4, 1]]}
    for wrap in (DistributedDataParallel, lambda model: model):
        wrapped = wrap(TwoHeads(counts))
        [window] = windows(fake_window(counts, rank))
        losses = [window.loss(**head_sums(wrapped, micro)) for micro in window.micro_batches(wrapped)]
        if wrap is DistributedDataParallel:
            with pytest.raises(PlanError, match=rf"backward was called when its micro-batch was over, on rank {rank}"):
                losses[0].backward()
        else:
            losses[0].backward()  # of a plain module that is right


def parameters_that_a_loss_does_not_reach(rank):
    """One rank's head has a graph, but not through its own parameters: DDP says so at the next forward only."""
    counts = {"aux": [[1], [1]], "lm": [[1], [1]]}
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = TwoHeads(counts)
    wrapped = DistributedDataParallel(model, process_group=group)
    driven = windows(fake_window(counts, rank))
    error, message = [(RuntimeError, "Timed out"), (DesyncError, LEFT_OUT)][rank]
    with pytest.raises(error, match=message):
        train_with_a_detour(next(driven), wrapped, is_odd=rank == 1)


LEFT_OUT = (
    r"not summed .* on rank 1, .*by head 'aux' 2, head 'lm' 4: .*none for heads.aux.weight, heads.aux.bias; "
    "run every head on every rank"
)


def train_with_a_detour(window, wrapped, *, is_odd):
    for micro in window.micro_batches(wrapped):
        sums = head_sums(wrapped, micro)
        if is_odd:
            sums["aux"] = wrapped.module.trunk(micro["x"]).sum() * 0
        window.loss(**sums).backward()


TWO_RANKS = [
    fsdp2_equals_one_process,
    a_communication_hook_that_sums,
    ddp_may_synchronise_each_micro_batch,
    what_ddp_cannot_do_is_refused,
    synchronisation_is_restored,
    backward_that_comes_too_late,
    parameters_that_a_loss_does_not_reach,
]


def a_mesh_with_tensor_parallel_peers(rank):
    """Peers in the mesh's second dimension hold the same data: it counts once, whoever averages over it."""
    counts = {"aux": [[0, 4], [1, 0]], "lm": [[1, 2], [0, 0]]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_rank = mesh.get_local_rank("dp")
    for group, given in ((mesh.get_group("dp"), mesh), (None, mesh["dp"])):
        model = TwoHeads(counts)
        wrapped = DistributedDataParallel(model, process_group=group)
        check(
            step_with(model, fake_window(counts, data_rank), right, options={"mesh": given}, wrapped=wrapped),
            counts,
            torch.float64,
        )
    [window] = windows(fake_window(counts, data_rank), group=mesh.get_group("dp"))
    assert (window.targets, window.num_averaged) == ({"aux": 5, "lm": 3}, 2)


def hsdp_equals_one_process(rank):
    counts = {"lm": [[1, 2], [0, 0], [4, 1], [0, 9]]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for sync in (None, "last"):
        model = TwoHeads(counts)
        fully_shard(model, mesh=mesh)
        options = {"mesh": mesh, "mesh_dim": ("replicate", "shard"), "sync": sync}
        found = step_with(model, fake_window(counts, rank), right, options=options)
        check([[tensor.full_tensor() for tensor in tensors] for tensors in found], counts, torch.float64)


def a_replica_with_a_group_more(rank):
    """Torch names a group that only its ranks make by how many groups a rank is in; ours must meet all the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if rank >= 2:
        dist.new_group([2, 3], use_local_synchronization=True)
    sums = RankSums(mesh=mesh, timeout_s=5.0, purpose="test")
    assert sums.issue([1, rank], "a window").wait() == [2, 2 * (rank % 2) + 2]
    assert RankSums(mesh=mesh, timeout_s=5.0, purpose="test").group is sums.group


def ranks_in_another_order(rank):
    """Group ranks are data ranks, also where the mesh's dimensions are given in another order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sums = RankSums(mesh=mesh, mesh_dim=("shard", "replicate"), timeout_s=5.0, purpose="test")
    assert sums.ranks == [0, 2, 1, 3]
    assert dist.get_rank(sums.group) == sums.topology.rank == [0, 2, 1, 3][rank]
    said = [None] * 4
    dist.all_gather_object(said, rank, group=sums.group)
    assert said == sums.ranks
    root = torch.tensor([rank])
    dist.broadcast(root, src=2, group=sums.group)
    assert int(root) == 2


FOUR_RANKS = [
    a_mesh_with_tensor_parallel_peers,
    hsdp_equals_one_process,
    a_replica_with_a_group_more,
    ranks_in_another_order,
]


def one_that_does_not_count(rank):
    """Nobody waits for it longer than the deadline, and all are told who it is."""
    if rank != 1:
        with pytest.raises(TopologyError, match=r"2 of 3 ranks came to the group of counts within 1 s.*missing 1"):
            windows(fake_window({"lm": [[1], [1], [1]]}, rank), timeout_s=1.0)
    dist.barrier()


def one_that_wants_another_backend(rank):
    with pytest.raises(TopologyError, match=r"different backends: found \{0: 'gloo', 1: 'nccl', 2: 'gloo'\}"):
        own_group([0, 1, 2], "nccl" if rank == 1 else "gloo", 5.0, "test")


THREE_RANKS = [one_that_does_not_count, one_that_wants_another_backend]


@pytest.fixture(scope="module")
def three_ranks():
    return run_checks(THREE_RANKS, 3)


@pytest.mark.parametrize("name", [check.__name__ for check in THREE_RANKS])
def test_on_three_ranks(three_ranks, name):
    assert three_ranks[name] == [""] * 3, "\n".join(three_ranks[name])


@pytest.fixture(scope="module")
def two_ranks():
    return run_checks(TWO_RANKS, 2)


@pytest.fixture(scope="module")
def four_ranks():
    return run_checks(FOUR_RANKS, 4)


@pytest.mark.parametrize("name", [check.__name__ for check in TWO_RANKS])
def test_on_two_ranks(two_ranks, name):
    assert two_ranks[name] == [""] * 2, "\n".join(two_ranks[name])


@pytest.mark.parametrize("name", [check.__name__ for check in FOUR_RANKS])
def test_on_four_ranks(four_ranks, name):
    assert four_ranks[name] == [""] * 4, "\n".join(four_ranks[name])
