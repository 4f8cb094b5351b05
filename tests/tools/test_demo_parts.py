"""tools/demo.py: what it is made of, and the whole of it in miniature."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tools.demo import Mishaps, main
from tools.training.launch import ROOT, LaunchError, Torchrun, call
from tools.training.metrics import plot_losses, read_metrics


@given(seed=st.integers(0, 2**32), first_checkpoint=st.integers(1, 30), more=st.integers(1, 100))
def test_mishaps_leave_time_for_what_they_show(seed, first_checkpoint, more):
    num_steps = first_checkpoint + more + 3
    mishaps = Mishaps.choose(seed, num_steps, first_checkpoint)
    assert first_checkpoint < mishaps.kill_step <= num_steps < mishaps.stop_step < 2 * num_steps
    assert mishaps.kill_rank in (0, 1)
    assert mishaps == Mishaps.choose(seed, num_steps, first_checkpoint)


def _line(step, attempt=0, loss=1.0):
    return {"step": step, "loss": loss, "attempt": attempt, "world_size": 2 + attempt}


def test_cut_lines_of_metrics_are_left_out(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = [json.dumps(_line(1)), json.dumps(_line(2))[:10], "7", "", json.dumps(_line(3)), '{"step": 4']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_the_loss_is_drawn_also_where_a_step_had_no_targets(tmp_path):
    lines = [*(_line(step, loss=1 / step) for step in range(1, 20)), _line(17, attempt=1, loss=None), _line(18, 1)]
    plot_losses(lines, tmp_path / "loss.png", "title")
    data = (tmp_path / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


def test_a_failed_command_shows_its_last_lines(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("for i in range(100): print('line', i)\nraise SystemExit(3)")
    with pytest.raises(LaunchError, match=r"fails.py\nexited with 3\n    line 75\n(.*\n)*    line 99$"):
        call([script])


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    script = tmp_path / "hangs.py"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], "
    script.write_text(child + "start_new_session=True); print(p.pid, flush=True); time.sleep(99)")
    with pytest.raises(LaunchError, match=r"still ran after 2 s\n    \d+") as caught:
        call([script], timeout_s=2)
    pid = int(str(caught.value).split()[-1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_cannot_start_says_why_and_leaves_no_process(tmp_path):
    with Torchrun(tmp_path / "none.yaml", tmp_path / "run", 1, max_restarts=0) as torchrun:
        process = psutil.Process(torchrun.pid)
        with pytest.raises(LaunchError, match=r"none\.yaml cannot be read") as caught:
            torchrun.wait_for()
    assert "ended before it came so far" in str(caught.value)
    assert not process.is_running()


def test_a_run_that_makes_no_step_is_given_up_and_killed(tmp_path):
    before = time.monotonic()
    with Torchrun(tmp_path / "none.yaml", tmp_path / "run", 1) as torchrun:
        process = psutil.Process(torchrun.pid)
        with pytest.raises(LaunchError, match="made no step for 0 s"):
            torchrun.wait_for(idle_s=0.05)
    assert not process.is_running()
    assert time.monotonic() - before < 60


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path):
    (tmp_path / "precious").write_text("data")
    result = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "the demo did not make it" in result.output
    assert (tmp_path / "precious").exists()


def test_wrong_settings_are_refused(tmp_path):
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "out"), "--set", "model.widht=8"])
    assert result.exit_code == 2
    assert "did you mean 'width'?" in result.output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_demo_in_miniature(tmp_path):
    small = ["model.width=16", "model.num_layers=1", "model.context_length=64", "data.global_batch=6"]
    small += ["data.max_micro_batch=2", "checkpoint.every_num_steps=5", "num_epochs=5", "data.num_workers=1"]
    options = [option for setting in small for option in ("--set", setting)]
    options += ["--num-documents", "200", "--max-document-bytes", "64", "--seed", "1"]
    command = [sys.executable, ROOT / "tools" / "demo.py", "--out", tmp_path / "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verdict: each sample was trained on exactly once in epoch(s) 0, 1, 2, 3, 4; targets of " in done.stdout
    assert "with SIGKILL" in done.stdout
    metrics = read_metrics(tmp_path / "demo" / "run")
    assert [line["world_size"] for line in metrics if line["attempt"] == 2][-1] == 3
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 10_000
    consumed = ["--ledger", str(tmp_path / "demo" / "run" / "ledger")]
    call(["-m", "shardstream", "audit", tmp_path / "demo" / "parquet.manifest.parquet", *consumed])

    log = tmp_path / "demo" / "run" / "ledger" / "rank-00002.attempt-0002.jsonl"  # and the proof is one:
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-5]))
    with pytest.raises(LaunchError, match="exited with 1"):
        call(["-m", "shardstream", "audit", tmp_path / "demo" / "parquet.manifest.parquet", *consumed])
