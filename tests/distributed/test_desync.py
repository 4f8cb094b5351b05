"""Ranks that are not in step: real gloo processes, of which one takes another branch; every rank learns of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardstream.audit.ledger import check_ledger, step_events
from shardstream.consumed import id_checksum
from shardstream.plan import Plan
from shardstream.quarantine import read_quarantine
from shardstream.rounds import read_rounds
from shardstream.torch import StreamingDataset, StreamingLoader, pad_tokens, resolve_topology
from shardstream.torch.ledger import Ledger
from shardstream.torch.windows import windows
from tests.support.corpora import parquet_manifest
from tests.support.processes import run_ranks
from tests.support.training import TokenModel, token_loss

pytestmark = pytest.mark.distributed

BOUND_S = 30.0


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("corpus"), [17, 18], 4)


def dataset_of(manifest, **options):
    options = {"batch_size": 2, "seed": 3, **options}
    return StreamingDataset(
        manifest, targets={"lm": "labels"}, shifted=True, collate=pad_tokens("tokens", shift=False), **options
    )


class Run:
    """One rank's loop; what a scenario does otherwise is its own method."""

    num_windows, accumulate, timeout_s, sync = 3, 1, 10.0, None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = TokenModel()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.num_steps = 0

    def options(self) -> dict[str, object]:
        return {}

    def go(self, manifest, folder) -> None:
        self.folder = folder
        loader = StreamingLoader(dataset_of(manifest, accumulate=self.accumulate, **self.options()))
        with Ledger(folder, loader, timeout_s=self.timeout_s) as ledger:
            driven = windows(loader, sync=self.sync, timeout_s=self.timeout_s)
            for number, window in enumerate(ledger.watch(driven)):
                if number == self.num_windows:
                    break
                if self.skips_window(number):
                    continue
                for micro in window.micro_batches(self.wrapped):
                    self.micro_batch(ledger, window, micro, number)
                self.collectives(ledger, number)
                window.step(self.optimizer)
                self.num_steps += 1
                self.optimizer.zero_grad()

    def skips_window(self, number) -> bool:
        return False

    def micro_batch(self, ledger, window, micro, number) -> None:
        window.loss(lm=token_loss(self.wrapped, micro)).backward()

    def collectives(self, ledger, number) -> None:
        pass


class Healthy(Run):
    def collectives(self, ledger, number):
        numbers = torch.ones(2)
        with ledger.collective("ones"):
            dist.all_reduce(numbers)
        with ledger.collective("more ones", check=False):
            dist.all_reduce(numbers)
        assert numbers.tolist() == [4.0, 4.0]


class MasksTooMuch(Run):
    """A rank whose samples cannot be decoded stops before the others could wait for it."""

    num_windows = None

    def options(self):
        transform = self.refuse if self.rank == 1 else None
        quarantine = Path(self.folder).parent / "quarantine"
        return {"transform": transform, "on_error": "mask", "max_masked_fraction": 0.0002, "quarantine": quarantine}

    @staticmethod
    def refuse(sample):
        return sample if sample["uid"] % 3 else None


class WholeEpoch(Run):
    num_windows = None


class SkipsAWindow(Run):
    def skips_window(self, number):
        return self.rank == 1 and number == 1


class SkipsABackward(Run):
    """``if loss.isnan(): continue``, seen by one rank."""

    def micro_batch(self, ledger, window, micro, number):
        loss = window.loss(lm=token_loss(self.wrapped, micro))
        if not (self.rank == 1 and number == 1):
            loss.backward()


class SkipsAMicroBatch(Run):
    accumulate = 4

    def micro_batch(self, ledger, window, micro, number):
        if not (self.rank == 1 and number == 1 and micro.micro_index == 1):
            super().micro_batch(ledger, window, micro, number)


class LeavesOutASynchronisation(Run):
    """Gradients are summed after each of four micro-batches, but for one on one rank."""

    accumulate, sync = 4, "each"

    def micro_batch(self, ledger, window, micro, number):
        if self.rank == 1 and number == 1 and micro.micro_index == 2:
            with self.wrapped.no_sync():
                super().micro_batch(ledger, window, micro, number)
        else:
            super().micro_batch(ledger, window, micro, number)


class SwapsTwoCollectives(Run):
    def collectives(self, ledger, number):
        labels = ["norm of gradients", "mean of losses"]
        if self.rank == 1 and number == 1:
            labels.reverse()
        for label in labels:
            with ledger.collective(label):
                dist.all_reduce(torch.ones(3))


class SwapsTwoThatAreComparedLater(SwapsTwoCollectives):
    def collectives(self, ledger, number):
        labels = ["a", "b"] if not (self.rank == 1 and number == 1) else ["b", "a"]
        for label in labels:
            with ledger.collective(label, check=False):
                dist.all_reduce(torch.ones(3))


class Hangs(Run):
    """Until the others have given it up."""

    timeout_s = 2.0

    def micro_batch(self, ledger, window, micro, number):
        deadline = time.monotonic() + BOUND_S - 5
        while self.rank == 1 and number == 1 and time.monotonic() < deadline:
            others = [log for log in read_rounds(self.folder) if log.rank != 1]
            if all(log.desyncs for log in others):
                break
            time.sleep(0.1)
        super().micro_batch(ledger, window, micro, number)


class Fails(Run):
    def micro_batch(self, ledger, window, micro, number):
        if self.rank == 1 and number == 1:
            raise ValueError("a bad sample in s3://key:secret@bucket/a")
        super().micro_batch(ledger, window, micro, number)


class LeavesEarly(Run):
    def __init__(self, rank):
        super().__init__(rank)
        self.num_windows = 3 - (rank == 1)


class HasBuffers(SkipsAWindow):
    """DDP sends buffers around in the forward, where a rank that does not come leaves the others."""

    def __init__(self, rank):
        super().__init__(rank)
        self.model = nn.Sequential(TokenModel(), nn.BatchNorm1d(40, dtype=torch.float64))
        self.model[1].eval()
        self.wrapped = DistributedDataParallel(self.model)

    def micro_batch(self, ledger, window, micro, number):
        logits = self.wrapped(micro["input_ids"].flatten())
        labels = micro["labels"].flatten()
        sums = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        window.loss(lm=sums).backward()


class LeavesOutAHead(Run):
    """A rank's loss has a graph, but not through all parameters that DDP waits for."""

    def micro_batch(self, ledger, window, micro, number):
        if self.rank == 1 and number == 1:
            self.wrapped(micro["input_ids"])
            window.loss(lm=self.model.layers[1].bias.sum()).backward()
        else:
            super().micro_batch(ledger, window, micro, number)


class ForgetsAHead(Run):
    """It says so itself; the other rank learns of it before it sums gradients."""

    def micro_batch(self, ledger, window, micro, number):
        sums = {} if self.rank == 1 and number == 1 else {"lm": token_loss(self.wrapped, micro)}
        window.loss(**sums).backward()


class Sharded(SkipsAWindow):
    """FSDP gathers parameters in the forward."""

    def __init__(self, rank):
        super().__init__(rank)
        self.model = self.wrapped = TokenModel()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)


class ShardedSkipsABackward(Sharded):
    accumulate = 2

    def skips_window(self, number):
        return False

    def micro_batch(self, ledger, window, micro, number):
        loss = window.loss(lm=token_loss(self.wrapped, micro))
        if not (self.rank == 1 and number == 1 and micro.micro_index == 0):
            loss.backward()


def outcome(rank, scenario, manifest, folder):
    run, begin_s = scenario(rank), time.monotonic()
    try:
        run.go(manifest, folder)
        error = None
    except Exception as caught:  # noqa: BLE001 - compared below
        error = f"{type(caught).__name__}: {caught}"
    parameters = [getattr(each, "_local_tensor", each).detach().clone() for each in run.model.parameters()]
    return error, run.num_steps, time.monotonic() - begin_s, parameters


def outcomes(scenario, manifest, folder, world_size=2):
    return run_ranks(outcome, world_size, scenario, manifest, str(folder), timeout_s=BOUND_S)


SCENARIOS = {
    SkipsAWindow: r"rank 0: forward of micro-batch 0; rank 1: the window was left after 0 of 1",
    LeavesOutAHead: r"rank 0: backward .* to 3 parameters of lm, .*; rank 1: .* to 1 parameters of lm",
    SkipsABackward: r"rank 0: backward of micro-batch 0.*rank 1: micro-batch 0 was left without backward",
    LeavesOutASynchronisation: r"rank 0: .*micro-batch 2.*gradients are summed; rank 1: .*micro-batch 2.* kept",
    SwapsTwoCollectives: r"rank 0: collective 'norm of gradients'; rank 1: collective 'mean of losses'",
    SwapsTwoThatAreComparedLater: r"rank 0: collective 'a'; rank 1: collective 'b'",
    Sharded: r"rank 0: forward of micro-batch 0; rank 1: the window was left",
    ShardedSkipsABackward: r"rank 0: backward of micro-batch 0, gradients are summed; rank 1: micro-batch 0 was left",
    HasBuffers: r"rank 0: forward of micro-batch 0; rank 1: the window was left",
}


def test_ranks_in_step_notice_nothing(manifest, tmp_path):
    found = outcomes(Healthy, manifest, tmp_path)
    assert [(error, num_steps) for error, num_steps, *_ in found] == [(None, 3)] * 2
    first, second = read_rounds(tmp_path)
    assert first.rounds == second.rounds
    assert first.has_ended
    assert second.has_ended
    assert first.desyncs == second.desyncs == ()


def test_an_epoch_is_proved_and_audited(manifest, tmp_path):
    """After an attempt in which ranks parted, and which took no wrong step."""
    outcomes(SkipsAWindow, manifest, tmp_path)
    assert not check_ledger(tmp_path, manifest).holds, "a run that ended like this is not a good one"
    assert [error for error, *_ in outcomes(WholeEpoch, manifest, tmp_path)] == [None, None]
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    assert "attempt 0: the run was ended there" in "".join(report.notes)
    assert [(attempt.num_windows, attempt.num_discarded) for attempt in report.consumed.attempts] == [(0, 1), (9, 0)]
    for rank in range(2):
        lines = (tmp_path / f"rank-0000{rank}.attempt-0001.jsonl").read_text().splitlines()
        (proved,) = (json.loads(line) for line in lines if '"epoch", "epoch"' in line)
        assert (proved["num_samples"], proved["checksum"]) == (35, f"{id_checksum(range(35)):016x}")
    step = step_events(tmp_path, manifest, 4)
    assert {event.rank for event in step.events if event.event == "parameters moved"} == {0, 1}
    held = [each for event in step.events for each in event.ids or ()]
    assert sorted(held) == sorted(plan_of(manifest).sample_ids(0, np.arange(16, 20)).tolist())


def test_the_audit_finds_rounds_that_differ(manifest, tmp_path):
    outcomes(Healthy, manifest, tmp_path)
    path = tmp_path / "rank-00001.attempt-0000.rounds.jsonl"
    path.write_text(path.read_text().replace("collective 'ones'", "collective 'twos'", 1))
    (violation,) = check_ledger(tmp_path, manifest).violations
    assert re.search("is not the same on all ranks: .*rank 0: collective 'ones'; rank 1: collective 'twos'", violation)


def plan_of(manifest):
    return Plan.make(manifest, batch_size=2, world_size=2, seed=3)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_rank_learns_before_the_step(scenario, manifest, tmp_path):
    found = outcomes(scenario, manifest, tmp_path)
    for error, num_steps, _, parameters in found:
        assert error is not None
        assert re.search(f"^DesyncError: ranks are not in step .*{SCENARIOS[scenario]}", error), error
        assert num_steps == 1, "the window in which they part is not stepped"
        assert issubclass(scenario, Sharded) or all(map(torch.equal, parameters, found[0][3]))
    logs = read_rounds(tmp_path)
    assert [log.rank for log in logs] == [0, 1], "the logs of all ranks are kept"
    assert all(re.search(SCENARIOS[scenario], log.desyncs[0]) for log in logs)
    assert not any(log.has_ended for log in logs)


def test_a_micro_batch_that_one_rank_skips(manifest, tmp_path):
    """It says so itself at once, and the others learn of it where they are next."""
    (first, *first_rest), (second, *second_rest) = outcomes(SkipsAMicroBatch, manifest, tmp_path)
    assert "rank 1 went past a micro-batch without window.loss" in second
    assert re.search("rank 1: micro-batch 1 was left without backward", first)
    assert first_rest[0] == second_rest[0] == 1


def test_an_error_of_one_rank_reaches_the_others(manifest, tmp_path):
    (first, *_), (second, *_) = outcomes(Fails, manifest, tmp_path)
    assert not any("secret" in path.read_text() for path in tmp_path.iterdir())
    assert second.startswith("ValueError")
    assert re.search("rank 1: left the loop with ValueError: a bad sample in s3://bucket/a", first)


def test_a_rank_that_masks_too_much_stops_all(manifest, tmp_path):
    (first, *_), (second, *_) = outcomes(MasksTooMuch, manifest, tmp_path / "ledger")
    masked = read_quarantine(tmp_path / "quarantine")
    assert {sample.rank for sample in masked} == {1}
    assert second.startswith("DecodeError: too many samples of rank 1 cannot be decoded")
    assert f"sample {masked[-1].sample_id} (" in second
    assert first.startswith("DesyncError")
    assert "rank 1: left the loop with DecodeError: too many samples of rank 1" in first


def test_a_head_that_one_rank_forgets(manifest, tmp_path):
    (first, *first_rest), (second, *second_rest) = outcomes(ForgetsAHead, manifest, tmp_path)
    assert second.startswith("DesyncError: head 'lm' has no loss on rank 1")
    assert re.search("rank 1: left the loop with DesyncError: head 'lm' has no loss on rank 1", first), first
    assert first_rest[0] == second_rest[0] == 1


def test_a_rank_that_hangs(manifest, tmp_path):
    (first, num_steps, waited_s, _), (second, second_steps, *_) = outcomes(Hangs, manifest, tmp_path)
    assert re.search("DesyncError: .*about to 'forward of micro-batch 0.*missing 1.*after 2", first), first
    assert "DesyncError" in second
    assert (num_steps, second_steps) == (1, 1)
    assert waited_s < BOUND_S


def test_a_rank_that_leaves_early(manifest, tmp_path):
    for error, *_ in outcomes(LeavesEarly, manifest, tmp_path):
        assert re.search("DesyncError: .*rank 0: backward of micro-batch 0.*rank 1: the ledger is closed", error), error


def test_of_three_ranks_the_odd_one_is_named(manifest, tmp_path):
    for error, *_ in outcomes(SkipsAWindow, manifest, tmp_path, world_size=3):
        assert re.search("ranks 0, 2: forward of micro-batch 0; rank 1: the window was left", error), error


def test_of_three_ranks_the_one_that_hangs_is_named(manifest, tmp_path):
    found = outcomes(Hangs, manifest, tmp_path, world_size=3)
    for rank in (0, 2):
        assert re.search("DesyncError: .*missing 1", found[rank][0]), found[rank][0]


def with_peers(rank, manifest, folder):
    """Four ranks, of which pairs share data: each pair is one data rank, and its first rank logs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = StreamingLoader(dataset_of(manifest, topology=resolve_topology(mesh=mesh)))
    model = TokenModel()
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters())
    with Ledger(folder, loader, mesh=mesh) as ledger:
        for window in ledger.watch(windows(loader, mesh=mesh)):
            for micro in window.micro_batches(wrapped):
                window.loss(lm=token_loss(wrapped, micro)).backward()
            window.step(optimizer)
    return sorted(path.name for path in Path(folder).iterdir())


def test_of_peers_the_first_one_logs(manifest, tmp_path):
    run_ranks(with_peers, 4, manifest, str(tmp_path), timeout_s=BOUND_S)
    assert len(list(tmp_path.iterdir())) == 4
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    assert report.consumed.epochs[0].is_finished
