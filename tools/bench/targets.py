"""The targets: which ratio of medians, or which median, is to be at least or at most what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeAlias

from tools.bench.statistics import Spread, ratio_of_medians
from tools.bench.subjects import PEERS, STREAMING_PEERS
from tools.bench.suites.growth import NUM_RANKS, NUM_SAMPLES, scale_name
from tools.bench.suites.packed import MINIMAL, PACKED, PACKED_PEERS, UNPACKED, WHOLE, WITH_WORKERS
from tools.bench.suites.start import RESUMED_AT

Values: TypeAlias = Mapping[tuple[str, str], Sequence[float]]  # (case, metric) → the values of all repetitions


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        topic: Heading it stands under.
        what: What is compared, in words.
        ours: Case whose metric counts.
        metric: Which; its name ends with its unit.
        against: Cases to divide by, the best of them that ran; none for a plain figure.
        at_least: Smallest value that is good, if there is one.
        at_most: Largest value that is good, if there is one.
    """

    topic: str
    what: str
    ours: str
    metric: str = "samples_per_s"
    against: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None


class Line(NamedTuple):
    """A target with what was measured.

    Attributes:
        target: The target.
        value: The ratio, or the median.
        ours: Our values.
        against: Best of the others: its case and values; None for a plain figure.
        is_met: Whether the value is on the right side of the bound; None without a bound.
    """

    target: Target
    value: float
    ours: Spread
    against: tuple[str, Spread] | None
    is_met: bool | None


def evaluate(targets: Sequence[Target], values: Values) -> list[Line]:
    """Returns a line for each target whose cases were measured; the others are left out."""
    lines = []
    for target in targets:
        ours = values.get((target.ours, target.metric), ())
        others = {name: values[name, target.metric] for name in target.against if values.get((name, target.metric))}
        if not ours or (target.against and not others):
            continue
        best = max(others, key=lambda name: median(others[name]), default=None)
        against = None if best is None else (best, Spread.of(others[best]))
        value = ratio_of_medians(ours, list(others.values())) if others else median(ours)
        lines.append(Line(target, value, Spread.of(ours), against, _is_met(target, value)))
    return lines


def _is_met(target: Target, value: float) -> bool | None:
    if target.at_least is None and target.at_most is None:
        return None
    return (target.at_least is None or value >= target.at_least) and (target.at_most is None or value <= target.at_most)


# ------------------------------------------------------------------------------------------------------ the targets


def all_targets() -> list[Target]:
    """Returns every target, in the order of the table."""
    return [*_parquet(), *_packed(), *_workers(), *_tars(), *_starts(), *_memory(), *_store(), *_loop(), *_growth()]


def _parquet() -> list[Target]:
    topic, targets = "T, Parquet, in the rank's process", []
    for threads in ("1 thread", "2 threads"):
        ours = f"shardstream Parquet, {threads}"
        decoded = (f"limit: Parquet decoded, {threads}",)
        shuffled = (f"limit: Parquet shuffled, {threads}",)
        targets += [
            Target(topic, f"to shuffle-and-copy, {threads}", ours, against=shuffled, at_least=1.05),
            Target(topic, f"to decoding only, {threads}", ours, against=decoded, at_least=0.6),
            Target(
                topic,
                f"1 of 8 ranks to decoding only, {threads}",
                f"{ours}, 1 of 8 ranks",
                against=decoded,
                at_least=0.75,
            ),
        ]
    ours = "shardstream Parquet, 2 threads"
    peers = tuple(f"{peer} T" for peer in STREAMING_PEERS)
    targets.append(Target(topic, "to the fastest streaming peer", ours, against=peers, at_least=15))
    targets += [Target(topic, f"to {peer}", ours, against=(f"{peer} T",)) for peer in PEERS]
    return targets


def _packed() -> list[Target]:
    topic, rate, per_cpu = "Packed sequences of 2,048, tokens/s", "values_per_s", "values_per_cpu_s"
    targets = [
        Target(topic, "to unpacked documents", PACKED, rate, (UNPACKED,), at_least=0.7),
        Target(topic, "to unpacked documents, of a processor second", PACKED, per_cpu, (UNPACKED,)),
        Target(topic, "inputs and labels, to unpacked documents", MINIMAL, rate, (UNPACKED,)),
        Target(topic, "whole documents, to unpacked ones", WHOLE, rate, (UNPACKED,)),
    ]
    for name in PACKED_PEERS.values():
        what = f"to {name.removeprefix('packed 2048, ')}"
        targets.append(Target(topic, what, PACKED, rate, (name,)))
        targets.append(Target(topic, f"{what}, 2 workers", WITH_WORKERS, rate, (f"{name}, 2 workers",)))
    return targets


def _workers() -> list[Target]:
    topic, limit = "T, Parquet, 2 workers", ("limit: transport T, 1 tensor",)
    plain, ours = (f"shardstream Parquet, {loader}, 2 workers" for loader in ("DataLoader", "StreamingLoader"))
    peers = [Target(topic, f"StreamingLoader to {peer}", ours, against=(f"{peer} T, 2 workers",)) for peer in PEERS]
    return [
        Target(topic, "DataLoader to one-tensor transport", plain, against=limit, at_least=0.8),
        Target(topic, "StreamingLoader to one-tensor transport", ours, against=limit, at_least=2.5),
        Target(topic, "StreamingLoader to decoding only", ours, against=("limit: Parquet decoded, 2 threads",)),
        *peers,
    ]


def _tars() -> list[Target]:
    topic, slices = "Tar, in the rank's process", ("limit: tar I sliced",)
    targets = [
        Target(topic, "text to WebDataset", "shardstream tar T", against=("webdataset T",), at_least=8),
        Target(topic, "text to shuffled slices", "shardstream tar T", against=("limit: tar T sliced",)),
        Target(
            topic, "images as bytes to shuffled slices", "shardstream tar I, as bytes", against=slices, at_least=0.7
        ),
        Target(topic, "images in one tensor to shuffled slices", "shardstream tar I", against=slices),
    ]
    targets += [
        Target(topic, f"images to {peer}", "shardstream tar I", against=(f"{peer} I",))
        for peer in ("webdataset", "litdata", "mds", "energon")
    ]
    for threads in ("1 thread", "2 threads"):
        ours, limit = f"shardstream tar.zst T, {threads}", (f"limit: zstd frames, {threads}",)
        targets.append(Target(topic, f".tar.zst to decompression, {threads}", ours, against=limit, at_least=0.7))
    return targets


def _starts() -> list[Target]:
    topic, metric, targets = "Time to the first batch", "first_batch_s", []
    bounds = {
        "first batch, rank 0 of 8": 0.05,
        "first batch, only rank, 64 lanes": 0.15,
        "first batch, 10,000 x 100 blocks": 0.5,
    }
    for name, at_most in bounds.items():
        targets.append(Target(topic, name.removeprefix("first batch, "), name, metric, at_most=at_most))
        for share in RESUMED_AT:
            resumed = f"{name}, resumed at {share:.0%}"
            what = f"{resumed.removeprefix('first batch, ')}, to a fresh start"
            targets.append(Target(topic, what, resumed, metric, (name,), at_most=1.2))
    targets.append(Target(topic, "import shardstream.torch", "import shardstream.torch", "seconds", at_most=0.2))
    cold = "first batch, rank 0 of 8, pyarrow not imported"
    targets.append(Target(topic, cold.removeprefix("first batch, "), cold, metric))
    targets += [Target(topic, peer, f"first batch, {peer}", metric) for peer in PEERS]
    return targets


def _memory() -> list[Target]:
    topic, metric = "Memory above the imports", "above_imports_mb"
    targets = [
        Target(topic, "T at defaults", "memory T", metric, at_most=400),
        Target(topic, "T with 2 workers", "memory T, 2 workers", metric, at_most=400),
        Target(topic, "ten times T to T", "memory T, ten times", metric, ("memory T",), at_most=1.2),
        Target(topic, "I, tar", "memory I, tar", metric, at_most=400),
        Target(topic, "one row group of 10^6 rows", "memory, one row group of 10^6 rows", metric, at_most=500),
        Target(topic, "one zstd frame of 2 GB", "memory, one zstd frame of 2 GB", metric, at_most=500),
    ]
    for peer in PEERS:
        targets.append(Target(topic, f"{peer}, T", f"memory T, {peer}", metric))
        targets.append(Target(topic, f"{peer}, T with 2 workers", f"memory T, {peer}, 2 workers", metric))
    return targets


def _store() -> list[Target]:
    topic, targets = "Object store, 50 ms and 100 MB/s", []
    for load in "TI":
        ours = f"store {load}"
        targets += [
            Target(topic, f"{load}: of the reachable bandwidth", ours, "of_reachable", at_least=0.8),
            Target(topic, f"{load}: bytes read to bytes needed", ours, "bytes_read_ratio", at_most=1.1),
            Target(topic, f"{load}: requests a block", ours, "requests_per_block"),
            Target(topic, f"{load}: first batch", f"{ours}, first batch", "first_batch_requests", at_most=5),
        ]
    return targets


def _loop() -> list[Target]:
    topic = "Windows/s of a training loop, to one without denominators"
    return [
        Target(
            topic,
            f"{mode}, {n} ranks",
            f"loop, counts {mode}, {n} ranks",
            "windows_per_s",
            (f"loop, counts none, {n} ranks",),
        )
        for n in (2, 4)
        for mode in ("blocking", "overlapped", "constant")
    ]


def _growth() -> list[Target]:
    topic, most = "Planning, from 10^6 to 10^9 samples", NUM_SAMPLES[-1]
    bound = Target(topic, "memory of the plan at 10^9, 1 rank", scale_name(most, 1), "growth_mb", at_most=100)
    metrics = ("plan_s", "first_micro_batch_s", "resume_s", "locate_s", "growth_mb")
    return [bound] + [
        Target(topic, f"{metric}, {n} ranks", scale_name(most, n), metric, (scale_name(10**6, n),))
        for n in NUM_RANKS
        for metric in metrics
    ]
