"""tools/train.py: its config, its checkpoints, and real runs under torchrun that are killed, stopped and resized."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shardstream.audit.ledger import check_ledger
from shardstream.errors import PlanError, ShardStreamError, ShardStreamWarning
from shardstream.manifest import Manifest
from shardstream.torch import StreamingDataset, Topology
from tests.support.corpora import parquet_manifest
from tools.train import main
from tools.training.checkpoint import Checkpoints, restore_rng, rng_state, seed_rng
from tools.training.config import ConfigError, Data, load_config
from tools.training.job import PatientLoader, TextToTokens
from tools.training.launch import ROOT, Torchrun, call
from tools.training.lock import hold
from tools.training.metrics import newest_step, read_metrics

DEMO = ROOT / "configs" / "demo.yaml"
SMALL = {
    "run": "run",
    "seed": 3,
    "num_epochs": 8,
    "timeout_s": 60,
    "data": {"manifest": "m.parquet", "global_batch": 6, "max_micro_batch": 2},
    "model": {"context_length": 64, "width": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.1},
    "checkpoint": {"every_num_steps": 5, "num_kept": 3},
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """96 documents, some of them empty, in three shards."""
    folder = tmp_path_factory.mktemp("corpus")
    options = ["--num-documents", "96", "--max-document-bytes", "64", "--num-shards", "3"]
    call([ROOT / "tools" / "make_corpus.py", folder, *options])
    path = folder / "corpus.manifest.parquet"
    call(["-m", "shardstream", "index", folder / "parquet", "-o", path, "--tokens-column", "tokens"])
    call(["-m", "shardstream", "index", folder / "tar", folder / "tar.zst", "-o", folder / "tar.manifest.parquet"])
    return path


# ------------------------------------------------------------------------------------------- how a job starts and ends


def _terminate_itself(_worker):
    os.kill(os.getpid(), signal.SIGTERM)


def test_workers_outlive_a_sigterm_that_comes_while_they_start(tmp_path):
    """Found by tools/chaos.py: one that had not begun to ignore it was gone, and its rank could not save."""
    path = parquet_manifest(tmp_path, [12]).save(tmp_path / "m").path
    dataset = StreamingDataset(path, batch_size=3, topology=Topology(0, 1))
    loader = PatientLoader(dataset, num_workers=2, worker_init_fn=_terminate_itself, timeout=60)
    assert sum(len(batch.sample_ids) for batch in loader) == 12
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


_FAILS = """
import sys
from shardstream.torch import StreamingDataset, Topology
from tools.training.job import PatientLoader, end_workers

if __name__ == "__main__":
    dataset = StreamingDataset(sys.argv[1], batch_size=3, topology=Topology(0, 1))
    try:
        batches = iter(PatientLoader(dataset, num_workers=2))
        next(batches)
        raise RuntimeError("a peer is gone")
    finally:
        end_workers()
"""


def test_a_rank_that_fails_does_not_wait_for_its_workers(tmp_path):
    """Found by tools/chaos.py: at its exit it waited for workers that ignore SIGTERM, until torchrun killed it."""
    path = parquet_manifest(tmp_path, [12]).save(tmp_path / "m").path
    command = [sys.executable, "-c", _FAILS, str(path)]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("RuntimeError: a peer is gone")


_HOLD = "import sys; from pathlib import Path; from tools.training.lock import hold; hold(Path(sys.argv[1]), 0.3)"


def test_a_run_folder_is_one_jobs_until_its_process_ends(tmp_path):
    def start():
        return subprocess.run([sys.executable, "-c", _HOLD, tmp_path], capture_output=True, text=True, check=False)

    with hold(tmp_path, 1):
        refused = start()
        assert refused.returncode == 1
        assert f"another job is at this run [{tmp_path}]: found process {os.getpid()} on" in refused.stderr
    assert start().returncode == 0
    with hold(tmp_path, 1):  # that one has ended
        pass


_RANK = """
import os, sys, time
from tools.train import Stop
stop = Stop()
assert not stop.is_asked
print("ready", flush=True)
while not stop.is_asked:
    time.sleep(0.01)
open(sys.argv[1], "w").write("stopped")
"""
_LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"


@pytest.mark.slow
@pytest.mark.parametrize("is_torchrun", [True, False])
def test_a_rank_stops_when_torchrun_is_gone_and_only_then(is_torchrun, tmp_path):
    """Found by tools/chaos.py: ranks trained on for ever after torchrun was killed, beside those of the next start."""
    told = tmp_path / "told"
    environ = {**os.environ, **({"TORCHELASTIC_RUN_ID": "1"} if is_torchrun else {})}
    command = [sys.executable, "-c", _LAUNCHER, _RANK, str(told)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        [rank] = psutil.Process(launcher.pid).children()
        launcher.kill()
    if is_torchrun:
        psutil.wait_procs([rank], timeout=30)
        assert told.read_text() == "stopped"
    else:  # started from a shell that was closed since
        time.sleep(0.3)
        assert rank.is_running()
        assert not told.exists()
        rank.kill()


# ------------------------------------------------------------------------------------------------------------- config


def test_the_demos_config_is_valid_and_can_be_overridden():
    config = load_config(DEMO, ["model.width=96", "optimizer.learning_rate=1e-4", "data.tokens=txt"])
    assert (config.model.width, config.optimizer.learning_rate, config.data.tokens) == (96, 1e-4, "txt")
    assert config.data.global_batch == load_config(DEMO).data.global_batch


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.widht=96", "model.widht: unknown key; did you mean 'width'?"),
        ("chekpoint.num_kept=2", "chekpoint: unknown key; did you mean 'checkpoint'?"),
        ("zzz=1", "zzz: unknown key; known: checkpoint, data,"),
        ("data.global_batch=many", "data.global_batch: input should be a valid integer"),
        ("data.global_batch=0", "data.global_batch: input should be greater than 0"),
        ("data.global_batch=2.5", "data.global_batch: input should be a valid integer"),
        ("data.tail=padd", "data.tail: input should be 'pad' or 'drop'"),
        ("data.manifest=null", "data: value error, give either manifest or mixture"),
        ("model.dropout=1", "model.dropout: input should be less than 1"),
        ("model=5", "model: input should be a valid dictionary"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate: input should be greater than 0"),
        ("model.width", "--set model.width: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("seed.x=3", "'seed' is a value, not a section"),
        ("seed=[", "the value is not YAML"),
    ],
)
def test_a_wrong_setting_is_named(override, message, config):
    with pytest.raises(ConfigError) as caught:
        load_config(config, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "found list"), ("", "found NoneType"), ("a: [", "is not YAML"), ("seed: 1", "data: field required")],
)
def test_a_file_that_is_no_config_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_every_fault_is_listed_and_the_exit_code_is_that_of_wrong_usage(config):
    result = CliRunner().invoke(main, [str(config), "--set", "model.widht=1", "--set", "seed=x"])
    assert result.exit_code == 2
    assert "widht: unknown key" in result.output
    assert "seed: input should be a valid integer" in result.output
    assert "Traceback" not in result.output


def test_a_world_size_that_does_not_fit_is_refused_before_any_rank_waits(config):
    environ = {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
    result = CliRunner().invoke(main, [str(config)], env=environ)
    assert result.exit_code == 2
    assert "world size of 3 or 6" in result.output


@given(world_size=st.integers(1, 12), share=st.integers(1, 60), most=st.integers(1, 70))
def test_the_micro_batch_is_the_largest_that_keeps_the_global_batch(world_size, share, most):
    data = Data(manifest="m", global_batch=world_size * share, max_micro_batch=most)
    micro_batch = data.micro_batch(world_size)
    assert 1 <= micro_batch <= most
    assert share % micro_batch == 0
    assert not [size for size in range(micro_batch + 1, min(most, share) + 1) if share % size == 0]


def test_a_share_that_is_no_whole_number_is_refused():
    with pytest.raises(PlanError, match="3 or 6"):
        Data(manifest="m", global_batch=6, max_micro_batch=2).micro_batch(4)


@pytest.mark.parametrize(("text", "tokens"), [(b"", []), ("", []), (b"a\xff", [97, 255]), ("ä", [195, 164])])
def test_the_bytes_of_a_text_are_its_tokens(text, tokens):
    sample = TextToTokens("txt")({"txt": text, "json": b"{}"})
    assert list(sample) == ["tokens"]
    assert sample["tokens"].tolist() == tokens
    assert sample["tokens"].dtype == np.uint8


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", num_kept=3)


def test_only_the_newest_are_kept_and_the_newest_is_found(checkpoints):
    assert checkpoints.newest() is None
    for step in (1, 2, 9, 10, 100):
        checkpoints.save(step, {"step": step, "weights": torch.full((3,), float(step))})
    assert [path.name for path in checkpoints.folder.iterdir() if path.suffix != ".pt"] == []
    assert [checkpoints.load(path)["step"] for path in checkpoints.paths()] == [9, 10, 100]
    assert checkpoints.load(checkpoints.newest())["weights"].tolist() == [100.0] * 3


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-1]])
def test_a_cut_checkpoint_is_set_aside_and_the_one_before_is_taken(damage, checkpoints):
    for step in (1, 2, 3):
        newest = checkpoints.save(step, {"step": step, "weights": torch.ones(10_000)})
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.warns(ShardStreamWarning, match="cannot be read, the one before is taken"):
        assert checkpoints.load(checkpoints.newest())["step"] == 2
    assert newest.with_suffix(".unreadable").exists()
    checkpoints.save(3, {"step": 3})  # what is unreadable takes no readable one's place
    assert [checkpoints.load(path)["step"] for path in checkpoints.paths()] == [1, 2, 3]


def test_a_run_whose_checkpoints_are_all_lost_does_not_silently_begin_again(checkpoints):
    checkpoints.save(1, {"step": 1}).write_bytes(b"")
    with pytest.warns(ShardStreamWarning), pytest.raises(ShardStreamError, match="no checkpoint can be read"):
        checkpoints.newest()


def test_a_checkpoint_runs_no_code(checkpoints, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "broken-in"),)

    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"step": 2, "attack": Attack()})
    with pytest.warns(ShardStreamWarning):
        assert checkpoints.load(checkpoints.newest())["step"] == 1
    assert not (tmp_path / "broken-in").exists()


def test_a_failed_write_leaves_the_last_checkpoint_and_its_remains_are_cleared(checkpoints):
    checkpoints.save(1, {"step": 1})
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        checkpoints.save(2, {"step": 2, "bad": lambda: None})
    assert checkpoints.load(checkpoints.newest())["step"] == 1
    checkpoints.save(2, {"step": 2})
    assert sorted(path.suffix for path in checkpoints.folder.iterdir()) == [".pt", ".pt"]


def _save_for_ever(checkpoints):
    for step in range(10**6):
        checkpoints.save(step, {"step": step, "weights": torch.ones(2_000_000)})


def test_a_writer_killed_at_any_time_leaves_only_whole_checkpoints(checkpoints):
    for round_index in range(3):
        # Not by fork: a child of a process whose torch has used its threads may hang in its first large operation.
        writer = multiprocessing.get_context("spawn").Process(target=_save_for_ever, args=(checkpoints,))
        writer.start()
        deadline = time.monotonic() + 60
        while not checkpoints.paths() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.003 * round_index)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(10)
        assert checkpoints.paths()
        for path in checkpoints.paths():
            assert checkpoints.load(path)["weights"].sum() == 2_000_000


def test_random_generators_continue_where_they_were_saved(checkpoints):
    def draw():
        return torch.rand(3).tolist(), np.random.randn(4).tolist(), random.random()  # noqa: NPY002

    before = rng_state()
    try:
        seed_rng(1, 2, 3)
        np.random.randn()  # noqa: NPY002 - leaves half a pair of normal numbers in the state
        path = checkpoints.save(1, {"rng": [rng_state()]})
        drawn = draw()
        restore_rng(checkpoints.load(path)["rng"][0])
        assert draw() == drawn
        seed_rng(1, 2, 4)
        assert draw() != drawn
    finally:
        restore_rng(before)


# --------------------------------------------------------------------------------------------------------------- runs


def _losses(run: Path, attempt: int) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run) if line["attempt"] == attempt}


def _weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(run / "checkpoints", 3)
    return checkpoints.load(checkpoints.newest())["model"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_run_killed_stopped_and_set_back_equals_an_undisturbed_one_bit_for_bit(manifest, config, tmp_path):
    settings = [f"data.manifest={manifest}"]
    with Torchrun(config, tmp_path / "undisturbed", 2, settings=settings) as torchrun:
        torchrun.finish()
    expected = _losses(tmp_path / "undisturbed", 0)
    assert list(expected) == list(range(1, 8 * 16 + 1))

    run = tmp_path / "disturbed"
    with Torchrun(config, run, 2, settings=settings) as torchrun:
        torchrun.wait_for(step=12)
        torchrun.send(signal.SIGKILL, rank=1)
        torchrun.wait_for(step=40, attempt=1)
        torchrun.send(signal.SIGTERM, rank=0)  # one rank is asked, all of them stop
        torchrun.finish()
    assert newest_step(run) == max(_losses(run, 1))  # SIGTERM saved where it stopped
    newest = Checkpoints(run / "checkpoints", 3).paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with Torchrun(config, run, 2, settings=settings) as torchrun:
        torchrun.finish()
    assert "cannot be read, the one before is taken" in (run / "torchrun.log").read_text()

    first, second, third = (_losses(run, attempt) for attempt in range(3))
    assert min(second) <= max(first) + 1
    assert min(third) <= max(second)  # the damaged checkpoint set the run back
    for losses in (first, second, third):
        assert losses == {step: expected[step] for step in losses}
    assert max(third) == max(expected)
    final = _weights(tmp_path / "undisturbed")
    assert all(torch.equal(final[name], weight) for name, weight in _weights(run).items())
    report = check_ledger(run / "ledger", Manifest.load(manifest))
    assert report.holds, report.violations
    assert [epoch.is_finished for epoch in report.consumed.epochs] == [True] * 8
    assert sum(attempt.num_discarded for attempt in report.consumed.attempts) >= 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_other_data_and_another_model_are_refused_and_a_finished_run_has_nothing_to_do(manifest, config, tmp_path):
    tar = manifest.with_name("tar.manifest.parquet")

    def train(*settings: str) -> subprocess.CompletedProcess[str]:
        common = (f"run={tmp_path / 'run'}", f"data.manifest={tar}", "data.tokens=txt", "num_epochs=1")
        options = [option for setting in (*common, *settings) for option in ("--set", setting)]
        command = [sys.executable, ROOT / "tools" / "train.py", config, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)

    first = train()  # a single process without torchrun, from tar and tar.zst
    assert first.returncode == 0, first.stderr
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, 33))
    for settings, message in (
        (("model.width=32",), "the checkpoint is of another model"),
        (("seed=4",), "seed: 3 in the cursor, 4 here"),
        (("data.tokens=tokens",), "data.tokens names no column"),
    ):
        refused = train(*settings)
        assert refused.returncode == 1
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    again = train()
    assert again.returncode == 0, again.stderr
    assert "resumes at step 32" in again.stdout
    assert len(read_metrics(tmp_path / "run")) == 32
    assert check_ledger(tmp_path / "run" / "ledger", Manifest.load(tar)).holds
