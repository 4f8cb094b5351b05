"""`make demo`: the main job, end to end, on text that every machine has; under three minutes on two cores.

A corpus of the Python standard library's sources is indexed and audited. A small transformer is trained on it by two
processes; one is killed at a random step; all are restarted and resume from the checkpoint's cursor; then the run is
stopped and continued by three processes. In the end the audit proves from the logs of all processes that each
document of each epoch was trained on exactly once.
"""

from __future__ import annotations

import json
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: our folder is found from the root

from tools.training.config import ConfigError, load_config
from tools.training.launch import ROOT, LaunchError, Torchrun, call
from tools.training.metrics import newest_step, plot_losses, read_metrics

CONFIG = ROOT / "configs" / "demo.yaml"


@dataclass(frozen=True)
class Mishaps:
    """What happens to the run.

    Attributes:
        kill_step: After this step a rank is killed: in the first epoch, after the first checkpoint.
        kill_rank: The rank.
        stop_step: After this step the run is stopped, to go on with more processes: in the second epoch.
    """

    kill_step: int
    kill_rank: int
    stop_step: int

    @classmethod
    def choose(cls, seed: int, num_steps: int, first_checkpoint: int) -> Mishaps:
        """Draws them at random.

        Args:
            seed: Decides them.
            num_steps: Steps of an epoch; more than there are before the first checkpoint.
            first_checkpoint: After this step the run is saved for the first time.

        Example:
            >>> Mishaps.choose(seed=1, num_steps=50, first_checkpoint=8)
            Mishaps(kill_step=17, kill_rank=0, stop_step=60)
        """
        draw = random.Random(seed)
        kill_step, kill_rank = draw.randint(first_checkpoint + 1, num_steps), draw.randrange(2)
        return cls(kill_step, kill_rank, num_steps + draw.randint(2, num_steps // 2))


class Demo:
    """The steps of the demo, in their order; each prints a line.

    Args:
        out: Folder of everything that is made.
        settings: ``key=value`` texts that replace entries of the config.
    """

    def __init__(self, out: Path, settings: Sequence[str]) -> None:
        self.out, self.run = out, out / "run"
        self.parquet, self.tar = out / "parquet.manifest.parquet", out / "tar.manifest.parquet"
        self.settings = [*settings, f"data.manifest={self.parquet}"]
        self.config = load_config(CONFIG, self.settings)
        self._started_s = time.monotonic()

    def say(self, title: str, text: str) -> None:
        """Prints one line with the time since the start."""
        print(f"[{time.monotonic() - self._started_s:4.0f} s] {title:8} {text}", flush=True)

    def make_corpus(self, num_documents: int, max_document_bytes: int) -> None:
        """Writes documents as Parquet, tar and tar.zst."""
        options = ["--num-documents", str(num_documents), "--max-document-bytes", str(max_document_bytes)]
        for line in call([ROOT / "tools" / "make_corpus.py", self.out / "corpus", *options]).splitlines():
            self.say("corpus", line.partition(" in ")[0])

    def index(self) -> int:
        """Makes the manifests; returns the number of documents."""
        corpus, num_samples = self.out / "corpus", 0
        for manifest, formats, options in (
            (self.tar, ["tar", "tar.zst"], []),
            (self.parquet, ["parquet"], ["--tokens-column", "tokens"]),
        ):
            shards = [corpus / name for name in formats]
            summary = json.loads(call(["-m", "shardstream", "index", *shards, "-o", manifest, "--json", *options]))
            num_samples = summary["num_samples"]
            self.say("index", f"{num_samples:,} samples in {summary['num_shards']} shards: {manifest.name}")
        return num_samples

    def audit(self, num_ranks: int) -> None:
        """Proves, before any training, what the plan deals to so many ranks."""
        data = self.config.data
        plan = {
            "world-size": num_ranks,
            "batch-size": data.micro_batch(num_ranks),
            "global-batch": data.global_batch,
            "tail": data.tail,
            "seed": self.config.seed,
            "epochs": self.config.num_epochs,
        }
        options = [option for name, value in plan.items() for option in (f"--{name}", str(value))]
        report = json.loads(call(["-m", "shardstream", "audit", self.parquet, *options, "--json"]))
        epoch = report["epochs"][0]
        dealt = f"{epoch['num_steps']} steps an epoch, each document once, {epoch['num_padding']} rows of padding"
        self.say("audit", f"{num_ranks} ranks: {dealt}")

    def train_through(self, mishaps: Mishaps) -> None:
        """Trains on two processes, of which one is killed; stops; goes on with three to the end."""
        with Torchrun(CONFIG, self.run, 2, settings=self.settings) as torchrun:
            first = torchrun.wait_for()
            self.say("train", f"2 processes; step 1, loss {first['loss']:.2f}")
            torchrun.wait_for(step=mishaps.kill_step)
            torchrun.send(signal.SIGKILL, mishaps.kill_rank)
            last = torchrun.metrics()[-1]
            self.say("kill", f"rank {mishaps.kill_rank} with SIGKILL, after step {last['step']}")
            again = torchrun.wait_for(attempt=1)
            self.say(
                "restart", f"by torchrun; from the checkpoint's cursor, training goes on with step {again['step']}"
            )
            torchrun.wait_for(step=mishaps.stop_step, attempt=1)
            torchrun.stop()
        last, saved_step = read_metrics(self.run)[-1], newest_step(self.run)
        if saved_step != last["step"]:
            raise LaunchError(f"the run stopped after step {last['step']} and saved step {saved_step}")
        self.say("stop", f"with SIGTERM; saved after step {saved_step}, loss {last['loss']:.2f}")
        with Torchrun(CONFIG, self.run, 3, settings=self.settings) as torchrun:
            again = torchrun.wait_for()
            self.say("resize", f"3 processes go on with step {again['step']}")
            torchrun.finish()
        last = read_metrics(self.run)[-1]
        self.say("train", f"done: step {last['step']}, loss {last['loss']:.2f}, {self.config.num_epochs} epochs")

    def train_from_tar(self, num_steps: int = 3) -> None:
        """Trains a few steps on the same documents as text in tar and tar.zst shards."""
        settings = [*self.settings, f"data.manifest={self.tar}", "data.tokens=txt"]
        with Torchrun(CONFIG, self.out / "tar-run", 2, settings=settings) as torchrun:
            line = torchrun.wait_for(step=num_steps)
            self.say("tar", f"{num_steps} steps from tar and tar.zst shards, loss {line['loss']:.2f}")
            torchrun.stop()

    def prove(self) -> None:
        """Proves from the logs that each document of each epoch was trained on exactly once.

        Raises:
            LaunchError: If that does not hold, or not all epochs were finished.
        """
        options = ["--ledger", str(self.run / "ledger"), "--json"]
        report = json.loads(call(["-m", "shardstream", "audit", self.parquet, *options]))
        for attempt in report["attempts"]:
            counted = f"{attempt['num_windows']} steps count, {attempt['num_discarded']} were rolled back by the crash"
            self.say("prove", f"attempt {attempt['attempt']}, {attempt['world_size']} ranks: {counted}")
        for epoch in report["epochs"]:
            wrong = f"{epoch['num_missing']} missing, {epoch['num_extra']} repeated, {epoch['num_foreign']} foreign"
            self.say("prove", f"epoch {epoch['epoch']}: {epoch['num_samples']:,} documents, {wrong}")
        num_finished = sum(epoch["is_finished"] for epoch in report["epochs"])
        if not report["holds"] or num_finished != self.config.num_epochs:
            raise LaunchError(f"{num_finished} of {self.config.num_epochs} epochs are finished; {report['verdict']}")
        print(f"\nVerdict: {report['verdict']}")
        print(f"  again with: shardstream audit {_shown(self.parquet)} --ledger {_shown(self.run / 'ledger')}")

    def plot(self) -> None:
        """Draws the loss of all attempts."""
        path = self.out / "loss.png"
        plot_losses(read_metrics(self.run), path, "A rank killed, then 2 → 3 processes: one order, one loss curve")
        print(f"  loss curve: {_shown(path)}; checkpoints, metrics and logs: {_shown(self.run)}")


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "build" / "demo")
@click.option("--seed", type=int, help="Decides when which rank is killed.  [default: drawn, and printed]")
@click.option("--num-documents", type=click.IntRange(min=200), default=800, show_default=True)
@click.option("--max-document-bytes", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replaces an entry of configs/demo.yaml.")
def main(out: Path, seed: int | None, num_documents: int, max_document_bytes: int, settings: tuple[str, ...]) -> None:
    """Run the main job end to end: index, audit, train, lose a rank, resume, go on with more ranks, prove it."""
    seed = secrets.randbelow(10_000) if seed is None else seed
    demo = _prepared(out.resolve(), settings)
    data = demo.config.data
    print(f"The main job in {_shown(demo.out)}; --seed {seed} repeats its accidents", flush=True)
    try:
        demo.make_corpus(num_documents, max_document_bytes)
        num_steps, first_checkpoint = demo.index() // data.global_batch, demo.config.checkpoint.every_num_steps
        if num_steps <= first_checkpoint:
            what = (
                f"an epoch of {num_steps} steps leaves no time for a crash after the checkpoint at {first_checkpoint}"
            )
            raise click.UsageError(f"{what}: set checkpoint.every_num_steps or data.global_batch lower")
        for num_ranks in (2, 3):
            demo.audit(num_ranks)
        demo.train_through(Mishaps.choose(seed, num_steps, first_checkpoint))
        demo.train_from_tar()
        demo.prove()
        demo.plot()
    except LaunchError as error:
        raise click.ClickException(f"the demo failed:\n{error}") from None


def _prepared(out: Path, settings: Sequence[str]) -> Demo:
    """Empties the folder, which must be the demo's own, and returns the demo."""
    mark = out / ".demo"
    if out.exists() and any(out.iterdir()) and not mark.exists():
        raise click.UsageError(f"{out} is not empty, and the demo did not make it: choose another folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    mark.touch()
    try:
        return Demo(out, settings)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


if __name__ == "__main__":
    main()
