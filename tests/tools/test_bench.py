from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench import report, runs
from tools.bench.case import REPOSITORY, Case, Folders
from tools.bench.contract import check, collate_arrays
from tools.bench.data import tar_members, write_form
from tools.bench.range_server import RangeServer, Served
from tools.bench.statistics import Spread, interleaved, ratio_of_medians
from tools.bench.subjects import PEERS, SUBJECTS, load_subject
from tools.bench.suites import EVERYDAY, GROWTH, SUITES
from tools.bench.targets import Target, all_targets, evaluate
from tools.bench.workloads import raw_shard, workload

# -------------------------------------------------------------------------------------------------------- arithmetic


@given(st.integers(0, 7), st.integers(0, 9))
def test_every_case_runs_once_a_repetition_in_alternating_order(num_cases, num_repetitions):
    turns = list(interleaved(range(num_cases), num_repetitions))
    for repetition in range(num_repetitions):
        order = [case for k, case in turns if k == repetition]
        assert order == sorted(order, reverse=repetition % 2 == 1)
        assert len(order) == num_cases
    assert [k for k, _ in turns] == sorted(k for k, _ in turns)


def test_ratio_is_of_medians_and_to_the_best():
    assert ratio_of_medians([9, 10, 1000], [[5, 4, 0.1], [2, 2, 900]]) == 10 / 4
    assert ratio_of_medians([10], [[], [5]]) == 2
    for ours, against in (([], [[1]]), ([1], [[], []]), ([1], [])):
        with pytest.raises(ValueError, match="no values"):
            ratio_of_medians(ours, against)


@given(st.lists(st.floats(1, 1e6), min_size=1))
def test_spread_encloses_its_median(values):
    spread = Spread.of(values)
    assert spread.least <= spread.median <= spread.most
    assert spread.num == len(values)


def test_targets_are_met_missed_or_left_out():
    values = {("ours", "samples_per_s"): [30, 10, 20], ("a", "samples_per_s"): [4], ("b", "samples_per_s"): [10]}
    targets = [
        Target("t", "met", "ours", against=("a", "b", "not run"), at_least=2),
        Target("t", "missed", "ours", against=("a",), at_most=4.9),
        Target("t", "plain", "ours"),
        Target("t", "nothing to compare with", "ours", against=("not run",)),
        Target("t", "not run", "not run"),
    ]
    lines = evaluate(targets, values)
    assert [(line.target.what, line.value, line.is_met) for line in lines] == [
        ("met", 2, True),
        ("missed", 5, False),
        ("plain", 20, None),
    ]
    assert lines[0].against == ("b", Spread(10, 10, 10, 1))
    text = report.render_table(lines)
    assert "MISSED" in text
    assert len({len(row) for row in text.splitlines()}) == 1


# ------------------------------------------------------------------------------------------------- cases and targets


def test_names_of_cases_are_unique_and_targets_know_them():
    cases = [case for suite in (*EVERYDAY, *GROWTH, "memory-large") for case in SUITES[suite]()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for target in all_targets():
        assert {target.ours, *target.against} <= set(names), target
    for case in cases:
        assert case.subject in {**SUBJECTS, **PEERS}
        assert Case.from_json(case.to_json()) == case


def test_every_subject_loads_without_its_package(tmp_path):
    for name in {**SUBJECTS, **PEERS}:
        assert load_subject(name, Folders(tmp_path, tmp_path)).package


# --------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("name", ["T", "I"])
def test_workloads_are_seeded_and_all_forms_hold_the_same(name, tmp_path):
    import pyarrow.parquet as pq

    load = workload(name, 0.0003 if name == "T" else 0.001)
    raw = raw_shard(load, 0)
    again = raw_shard(load, 0)
    assert (raw.values == again.values).all()
    assert not np.array_equal(raw_shard(load, 1).values[:100], raw.values[:100])
    expected = [values.tobytes() for shard in range(load.num_shards) for _, values in raw_shard(load, shard).samples()]
    for form in ("parquet", "tar", "memmap"):
        assert write_form(load, form, tmp_path / form)
        assert not write_form(load, form, tmp_path / form)
    dtype = load.dtype
    shards = sorted((tmp_path / "parquet").glob("*.parquet"))
    column = [value for path in shards for value in pq.read_table(path)[load.column].to_pylist()]
    assert [np.asarray(v, dtype).tobytes() if name == "T" else v for v in column] == expected
    tars = sorted((tmp_path / "tar").glob("*.tar"))
    members = [path.read_bytes()[at : at + n] for path in tars for at, n in tar_members(path, load.suffix)]
    assert members == expected
    assert (tmp_path / "memmap" / "flat.bin").read_bytes() == b"".join(expected)


def test_batches_are_held_to_the_contract():
    batch = collate_arrays([(3, np.arange(2, dtype=np.int32)), (5, np.arange(3, dtype=np.int32))])
    check(batch)
    assert (batch["ids"].tolist(), batch["lengths"].tolist(), batch["data"].tolist()) == (
        [3, 5],
        [2, 3],
        [0, 1, 0, 1, 2],
    )
    with pytest.raises(ValueError, match="lengths sum up"):
        check({**batch, "data": batch["data"][:-1]})
    with pytest.raises(ValueError, match="int64"):
        check({**batch, "ids": batch["ids"].int()})


# ------------------------------------------------------------------------------------------------------- range server


def test_range_server_serves_ranges_counts_them_and_is_slow(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.bin").write_bytes(bytes(range(256)) * 4)
    with RangeServer(tmp_path, latency_s=0.02) as server:
        url = server.storage_options["endpoint_url"] + "/bench/x/a.bin"

        def get(span: str) -> bytes:
            request = urllib.request.Request(url, headers={"Range": f"bytes={span}"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert answer.status == 206
                return answer.read()

        assert [get("10-19"), get("1020-"), get("-2")] == [bytes(range(10, 20)), bytes(range(252, 256)), b"\xfe\xff"]
        assert server.served() == Served(num_gets=3, num_bytes=16)
        assert server.served() == Served()  # counted anew
        for missing in ("/bench/x/b.bin", "/bench/../secret"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(server.storage_options["endpoint_url"] + missing, timeout=10)


# ------------------------------------------------------------------------------------------------------- the real thing


def _bench(root, *arguments: str) -> str:
    command = [sys.executable, "-m", "tools.bench", "--root", str(root), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_prepare_throughput_and_report_at_tiny_scale(tmp_path):
    _bench(tmp_path, "prepare", "--scale", "0.0005", "--workloads", "T", "--no-peers")
    chosen = ("limit: Parquet decoded, 1", "shardstream Parquet, 1 thread", "energon T")
    said = _bench(tmp_path, "throughput", "--repetitions", "1", *[x for name in chosen for x in ("--only", name)])
    assert "megatron.energon cannot be imported" in said
    said = _bench(tmp_path, "report")
    assert "to decoding only, 1 thread" in said
    written = json.loads((tmp_path / "report.json").read_text())
    line = next(line for line in written["targets"] if line["what"] == "to decoding only, 1 thread")
    assert line["value"] == pytest.approx(line["ours"]["median"] / line["against"]["median"])
    assert line["value"] > 0
    assert written["machine"]["cores"]
    assert (tmp_path / "throughput.png").stat().st_size > 1000
    text = (tmp_path / "report.md").read_text()
    assert str(tmp_path) not in text
    assert str(REPOSITORY) not in text


def test_a_case_that_fails_is_reported_and_not_tried_again(tmp_path, monkeypatch):
    outcomes = iter(
        [{"error": "KeyError: x", "trace": "..."}, {"metrics": {"seconds": 1.0}}, {"metrics": {"seconds": 2.0}}]
    )
    monkeypatch.setattr(runs, "run_fresh", lambda *_, **__: next(outcomes))
    said: list[str] = []
    folders = Folders(tmp_path, tmp_path)
    done = runs.run_suite("s", [Case("bad", "import"), Case("good", "import")], 2, folders, said.append)
    assert [(one.case, one.repetition, one.problem) for one in done] == [
        ("bad", 0, "KeyError: x"),
        ("good", 0, ""),
        ("good", 1, ""),
    ]
    assert runs.load_results(folders) == done
    assert report.values_of(done) == {("good", "seconds"): [1.0, 2.0]}
