"""Trains for as many micro-batches as a day has, on tiny data: memory, threads and files must stay as they are.

    python tools/soak.py --micro-batches 10000000 --json docs/reliability/soak.json

One process reads a data set again and again, in windows and with a ledger as in a real job, of which each epoch is
proved. Memory is the process's and its workers' proportional share (PSS), compared between the second and the last
quarter of the run, so that what is set up at the start does not count.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: our folder is found from the root

from shardstream.index import build_manifest
from shardstream.torch import Ledger, StreamingDataset, StreamingLoader, Topology, windows

_NUM_ROWS = 4096
_BATCH_SIZE = 2
_ACCUMULATE = 8
_NUM_PROBES, _PROBE_EVERY = 200, 500
_LEDGER_NUM_BYTES = 4 << 20
MOST_GROWTH_MB = 4.0
"""What memory may differ by between the quarters: allocators are not exact."""


@dataclass(frozen=True)
class Probe:
    """What a process and its workers hold at one time.

    Attributes:
        num_micro_batches: Trained on so far.
        pss_mb: Memory, in MB.
        num_threads: Threads.
        num_files: Open descriptors.
    """

    num_micro_batches: int
    pss_mb: float
    num_threads: int
    num_files: int

    def __str__(self) -> str:
        return f"{self.num_micro_batches}: {self.pss_mb} MB, {self.num_threads} threads, {self.num_files} files"

    @classmethod
    def take(cls, num_micro_batches: int) -> Probe:
        """Looks at this process and its children."""
        gc.collect()
        me = psutil.Process()
        family = [me, *me.children(recursive=True)]
        threads, files = (sum(count) for count in ([p.num_threads() for p in family], [p.num_fds() for p in family]))
        return cls(num_micro_batches, round(sum(map(_pss_mb, family)), 2), threads, files)


def _pss_mb(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / 1e6


def make_data(folder: Path) -> Path:
    """Writes two shards of short token lists, and their manifest."""
    lengths = np.arange(_NUM_ROWS) % 7
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.arange(offsets[-1], dtype=np.int32)
    tokens = pa.ListArray.from_arrays(offsets, values)
    urls = []
    for shard, rows in enumerate(np.array_split(np.arange(_NUM_ROWS), 2)):
        urls.append(folder / f"part-{shard}.parquet")
        pq.write_table(pa.table({"tokens": tokens.take(pa.array(rows))}), urls[-1], row_group_size=512)
    path = folder / "manifest.parquet"
    build_manifest([str(url) for url in urls], output=str(path), num_workers=0)
    return path


def loop(manifest: Path, ledger_folder: Path, num_workers: int, method: str | None) -> Iterator[int]:
    """Goes through all windows for ever, in the manner of a training loop; yields their numbers of micro-batches."""
    options: dict[str, Any] = {"batch_size": _BATCH_SIZE, "accumulate": _ACCUMULATE, "topology": Topology(0, 1)}
    dataset = StreamingDataset(str(manifest), targets={"lm": "tokens"}, shifted=True, **options)
    started: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": True} if num_workers else {}
    loader = StreamingLoader(dataset, num_workers=num_workers, **started)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    with Ledger(ledger_folder, loader, keep_num_bytes=_LEDGER_NUM_BYTES, rotate_num_bytes=1 << 20) as ledger:
        while True:
            for window in ledger.watch(windows(loader, heads=("lm",))):
                for micro in window.micro_batches():
                    total = micro["tokens"].values.sum()
                    window.loss(lm=weight * total).backward()  # type: ignore[no-untyped-call]
                window.step(optimizer)
                optimizer.zero_grad()
                yield len(window.batches)


def soak(num_micro_batches: int, num_workers: int, method: str | None) -> dict[str, Any]:
    """Runs the loop, and returns what was seen; ``violations`` is empty if all stayed flat."""
    probes: list[Probe] = []
    done, begin_s = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        place = Path(folder)
        trained = loop(make_data(place), place / "ledger", num_workers, method)
        every = max(_PROBE_EVERY, num_micro_batches // _NUM_PROBES)
        for num in trained:
            done += num
            if done >= len(probes) * every:
                probes.append(Probe.take(done))
            if done >= num_micro_batches:
                break
        trained.close()  # type: ignore[attr-defined]
        ledger_mb = sum(path.stat().st_size for path in (place / "ledger").iterdir()) / 1e6
    took_s = time.monotonic() - begin_s
    return {
        "num_micro_batches": done,
        "num_workers": num_workers,
        "method": method,
        "num_epochs": done * _BATCH_SIZE // _NUM_ROWS,
        "took_s": round(took_s, 1),
        "cpu_s": round(time.process_time(), 1),
        "micro_batches_per_s": round(done / took_s),
        "ledger_mb": round(ledger_mb, 2),
        **flatness(probes),
    }


def flatness(probes: list[Probe]) -> dict[str, Any]:
    """Compares the second quarter of probes with the last."""
    quarter = len(probes) // 4
    early, late = probes[quarter : 2 * quarter], probes[-quarter:]
    before, after = (statistics.median(probe.pss_mb for probe in part) for part in (early, late))
    num_between = late[0].num_micro_batches - early[0].num_micro_batches
    violations = []
    if after - before > MOST_GROWTH_MB:
        violations.append(f"memory grew from {before:.1f} to {after:.1f} MB")
    most = {}
    for name in ("num_threads", "num_files"):
        most[name] = [max(getattr(probe, name) for probe in part) for part in (early, late)]
        if most[name][1] > most[name][0]:
            violations.append(f"{name} grew from {most[name][0]} to {most[name][1]}")
    return {
        "pss_mb": [round(before, 1), round(after, 1)],
        "growth_bytes_per_micro_batch": round((after - before) * 1e6 / num_between, 3),
        **most,
        "violations": violations,
        "probes": list(map(str, probes)),
    }


@click.command()
@click.option(
    "--micro-batches", "num_micro_batches", type=click.IntRange(8 * _PROBE_EVERY), default=100_000, show_default=True
)
@click.option("--workers", "num_workers", type=click.IntRange(0), default=0, show_default=True)
@click.option("--method", type=click.Choice(["fork", "spawn", "forkserver"]), help="How workers are started.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures there.")
def main(num_micro_batches: int, num_workers: int, method: str | None, json_path: Path | None) -> None:
    """Train on and on, and show that memory, threads and open files stay as they are."""
    report = soak(num_micro_batches, num_workers, method)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "probes"}, indent=1))
    if report["violations"]:
        raise click.ClickException("; ".join(report["violations"]))


if __name__ == "__main__":
    main()
