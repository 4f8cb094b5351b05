"""Reads an epoch under each fault and prints what came of it.

python -m tools.faults --share 0.2
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from tools.faults.rounds import fault_rounds


@click.command()
@click.option("--share", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="Of requests that fail.")
@click.option("--seed", default=0, show_default=True, help="Of the choice.")
def main(share: float, seed: int) -> None:
    """Print a JSON line for each epoch; exit 1 if one was neither exact nor refused in time."""
    is_good = True
    with tempfile.TemporaryDirectory() as folder:
        for done in fault_rounds(Path(folder), share=share, seed=seed):
            print(json.dumps(asdict(done)), flush=True)
            is_good = is_good and done.is_good
    raise SystemExit(0 if is_good else 1)


if __name__ == "__main__":
    main()
