"""``verify_ranks`` with real processes: the odd one out is named by all, and nobody waits for one that never comes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardstream.errors import ShardStreamError, TopologyError
from shardstream.manifest import Manifest
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, verify_ranks
from shardstream.torch.topology import resolve_topology
from tests.support.processes import run_ranks

pytestmark = pytest.mark.distributed

DATA = {"num_shards": 4, "blocks_per_shard": 3, "rows_per_block": 10}
SETTINGS = {"batch_size": 2, "accumulate": 2, "seed": 1}
RIGHT = "every rank is right"


def dataset_of(topology, manifest=DATA, **changed):
    return StreamingDataset(Manifest.synthetic(**manifest), topology=topology, **{**SETTINGS, **changed})


def outcome(dataset, **options):
    try:
        verify_ranks(dataset, **{"timeout_s": 20.0, **options})
    except ShardStreamError as error:
        return f"{type(error).__name__}: {error}"
    return RIGHT


def seeked(dataset, epoch):
    dataset.set_epoch(epoch)
    return dataset


def odd_ranks(rank):
    """One dataset after the other, rank 1's being another one than those of ranks 0 and 2."""
    odd = rank == 1
    other = {**DATA, "num_shards": 5}
    datasets = {
        "right": dataset_of(Topology(rank, 3)),
        "a loader": StreamingLoader(dataset_of(Topology(rank, 3))),
        "found in the group": StreamingDataset(Manifest.synthetic(**DATA), **SETTINGS),
        "another seed": dataset_of(Topology(rank, 3), seed=2 if odd else 1),
        "another manifest": dataset_of(Topology(rank, 3), manifest=other if odd else DATA),
        "another order": dataset_of(Topology(rank, 3), shuffle=not odd, lanes=4, tail="drop" if odd else "pad"),
        "another epoch": seeked(dataset_of(Topology(rank, 3)), 4 if odd else 0),
        "another batch": dataset_of(Topology(rank, 3), batch_size=4 if odd else 2, accumulate=1 if odd else 2, lanes=4),
        "another rank": dataset_of(Topology(2 if odd else rank, 3)),
        "another world size": dataset_of(Topology(rank, 2 if odd else 3)),
        "a world of one each": dataset_of(Topology(0, 1, source="single process")),
        "heads": dataset_of(Topology(rank, 3), targets={"aux" if odd else "lm": len}),
        "another on_error": dataset_of(Topology(rank, 3), on_error="mask" if odd else "raise"),
    }
    found = {name: outcome(dataset) for name, dataset in datasets.items()}
    found["right again"] = outcome(datasets["right"])
    return found


EXPECTED = {
    "right": RIGHT,
    "a loader": RIGHT,
    "found in the group": RIGHT,
    "another seed": "PlanError: ranks differ in seed: 1 on ranks 0, 2, 2 on rank 1; start all ranks with the same",
    "another manifest": "PlanError: ranks differ in fingerprint: ",
    "another order": "PlanError: ranks differ in shuffle: True on ranks 0, 2, False on rank 1; tail: 'pad' on ranks",
    "another epoch": "PlanError: ranks differ in epoch: 0 on ranks 0, 2, 4 on rank 1; start",
    "another batch": "PlanError: ranks differ in batch_size: 2 on ranks 0, 2, 4 on rank 1; accumulate: 2 on ranks",
    "another rank": (
        "TopologyError: every data rank must have 1: data rank 1 is read by no rank, data rank 2 is read by ranks 1, 2"
    ),
    "another world size": "TopologyError: world sizes differ: 3 on ranks 0, 2, 2 on rank 1",
    "a world of one each": (
        "TopologyError: rank 0 reads as 0 of 1 (single process) in a process group of 3; start every process"
    ),
    "heads": "PlanError: ranks differ in heads: ['lm'] on ranks 0, 2, ['aux'] on rank 1",
    "another on_error": "PlanError: ranks differ in on_error: 'raise' on ranks 0, 2, 'mask' on rank 1",
    "right again": RIGHT,
}


def test_the_odd_one_out_is_named_and_every_rank_raises_the_same():
    found = run_ranks(odd_ranks, 3)
    assert found[0] == found[1] == found[2]
    assert found[0].keys() == EXPECTED.keys()
    for name, text in found[0].items():
        assert text.startswith(EXPECTED[name]), name


def peers(rank):
    """Four processes, two of which read the same data each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    topology = resolve_topology(mesh=mesh)
    right = outcome(dataset_of(topology))
    within = outcome(dataset_of(topology), group=mesh.get_group("dp"))
    explicit = outcome(dataset_of(Topology(rank // 2, 2)))
    differ = outcome(dataset_of(topology, seed=7 if rank == 3 else 1))
    uneven = outcome(dataset_of(Topology(int(rank == 0), 2)))
    return right, within, explicit, differ, uneven


def test_peers_share_a_data_rank():
    found = run_ranks(peers, 4)
    assert len(set(found)) == 1
    right, within, explicit, differ, uneven = found[0]
    assert (right, within, explicit) == (RIGHT,) * 3
    assert differ.startswith(
        "PlanError: ranks differ in seed: 1 on ranks 0, 1, 2, 7 on rank 3 (ranks 2, 3 are peers of data rank 1)"
    )
    assert uneven.startswith(
        "TopologyError: every data rank must have 2: data rank 0 is read by ranks 1, 2, 3, data rank 1 is read by"
    )


def absent(rank, missing):
    """The missing rank never asks; the others are told within the deadline."""
    if rank in missing:
        return None
    return outcome(dataset_of(Topology(rank, 3)), timeout_s=1.0)


@pytest.mark.parametrize(("missing", "num_came"), [((1,), 2), ((0,), 2), ((0, 2), 1)])
def test_a_rank_that_never_comes_is_named_within_the_deadline(missing, num_came):
    found = [told for told in run_ranks(absent, 3, missing, timeout_s=30.0) if told is not None]
    assert len(found) == num_came
    for text in found:
        named = ", ".join(map(str, missing))
        expected = f"TopologyError: {num_came} of 3 ranks came to verify_ranks within 1 s: expected all of them; "
        assert text.startswith(f"{expected}missing {named}")


def slurm(rank, local_ranks):
    """Topologies that Slurm's variables give, on one host."""
    variables = {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_LOCALID": local_ranks[rank],
        "SLURM_STEP_ID": 0,
    }
    topology = resolve_topology(environ={name: str(value) for name, value in variables.items()})
    assert dist.get_world_size() == 2
    return outcome(dataset_of(topology)), outcome(dataset_of(topology), may_share_device=True)


def test_slurm_variables_that_map_two_ranks_to_one_device_are_refused():
    assert run_ranks(slurm, 2, (0, 1)) == [(RIGHT, RIGHT)] * 2
    found = run_ranks(slurm, 2, (0, 0))
    assert found[0] == found[1]
    assert found[0][0].startswith("TopologyError: ranks 0, 1 share local rank 0 of ")
    assert found[0][1] == RIGHT


def test_a_single_process_is_right():
    verify_ranks(dataset_of(Topology(0, 1)))
    with pytest.raises(TopologyError, match="1 processes cannot be 2 data ranks"):
        verify_ranks(dataset_of(Topology(0, 2)))
