"""Windows in one process: what the loader says, which windows there are, and the arithmetic of losses."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardstream.errors import CursorError, PlanError, TopologyError
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, pad_tokens
from shardstream.torch.counts import RankSums, WindowCounts
from shardstream.torch.groups import default_backend
from shardstream.torch.topology import data_parallel_ranks
from shardstream.torch.windows import windows
from tests.support.corpora import manifest_of_files, parquet_manifest
from tests.support.training import TwoHeads, fake_batch, fake_window, gradients_of, head_sums, relative_error


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("corpus"), [9, 0, 13], 4)


def dataset_of(manifest, **options):
    options = {"batch_size": 2, "accumulate": 2, "topology": Topology(0, 1), **options}
    return StreamingDataset(
        manifest, targets={"lm": "labels"}, shifted=True, collate=pad_tokens("tokens", shift=False), **options
    )


def ids_of(window):
    return [batch.sample_ids[~batch.is_padding].tolist() for batch in window.batches]


# ---------------------------------------------------------------------------------------------------- the loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_windows_are_the_loaders_batches(manifest, num_workers):
    """22 samples by 4: five whole windows, and one of one micro-batch."""
    expected = [batch.sample_ids.tolist() for batch in StreamingLoader(dataset_of(manifest))]
    for loader in (
        StreamingLoader(dataset_of(manifest), num_workers=num_workers),
        DataLoader(dataset_of(manifest), batch_size=None, num_workers=num_workers),
    ):
        found = list(windows(loader))
        assert [ids for window in found for ids in ids_of(window)] == expected
        assert [len(window.batches) for window in found] == [2, 2, 2, 2, 2, 1]
        assert [window.position for window in found] == [0, 4, 8, 12, 16, 20]
        assert sum(window.num_samples for window in found) == 22
        assert sum(window.targets["lm"] for window in found) == sum(uid % 5 for uid in range(22))


def test_the_loaders_state_is_what_the_loop_got(manifest):
    loader = StreamingLoader(dataset_of(manifest))
    start = loader.state_dict()
    for window in windows(loader):
        assert loader.state_dict() == start  # held, not trained on
        for _ in window.micro_batches():
            pass
        start = window.cursor.state_dict()
        assert loader.state_dict() == start
    assert (start["epoch"], start["position"]) == (1, 0)
    assert loader.state_dict() == start


def test_a_window_that_is_only_looked_at_counts_when_the_next_is_asked_for(manifest):
    loader = StreamingLoader(dataset_of(manifest))
    driven = windows(loader)
    first = next(driven)
    next(driven)
    assert loader.state_dict() == first.cursor.state_dict()


@pytest.mark.parametrize("num_windows", [0, 1, 5, 6])
def test_a_run_resumes_behind_the_window_it_saved(manifest, num_windows):
    whole = [ids_of(window) for window in windows(StreamingLoader(dataset_of(manifest)))]
    loader, driven = StreamingLoader(dataset_of(manifest)), None
    driven = windows(loader)
    for _ in range(num_windows):
        for _ in next(driven).micro_batches():
            pass
    resumed = StreamingLoader(dataset_of(manifest))
    resumed.load_state_dict(loader.state_dict())
    rest = [ids_of(window) for window in windows(resumed)]
    assert rest == whole[num_windows:] or num_windows == 6  # then it is the next epoch
    assert len(rest) == (6 - num_windows or 6)


def two_windows(loader):
    """Trains on two windows and breaks; returns their ids."""
    seen = []
    for window in windows(loader):
        seen.append(ids_of(window))
        for _ in window.micro_batches():
            pass
        if len(seen) == 2:
            break
    return seen


def test_a_break_restarts_once(manifest):
    loader = StreamingLoader(dataset_of(manifest))
    assert two_windows(loader) == two_windows(loader)
    with pytest.raises(CursorError, match="for the second time"):
        two_windows(loader)


def test_a_break_in_the_last_window_but_one_is_one(manifest):
    """Everything was read ahead by then, but the loop did not see it."""
    loader = StreamingLoader(dataset_of(manifest))
    for window in windows(loader):
        for _ in window.micro_batches():
            pass
        if window.position == 16:
            break
    assert next(windows(loader)).cursor.epoch == 0


def test_a_window_that_is_kept_keeps_no_workers(manifest):
    loader = StreamingLoader(dataset_of(manifest), num_workers=1)
    kept = next(windows(loader))
    assert loader._progress.is_alive() is None
    assert kept.cursor.position == 4


def test_a_break_continues_behind_the_last_window(manifest):
    whole = [ids_of(window) for window in windows(StreamingLoader(dataset_of(manifest)))]
    loader = StreamingLoader(dataset_of(manifest), on_break="continue")
    assert two_windows(loader) + two_windows(loader) == whole[:4]


@pytest.mark.parametrize("kind", [StreamingLoader, DataLoader])
def test_a_pass_to_the_end_goes_on_to_the_next_epoch(manifest, kind):
    loader = kind(dataset_of(manifest)) if kind is StreamingLoader else kind(dataset_of(manifest), batch_size=None)
    epochs = []
    for _ in range(3):
        for window in windows(loader):
            for micro in window.micro_batches():
                micro["labels"]  # a plain DataLoader knows by this what was consumed
        epochs.append(window.cursor.epoch)
    assert epochs == [1, 2, 3]


def test_a_plain_data_loader_restarts_after_a_break(manifest):
    loader = DataLoader(dataset_of(manifest), batch_size=None)
    for window in windows(loader):
        for micro in window.micro_batches():
            micro["labels"]
        if window.position == 16:
            break
    assert next(windows(loader)).cursor.epoch == 0


def test_endless_windows_cross_epochs(manifest):
    """22 samples by 4: the sixth window holds the last two and the first two of the next epoch."""
    driven = windows(StreamingLoader(dataset_of(manifest, tail="continue")))
    found = [next(driven) for _ in range(11)]
    assert [window.num_samples for window in found] == [4] * 11
    assert (found[5].cursor.epoch, found[5].cursor.position) == (1, 2)
    assert sum(window.targets["lm"] for window in found) == 2 * sum(uid % 5 for uid in range(22))


# ---------------------------------------------------------------------------------------------------- losses


def test_case_c50(tmp_path):
    """Tokens 4, 4, 2, 6, 3 and loss sums 8, 4, 1, 3, 6 in windows of 2: each is divided by what is really in it."""
    num_tokens, loss_sums = [4, 4, 2, 6, 3], [8.0, 4.0, 1.0, 3.0, 6.0]
    labels = [[1] * count + [-100] * (6 - count) for count in num_tokens]
    pq.write_table(pa.table({"labels": labels, "loss_sum": loss_sums}), tmp_path / "part-0.parquet")
    dataset = StreamingDataset(
        manifest_of_files([tmp_path / "part-0.parquet"]),
        batch_size=1,
        accumulate=2,
        shuffle=False,
        targets={"lm": "labels"},
        shifted=True,
        topology=Topology(0, 1),
    )
    means, flags = [], []
    for window in windows(StreamingLoader(dataset)):
        total = torch.zeros((), dtype=torch.float64)
        for micro in window.micro_batches():
            flags.append(micro.is_last_in_window)
            total += window.loss(lm=micro["loss_sum"].sum().requires_grad_()).detach()
        means.append(float(total))
    assert means == pytest.approx([1.5, 0.5, 2.0], rel=1e-12)
    assert [index for index, flag in enumerate(flags) if flag] == [1, 3, 4]


def test_accumulating_changes_nothing():
    counts = {"aux": [[1, 2, 0, 3]], "lm": [[5, 0, 1, 0]]}
    model, whole = TwoHeads(counts), TwoHeads(counts)
    [window] = windows(fake_window(counts, 0))
    for micro in window.micro_batches(model):
        window.loss(**head_sums(model, micro)).backward()
    columns = {name: torch.cat([batch[name] for batch in window.batches]) for name in ("x", "aux", "lm")}
    sums = head_sums(whole, columns)
    (sums["lm"] / 6 + sums["aux"] / 6).backward()
    assert relative_error(gradients_of(model), gradients_of(whole)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scaled_in_float32(dtype):
    """1 / 50,000 is below what float16 holds with any precision."""
    [window] = windows([fake_batch({"lm": 1}, 0, micro_index=0, is_last_in_window=True)])
    window.scale["lm"] = 1 / 50_000
    loss = window.loss(lm=torch.tensor(3.0, dtype=dtype, requires_grad=True))
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(3 / 50_000, rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_no_targets_give_an_exact_zero_with_its_graph(value):
    """nan is a user's mean over nothing."""
    [window] = windows([fake_batch({"lm": 0}, 0, micro_index=0, is_last_in_window=True)])
    weight = torch.tensor(value, requires_grad=True)
    for _ in window.micro_batches():
        loss = window.loss(lm=weight * 1.0)
        loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(weight.grad) == 0.0
    assert window.scale == {"lm": 0.0}
    assert not window.has_targets


def test_without_heads_the_samples_decide(manifest):
    [window] = windows([fake_batch({}, 0, micro_index=0, is_last_in_window=True)])
    assert window.has_targets
    with pytest.raises(PlanError, match="counts no targets"):
        window.loss()
    assert float(window.mean_loss(torch.tensor(3.0))) == 3.0


def test_a_window_without_targets_is_not_stepped():
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    [window] = windows([fake_batch({"lm": 0}, 0, micro_index=0, is_last_in_window=True)])
    for _ in window.micro_batches(model):
        window.loss(lm=model(torch.ones(1, 1)).sum()).backward()
    assert window.step(optimizer) is False
    assert torch.equal(model.weight, before)


def test_a_part_of_a_window_is_not_stepped():
    """A loop that breaks on its way has gradients that nobody summed over the ranks."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    [window] = windows(fake_window({"lm": [[1, 1]]}, 0))
    for _ in window.micro_batches(model):
        window.loss(lm=model(torch.ones(1, 1)).sum()).backward()
        with pytest.raises(PlanError, match="a part of its micro-batches: expected all 2 handed out, found 1"):
            window.step(optimizer)
        break
    with pytest.raises(PlanError, match="a part of its micro-batches"):
        window.step(optimizer)
    for _ in window.micro_batches(model):
        window.loss(lm=model(torch.ones(1, 1)).sum())
    assert window.step(optimizer)


@pytest.mark.parametrize(("loss", "found"), [(torch.ones(3), r"torch.Size\(\[3\]\)"), (3.0, "float")])
def test_a_loss_that_is_no_sum(loss, found):
    [window] = windows(fake_window({"lm": [[1]]}, 0))
    with pytest.raises(PlanError, match=f"head 'lm' must be a sum: expected a scalar tensor, found {found}"):
        window.loss(lm=loss)


# ---------------------------------------------------------------------------------------------------- counts, refusals


def test_one_rank_communicates_nothing(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    sums = RankSums()
    assert sums.group is None
    assert sums.issue([2**40, 3], "a window").wait() == [2**40, 3]
    assert [window.targets for window in windows(fake_window({"lm": [[2, 3]]}, 0))] == [{"lm": 5}]


def test_counts_leave_padding_out(manifest):
    *_, last = windows(StreamingLoader(dataset_of(manifest, batch_size=3)))
    assert (last.num_samples, last.num_micro_batches) == (4, 2)
    counts = WindowCounts.of(last.batches, ["lm"])
    assert counts.num_samples == 4
    assert WindowCounts.from_vector(counts.vector(), ["lm"]) == counts


def test_large_jobs_count_on_their_own_backend(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert default_backend(256) == "gloo"
    assert default_backend(257) == "nccl"


def test_refusals(manifest):
    loader = StreamingLoader(dataset_of(manifest))
    with pytest.raises(PlanError, match=r"there is no head 'lmm': expected lm.*did you mean 'lm'"):
        windows(loader, heads=["lmm"])
    with pytest.raises(PlanError, match=r"there is no head 'aux': expected lm"):
        next(windows(fake_window({"lm": [[1]]}, 0), heads=["lm", "aux"]))
    with pytest.raises(PlanError, match=r"unknown gradients: expected 'mean' or 'sum', found 'average'"):
        windows(loader, gradients="average")
    with pytest.raises(PlanError, match=r"named twice: found \['lm', 'lm'\]"):
        windows(loader, heads=["lm", "lm"])
    assert next(windows(loader, heads="lm")).targets.keys() == {"lm"}
    with pytest.raises(PlanError, match=r"yields no Batch: found dict; give .*batch_size=None"):
        next(windows(DataLoader([{"x": 1}], batch_size=None)))
    with pytest.raises(PlanError, match="unknown sync"):
        windows(loader, sync="never")
    with pytest.raises(TopologyError, match=r"rank 1 of 2 \(explicit\), found rank 0 of 1"):
        windows(StreamingLoader(dataset_of(manifest, topology=Topology(1, 2))))
    with pytest.raises(TopologyError, match="both group= and mesh="):
        data_parallel_ranks(group=object(), mesh=object())
