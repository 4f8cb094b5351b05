"""A ledger in one process: what is logged, what is proved at an epoch's end, and what the audit makes of it."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from shardstream.audit.ledger import check_ledger, step_events
from shardstream.cli import main
from shardstream.consumed import id_checksum, read_logs
from shardstream.errors import DesyncError, PlanError, ReadError
from shardstream.mixing import Mixture
from shardstream.quarantine import read_quarantine
from shardstream.rounds import read_rounds
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, pad_tokens
from shardstream.torch.ledger import Ledger
from shardstream.torch.windows import windows
from tests.support.corpora import parquet_manifest
from tests.support.training import TokenModel, token_loss

NUM_SAMPLES = 22


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("corpus"), [9, 0, 13], 4)


def loader_of(manifest, **options):
    options = {"batch_size": 2, "accumulate": 2, "topology": Topology(0, 1), "seed": 3, **options}
    dataset = StreamingDataset(
        manifest, targets={"lm": "labels"}, shifted=True, collate=pad_tokens("tokens", shift=False), **options
    )
    return StreamingLoader(dataset)


class Trainer:
    """Trains one model; each call goes through one pass, or so many windows of it."""

    def __init__(self):
        self.model = TokenModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self, ledger, driven, num_windows=None):
        for number, window in enumerate(ledger.watch(driven)):
            if number == num_windows:
                break
            for micro in window.micro_batches(self.model):
                window.loss(lm=token_loss(self.model, micro)).backward()
            window.step(self.optimizer)
            self.optimizer.zero_grad()


def lines_of(folder, name="rank-00000.attempt-0000.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- what is logged


def refuse_some(sample):
    return None if sample["uid"] in (4, 9, 21) else sample


@pytest.mark.parametrize("tail", ["pad", "continue"])
def test_masked_samples_are_named_and_not_taken_for_trained(manifest, tmp_path, tail):
    options = {"transform": refuse_some, "on_error": "mask", "max_masked_fraction": 1.0, "quarantine": tmp_path / "q"}
    loader = loader_of(manifest, tail=tail, **options)
    with Ledger(tmp_path, loader) as ledger:
        Trainer()(ledger, windows(loader), num_windows=12 if tail == "continue" else None)
    entries = [line for line in lines_of(tmp_path) if line["kind"] == "window"]
    masked = [number for line in entries for number in line.get("masked_ids", ())]
    reported = read_quarantine(tmp_path / "q")
    # The report is written when a batch is handed out, here one window ahead of the ledger.
    in_order = [sample.sample_id for sample in reported]
    assert sorted(masked) == sorted(in_order[: len(masked)])
    assert len(in_order) - len(masked) <= 4
    assert set(masked) == {4, 9, 21}
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    epoch = report.consumed.epochs[0]
    assert (epoch.num_samples, epoch.num_masked, epoch.num_missing) == (NUM_SAMPLES - 3, 3, 0)
    assert [name.partition(" ")[0] for name in epoch.masked] == ["4", "9", "21"]
    assert any(
        note.startswith("epoch 0: 3 masked, that is dealt and not trained on: 4 (") for note in report.consumed.notes
    )


def test_numbers(manifest, tmp_path):
    loader = loader_of(manifest)
    with Ledger(tmp_path, loader, ids=True) as ledger:
        Trainer()(ledger, windows(loader))
    start, first, sums, *rest = lines_of(tmp_path)
    assert (start["kind"], start["rank"], start["world_size"]) == ("start", 0, 1)
    assert (first["kind"], first["epoch"], first["position"], first["num_samples"]) == ("window", 0, 0, 4)
    assert first["checksum"] == f"{id_checksum(first['ids']):016x}"
    num_targets = sum(uid % 5 for uid in first["ids"])
    assert first["targets"] == {"lm": [num_targets, num_targets]}
    assert sums["kind"] == "sums"
    assert sums["sums"]["lm"] > 0
    assert rest[-1] == {"kind": "end"}
    epoch = next(line for line in rest if line["kind"] == "epoch")
    assert (epoch["num_samples"], epoch["position"]) == (NUM_SAMPLES, 0)
    assert epoch["checksum"] == f"{id_checksum(range(NUM_SAMPLES)):016x}"
    ids = [sample for line in (first, *rest) for sample in line.get("ids", [])]
    assert sorted(ids) == list(range(NUM_SAMPLES))


def test_sums_are_the_losses(manifest, tmp_path):
    loader, trainer, expected = loader_of(manifest), Trainer(), []
    with Ledger(tmp_path, loader) as ledger:
        for window in ledger.watch(windows(loader)):
            total = 0.0
            for micro in window.micro_batches(trainer.model):
                loss_sum = token_loss(trainer.model, micro)
                window.loss(lm=(loss_sum, 0.5)).backward()
                total += loss_sum.item()
            expected.append(total)
            window.step(trainer.optimizer)
    (log,), _ = read_logs(tmp_path)
    assert [window.sums["lm"] for window in log.windows] == pytest.approx(expected, rel=1e-12)
    assert all(window.ids is None for window in log.windows)


def test_communication(manifest, tmp_path):
    loader, trainer = loader_of(manifest), Trainer()
    with Ledger(tmp_path, loader) as ledger:
        for window in ledger.watch(windows(loader)):
            for micro in window.micro_batches(trainer.model):
                window.loss(lm=token_loss(trainer.model, micro)).backward()
            with ledger.collective("norm"):
                pass
            window.step(trainer.optimizer)
            if window.position == 8:
                break
    (log,) = read_rounds(tmp_path)
    steady = [events for events in log.rounds.values() if "window at epoch 0, position 8, 2 micro-batch(es)" in events]
    assert steady == [
        (
            "parameters moved",
            "window at epoch 0, position 8, 2 micro-batch(es)",
            "backward of micro-batch 0, gradients are kept",
            "backward of micro-batch 1, gradients are summed",
        )
    ]
    assert list(log.rounds.values())[-2:] == [("collective 'norm'",), ("the ledger is closed",)]
    assert [text for _, text in log.times[0, 8]] == [
        "takes micro-batch 0",
        "takes micro-batch 1",
        "gradients are summed: begins",
        "gradients are summed: ends",
        "collective 'norm' begins",
        "collective 'norm' ends",
        "parameters moved",
    ]


def test_the_window_is_logged_before_the_step(manifest, tmp_path):
    """A checkpoint that is saved behind a window never runs ahead of the log."""
    loader, trainer = loader_of(manifest), Trainer()
    with Ledger(tmp_path, loader) as ledger:
        for number, window in enumerate(ledger.watch(windows(loader)), 1):
            for micro in window.micro_batches(trainer.model):
                window.loss(lm=token_loss(trainer.model, micro)).backward()
            assert len(read_logs(tmp_path)[0][0].windows) == number


def test_without_loss_and_optimizer(manifest, tmp_path):
    """A loop of one's own is watched, too, as far as it goes through the micro-batches."""
    loader = loader_of(manifest)
    with Ledger(tmp_path, loader) as ledger:
        for window in ledger.watch(windows(loader)):
            for _ in window.micro_batches():
                pass
    assert check_ledger(tmp_path, manifest).holds
    (log,) = read_rounds(tmp_path)
    assert "micro-batch 1 was left without backward" in log.rounds[0]


# ---------------------------------------------------------------------------------------------------- proofs


@pytest.mark.parametrize("tail", ["pad", "drop", "repeat", "truncate"])
@pytest.mark.filterwarnings("ignore:shuffle='full' opens each block")
@pytest.mark.parametrize("shuffle", [True, "full"])
def test_two_epochs_are_proved(manifest, tmp_path, tail, shuffle):
    loader, trainer = loader_of(manifest, tail=tail, shuffle=shuffle), Trainer()
    with Ledger(tmp_path, loader) as ledger:
        for _ in range(2):
            trainer(ledger, windows(loader))
    proved = [line["num_samples"] for line in lines_of(tmp_path) if line["kind"] == "epoch"]
    assert proved == [20 if tail == "drop" else NUM_SAMPLES] * 2
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    assert [epoch.is_finished for epoch in report.consumed.epochs] == [True, True]
    assert report.num_denominators == len(read_logs(tmp_path)[0][0].windows)


def test_an_endless_pass_is_proved_epoch_by_epoch(manifest, tmp_path):
    loader = loader_of(manifest, tail="continue")
    with Ledger(tmp_path, loader) as ledger:
        Trainer()(ledger, windows(loader), num_windows=20)
    proved = [line for line in lines_of(tmp_path) if line["kind"] == "epoch"]
    assert [(line["epoch"], line["position"], line["num_samples"]) for line in proved] == [
        (0, 0, 24),
        (1, 2, 20),
        (2, 0, 24),
    ]
    assert check_ledger(tmp_path, manifest).holds


@pytest.mark.parametrize("num_windows", [0, 1, 3])
def test_a_run_that_resumes_proves_the_rest(manifest, tmp_path, num_windows):
    loader, trainer = loader_of(manifest), Trainer()
    with Ledger(tmp_path, loader) as ledger:
        trainer(ledger, windows(loader), num_windows)
    state = loader.state_dict()
    resumed = loader_of(manifest, batch_size=1, accumulate=4)
    resumed.load_state_dict(state)
    with Ledger(tmp_path, resumed) as ledger:
        assert ledger.attempt == 1
        trainer(ledger, windows(resumed))
    (epoch,) = (line for line in lines_of(tmp_path, "rank-00000.attempt-0001.jsonl") if line["kind"] == "epoch")
    assert (epoch["position"], epoch["num_samples"]) == (4 * num_windows, NUM_SAMPLES - 4 * num_windows)
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    assert len(report.consumed.attempts) == 2


def without_the_second(driven):
    for number, window in enumerate(driven):
        if number != 1:
            yield window


def with_one_sample_twice(driven):
    for window in driven:
        batch = window.batches[0]
        if window.position == 4:
            batch._sample_ids = batch._sample_ids.clone()
            batch._sample_ids[0] = batch._sample_ids[1]
        yield window


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_the_second, "epoch 0 was not consumed exactly once from position 0 on: 4 samples too few"),
        (with_one_sample_twice, "as many samples as there should be, but wrong ones"),
    ],
)
def test_what_is_not_exactly_once_is_found(manifest, tmp_path, fault, message):
    loader = loader_of(manifest)
    with pytest.raises(DesyncError, match=message), Ledger(tmp_path, loader, ids=True) as ledger:
        Trainer()(ledger, fault(windows(loader)))
    assert not check_ledger(tmp_path, manifest).holds


def test_a_window_that_all_ranks_leave_is_no_fault_but_told(manifest, tmp_path):
    """Its samples were dealt and not trained on."""
    loader, trainer = loader_of(manifest), Trainer()
    with Ledger(tmp_path, loader) as ledger:
        for window in ledger.watch(windows(loader)):
            if window.position != 4:
                for micro in window.micro_batches(trainer.model):
                    window.loss(lm=token_loss(trainer.model, micro)).backward()
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    assert report.consumed.epochs[0].num_masked == 4


def test_a_part_of_a_window_is_not_stepped(manifest, tmp_path):
    """All ranks may do that alike: nothing differs, and each would step on gradients of its own."""
    model, loader = TokenModel(), loader_of(manifest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ledger(tmp_path, loader) as ledger:
        driven = ledger.watch(windows(loader))
        window = next(driven)
        for micro in window.micro_batches(model):
            window.loss(lm=token_loss(model, micro)).backward()
            break
        with pytest.raises(PlanError, match="a part of its micro-batches"):
            optimizer.step()


def test_a_loop_that_was_left_but_is_still_referenced(manifest, tmp_path):
    """What it would have written at its end was written when the ledger was closed."""
    loader, trainer = loader_of(manifest), Trainer()
    with Ledger(tmp_path, loader) as ledger:
        driven = ledger.watch(windows(loader))
        window = next(driven)
        for micro in window.micro_batches(trainer.model):
            window.loss(lm=token_loss(trainer.model, micro)).backward()
    trainer.optimizer.step()  # nobody's business any more
    driven.close()
    (log,) = read_rounds(tmp_path)
    assert log.has_ended
    assert [text for _, text in log.times[0, 0]][-1] == "gradients are summed: ends"


# ---------------------------------------------------------------------------------------------------- mixtures


@pytest.fixture(scope="module")
def mixture(manifest, tmp_path_factory):
    other = parquet_manifest(tmp_path_factory.mktemp("other"), [7], 4)
    return Mixture({"web": (manifest, 3), "code": (other, 1)}, stop_after=48)


@pytest.mark.parametrize("num_windows", [None, 5])
def test_a_mixture_is_proved_where_it_stops_and_when_the_ledger_is_closed(mixture, tmp_path, num_windows, monkeypatch):
    monkeypatch.setattr("shardstream.torch.ledger.TABLE_POSITIONS", 16)
    loader = loader_of(mixture)
    with Ledger(tmp_path, loader, ids=True) as ledger:
        Trainer()(ledger, windows(loader), num_windows)
    proved = [(line["position"], line["num_samples"]) for line in lines_of(tmp_path) if line["kind"] == "epoch"]
    assert proved == ([(0, 16), (16, 16), (32, 16)] if num_windows is None else [(0, 16), (16, 4)])
    report = check_ledger(tmp_path, mixture)
    assert report.holds, report.violations
    assert report.num_denominators == report.consumed.num_windows == (num_windows or 12)
    assert report.num_rounds > report.num_denominators
    assert "add up on all ranks" in report.verdict()
    assert "been through" in report.verdict()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_the_second, "4 samples too few"),
        (with_one_sample_twice, "as many samples as there should be, but wrong"),
    ],
)
def test_what_a_mixture_has_not_exactly_once_is_found(mixture, tmp_path, fault, message):
    loader = loader_of(mixture)
    with pytest.raises(DesyncError, match=message), Ledger(tmp_path, loader) as ledger:
        Trainer()(ledger, fault(windows(loader)))
    assert not check_ledger(tmp_path, mixture).holds


def test_denominators_and_steps_of_a_mixture(mixture, tmp_path):
    loader, folder = loader_of(mixture), tmp_path / "ledger"
    with Ledger(folder, loader) as ledger:
        Trainer()(ledger, windows(loader), num_windows=4)
    step = step_events(folder, mixture, 2)
    held = [name for event in step.events for name in event.ids or ()]
    assert (step.position, sorted(name.partition(":")[0] for name in held)) == (8, ["code", "web", "web", "web"])
    sources = {
        name: {"manifest": manifest.save(tmp_path / name).path, "weight": 1}
        for name, manifest in zip(mixture.names, mixture.manifests, strict=True)
    }
    (tmp_path / "mixture.yaml").write_text(json.dumps({"sources": sources}))
    arguments = ["audit", str(tmp_path / "mixture.yaml"), "--ledger", str(folder)]
    result = CliRunner().invoke(main, [*arguments, "--step", "2"])
    assert result.exit_code == 0, result.output
    assert held[0] in result.output

    def change(line):
        if line.get("position") == 8 and "targets" in line:
            line["targets"]["lm"][0] += 1
        return line

    edited(folder, "*0.jsonl", change)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "position 8: head 'lm' was divided by" in result.output


# ---------------------------------------------------------------------------------------------------- refusals


def test_refusals(manifest, tmp_path):
    with pytest.raises(PlanError, match="a ledger is of a StreamingDataset"):
        Ledger(tmp_path, [])
    loader = loader_of(manifest, tail="uneven", topology=Topology(0, 2), accumulate=1)
    with pytest.raises(PlanError, match=r"use tail='pad'.*check=False"):
        Ledger(tmp_path, loader)


# ---------------------------------------------------------------------------------------------------- the audit


@pytest.fixture
def finished(manifest, tmp_path):
    loader, folder = loader_of(manifest), tmp_path / "ledger"
    with Ledger(folder, loader, ids=True) as ledger:
        Trainer()(ledger, windows(loader))
    return folder


def edited(folder, pattern, change):
    (path,) = folder.glob(pattern)
    path.write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in path.read_text().splitlines()))


def test_denominators_are_checked(manifest, finished):
    def change(line):
        if line.get("position") == 8 and "targets" in line:
            line["targets"]["lm"][0] += 1
        return line

    edited(finished, "*0.jsonl", change)
    report = check_ledger(finished, manifest)
    assert len(report.violations) == 1
    assert "epoch 0, position 8: head 'lm' was divided by" in report.violations[0]


def test_parts_that_were_dropped_are_told(manifest, tmp_path):
    loader, trainer = loader_of(manifest), Trainer()
    with Ledger(tmp_path, loader, keep_num_bytes=8000) as ledger:
        for _ in range(4):
            trainer(ledger, windows(loader))
    report = check_ledger(tmp_path, manifest)
    assert report.holds, report.violations
    assert any("nothing is proved before" in note for note in report.consumed.notes)
    assert not report.consumed.epochs[0].is_finished or report.consumed.epochs[0].epoch > 0
    assert report.consumed.epochs[-1].is_finished


def test_one_step(manifest, finished):
    step = step_events(finished, manifest, 2)
    (log,), _ = read_logs(finished)
    assert (step.epoch, step.position) == (0, 8)
    assert [each.ids for each in step.events if each.ids is not None] == [
        log.windows[2].ids[:2],
        log.windows[2].ids[2:],
    ]
    assert [each.event for each in step.events][-1] == "parameters moved"
    assert step.targets == {"lm": log.windows[2].targets["lm"][0]}
    with pytest.raises(ReadError, match=r"no such step.*0 to 5, found 6"):
        step_events(finished, manifest, 6)


def audit(*arguments):
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def test_the_command(manifest, finished, tmp_path):
    path = tmp_path / "corpus.manifest.parquet"
    manifest.save(path)
    shown = audit(path, "--ledger", finished, "--step", 2)
    assert shown.exit_code == 0, shown.output
    assert "Step 2: epoch 0, position 8" in shown.output
    assert "parameters moved" in shown.output
    assert "each sample was trained on exactly once in epoch(s) 0" in shown.output
    result = json.loads(audit(path, "--ledger", finished, "--step", 2, "--json").output)
    assert result["holds"]
    assert result["step"]["position"] == 8
    edited(
        finished,
        "*.rounds.jsonl",
        lambda line: {**line, "kind": "desync", "text": "rank 1: left"} if line["kind"] == "end" else line,
    )
    failed = audit(path, "--ledger", finished)
    assert failed.exit_code == 1
    assert "the run was ended there" in failed.output
    assert audit(path, "--consumed", finished).exit_code == 0
    assert audit(path, "--consumed", finished, "--step", 1).exit_code == 2
    assert audit(path, "--consumed", finished, "--ledger", finished).exit_code == 2
