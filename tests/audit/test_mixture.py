"""The audit of mixtures: what holds is shown, what is broken is found; the command, its file and its picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from shardstream.audit import audit_mixture
from shardstream.cli import main
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.mixing import Era, Mixture, Shares
from shardstream.mixture_file import mixture_of
from shardstream.mixture_plan import MixturePlan
from shardstream.packing import Packed, Packing, num_runs
from tests.support.corpora import parquet_manifest
from tests.support.layouts import manifest_of
from tests.support.token_files import token_manifest

WEB, CODE = manifest_of([30, 20, 41, 9], [7, 100, 10, 3]), manifest_of([11, 13], [4, 4])


def plan_of(world_size=2, batch_size=3, accumulate=2, kind=MixturePlan, packing=None, **more):
    mixture = Mixture({"web": (WEB, 0.7), "code": (CODE, 0.3)}, **more)
    return kind.make(
        mixture, world_size=world_size, batch_size=batch_size, accumulate=accumulate, seed=1, packing=packing
    )


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("more", [{}, {"schedule": [(50, {"code": 1})]}, {"stop_after": 200}, {"stop_after": "web"}])
def test_what_holds_is_shown(num_workers, more):
    report = audit_mixture(plan_of(**more), num_workers=num_workers)
    assert report.violations == ()
    assert len(report.proofs) == 4
    code, web = report.sources
    assert (code.num_samples, web.num_samples) == (24, 100)
    assert (
        code.num_given + web.num_given == report.settings["end"] == (report.settings["stop"] or report.settings["end"])
    )
    assert json.loads(json.dumps(report.to_dict()))["holds"] is True


def test_packed_sources_are_followed_token_by_token():
    packed = [Packed(Packing(5), np.arange(int(num_runs(m).sum())) % 9 + 6) for m in (CODE, WEB)]
    report = audit_mixture(plan_of(packing=packed))
    assert report.holds
    assert all("all tokens" in proof for proof in report.proofs[2:])


def test_an_audit_may_begin_at_a_cursor():
    plan = plan_of()
    report = audit_mixture(plan, start=plan.cursor(0, 120), num_windows=5)
    assert (report.settings["start"], report.settings["end"]) == (120, 180)
    assert report.holds


class TwiceDealt(MixturePlan):
    def windows(self, position, num_windows):
        dealt = super().windows(position, num_windows)
        dealt[:, 0] = dealt[:, 1]
        return dealt


class OtherWindow(MixturePlan):
    def windows(self, position, num_windows):
        return super().windows(position, num_windows)[::-1]


class Uneven(MixturePlan):
    def micro_batches(self, rank, start, **options):
        batches = super().micro_batches(rank, start, **options)
        if rank:
            next(batches)
        return batches


class Starved(MixturePlan):
    def sources(self, positions):
        return Shares((Era(0, self.global_batch, (1.0, 1.0)),)).locate(positions)


class Skipping(MixturePlan):
    def sources(self, positions):
        places = super().sources(positions)
        return places._replace(position=places.position * 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwiceDealt, "is dealt 2 times"),
        (OtherWindow, "is not one of its window"),
        (Uneven, "rank 1 has 15 micro-batches, the plan says 16"),
        (Starved, "its share is"),
        (Skipping, "do not come once each"),
    ],
)
def test_what_is_broken_is_found(kind, message):
    report = audit_mixture(plan_of(kind=kind), num_windows=8)
    assert not report.holds
    assert any(message in text for text in report.violations), report.violations


def test_a_source_whose_order_is_no_bijection_is_found():
    plan = plan_of()
    broken = replace(plan.plans[1])
    order = broken.order(0)
    object.__setattr__(broken, "order", lambda epoch: _Doubled(order) if epoch == 0 else order)
    report = audit_mixture(replace(plan, plans=(plan.plans[0], broken)), num_windows=8)
    assert any("source 'web': epoch 0: the order is no bijection" in text for text in report.violations)


class _Doubled:
    def __init__(self, order):
        self._order = order

    def __getattr__(self, name):
        return getattr(self._order, name)

    def sample_ids(self, positions):
        ids = self._order.sample_ids(positions).copy()
        ids[0] = ids[1]
        return ids


def test_impossible_numbers_are_refused():
    with pytest.raises(PlanError, match="num_windows"):
        audit_mixture(plan_of(), num_windows=0)


# ---------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def mixture_file(tmp_path):
    web = parquet_manifest(tmp_path / "web", [20, 30], tokens_column="tokens").save(tmp_path / "web.parquet")
    code = parquet_manifest(tmp_path / "code", [25], tokens_column="tokens").save(tmp_path / "code.parquet")
    settings = {
        "sources": {"web": {"manifest": web.path, "weight": 3}, "code": {"manifest": code.path, "weight": 1}},
        "schedule": [{"at": 64, "weights": {"web": 1, "code": 1}}],
        "stop_after": 200,
    }
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "mixture.yaml"


def run(*arguments):
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def test_a_mixtures_file_is_read(mixture_file):
    mixture = Mixture.load(mixture_file)
    assert mixture.names == ("code", "web")
    assert [era.weights for era in mixture.eras(8)] == [(1.0, 3.0), (1.0, 1.0)]
    assert (mixture.stop_after, mixture.manifests[0].num_samples) == (200, 25)


def test_the_command_proves_a_mixture(mixture_file):
    result = run(mixture_file, "--world-size", 2, "--batch-size", 4, "--num-workers", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["holds"]
    assert {source["name"]: source["num_given"] for source in report["sources"]} == {"code": 84, "web": 116}
    shown = run(mixture_file, "--sequence-length", 8, "--eos-id", 0)
    assert shown.exit_code == 0, shown.output
    assert "every promise holds" in shown.output
    assert "0.25 → 0.5" in shown.output


def test_the_command_proves_sources_that_are_packed_and_not(mixture_file, tmp_path):
    lengths = [3, 0, None, 30, 5, 8, 2, 11] * 3  # 1, 1, none, 4, 1, 1, 1, 2 sequences, each with its end
    chat = token_manifest(tmp_path / "chat", lengths, pack=[8]).save(tmp_path / "chat.parquet")
    settings = yaml.safe_load(mixture_file.read_text())
    settings["sources"]["chat"] = {"manifest": chat.path, "weight": 1, "packing": {"mode": "unpacked"}}
    mixture_file.write_text(yaml.safe_dump(settings))
    allowed = ["--allow-url", f"{tmp_path}/*"]  # its shards are named by full paths
    plan = ["--sequence-length", 8, "--eos-id", 0, "--world-size", 2, "--batch-size", 4]
    result = run(mixture_file, *plan, "--json", *allowed)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert {source["name"]: source["num_samples"] for source in report["sources"]}["chat"] == 3 * 11
    assert any(proof.startswith("source chat:") and "all tokens" in proof for proof in report["proofs"])
    assert run(mixture_file, *allowed).exit_code == 2  # a source says how it is packed
    settings["sources"]["chat"]["packing"] = {"sequence_length": 9}
    mixture_file.write_text(yaml.safe_dump(settings))
    refused = run(mixture_file, "--sequence-length", 8, *allowed)
    assert (refused.exit_code, "that of all sources" in refused.output) == (1, True), refused.output


def test_the_command_draws_shares(mixture_file, tmp_path):
    result = run(mixture_file, "--plot", tmp_path / "shares.png", "--windows", 20)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_way_out_is_named(mixture_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(mixture_file, "--plot", tmp_path / "shares.png")
    assert result.exit_code == 1
    assert "shardstream[plot]" in result.output


@pytest.mark.parametrize("arguments", [["--tail", "pad"], ["--lanes", 4], ["--trace"], ["--epochs", 2]])
def test_options_of_one_data_set_are_wrong_usage(mixture_file, arguments):
    result = run(mixture_file, *arguments)
    assert result.exit_code == 2
    assert "not with a mixture" in result.output


def test_options_of_mixtures_are_wrong_usage_with_a_manifest():
    result = run("--synthetic", "1x1x10", "--plot", "x.png")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "must be keys and values"),
        ({"schedule": []}, "sources, perhaps schedule, perhaps stop_after"),
        ({"sources": {"a": "x"}}, "source 'a' must be keys and values"),
        ({"sources": {"a": {"manifest": "x"}}}, "source 'a' has other keys.*manifest, weight, perhaps packing"),
        ({"sources": {}, "stop": 3}, "has other keys"),
        ({"sources": {}, "schedule": [{"at": 3}]}, "an entry of the schedule has other keys"),
    ],
)
def test_files_with_faults_are_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        mixture_of(settings)


def test_a_file_that_is_not_there_or_no_yaml_is_exit_1(tmp_path):
    (tmp_path / "bad.yaml").write_text("{")
    for name in ("bad.yaml", "none.yaml"):
        result = run(tmp_path / name)
        assert result.exit_code == 1
        assert "cannot be read" in result.output


def test_far_more_than_is_dealt_out_is_proved_by_arithmetic():
    huge = Manifest.synthetic(num_shards=100, blocks_per_shard=100, rows_per_block=1000)
    plan = MixturePlan.make(Mixture({"a": (huge, 3), "b": (huge, 1)}), batch_size=64, world_size=8)
    report = audit_mixture(plan, num_windows=20)
    assert report.holds
