"""Exactly-once from a run's logs: good runs of every kind hold, each way to lose or repeat a sample is named."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.audit.consumption import check_consumed
from shardstream.consumed import ConsumedLog, next_attempt
from shardstream.deal import PARITY_TAILS, TAILS
from shardstream.plan import Plan
from tests.support.layouts import manifest_of

MANIFEST = manifest_of([9, 14, 7, 20, 11], [9, 5, 7, 8, 11], [2, 0, 1, 2])  # 61 samples
GLOBAL_BATCH = 8


class Run:
    """A training run that does not train: it logs what each rank is dealt, attempt after attempt."""

    def __init__(self, folder, tail="pad", manifest=MANIFEST, *, with_ids=True):
        self.folder, self.tail, self.manifest, self.with_ids = folder, tail, manifest, with_ids
        self.cursor = None

    def attempt(self, num_windows, *, world_size=4, batch_size=2, start=None, ends=False, **settings):
        """Trains some windows from ``start`` (the last cursor by default); returns the cursor after each."""
        shuffle = settings.pop("shuffle", self.tail not in PARITY_TAILS)
        settings.setdefault("global_batch", GLOBAL_BATCH)
        plan = Plan.make(
            self.manifest, world_size=world_size, batch_size=batch_size, tail=self.tail, shuffle=shuffle, **settings
        )
        cursor = start or self.cursor or plan.cursor()
        plan, cursor = plan.resume(cursor, allow_batch_change=True)
        number, saved = next_attempt(self.folder), []
        logs = [
            ConsumedLog(self.folder, rank, world_size, number, cursor, plan, with_ids=self.with_ids)
            for rank in range(world_size)
        ]
        for _ in range(num_windows):
            for rank, log in enumerate(logs):
                self._window(plan, log, rank, cursor)
            cursor = cursor.advanced(1, num_positions=plan.num_positions)
            saved.append(cursor)
        for log in logs:
            log.end() if ends else log.close()
        self.cursor = cursor
        return saved

    def _window(self, plan, log, rank, cursor):
        batches = []
        for batch in plan.micro_batches(rank, cursor):
            if batch.window:
                break
            batches.append(batch)
        if not batches:
            return
        positions, padding = (
            np.concatenate([getattr(b, name) for b in batches]) for name in ("positions", "is_padding")
        )
        ids = plan.sample_ids(cursor.epoch, positions[~padding])
        log.window(epoch=cursor.epoch, position=cursor.position, ids=ids, num_padding=int(padding.sum()))

    def report(self):
        return check_consumed(self.folder, self.manifest)


def edit(folder, rank, attempt, change):
    """Rewrites one log through ``change(lines) -> lines``, each line a dict."""
    path = folder / f"rank-{rank:05d}.attempt-{attempt:04d}.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# ---------------------------------------------------------------------------------------------------------- good runs


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("tail", TAILS)
def test_three_epochs_in_one_go(tmp_path, tail, with_ids):
    run = Run(tmp_path, tail, with_ids=with_ids)
    run.attempt(24, ends=True)
    report = run.report()
    assert report.violations == ()
    assert report.attempts[0].has_ended
    finished = [epoch for epoch in report.epochs if epoch.is_finished]
    assert [epoch.epoch for epoch in finished][:3] == [0, 1, 2]
    numbers = {
        "pad": (61, 3, 0, 0),
        "drop": (56, 0, 5, 0),
        "uneven": (61, 0, 0, 0),
        "continue": (61, 0, 0, 0),
        "repeat": (64, 0, 0, 3),
        "truncate": (60, 0, 1, 0),
    }[tail]
    for e in finished:
        assert (e.num_samples, e.num_padding, e.num_dropped, e.num_repeated) == numbers
    assert report.verdict().startswith("each sample was trained on exactly once in epoch(s) 0, 1, 2")


def test_crashes_roll_back_and_are_counted(tmp_path):
    run = Run(tmp_path)
    saved = run.attempt(5)
    run.attempt(3, start=saved[2])  # the checkpoint was two windows old
    run.attempt(4, start=saved[2])  # and the next attempt came not far either
    run.attempt(2, start=saved[0], world_size=2)  # and that checkpoint was damaged
    run.attempt(7)
    report = run.report()
    assert report.violations == ()
    assert [(a.num_windows, a.num_discarded) for a in report.attempts] == [(1, 4), (0, 3), (0, 4), (2, 0), (7, 0)]
    assert [(e.epoch, e.is_finished, e.num_windows) for e in report.epochs] == [(0, True, 8), (1, False, 2)]


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "continue"])
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (2, 1), (1, 2)]), st.integers(0, 3)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_chains_of_elastic_attempts(tmp_path_factory, tail, attempts):
    run = Run(tmp_path_factory.mktemp("run"), tail)
    for num_windows, (world_size, batch_size), num_lost in attempts:
        saved = run.attempt(num_windows, world_size=world_size, batch_size=batch_size)
        run.cursor = (
            ([run.cursor, *saved][: len(saved) + 1 - num_lost] or saved)[-1] if num_lost < len(saved) else saved[0]
        )
    report = run.report()
    assert report.violations == ()


@pytest.mark.filterwarnings("ignore:the global batch changes:shardstream.errors.ShardStreamWarning")
def test_another_global_batch(tmp_path):
    run = Run(tmp_path)
    run.attempt(3)
    run.attempt(3, global_batch=12, world_size=3, batch_size=2)
    run.attempt(4, global_batch=12, world_size=2, batch_size=3)
    report = run.report()
    assert report.violations == ()
    assert report.epochs[0].is_finished
    assert [attempt.global_batch for attempt in report.attempts] == [8, 12, 12]


@pytest.mark.filterwarnings("ignore:the global batch changes:shardstream.errors.ShardStreamWarning")
def test_a_larger_global_batch_that_leaves_nothing_of_an_epoch(tmp_path):
    run = Run(tmp_path, "drop")
    run.attempt(6)  # 48 of 61: 13 are left
    run.attempt(2, global_batch=16, world_size=4, batch_size=4)
    report = run.report()
    assert report.violations == ()
    assert (report.epochs[0].is_finished, report.epochs[0].num_dropped) == (True, 13)


def test_more_ranks_than_samples_in_a_window(tmp_path):
    run = Run(tmp_path, "uneven", manifest_of([3], [3]))
    run.attempt(3, world_size=8, batch_size=1)
    assert run.report().violations == ()


def test_masked_samples_are_no_missing_ones(tmp_path):
    run = Run(tmp_path)
    run.attempt(9)

    def mask(lines):
        masked = lines[1]["ids"].pop()
        fresh = dataclasses.replace(MANIFEST)
        log = ConsumedLog(tmp_path / "other", 0, 4, 0, run.cursor, Plan.make(fresh, batch_size=2, world_size=4))
        log.window(epoch=0, position=0, ids=lines[1]["ids"], num_padding=1, masked_ids=[masked])
        log.close()
        return [lines[0], json.loads(next((tmp_path / "other").iterdir()).read_text().splitlines()[1]), *lines[2:]]

    edit(tmp_path, 2, 0, mask)
    report = run.report()
    assert report.violations == ()
    assert (report.epochs[0].num_masked, report.epochs[0].num_samples) == (1, 60)
    assert "1 masked" in report.verdict()


# --------------------------------------------------------------------------------------------------- what is no fault


def test_an_unfinished_last_window_is_a_note(tmp_path):
    run = Run(tmp_path)
    run.attempt(10)
    edit(tmp_path, 1, 0, lambda lines: lines[:-1])
    report = run.report()
    assert report.violations == ()
    assert any(
        "unfinished last window (attempt 0, epoch 1, position 8): rank(s) 1 had" in note for note in report.notes
    )
    assert report.epochs[1].num_windows == 1


def test_a_cut_line_is_a_note(tmp_path):
    run = Run(tmp_path)
    run.attempt(9)
    path = tmp_path / "rank-00003.attempt-0000.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    report = run.report()
    assert report.violations == ()
    assert report.notes[0] == "1 log(s) end in a cut line, as killed processes leave it: rank-00003.attempt-0000.jsonl"


def test_no_finished_epoch(tmp_path):
    run = Run(tmp_path)
    run.attempt(3)
    assert run.report().verdict() == "no epoch is finished; so far no sample was trained on twice"


# ------------------------------------------------------------------------------------------------------------- faults


def faults_of(tmp_path, change, rank=1, *, with_ids=True):
    run = Run(tmp_path, with_ids=with_ids)
    run.attempt(9)
    edit(tmp_path, rank, 0, change)
    report = run.report()
    assert report.violations
    assert report.verdict().startswith("NOT exactly once")
    return report


def replaced(number, **changes):
    return lambda lines: [{**line, **changes} if k == number else line for k, line in enumerate(lines)]


def test_a_sample_trained_twice_and_another_never(tmp_path):
    first = {}

    def change(lines):
        first.update(twice=lines[1]["ids"][0], never=lines[4]["ids"][1])
        lines[4]["ids"][1] = first["twice"]
        return lines

    report = faults_of(tmp_path, change)
    epoch = report.epochs[0]
    assert (epoch.num_missing, epoch.num_extra, epoch.num_foreign) == (1, 1, 0)
    assert epoch.missing[0].startswith(f"{first['never']} (")
    assert epoch.repeated[0].startswith(f"{first['twice']} (")
    shard = int(MANIFEST.shard_of_sample(np.array([first["never"]]))[0])
    place = f"({shard}.parquet:{first['never'] - int(MANIFEST.first_sample[shard])})"
    assert any("1 missing" in text and place in text for text in report.violations)
    assert any("is not that of the ids beside it" in text for text in report.violations)


def test_foreign_ids(tmp_path):
    report = faults_of(tmp_path, lambda lines: [*lines[:3], {**lines[3], "ids": [99, -5]}, *lines[4:]])
    assert report.epochs[0].foreign == ("99", "-5")
    assert report.epochs[0].num_missing == 2


def test_a_window_that_a_rank_did_not_log(tmp_path):
    report = faults_of(tmp_path, lambda lines: lines[:3] + lines[4:])
    assert "attempt 0, epoch 0, position 16: rank(s) 1 did not log this window" in report.violations
    assert report.epochs[0].num_missing == 2


def test_a_window_logged_twice(tmp_path):
    report = faults_of(tmp_path, lambda lines: [*lines[:3], lines[2], *lines[3:]])
    assert "attempt 0, epoch 0, position 8: rank(s) 1 logged this window more than once" in report.violations
    assert report.epochs[0].num_extra == 2


def test_a_window_that_nobody_logged(tmp_path):
    run = Run(tmp_path)
    run.attempt(9)
    for rank in range(4):
        edit(tmp_path, rank, 0, lambda lines: lines[:3] + lines[4:])
    report = run.report()
    assert any(
        "a window begins at epoch 0, position 24; expected at epoch 0, position 16" in v for v in report.violations
    )
    assert report.epochs[0].num_missing == 8


def test_logs_of_the_first_attempt_lost(tmp_path):
    run = Run(tmp_path)
    run.attempt(3)
    run.attempt(6)
    for path in tmp_path.glob("*attempt-0000*"):
        path.unlink()
    report = run.report()
    assert report.epochs[0].num_missing == 24
    assert len(report.epochs[0].missing) == 20
    assert any("24 missing" in text and "and 4 more" in text for text in report.violations)


def test_a_resume_that_skips_samples(tmp_path):
    run = Run(tmp_path)
    saved = run.attempt(9)
    for path in tmp_path.iterdir():
        path.unlink()
    run.attempt(3, start=dataclasses.replace(saved[0], epoch=0, position=0))
    run.attempt(5, start=saved[4])
    report = run.report()
    assert report.epochs[0].num_missing == 16


def test_every_rank_trains_on_the_same(tmp_path):
    """Case C30 in the logs: nobody split the data."""
    run = Run(tmp_path)
    run.attempt(9)
    same = [json.loads(line) for line in (tmp_path / "rank-00000.attempt-0000.jsonl").read_text().splitlines()]
    for rank in range(1, 4):
        edit(tmp_path, rank, 0, lambda lines: [lines[0], *same[1:]])
    report = run.report()
    assert report.epochs[0].num_missing > 40
    assert report.epochs[0].num_extra > 10


def test_checksums_without_ids(tmp_path):
    report = faults_of(tmp_path, replaced(2, checksum="0123456789abcdef"), with_ids=False)
    text = "attempt 0, epoch 0, position 8, rank 1: the checksum 0123456789abcdef is not that of what the plan deals"
    assert any(violation.startswith(text) for violation in report.violations)


def test_wrong_padding(tmp_path):
    report = faults_of(tmp_path, replaced(2, num_padding=1))
    assert "attempt 0, epoch 0, position 8, rank 1: 1 padding rows, expected 0" in report.violations


def test_ranks_that_disagree(tmp_path):
    def other_seed(lines):
        lines[0]["plan"]["seed"] = 9
        return lines

    report = faults_of(tmp_path, other_seed)
    assert "attempt 0: ranks 0 and 1 disagree in start or plan" in report.violations


def test_logs_of_another_manifest(tmp_path):
    run = Run(tmp_path)
    run.attempt(2)
    report = check_consumed(tmp_path, manifest_of([61], [61]))
    assert len(report.violations) == 4
    assert "of another manifest" in report.violations[0]
    assert not report.holds
