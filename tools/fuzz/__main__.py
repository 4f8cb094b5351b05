"""Fuzzes readers: ``python -m tools.fuzz --seconds 60 tar parquet`` (all of them by default).

Inputs are good ones with damage that hypothesis draws and shrinks; with ``--engine atheris`` (``pip install atheris``)
libFuzzer looks for damage that reaches new code. Each target runs in a process of its own, which is watched: an error
that is not of the library's own tree, a crash, a hang and memory without bound are findings. A finding is written to
build/fuzz and makes the exit code 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from tools.fuzz.targets import TARGETS

_PATIENCE_S = 120  # beyond the time given, for a process that no longer answers


@click.command()
@click.argument("names", metavar="[TARGET]...", nargs=-1, type=click.Choice(sorted(TARGETS)))
@click.option("--seconds", type=click.FloatRange(0), default=10.0, show_default=True, help="For each target.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another one draws other inputs.")
@click.option("--engine", type=click.Choice(["hypothesis", "atheris"]), default="hypothesis", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/fuzz"), show_default=True, help="Where findings go."
)
def main(names: tuple[str, ...], seconds: float, seed: int, engine: str, out: Path) -> None:
    """Fuzz each TARGET for a while; all of them by default."""
    failed = []
    for name in names or sorted(TARGETS):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", f"tools.fuzz.{engine}_engine", name, str(seconds), str(seed), str(folder)]
        try:
            code = subprocess.run(command, timeout=seconds + _PATIENCE_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -9
        if code:
            failed.append(name)
            click.echo(f"{name}: FAILED ({f'signal {-code}' if code < 0 else f'exit {code}'}); look into {folder}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
