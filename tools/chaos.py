"""Kills a training job at random, again and again, and proves that nothing was lost.

    python tools/chaos.py --rounds 100 --seed 1 --json docs/reliability/chaos.json

``tools/train.py`` runs under torchrun with 2 to 4 processes. Each round hits a rank, a DataLoader worker or torchrun
itself with SIGKILL, SIGTERM or SIGSTOP (longer than others wait for it): while processes start, after some steps, while
a checkpoint is being written, or at the change of an epoch. It is started again with other numbers of ranks and
workers. In the end the ledger must show each sample of each finished epoch exactly once, the losses must be those of an
undisturbed run at the same steps, and no process, temporary file, socket or shared memory may be left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: our folder is found from the root

from tools.training.launch import ROOT, LaunchError
from tools.training.metrics import read_metrics
from tools.trials.disturbed import Disturbed, Round, TrialError
from tools.trials.family import alone_with_shared_memory, shared_memory, temporary_files
from tools.trials.proof import Proof, left_in_run, prove, summary, undisturbed
from tools.trials.publishing import publish
from tools.trials.setting import Setting

# Of programs that are killed before they can clear up: torchrun's logs, Python's sockets; and torch's cache.
_OF_OTHERS = {"torchelastic", "pymp", "torchinductor"}
_CLOSE = 1e-6


class Stop:
    """Whether no more rounds shall begin: SIGTERM or Ctrl-C asks for it, and what was done until then is proved."""

    def __init__(self) -> None:
        self.is_asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


def run_rounds(disturbed: Disturbed, num_rounds: int, stop: Stop) -> list[Round]:
    """Lets mishaps happen, prints a line for each, and stops the job in the end."""
    rounds: list[Round] = []
    begin_s = time.monotonic()
    while len(rounds) < num_rounds and not stop.is_asked:
        done = disturbed.round(len(rounds))
        if done.outcome == "missed":
            continue
        rounds.append(done)
        told = [f"[{time.monotonic() - begin_s:5.0f} s] round {done.number:3}: {done}"]
        told += [f"    {text}" for text in disturbed.violations if text.startswith(f"round {done.number},")]
        print("\n".join(told), flush=True)
    disturbed.stop()
    return rounds


def refusal(setting: Setting) -> str:
    """Returns what a rank is answered with whose world size does not divide the global batch."""
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
    command = [sys.executable, str(ROOT / "tools" / "train.py"), str(setting.config)]
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    lines: list[str] = [line.strip() for line in refused.stderr.splitlines() if "world size of" in line]
    if refused.returncode == 0 or not lines:
        raise TrialError(f"5 ranks share a global batch of 12: {refused.stderr}")
    return lines[0]


def report_of(rounds: list[Round], disturbed: Disturbed, proof: Proof, left: dict[str, Any]) -> dict[str, Any]:
    """Returns everything as JSON values."""
    ends = [each.end_s for each in rounds if each.end_s is not None]
    return {
        "rounds": len(rounds),
        "by_kind": summary([each.mishap.kind for each in rounds]),
        "by_moment": summary([each.mishap.moment for each in rounds]),
        "by_outcome": summary([each.outcome for each in rounds]),
        "by_world_size": summary([each.world_size for each in rounds]),
        "by_num_workers": summary([each.num_workers for each in rounds]),
        "launches": disturbed.num_launches,
        "ranks_lost_for_good": disturbed.num_lost,
        "longest_wait_for_a_stopped_rank_s": max(ends, default=None),
        **asdict(proof),
        **left,
    }


@click.command()
@click.option("--rounds", "num_rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides every mishap.")
@click.option("--fixed-world-size", type=click.IntRange(2, 4), help="So many ranks always: losses must be bit-equal.")
@click.option("--timeout-s", type=float, default=10.0, show_default=True, help="The job's own deadline.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the counts there.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Work in this new folder and keep it.")
def main(
    num_rounds: int,
    seed: int,
    fixed_world_size: int | None,
    timeout_s: float,
    json_path: Path | None,
    keep: Path | None,
) -> None:
    """Kill a training job at random and prove that nothing was lost."""
    alone_with_shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="chaos-")) if keep is None else keep.resolve()
    try:
        report = chaos(folder, num_rounds, seed, fixed_world_size, timeout_s)
    except (TrialError, LaunchError) as error:
        raise click.ClickException(f"{error}\n(everything is in {folder})") from None
    publish(report, folder, json_path)
    if keep is None:
        shutil.rmtree(folder)


def chaos(folder: Path, num_rounds: int, seed: int, fixed_world_size: int | None, timeout_s: float) -> dict[str, Any]:
    """Does it all, and returns the report; ``violations`` is empty if everything holds.

    Raises:
        TrialError: If a process lives on, or a job does nothing any more.
        LaunchError: If a program fails that nothing was done to.
    """
    memory, begin_s = shared_memory(), time.monotonic()
    setting = Setting.make(folder, timeout_s=timeout_s, dropout=0.0 if fixed_world_size is None else 0.1)
    with Disturbed(setting, random.Random(seed), timeout_s, fixed_world_size) as disturbed:
        rounds = run_rounds(disturbed, num_rounds, Stop())
    took_s = time.monotonic() - begin_s
    temporary = temporary_files(setting.temporary)
    left: dict[str, Any] = {
        "processes_left": 0,  # each round waits for the end of all, or fails
        "temporary_files_left": [*left_in_run(setting.run), *sorted(set(temporary) - _OF_OTHERS)],
        "temporary_files_left_by_others": temporary,
        "shared_memory_left": sorted(shared_memory() - memory),
    }
    last = max(line["step"] for line in read_metrics(setting.run))
    expected = undisturbed(setting, fixed_world_size or 2, last)
    proof = prove(setting, expected, 0.0 if fixed_world_size is not None else _CLOSE)
    about = {
        "seed": seed,
        "fixed_world_size": fixed_world_size,
        "timeout_s": timeout_s,
        "took_s": round(took_s),
        "five_ranks_are_answered": refusal(setting),
    }
    report = {**about, **report_of(rounds, disturbed, proof, left)}
    left_over = map(str, [*left["temporary_files_left"], *left["shared_memory_left"]])
    report["violations"] = [*disturbed.violations, *proof.violations, *left_over]
    report["each_round"] = list(map(str, rounds))
    return report


if __name__ == "__main__":
    main()
