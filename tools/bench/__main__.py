"""The command line: ``python -m tools.bench COMMAND``."""

from __future__ import annotations

from pathlib import Path

import click

from tools.bench.case import REPOSITORY, Case, Folders
from tools.bench.preparing import prepare_data, prepare_large, prepare_many, prepare_peers, prepare_store
from tools.bench.profiling import profile
from tools.bench.report import write_report
from tools.bench.runs import run_suite
from tools.bench.subjects import PEERS
from tools.bench.suites import EVERYDAY, GROWTH, SUITES


@click.group(context_settings={"show_default": True})
@click.option("--root", type=click.Path(path_type=Path), envvar="BENCH_ROOT", default=REPOSITORY / "build/bench")
@click.option("--data", type=click.Path(path_type=Path), envvar="BENCH_DATA", help="Default: ROOT/data.")
@click.pass_context
def main(context: click.Context, root: Path, data: Path | None) -> None:
    """Shardstream beside what users have today, and beside what this machine can do."""
    context.obj = Folders(root.resolve(), (data or root / "data").resolve())


@main.command()
@click.option("--scale", default=1.0, help="Fraction of the samples.")
@click.option("--workloads", default="TI")
@click.option("--large", is_flag=True, help="Also the two large blocks of the memory suite (3.2 GB).")
@click.option("--peers/--no-peers", default=True)
@click.pass_obj
def prepare(folders: Folders, scale: float, workloads: str, large: bool, peers: bool) -> None:  # noqa: FBT001 - flags
    """Write data, manifests and the peers' own formats; what is there is left alone."""
    prepare_data(folders, workloads, scale, click.echo)
    prepare_many(folders, scale, click.echo)
    prepare_store(folders, workloads, click.echo)
    if large:
        prepare_large(folders, scale, click.echo)
    if peers:
        prepare_peers(folders, list(PEERS), workloads, scale, click.echo)


@main.command("profile")
@click.option("--workload", default="T", type=click.Choice(["T", "I"]))
@click.option("--threads", default=2)
@click.option("--form", default="parquet", type=click.Choice(["parquet", "tar", "tar.zst"]))
@click.option("--ranks", default=1, help="Read as rank 0 of so many.")
@click.option("--samples", default=200_000)
@click.option("--functions", default=30)
@click.pass_obj
def profile_command(
    folders: Folders, workload: str, threads: int, form: str, ranks: int, samples: int, functions: int
) -> None:
    """Profile shardstream's reading path in this process."""
    options = {"form": form}
    case = Case("profile", "shardstream", workload, num_threads=threads, world_size=ranks, options=options)
    profile(case, folders, samples, functions, click.echo)


def _add_suite(name: str) -> None:
    @main.command(name, help=f"Run the {name} suite.")
    @click.option("--repetitions", default=5)
    @click.option("--only", multiple=True, help="Cases whose name contains this; may be given several times.")
    @click.pass_obj
    def run(folders: Folders, repetitions: int, only: tuple[str, ...]) -> None:
        cases = [case for case in SUITES[name]() if not only or any(part in case.name for part in only)]
        run_suite(name, cases, repetitions, folders, click.echo)


for _name in SUITES:
    _add_suite(_name)


@main.command("all")
@click.option("--repetitions", default=5)
@click.option("--growth", is_flag=True, help="The suites of `make bench-scale` instead.")
@click.option("--large", is_flag=True, help="Also the memory suite's large blocks.")
@click.pass_obj
def run_all(folders: Folders, repetitions: int, growth: bool, large: bool) -> None:  # noqa: FBT001 - flags
    """Run every suite, then the report."""
    for name in (*(GROWTH if growth else EVERYDAY), *["memory-large"] * large):
        click.echo(f"== {name}")
        run_suite(name, SUITES[name](), repetitions, folders, click.echo)
    write_report(folders, click.echo)


@main.command()
@click.pass_obj
def report(folders: Folders) -> None:
    """Write the table, the JSON and the plots of what was measured so far."""
    write_report(folders, click.echo)


if __name__ == "__main__":
    main(prog_name="python -m tools.bench")
