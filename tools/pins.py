"""Hashes of what development installs: ``python tools/pins.py write`` or ``check`` (``make verify-pins``).

pip is asked what it would install for ``.[dev]`` under tools/constraints.txt, and for the hash of each file; nothing
is installed. torch and what it alone brings are left out: their wheels differ between package indexes (CPU or CUDA).
The hashes are those of wheels for one Python version and platform: the check is for the machines that releases are
made on.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tools" / "requirements.lock"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
LEFT_OUT = ("torch", "triton", "nvidia", "cuda", "shardstream")


def wanted() -> dict[str, str]:
    """Returns what pip would install: ``name==version`` → sha256 of the file."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", "-c", str(CONSTRAINTS), "--no-build-isolation", f"{ROOT}[dev]"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = {}
    for each in report["install"]:
        name, version = each["metadata"]["name"].lower(), each["metadata"]["version"]
        if name != "torchdata" and name.startswith(LEFT_OUT):
            continue
        found[f"{name}=={version}"] = each["download_info"]["archive_info"]["hashes"]["sha256"]
    return found


@click.command()
@click.argument("action", type=click.Choice(["write", "check"]))
def main(action: str) -> None:
    """Write tools/requirements.lock anew, or check that what would be installed is what it says."""
    found = wanted()
    here = f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])} {platform.machine()}"
    if action == "write":
        lines = [f"# For {here}. Made by `python tools/pins.py write`; torch is left out.\n"]
        lines += [f"{name} --hash=sha256:{digest}\n" for name, digest in sorted(found.items())]
        LOCK.write_text("".join(lines))
        return
    if not LOCK.exists():
        sys.exit(f"{LOCK.name} is not there yet: python tools/pins.py write")
    first, *lines = LOCK.read_text().splitlines()
    if here not in first:
        sys.exit(f"the hashes are those of another machine: {first}")
    known = dict(line.split(" --hash=sha256:") for line in lines)
    different = sorted(name for name in found.keys() | known.keys() if found.get(name) != known.get(name))
    if different:
        sys.exit("not as in tools/requirements.lock: " + ", ".join(different))
    print(f"{len(known)} packages have the hashes that are known")


if __name__ == "__main__":
    main()
