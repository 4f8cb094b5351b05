"""Cuts the cable between two hosts of a training job, and proves that nothing was lost. Needs root.

    python tools/two_hosts.py --cuts 4 --json docs/reliability/two-hosts.json

Each host is a network namespace with a torchrun of its own (``--nnodes=2``); a cable (veth) joins them. It is pulled
out in mid-epoch, now at one end and now at the other. Both sides must end within the deadline. Then the job goes on
with one host, and with two again. In the end the ledger must show each sample of each finished epoch exactly once.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: our folder is found from the root

from tools.training.launch import LaunchError, Torchrun
from tools.training.metrics import read_metrics
from tools.trials.disturbed import TrialError
from tools.trials.network import DEVICE, Host, two_hosts, why_not
from tools.trials.proof import left_in_run, prove, undisturbed
from tools.trials.publishing import publish
from tools.trials.setting import NUM_STEPS, Setting

_END_S = 30.0
"""Within so much more than the job's deadline both sides must have ended; the machine may be busy."""
_IDLE_S = 300.0
_CLOSE = 1e-6


@contextmanager
def started(setting: Setting, hosts: tuple[Host, ...], port: int) -> Iterator[list[Torchrun]]:
    """Starts torchrun on each host, with a rank; rank 0 is on the first."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Torchrun(
                    setting.config,
                    setting.run,
                    1,
                    max_restarts=0,
                    meeting=[
                        f"--nnodes={len(hosts)}",
                        f"--node-rank={number}",
                        f"--master-addr={hosts[0].address}",
                        f"--master-port={port}",
                    ],
                    prefix=host.prefix,
                    environ={"GLOO_SOCKET_IFNAME": DEVICE},
                )
            )
            for number, host in enumerate(hosts)
        ]


def trial(folder: Path, num_cuts: int, timeout_s: float) -> dict[str, Any]:
    """Does it all, and returns the report; ``violations`` is empty if everything holds.

    Raises:
        TrialError: If a side does not end.
        LaunchError: If a job fails that nothing was done to.
    """
    setting = Setting.make(folder, timeout_s=timeout_s)
    ends: list[list[float]] = []
    with two_hosts() as hosts:
        step, port = 0, 29_500
        for number in range(num_cuts):
            pulled = hosts[1 - number % 2]
            with started(setting, hosts, port := port + 1) as sides:
                step = _in_mid_epoch(sides[0], step)
                pulled.plug(is_in=False)
                ends.append(_ends(sides, timeout_s))
            say(f"cable pulled after step {step}, at host {pulled.address}: sides ended after {ends[-1]} s")
            with started(setting, hosts[:1], port := port + 1) as sides:
                step = _in_mid_epoch(sides[0], step)
                sides[0].stop()
            say(f"one host goes on, to step {step}")
            pulled.plug(is_in=True)
        with started(setting, hosts, port + 1) as sides:
            step = _in_mid_epoch(sides[0], step)
            for side in sides:  # a torchrun that is not asked would wait for the other one at its exit
                side.ask_to_stop()
            _ends(sides, timeout_s)
        say(f"two hosts go on, to step {step}")
    last = max(line["step"] for line in read_metrics(setting.run))
    proof = prove(setting, undisturbed(setting, 2, last), _CLOSE)
    return {
        "cuts": num_cuts,
        "timeout_s": timeout_s,
        "longest_until_a_side_ended_s": max(max(each) for each in ends),
        **asdict(proof),
        "violations": [*proof.violations, *left_in_run(setting.run)],
    }


def say(text: str) -> None:
    """Prints a line."""
    print(text, flush=True)


def _in_mid_epoch(torchrun: Torchrun, step: int) -> int:
    """Waits until at least an epoch's half was made since ``step``, and returns the step that was just made."""
    wanted = step + NUM_STEPS // 2
    return int(torchrun.wait_for(step=wanted + (wanted % NUM_STEPS in (NUM_STEPS - 1, 0)) * 2, idle_s=_IDLE_S)["step"])


def _ends(sides: list[Torchrun], timeout_s: float) -> list[float]:
    begin_s, ends = time.monotonic(), []
    for number, side in enumerate(sides):
        left_s = begin_s + timeout_s + _END_S - time.monotonic()
        if not side.ends_within(max(0.0, left_s)):
            raise TrialError(f"side {number} still runs {timeout_s + _END_S:.0f} s after the cut")
        ends.append(round(time.monotonic() - begin_s, 1))
    return ends


@click.command()
@click.option("--cuts", "num_cuts", type=click.IntRange(1), default=1, show_default=True)
@click.option("--timeout-s", type=float, default=10.0, show_default=True, help="The job's own deadline.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the counts there.")
def main(num_cuts: int, timeout_s: float, json_path: Path | None) -> None:
    """Cut the cable between two hosts of a training job and prove that nothing was lost."""
    if reason := why_not():
        raise click.ClickException(reason)
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    try:
        report = trial(folder, num_cuts, timeout_s)
    except (TrialError, LaunchError) as error:
        raise click.ClickException(f"{error}\n(everything is in {folder})") from None
    publish(report, folder, json_path)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
