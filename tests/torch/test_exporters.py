"""What monitoring systems get of a loader, each read back with its own library."""

from __future__ import annotations

import sys
import urllib.request
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from shardstream.errors import PlanError
from shardstream.torch import StreamingDataset, StreamingLoader, Topology
from shardstream.torch.exporters import METRICS, TensorBoardStats, export_to_opentelemetry, export_to_prometheus
from shardstream.torch.stats import LoaderStats
from tests.support.corpora import parquet_manifest

metrics = pytest.importorskip("opentelemetry.sdk.metrics")
metrics_export = pytest.importorskip("opentelemetry.sdk.metrics.export")
prometheus = pytest.importorskip("prometheus_client")
prometheus_parser = pytest.importorskip("prometheus_client.parser")
tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("exported"), [100, 100], 10, tokens_column="tokens")


@pytest.fixture
def loader(manifest):
    return StreamingLoader(StreamingDataset(manifest, batch_size=10, topology=Topology(0, 1)))


def scraped(port: int) -> dict[str, tuple[str, float, dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        families = list(prometheus_parser.text_string_to_metric_families(answer.read().decode()))
    return {family.name: (family.type, family.samples[0].value, family.samples[0].labels) for family in families}


def test_every_figure_has_a_metric():
    assert {metric.field for metric in METRICS} == {each.name for each in fields(LoaderStats)}
    assert len({metric.prometheus_name for metric in METRICS}) == len(METRICS)


def test_prometheus_scrapes_a_loop_that_runs(loader):
    registry = prometheus.CollectorRegistry()
    export_to_prometheus(loader, registry, labels={"rank": "3"})
    server, thread = prometheus.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        before = scraped(server.server_port)
        assert before["shardstream_samples"] == ("counter", 0, {"rank": "3"})
        assert "shardstream_read_amplification" not in before  # not known before the first block
        seen = [scraped(server.server_port)["shardstream_samples"][1] for _ in loader]
        after, stats = scraped(server.server_port), loader.stats()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)
    assert seen == [10 * k for k in range(1, 21)]
    assert after["shardstream_tokens"][:2] == ("counter", stats.num_tokens)
    assert after["shardstream_wait_seconds"][1] == stats.wait_s > 0
    assert after["shardstream_columns_bytes"][1] == stats.num_bytes > 0
    assert after["shardstream_read_amplification"][:2] == ("gauge", stats.read_amplification)


def test_several_loaders_by_name(loader, manifest):
    other = StreamingLoader(StreamingDataset(manifest, batch_size=20, topology=Topology(0, 1)))
    registry = prometheus.CollectorRegistry(auto_describe=True)  # as prometheus_client's own
    collector = export_to_prometheus({"train": loader, "eval": other}, registry, labels={"rank": "1"})
    next(iter(other))
    for name, samples in (("train", 0), ("eval", 20)):
        labels = {"rank": "1", "loader": name}
        assert registry.get_sample_value("shardstream_samples_total", labels) == samples
    assert prometheus.generate_latest(registry).decode().count("# TYPE shardstream_samples_total") == 1
    registry.unregister(collector)
    assert registry.get_sample_value("shardstream_samples_total", {"rank": "1", "loader": "eval"}) is None


def test_totals_never_fall():
    stats = LoaderStats(1, 8, 0, None, 9, 1.0, 5.0, 1, 1, 1.0, 0, 0, 0, 0)
    given = [stats, replace(stats, held_s=2.0, read_amplification=0.5), replace(stats, held_s=6.0)]
    registry = prometheus.CollectorRegistry()
    export_to_prometheus(SimpleNamespace(stats=lambda: given[0]), registry)
    held = []
    while given:
        held.append(registry.get_sample_value("shardstream_held_seconds_total"))
        given.pop(0) if len(given) > 1 else given.clear()
    assert held == [5.0, 5.0, 6.0]


def test_opentelemetry(loader):
    reader = metrics_export.InMemoryMetricReader()
    provider = metrics.MeterProvider(metric_readers=[reader])
    export_to_opentelemetry(loader, provider.get_meter("test"), attributes={"rank": "0"})
    for _ in loader:
        pass
    found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    points = {metric.name: (metric.unit, metric.data.data_points[0]) for metric in found}
    stats = loader.stats()
    unit, point = points["shardstream.samples"]
    assert (unit, point.value, dict(point.attributes)) == ("{sample}", 200, {"rank": "0"})
    assert points["shardstream.wait"][1].value == stats.wait_s
    assert points["shardstream.columns"][0] == "By"
    assert points["shardstream.read_amplification"][1].value == stats.read_amplification
    assert points["shardstream.tokens"][1].value == stats.num_tokens
    assert len(points) == len(METRICS)
    provider.shutdown()


def test_tensorboard(loader, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        written = TensorBoardStats(loader, writer)
        written.log(0)  # nothing was read: nothing is written
        for step, _ in enumerate(loader, 1):
            if step % 10 == 0:
                written.log(step)
    events = tensorboard.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        f"data/{name}_per_s" for name in ("samples", "tokens", "bytes")
    } | {"data/wait_share", "data/read_amplification", "data/masked_samples"}  # fmt: skip
    assert [event.step for event in events.Scalars("data/samples_per_s")] == [10, 20]
    assert all(event.value > 0 for event in events.Scalars("data/tokens_per_s"))
    assert all(0 <= event.value <= 1 for event in events.Scalars("data/wait_share"))


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("prometheus_client", "prometheus", export_to_prometheus),
        ("opentelemetry.metrics", "opentelemetry", lambda loader: export_to_opentelemetry(loader, None)),
    ],
)
def test_a_missing_package_is_named_with_its_extra(loader, monkeypatch, package, extra, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PlanError, match=rf"pip install 'shardstream\[{extra}\]'"):
        call(loader)
