"""Trains a small byte-level transformer on any number of processes; started again, it continues where it was.

    torchrun --nproc-per-node 2 --max-restarts 3 tools/train.py configs/demo.yaml --set run=build/run

Kill a rank: torchrun restarts all, and they resume from the newest checkpoint's cursor. Send SIGTERM: the window under
way is finished and saved. Start it with another number of processes: the same global batches follow, dealt anew.

The run folder gets ``checkpoints/``, ``metrics.jsonl`` (a line a step), ``ledger/`` (which documents each rank was
trained on, and what all did together, for ``shardstream audit --ledger``), ``pids/`` (the process of each rank) and
``lock`` (held by the job that is at it). When torchrun itself is killed, its ranks save and stop by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType

import click
import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: our folder is found from the root

from shardstream.errors import PlanError, ShardStreamError
from shardstream.mixture_plan import MixturePlan
from shardstream.torch import Window, init_process_group, verify_ranks, windows
from shardstream.torch.ledger import Ledger
from shardstream.torch.topology import topology_from_environ
from tools.training.config import Config, ConfigError, load_config
from tools.training.job import Job, end_workers
from tools.training.lock import hold


class Stop:
    """Whether this process shall stop; the loop looks at it between windows.

    SIGTERM asks for it. So does the end of torchrun: ranks that outlive it would train on unseen, beside those of the
    next start.
    """

    def __init__(self) -> None:
        self._has_signal = False
        self._launcher = os.getppid() if dist.is_torchelastic_launched() else None
        signal.signal(signal.SIGTERM, self._ask)

    @property
    def is_asked(self) -> bool:
        """Whether a signal came, or the launcher is gone."""
        return self._has_signal or self._launcher not in (None, os.getppid())

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self._has_signal = True


def train(job: Job, ledger: Ledger, stop: Stop) -> None:
    """Trains to the end of the run's last epoch, or until any rank is asked to stop, and saves where that is."""
    config, run = job.config, job.config.run
    with ledger, (run / "metrics.jsonl").open("a", buffering=1) as metrics:
        for _ in range(job.cursor.epoch, config.num_epochs):
            driven = windows(job.loader, heads=("lm",), timeout_s=config.timeout_s)
            for wait_s, window in timed(ledger.watch(driven)):
                begin_s, epoch = time.monotonic(), job.cursor.epoch
                loss_sum = train_window(job, window)
                job.step, job.cursor = job.step + 1, window.cursor
                # One small sum over ranks: the loss for the metrics, and whether any rank was asked to stop.
                totals = torch.stack([loss_sum.cpu(), torch.tensor(float(stop.is_asked), dtype=torch.float64)])
                with ledger.collective("loss and stop", check=False):
                    dist.all_reduce(totals)
                num_targets = window.targets["lm"]
                if job.topology.rank == 0:
                    line = {
                        "step": job.step,
                        "epoch": epoch,
                        "loss": totals[0].item() / num_targets if num_targets else None,
                        **passes(job, window),
                        "tokens_per_s": round(num_targets / (time.monotonic() - begin_s + wait_s)),
                        "wait_s": round(wait_s, 4),
                        "attempt": job.attempt,
                        "world_size": job.topology.world_size,
                    }
                    metrics.write(json.dumps(line) + "\n")
                if totals[1] > 0:
                    job.save()
                    return
                if job.step % config.checkpoint.every_num_steps == 0:
                    job.save()
        job.save()


def train_window(job: Job, window: Window) -> torch.Tensor:
    """Makes one optimizer step, the same on every rank.

    Returns:
        float64[], the loss summed over this rank's targets.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=job.device)
    for micro in window.micro_batches(job.model):
        batch = micro.to(job.device, non_blocking=True)
        with torch.autocast(job.device.type, torch.bfloat16, enabled=job.config.precision == "bfloat16"):
            logits = job.model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        window.loss(lm=loss).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach()
    if window.has_targets:
        clip_grad_norm_(job.model.parameters(), job.config.optimizer.max_gradient_norm)
    if window.step(job.optimizer):
        job.scheduler.step()
    job.optimizer.zero_grad()
    return loss_sum


def passes(job: Job, window: Window) -> dict[str, dict[str, float]]:
    """Returns, for the metrics, how often each source of a mixture has been through; empty for one data set."""
    plan = job.loader.streaming_dataset.plan
    if not isinstance(plan, MixturePlan):
        return {}
    return {"passes": {name: round(num, 4) for name, num in plan.passes(window.cursor.position).items()}}


def timed(windows: Iterable[Window]) -> Iterator[tuple[float, Window]]:
    """Yields each window with the seconds that it was waited for."""
    begin_s = time.monotonic()
    for window in windows:
        yield time.monotonic() - begin_s, window
        begin_s = time.monotonic()


def run_rank(config: Config, stop: Stop) -> None:
    """Does what one rank has to do, from meeting the others to the last checkpoint."""
    timeout = timedelta(seconds=config.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    topology = init_process_group(backend, timeout_s=config.timeout_s, timeout=timeout)
    held = hold(config.run, config.timeout_s) if topology.rank == 0 else None
    pids = config.run / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    (pids / f"rank-{topology.rank}").write_text(str(os.getpid()))
    job = Job.start(config, topology)
    resumed = job.resume()
    verify_ranks(job.loader, timeout_s=config.timeout_s)
    ledger = job.open_ledger()
    if topology.rank == 0:
        how = f"resumes at step {job.step}, epoch {job.cursor.epoch}" if resumed else "begins"
        print(f"{config.run}: attempt {job.attempt} on {topology.world_size} ranks {how}", flush=True)
        plan = job.loader.streaming_dataset.plan
        if isinstance(plan, MixturePlan) and plan.stop is not None:
            times = ", ".join(f"{name} {num:.2f} times" for name, num in plan.passes(plan.stop).items())
            print(f"{config.run}: until position {plan.stop} the sources are gone through: {times}", flush=True)
    train(job, ledger, stop)
    dist.barrier()  # nobody takes the connections down while others use them
    dist.destroy_process_group()
    if held is not None:
        held.close()


@click.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replaces an entry: model.width=96.")
def main(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Train as CONFIG says, or continue the run that is in its run folder. Start it with torchrun."""
    try:
        config = load_config(config_path, overrides)
        config.data.micro_batch(topology_from_environ().world_size)  # refused here, before ranks wait for each other
    except (ConfigError, PlanError) as error:
        raise click.UsageError(str(error)) from None
    try:
        run_rank(config, Stop())
    except ShardStreamError as error:
        raise click.ClickException(f"rank {os.environ.get('RANK', '0')}: {error}") from error
    finally:
        end_workers()


if __name__ == "__main__":
    main()
