"""A trial of an engine, whose workers are killed: ``python -m tests.support.engine_trial ray|dask FOLDER``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.errors import PlanError
from shardstream.executors import executor_of
from shardstream.formats import IndexOptions
from shardstream.index import IndexSettings, build_manifest
from shardstream.index._look import Look, look_at_all
from shardstream.prepare import PrepareSettings, prepare

PATIENCE_S = 60


@dataclass(frozen=True)
class Watched(Look):
    """A look that tells where it happens, and takes its time."""

    folder: str = ""

    def find(self):
        with Path(self.folder, "looks.txt").open("a") as file:
            print(Path(self.url).name, os.getpid(), file=file, flush=True)
        time.sleep(0.5)
        return super().find()


def looks(folder):
    path = Path(folder, "looks.txt")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def raises():
    raise PlanError("a task's own error", found=1)


def trial(engine, folder):
    paths = []
    for place in range(12):
        table = pa.table({"x": range(place * 50, place * 50 + 50), "t": [[1] * (k % 5) for k in range(50)]})
        paths.append(str(folder / "data" / f"{place:02d}.parquet"))
        Path(paths[-1]).parent.mkdir(exist_ok=True)
        pq.write_table(table, paths[-1], row_group_size=20)
    local = build_manifest(paths, folder / "local.parquet", tokens_column="t", num_workers=0)
    small = {"shard_num_bytes": 400, "shuffle": True, "seed": 5, "spill_dir": str(folder / "spills")}
    prepare(paths, folder / "out-local", settings=PrepareSettings(num_workers=0, **small))

    with executor_of(engine, 2) as executor:
        assert executor.num_workers == 2
        error = executor.submit(raises).exception(PATIENCE_S)
        assert type(error) is PlanError, repr(error)
        assert str(error) == "a task's own error: found 1"

        # A worker is killed while it looks at a shard.
        found = []
        tasks = [Watched(path, IndexOptions(tokens_column="t"), folder=str(folder)) for path in paths]
        reader = threading.Thread(target=lambda: found.extend(look_at_all(tasks, None, executor)), daemon=True)
        reader.start()
        until = time.monotonic() + PATIENCE_S
        while len(looks(folder)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        name, pid = looks(folder)[-1]
        os.kill(int(pid), signal.SIGKILL)
        reader.join(PATIENCE_S)
        assert [one.digest for one in found] == list(local.digests)
        again = [other for shard, other in looks(folder) if shard == name]
        assert len(again) > 1, "it was killed too late"
        assert again[-1] != pid

        # So is one that writes, as soon as something is written.
        def kill(done):
            if done.num_parts_done and not killed:
                killed.append(executor.submit(os.getpid).result(PATIENCE_S))
                os.kill(killed[0], signal.SIGKILL)

        killed = []
        prepare(paths, folder / "out", settings=PrepareSettings(executor=executor, progress=kill, **small))
        assert killed
        written = [sorted(p.name for p in (folder / name).glob("*.parquet")) for name in ("out", "out-local")]
        assert written[0] == written[1]
        assert len(written[0]) > 4
        for name in set(written[0]) - {"manifest.parquet"}:
            assert (folder / "out" / name).read_bytes() == (folder / "out-local" / name).read_bytes(), name

        made = build_manifest(
            paths, folder / "made.parquet", tokens_column="t", settings=IndexSettings(executor=executor)
        )
        assert Path(made.path).read_bytes() == Path(local.path).read_bytes()

        # The commands, on what runs already.
        if engine == "dask":
            engine += f":{executor.submit(scheduler).result(PATIENCE_S)}"
        by_command = folder / "command.parquet"
        run("index", folder / "data", "-o", by_command, "--tokens-column", "t", "--engine", engine, "--json")
        assert by_command.read_bytes() == Path(local.path).read_bytes()
        assert json.loads(run("verify", by_command, "--engine", engine, "--json"))["is_good"]
        told = json.loads(run("reshard", folder / "data", folder / "again", "--engine", engine, "--json"))
        assert told["num_samples"] == local.num_samples


def scheduler():
    from distributed import get_worker

    return get_worker().scheduler.address


def run(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


if __name__ == "__main__":
    warnings.simplefilter("default")
    trial(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.write("good\n")
