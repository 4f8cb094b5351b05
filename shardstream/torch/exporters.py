"""What a loader says of itself, told to TensorBoard, Prometheus and OpenTelemetry, each through its own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from shardstream.errors import PlanError
from shardstream.torch.stats import LoaderStats

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector


class HasStats(Protocol):
    """A ``StreamingLoader``, or whatever counts like one."""

    def stats(self) -> LoaderStats:
        """Returns what it did so far."""
        ...


class ScalarWriter(Protocol):
    """A ``torch.utils.tensorboard.SummaryWriter``, or whatever writes like one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Writes one number."""
        ...


@dataclass(frozen=True)
class Metric:
    """One figure of ``LoaderStats`` as monitoring systems name it.

    Attributes:
        field: The figure.
        name: Its name, in words.
        unit: Of what, as UCUM writes it.
        text: What it is.
        is_total: Whether it only grows: then systems take rates of it.
    """

    field: str
    name: str
    unit: str
    text: str
    is_total: bool = True

    @property
    def prometheus_name(self) -> str:
        """As Prometheus names it, without the ``_total`` that its client adds."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return "shardstream_" + self.name.replace(" ", "_") + unit

    @property
    def opentelemetry_name(self) -> str:
        """As OpenTelemetry names it."""
        return "shardstream." + self.name.replace(" ", "_")


METRICS = (
    Metric("num_batches", "batches", "{batch}", "Micro-batches handed out."),
    Metric("num_samples", "samples", "{sample}", "Their rows, padding included."),
    Metric("num_masked", "masked samples", "{sample}", "Samples that could not be decoded or were rejected."),
    Metric("num_tokens", "tokens", "{token}", "Tokens handed out, where they are known."),
    Metric("num_bytes", "columns", "By", "Bytes of columns that were read."),
    Metric("wait_s", "wait", "s", "Time in which the loop waited for data."),
    Metric("held_s", "held", "s", "Time in which the loop had a batch."),
    Metric("num_blocks_opened", "blocks opened", "{block}", "How often blocks were opened."),
    Metric("num_blocks_needed", "blocks needed", "{block}", "Different blocks opened, counted anew each epoch."),
    Metric("read_amplification", "read amplification", "1", "Opens of each block that was needed.", is_total=False),
    Metric("num_requests", "requests", "{request}", "Ranges read from a remote store."),
    Metric("num_bytes_fetched", "fetched", "By", "Bytes read from a remote store."),
    Metric("num_cache_hits", "cache hits", "{request}", "Ranges that the disk cache had instead."),
    Metric("num_blocks_verified", "blocks verified", "{block}", "Blocks compared with their checksums."),
)


class _Readings:
    """Figures of a loader, of which totals never go down: a fall would be read as a new start of the process.

    A loop that is left by ``break`` holds its last batch until the next pass begins, which takes that time back.
    """

    def __init__(self, loader: HasStats) -> None:
        self._loader = loader
        self._highest: dict[str, float] = {}

    def now(self) -> Iterator[tuple[Metric, float]]:
        """Yields the figures that are known."""
        stats = self._loader.stats()
        for metric in METRICS:
            value = getattr(stats, metric.field)
            if value is None:
                continue
            if metric.is_total:
                value = self._highest[metric.field] = max(value, self._highest.get(metric.field, 0))
            yield metric, value


def export_to_prometheus(
    loaders: HasStats | Mapping[str, HasStats],
    registry: CollectorRegistry | None = None,
    *,
    labels: Mapping[str, str] | None = None,
) -> Collector:
    """Registers the figures of loaders, which are read whenever Prometheus asks. Once a registry.

    Args:
        loaders: A loader; or several by name, which becomes the label ``loader``.
        registry: Where; by default ``prometheus_client.REGISTRY``.
        labels: Of every figure, such as ``{"rank": "3"}``.

    Returns:
        What was registered: ``registry.unregister`` takes it.

    Raises:
        PlanError: If prometheus_client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError:
        raise _missing("prometheus_client", "prometheus") from None
    by_name = loaders if isinstance(loaders, Mapping) else {None: loaders}
    names = [*(labels or {}), *(["loader"] if isinstance(loaders, Mapping) else [])]
    readings = [
        ([*map(str, (labels or {}).values()), *([] if name is None else [name])], _Readings(loader))
        for name, loader in by_name.items()
    ]

    class _Collector(Collector):
        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for values, of_loader in readings:
                for metric, value in of_loader.now():
                    family = CounterMetricFamily if metric.is_total else GaugeMetricFamily
                    if metric.field not in families:
                        families[metric.field] = family(metric.prometheus_name, metric.text, labels=names)
                    families[metric.field].add_metric(values, value)
            yield from families.values()

    collector = _Collector()
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def export_to_opentelemetry(loader: HasStats, meter: Meter, *, attributes: Mapping[str, str] | None = None) -> None:
    """Makes observable instruments of a loader's figures, which are read whenever metrics are collected.

    Args:
        loader: The loader.
        meter: From ``opentelemetry.metrics.get_meter``, or of a provider of your own.
        attributes: Of every figure, such as ``{"rank": "3"}``.

    Raises:
        PlanError: If opentelemetry is not installed.
    """
    try:
        from opentelemetry.metrics import CallbackOptions, Observation
    except ImportError:
        raise _missing("opentelemetry-api", "opentelemetry") from None
    readings, given = _Readings(loader), dict(attributes or {})

    def observing(wanted: Metric) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observe(_options: CallbackOptions) -> Iterator[Observation]:
            for metric, value in readings.now():
                if metric == wanted:
                    yield Observation(value, given)

        return observe

    for metric in METRICS:
        make = meter.create_observable_counter if metric.is_total else meter.create_observable_gauge
        make(metric.opentelemetry_name, [observing(metric)], unit=metric.unit, description=metric.text)


@final
class TensorBoardStats:
    """Writes how fast a loader is to TensorBoard: rates since the last time, because TensorBoard makes none.

    Args:
        loader: The loader.
        writer: A ``SummaryWriter`` of torch or tensorboardX.
        prefix: Tags begin with it.

    Example:
        >>> from types import SimpleNamespace
        >>> stats = LoaderStats(4, 32, 0, None, 640, 1.0, 3.0, 2, 2, 1.0, 0, 0, 0, 0)
        >>> written = TensorBoardStats(SimpleNamespace(stats=lambda: stats), SimpleNamespace(add_scalar=print))
        >>> written.log(step=4)
        data/samples_per_s 8.0 4
        data/bytes_per_s 160.0 4
        data/wait_share 0.25 4
        data/read_amplification 1.0 4
        data/masked_samples 0 4
    """

    def __init__(self, loader: HasStats, writer: ScalarWriter, *, prefix: str = "data") -> None:
        self._loader, self._writer, self._prefix = loader, writer, prefix
        self._before: LoaderStats | None = None

    def log(self, step: int) -> None:
        """Writes the figures since the last call; nothing where no time has gone by in a pass.

        Args:
            step: The optimizer step, or whatever the run counts.
        """
        now, before = self._loader.stats(), self._before

        def more(field: str) -> float:
            return getattr(now, field) - (0 if before is None else getattr(before, field) or 0)  # type: ignore[no-any-return]

        seconds = more("wait_s") + more("held_s")
        if seconds <= 0:
            return
        figures: dict[str, float] = {"samples_per_s": more("num_samples") / seconds}
        if now.num_tokens is not None:
            figures["tokens_per_s"] = more("num_tokens") / seconds
        figures["bytes_per_s"] = more("num_bytes") / seconds
        figures["wait_share"] = more("wait_s") / seconds
        if now.read_amplification is not None:
            figures["read_amplification"] = now.read_amplification
        figures["masked_samples"] = now.num_masked
        for name, value in figures.items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, step)
        self._before = now


def _missing(package: str, extra: str) -> PlanError:
    hint = f"pip install 'shardstream[{extra}]'"
    return PlanError(f"this export needs {package}, which is not installed", hint=hint)
