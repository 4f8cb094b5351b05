"""What a rank sees is the same for every loader, number of workers and start method; nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import http.server
import json
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import fsspec
import psutil
import pytest
import torch

from shardstream.errors import PlanError, ShardStreamWarning
from shardstream.fetch import Reading
from shardstream.torch import StreamingDataset, StreamingLoader, Topology
from tests.support.corpora import manifest_of_files, parquet_manifest, with_runs
from tests.support.streams import loader_of, real_ids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def dataset_of(manifest, **options):
    options = {"batch_size": 3, "accumulate": 2, "seed": 11, "topology": Topology(1, 2), **options}
    return StreamingDataset(manifest, **options)


def shown(batches):
    """Everything that a batch is, as JSON values."""
    return [
        {
            "uid": batch["uid"].tolist(),
            "tokens": batch["tokens"].tolist(),
            "text": batch["text"],
            "ids": batch.sample_ids.tolist(),
            "padding": batch.is_padding.tolist(),
            "valid": batch.valid_tokens["lm"].tolist(),
            "place": [batch.position, batch.window_index, batch.micro_index, batch.is_last_in_window],
            "cursor": batch.cursor.state_dict(),
        }
        for batch in batches
    ]


def test_other_datasets_are_refused():
    with pytest.raises(PlanError, match=r"takes a StreamingDataset: found list"):
        StreamingLoader([1, 2])


FORKED = [(kind, "fork", num_workers) for num_workers in (1, 2, 3, 5) for kind in ("plain", "streaming")]
STARTED = [("streaming", "spawn", 2), ("plain", "forkserver", 3)]


@pytest.mark.parametrize(
    ("kind", "method", "num_workers"), [*FORKED, *(pytest.param(*case, marks=pytest.mark.slow) for case in STARTED)]
)
def test_what_a_rank_sees_does_not_depend_on_workers(corpus, kind, method, num_workers):
    options = {"targets": {"lm": "tokens"}, "shifted": True, "transform": dict}
    expected = shown(dataset_of(corpus, **options))
    assert len(expected) == 14
    assert shown(loader_of(kind, dataset_of(corpus, **options), num_workers, method)) == expected


# ------------------------------------------------------------------------------------------------ nothing is left


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["plain", "streaming"])
@pytest.mark.parametrize("end", ["break", "exception", "exhausted"])
def test_a_loop_that_is_left_leaves_neither_thread_nor_file(tmp_path, no_collector, kind, end):
    """At once, and without the help of the garbage collector."""
    manifest = with_runs(parquet_manifest(tmp_path, [100, 100], 50), 5)
    loader = loader_of(kind, dataset_of(manifest))

    def loop():
        for _ in loader:
            if end == "break":
                break
            if end == "exception":
                raise KeyError

    with pytest.raises(KeyError) if end == "exception" else contextlib.nullcontext():
        loop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardstream")]
    assert not [file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]


def test_nothing_is_started_before_the_first_batch(tmp_path):
    dataset = dataset_of(parquet_manifest(tmp_path, [20]))
    iter(dataset)
    before = threading.active_count()
    batches = iter(loader_of("streaming", dataset))
    assert threading.active_count() == before
    next(batches)
    assert threading.active_count() > before


# ------------------------------------------------------------------------------------------------ case C46


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files with byte ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, status, wanted = path.read_bytes(), 200, self.headers.get("Range")
        self.send_response(206 if wanted else status)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin = int(first) if first else max(0, len(data) - int(last))
            end = min(int(last) + 1, len(data)) if first and last else len(data)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            data = data[begin:end]
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def served(tmp_path):
    """A folder, and its address on the loopback."""

    def handler(*args, **options):
        return RangeHandler(*args, directory=str(tmp_path), **options)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_case_c46_a_file_system_that_was_used_before_the_workers_start(served, method):
    folder, address = served
    parquet_manifest(folder, [7, 5])
    urls = [f"{address}/part-{shard:05d}.parquet" for shard in range(2)]
    manifest = manifest_of_files(urls)  # reads both, in this process
    with fsspec.open(urls[0]) as file:
        assert file.read(4) == b"PAR1"
    dataset = dataset_of(manifest, topology=Topology(0, 1), reading=Reading(timeout_s=60))
    assert len(real_ids(islice(dataset, 1))) == 3  # and here, too
    assert sorted(real_ids(loader_of("plain", dataset, 2, method, timeout=60))) == list(range(12))


# ------------------------------------------------------------------------------------------------ memory


STREAM_AND_MEASURE = """
import json, sys, threading, time
import psutil
from shardstream.torch import StreamingDataset, StreamingLoader, Topology
from shardstream.manifest import Manifest

def main(path, batch_size, lanes):
    dataset = StreamingDataset(path, batch_size=batch_size, lanes=lanes, seed=1, topology=Topology(0, 1))
    process = psutil.Process()
    before = process.memory_info().rss
    peak, samples, num_bytes = before, 0, 0
    for batch in StreamingLoader(dataset):
        samples += len(batch)
        num_bytes += batch["tokens"].values.nbytes
        peak = max(peak, process.memory_info().rss)
    print(json.dumps({"growth": peak - before, "samples": samples, "num_bytes": num_bytes}))

main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_follows_what_is_open_not_the_size_of_a_row_group(tmp_path):
    """A row group of 400 MB decoded, streamed run by run in its own process: a run and a decoder for each lane."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_rows, length = 200_000, 500
    values = np.random.default_rng(0).integers(0, 50_000, num_rows * length, dtype=np.int32)
    tokens = pa.ListArray.from_arrays(np.arange(0, num_rows * length + 1, length, dtype=np.int32), values)
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"tokens": tokens}), path, row_group_size=num_rows, use_dictionary=False)
    del values, tokens
    with pytest.warns(ShardStreamWarning, match="larger than 64 MiB"):
        manifest_of_files([path], output=str(tmp_path / "m.parquet"))
    command = [sys.executable, "-c", STREAM_AND_MEASURE, str(tmp_path / "m.parquet"), "32", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=Path.cwd())
    measured = json.loads(done.stdout)
    assert measured["samples"] == num_rows
    assert measured["num_bytes"] == 4 * num_rows * length
    assert measured["growth"] < 250 << 20, measured


def test_iterating_takes_nothing_from_the_global_random_stream(corpus):
    torch.manual_seed(5)
    loader = StreamingLoader(dataset_of(corpus), num_workers=2)
    next(iter(loader))
    with_loader = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(with_loader, torch.rand(3))
