"""Proofs of mixtures from logs: resizes, rollbacks, schedules hold; what is lost, repeated or foreign is found."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import islice

import pytest
from click.testing import CliRunner

from shardstream.audit import check_mixture_logs
from shardstream.cli import main
from shardstream.consumed import ConsumedLog, next_attempt
from shardstream.errors import ReadError, ShardStreamWarning
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.mixture_plan import MixturePlan, logged_ids
from tests.support.layouts import manifest_of

WEB, CODE = manifest_of([30, 20, 41, 9], [7, 100, 10, 3]), manifest_of([11, 13], [4, 4])


def mixture_of(schedule=(), web=WEB):
    return Mixture({"web": (web, 3), "code": (CODE, 1)}, schedule)


def plan_of(world_size, schedule=(), batch=12, **more):
    return MixturePlan.make(mixture_of(schedule), world_size=world_size, batch_size=batch // world_size, seed=2, **more)


def train(folder, plan, start, num_windows, *, change=None, with_ids=True):
    """Logs some windows as the ranks of an attempt would; returns the cursor behind them."""
    attempt, cursor = next_attempt(folder), start
    for rank in range(plan.world_size):
        with ConsumedLog(folder, rank, plan.world_size, attempt, start, plan, with_ids=with_ids) as log:
            windows = defaultdict(list)
            for batch in islice(plan.micro_batches(rank, start), num_windows * plan.accumulate):
                windows[batch.position] += logged_ids(plan, batch.positions).tolist()
                cursor = plan.cursor_after(batch)
            for position, ids in windows.items():
                logged = (position, ids) if change is None else change(rank, position, ids)
                if logged is not None:
                    log.window(epoch=0, position=logged[0], ids=logged[1])
    return cursor


@pytest.mark.parametrize("with_ids", [True, False])
def test_resizes_rollbacks_and_schedules_hold(tmp_path, with_ids):
    cursor = train(tmp_path, plan_of(2), plan_of(2).cursor(), 6, with_ids=with_ids)
    plan, start = plan_of(3).resume(plan_of(2).cursor(0, 48))  # the last two windows were lost with a crash
    cursor = train(tmp_path, plan, start, 5, with_ids=with_ids)
    with pytest.warns(ShardStreamWarning, match="changed ahead"):
        plan, start = plan_of(4, [(120, {"code": 1})]).resume(cursor)
    cursor = train(tmp_path, plan, start, 4, with_ids=with_ids)
    with pytest.warns(ShardStreamWarning, match="from 12 to 8"):
        plan, start = plan_of(1, [(120, {"code": 1})], batch=8).resume(cursor, allow_batch_change=True)
    train(tmp_path, plan, start, 3, with_ids=with_ids)
    report = check_mixture_logs(tmp_path, mixture_of())
    assert report.violations == ()
    assert (report.num_attempts, report.num_windows, report.position) == (4, 16, 180)
    assert "each of 16 windows was trained on once" in report.verdict()
    assert report.passes["code"] == plan.passes(180)["code"] > 3


def lost(rank, position, ids):
    return (position, ids[1:] if rank == 1 and position == 24 else ids)


def twice(rank, position, ids):
    return (position, [ids[0], *ids[:-1]] if rank == 0 and position == 24 else ids)


def unlogged(rank, position, ids):
    return None if rank == 1 and position == 24 else (position, ids)


def left_out(_rank, position, ids):
    return None if position == 24 else (position, ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost, "position 24: other samples than the mixture has there: sample"),
        (twice, "position 24: other samples"),
        (unlogged, r"position 24: rank\(s\) 1 did not log this window"),
        (left_out, "between positions 24 and 36 was not trained on"),
    ],
)
@pytest.mark.parametrize("with_ids", [True, False])
def test_what_is_wrong_is_found(tmp_path, change, message, with_ids):
    import re

    plan = plan_of(2)
    train(tmp_path, plan, plan.cursor(), 5, change=change, with_ids=with_ids)
    report = check_mixture_logs(tmp_path, mixture_of())
    assert not report.holds
    message = message if with_ids else message.replace(": sample", "")
    assert any(re.search(message, text) for text in report.violations), report.violations


def test_a_run_that_skipped_or_went_back_without_a_new_past_is_found(tmp_path):
    plan = plan_of(2)
    train(tmp_path, plan, plan.cursor(), 3)
    train(tmp_path, plan, plan.cursor(0, 48), 2)
    assert any("between positions 36 and 48" in text for text in check_mixture_logs(tmp_path, mixture_of()).violations)


def test_a_forged_past_is_found(tmp_path):
    train(tmp_path, plan_of(2), plan_of(2).cursor(), 4)
    other = MixturePlan.make(Mixture({"web": (WEB, 1), "code": (CODE, 1)}), world_size=2, batch_size=6, seed=2)
    train(tmp_path, other, other.cursor(0, 48), 2)
    assert any("its past is not that" in text for text in check_mixture_logs(tmp_path, mixture_of()).violations)


def test_the_last_window_may_be_unfinished(tmp_path):
    plan = plan_of(2)
    train(tmp_path, plan, plan.cursor(), 4, change=lambda r, p, ids: None if (r, p) == (1, 36) else (p, ids))
    report = check_mixture_logs(tmp_path, mixture_of())
    assert report.holds
    assert "unfinished last window" in report.notes[0]


def test_other_sources_are_refused(tmp_path):
    train(tmp_path, plan_of(2), plan_of(2).cursor(), 1)
    with pytest.raises(ReadError, match="source 'web'"):
        check_mixture_logs(tmp_path, mixture_of(web=CODE))


def test_the_command_proves_logs(tmp_path):
    web = Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=20).save(tmp_path / "web.parquet")
    text = f"sources: {{web: {{manifest: {web.path}, weight: 1}}}}"
    (tmp_path / "mixture.yaml").write_text(text)
    plan = MixturePlan.make(Mixture.load(tmp_path / "mixture.yaml"), batch_size=4)
    train(tmp_path / "logs", plan, plan.cursor(), 3)
    arguments = ["audit", str(tmp_path / "mixture.yaml"), "--ledger", str(tmp_path / "logs")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "each of 3 windows was trained on once" in result.output
    report = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert report["passes"] == {"web": 0.3}
    other = MixturePlan.make(Mixture.load(tmp_path / "mixture.yaml"), batch_size=4, seed=9)
    train(tmp_path / "logs", other, plan.cursor(0, 12), 1)
    assert CliRunner().invoke(main, arguments).exit_code == 1
