"""Plans of packed sequences: audited before, and proved from their logs after."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from shardstream.audit import audit
from shardstream.audit.arithmetic import check_by_arithmetic
from shardstream.audit.consumption import check_consumed
from shardstream.consumed import ConsumedLog
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.packing import Packing
from shardstream.plan import Plan


def test_packed_plans(tmp_path):
    table = pa.table({"tokens": [list(range(k % 7)) for k in range(200)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    manifest = build_manifest(str(tmp_path / "a.parquet"), tmp_path / "m", tokens_column="tokens")
    plan = Plan.make(Manifest.load(manifest.path), batch_size=3, world_size=2, packing=Packing(8, eos_id=0))
    report = audit(plan, num_workers=2)
    assert report.violations == ()
    assert report.epochs[0].num_samples == plan.num_positions
    assert report.quality is None
    assert check_by_arithmetic(plan, plan.cursor(), 2, 2).violations == []
    for rank in range(2):
        with ConsumedLog(tmp_path / "logs", rank, 2, 0, plan.cursor(), plan) as log:
            for batch in plan.micro_batches(rank, plan.cursor()):
                ids = plan.sample_ids(0, batch.positions[~batch.is_padding])
                log.window(epoch=0, position=batch.position, ids=ids, num_padding=int(batch.is_padding.sum()))
    checked = check_consumed(tmp_path / "logs", manifest)
    assert checked.violations == ()
    assert checked.epochs[0].num_samples == plan.num_positions
