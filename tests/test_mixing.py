"""Mixtures as arithmetic: the table of windows, its sums, the schedule; against a slow, obvious reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import ManifestError, PlanError
from shardstream.manifest import Manifest
from shardstream.mixing import Era, Mixture, Shares, table_totals, window_table
from tests.support import mixing_reference as ref

GOLDEN = json.loads((Path(__file__).parent / "golden" / "mixing_golden.json").read_text())


def manifest(rows=10):
    return Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=rows)


def mixture(weights, schedule=(), **more):
    names = [f"s{k:02d}" for k in range(len(weights))]
    entries = [(at, dict(zip(names, w, strict=True))) for at, w in schedule]
    return Mixture({name: (manifest(), w) for name, w in zip(names, weights, strict=True)}, entries, **more)


some_weights = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 5)), min_size=1, max_size=6).filter(any)


# ------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("case", GOLDEN["tables"], ids=lambda case: f"{case['weights']}, G={case['global_batch']}")
def test_golden_tables(case):
    table = window_table(tuple(case["weights"]), case["global_batch"])
    assert np.diff(table, axis=0)[: len(case["windows"])].tolist() == case["windows"]
    assert (len(table) - 1, table[-1].tolist()) == (case["num_windows"], case["totals"])


@settings(max_examples=15)
@given(weights=some_weights, global_batch=st.sampled_from([30, 64, 200, 1000]))
def test_windows_are_those_of_the_reference(weights, global_batch):
    table = window_table(tuple(weights), global_batch)
    num_positions = (len(table) - 1) * global_batch
    assert table[-1].tolist() == ref.totals(weights, num_positions) == table_totals(weights, num_positions)
    assert np.diff(table, axis=0)[:20].tolist() == ref.table(weights, global_batch, 20)


@settings(max_examples=20)
@given(weights=some_weights, global_batch=st.sampled_from([50, 64, 1000]))
def test_no_source_is_ever_a_sample_ahead_nor_starves(weights, global_batch):
    table = window_table(tuple(weights), global_batch)
    due = np.arange(len(table))[:, None] * table[-1] / (len(table) - 1)
    assert (table - due < 1).all()
    assert (table - due > -max(1, len(weights) - 1)).all()
    assert (np.diff(table, axis=0) >= 0).all()
    assert ((table[-1] > 0) == (np.array(weights) > 0)).all()


# ---------------------------------------------------------------------------------------------------------- positions


@settings(max_examples=20)
@given(data=st.data(), global_batch=st.sampled_from([24, 30, 64]), num_sources=st.integers(1, 4))
def test_positions_are_those_of_a_count_by_hand(data, global_batch, num_sources):
    some = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    weights = data.draw(some)
    schedule = [(at, data.draw(some)) for at in sorted(data.draw(st.sets(st.integers(1, 900), max_size=3)))]
    expected = ref.stream([(0, weights), *schedule], global_batch, 30)
    mixed = Shares(mixture(weights, schedule).eras(global_batch))
    positions = data.draw(st.permutations(range(30 * global_batch)))[:200]
    flat = [place for window in expected for place in window]
    located = mixed.locate(np.array(positions, np.int64))
    assert list(zip(located.source.tolist(), located.position.tolist(), strict=True)) == [flat[p] for p in positions]
    counts = mixed.counts(np.arange(0, 30 * global_batch, global_batch))
    assert counts[-1].tolist() == [
        sum(source == k for source, _ in flat[: 29 * global_batch]) for k in range(len(weights))
    ]


@settings(max_examples=20)
@given(weights=some_weights, global_batch=st.sampled_from([40, 64]), count=st.integers(0, 10**9))
def test_when_a_source_will_have_had_so_many(weights, global_batch, count):
    mixed = Shares(mixture(weights, [(10_000, weights[::-1])]).eras(global_batch))
    for source in range(len(weights)):
        position = mixed.reach(source, count)
        if position is None:
            assert max(weights[source], 0) == 0 or weights[::-1][source] == 0
            continue
        assert mixed.counts(np.array([position]))[0, source] >= count
        assert position == 0 or mixed.counts(np.array([position - global_batch]))[0, source] < count


@settings(max_examples=6)
@given(weights=some_weights, global_batch=st.sampled_from([20_000, 40_000, 70_000]))
def test_behind_its_last_window_a_table_begins_again(weights, global_batch):
    change = 5 * global_batch
    mixed = Shares(mixture(weights, [(change, weights[::-1])]).eras(global_batch))
    tables = [np.diff(window_table(tuple(map(float, each)), global_batch), axis=0) for each in (weights, weights[::-1])]
    is_one = len(mixed.eras) == 1
    by_hand = [tables[0][w % len(tables[0])] for w in range(12 if is_one else 5)]
    by_hand += [] if is_one else [tables[1][w % len(tables[1])] for w in range(7)]
    counts = mixed.counts(np.arange(13) * global_batch)
    assert np.diff(counts, axis=0).tolist() == np.array(by_hand).tolist()


def test_far_away_costs_nothing():
    mixed = Shares(mixture([7, 2, 1]).eras(512))
    position = 512 * 10**12
    located = mixed.locate(np.arange(position, position + 512))
    assert np.bincount(located.source).sum() == 512
    assert mixed.counts(np.array([position])).sum() == position


# ----------------------------------------------------------------------------------------------------------- schedule


def test_entries_of_a_schedule_round_up_to_windows_and_the_later_one_wins():
    mixed = mixture([1, 0], [(1, [1, 1]), (8, [0, 1]), (9, [2, 2]), (17, [3, 3]), (40, [1, 3])])
    assert mixed.eras(8) == (
        Era(0, 8, (1.0, 0.0)),
        Era(8, 8, (0.0, 1.0)),
        Era(16, 8, (2.0, 2.0)),  # (3, 3) is the same
        Era(40, 8, (1.0, 3.0)),
    )


def test_a_changed_global_batch_begins_a_new_grid_and_table():
    mixed = mixture([1, 0], [(20, [1, 1])])
    assert mixed.eras((0, 8), (16, 6)) == (Era(0, 8, (1.0, 0.0)), Era(16, 6, (1.0, 0.0)), Era(22, 6, (1.0, 1.0)))
    assert mixed.eras((0, 8), (24, 6)) == (Era(0, 8, (1.0, 0.0)), Era(24, 6, (1.0, 1.0)))
    counts = Shares(mixed.eras((0, 8), (16, 6))).counts(np.array([0, 8, 16, 22, 28, 34]))
    assert counts.tolist() == [[0, 0], [8, 0], [16, 0], [22, 0], [25, 3], [28, 6]]


def test_names_are_sorted_so_that_the_order_they_are_given_in_changes_nothing():
    web, code = manifest(), manifest(7)
    first = Mixture({"web": (web, 2), "code": (code, 1)})
    second = Mixture({"code": (code, 1), "web": (web, 2)})
    assert first.names == second.names == ("code", "web")
    assert first.manifests == second.manifests == (code, web)
    assert first.eras(4) == second.eras(4)


@pytest.mark.parametrize(
    ("sources", "more", "message"),
    [
        ({}, {}, "at least one source"),
        ({"a": 3}, {}, "must be (manifest, weight)"),
        ({"a": -1.0}, {}, "from 0 on"),
        ({"a": float("nan")}, {}, "from 0 on"),
        ({"a": "1"}, {}, "from 0 on"),
        ({"a": True}, {}, "from 0 on"),
        ({"a": 0}, {}, "weight above 0"),
        ({"a": 1}, {"schedule": [(5, {"b": 1})]}, "weights of no source"),
        ({"a": 1}, {"schedule": [(5, {"a": 1}), (5, {"a": 2})]}, "must increase"),
        ({"a": 1}, {"schedule": [(-5, {"a": 1})]}, "must not be negative"),
        ({"a": 1}, {"schedule": [(2.5, {"a": 1})]}, "whole number"),
        ({"a": 1}, {"stop_after": "b"}, "names no source"),
        ({"a": 1}, {"stop_after": 1.5}, "whole number"),
        ({"a": 1}, {"packing": {"b": "whole"}}, "packing of no source"),
        ({"a": 1}, {"packing": {"a": "split"}}, "unknown packing"),
        ({"a": 1}, {"packing": {"a": {"sequence_length": 8}}}, "that of all sources"),
        ({"a": 1}, {"packing": {"a": {"eos": 8}}}, "is not understood"),
    ],
)
def test_impossible_mixtures_are_refused(sources, more, message):
    given = {name: (manifest(), weight) for name, weight in sources.items()}
    if message.startswith("must be"):
        given = sources
    with pytest.raises(PlanError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Mixture(given, **more)


def test_a_manifest_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ManifestError, match=r"nothing\.parquet"):
        Mixture({"a": (tmp_path / "nothing.parquet", 1)})
