"""Writes docs/reliability.md from what the trials found: ``python -m tools.reliability``.

    python -m tools.reliability --run chaos --run chaos-fixed --run two-hosts --run soak --run faults

``--run`` repeats a trial first and writes its counts to docs/reliability/; what is not repeated is taken from there. So
no figure of the page is typed by hand. ``--check`` tells whether the page is what the counts say.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PAGE, COUNTS = ROOT / "docs" / "reliability.md", ROOT / "docs" / "reliability"

TRIALS = {
    "chaos": ["tools/chaos.py", "--rounds", "110", "--seed", "2026", "--timeout-s", "20"],
    "chaos-fixed": ["tools/chaos.py", "--rounds", "20", "--seed", "7", "--fixed-world-size", "2", "--timeout-s", "20"],
    "two-hosts": ["tools/two_hosts.py", "--cuts", "4"],
    "soak": ["tools/soak.py", "--micro-batches", "10000000"],
    "soak-workers": ["tools/soak.py", "--micro-batches", "1000000", "--workers", "2", "--method", "fork"],
}
Report = dict[str, Any]
_FUZZ_S = 20


def table(rows: list[tuple[object, ...]]) -> str:
    """Returns a Markdown table; the first row is its head.

    Example:
        >>> print(table([("what", "count"), ("kills", 3)]))
        | what | count |
        |---|---|
        | kills | 3 |
    """
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _counted(title: str, counts: dict[str, int]) -> str:
    return f"{title}: " + ", ".join(f"{name} {number}" for name, number in counts.items()) + "."


def _verdict(report: Report) -> str:
    if not report["violations"]:
        return "Nothing was violated."
    return "**Violated**:\n\n" + "\n".join(f"- {text}" for text in report["violations"])


def chaos(report: Report) -> str:
    """Renders a run of tools/chaos.py."""
    fixed = report["fixed_world_size"]
    sizes = f"always {fixed} processes" if fixed else "2 to 4 processes, drawn at each start"
    equal = "bit-equal" if report["largest_difference"] == 0 else f"within {report['largest_difference']:.1g} of it"
    wait = report["longest_wait_for_a_stopped_rank_s"]
    rows: list[tuple[object, ...]] = [
        ("what", "count"),
        ("rounds (a signal each)", report["rounds"]),
        ("starts of torchrun", report["launches"]),
        ("attempts that trained", report["num_attempts"]),
        ("ranks lost for good, after which the job went on with one less", report["ranks_lost_for_good"]),
        ("steps that count", f"{report['num_steps']:,}"),
        ("windows trained and rolled back by a crash", report["num_rolled_back"]),
        ("epochs finished", report["num_epochs"]),
        ("samples of those, each exactly once by the ledger", f"{report['num_samples']:,}"),
        ("losses compared with an undisturbed run's at the same step", f"{report['num_losses']:,}, {equal}"),
        ("processes, temporary files, shared memory left", _left(report)),
    ]
    if wait is not None:
        told = f"{wait:.0f} s (deadline {report['timeout_s']:.0f} s)"
        rows.insert(5, ("longest until others ended, when a rank was stopped", told))
    return "\n\n".join(
        [
            f"Seed {report['seed']}, {sizes}, in {report['took_s'] / 60:.0f} minutes.",
            table(rows),
            "\n".join(
                [
                    _counted("- Hit", report["by_kind"]),
                    _counted("- When", report["by_moment"]),
                    _counted("- What came of it", report["by_outcome"]),
                    _counted("- Number of ranks", report["by_world_size"]),
                ]
            ),
            _verdict(report),
        ]
    )


def _left(report: Report) -> str:
    kinds = ("temporary_files_left", "shared_memory_left")
    return ", ".join(str(number) for number in (report["processes_left"], *(len(report[kind]) for kind in kinds)))


def two_hosts(report: Report) -> str:
    """Renders a run of tools/two_hosts.py."""
    rows: list[tuple[object, ...]] = [
        ("what", "count"),
        ("cuts in mid-epoch, at either end", report["cuts"]),
        (
            "longest until both sides had ended",
            f"{report['longest_until_a_side_ended_s']:.0f} s (deadline {report['timeout_s']:.0f} s)",
        ),
        ("number of ranks, one after the other", " → ".join(map(str, report["world_sizes"]))),
        ("epochs finished", report["num_epochs"]),
        ("samples of those, each exactly once by the ledger", f"{report['num_samples']:,}"),
    ]
    return f"{table(rows)}\n\n{_verdict(report)}"


def soak(report: Report) -> str:
    """Renders a run of tools/soak.py."""
    workers = f"{report['num_workers']} workers ({report['method']})" if report["num_workers"] else "threads"
    rows: list[tuple[object, ...]] = [
        (f"with {workers}", "second quarter", "last quarter"),
        ("memory (PSS), median", *(f"{value:.1f} MB" for value in report["pss_mb"])),
        ("threads, most", *report["num_threads"]),
        ("open descriptors, most", *report["num_files"]),
    ]
    told = (
        f"{report['num_micro_batches']:,} micro-batches, {report['num_epochs']:,} epochs, each proved, "
        f"in {report['took_s'] / 60:.0f} minutes; {report['growth_bytes_per_micro_batch']:+.2f} bytes a micro-batch."
    )
    return f"{told}\n\n{table(rows)}\n\n{_verdict(report)}"


def faults(report: Report) -> str:
    """Renders the epochs of tools/faults."""
    rows: list[tuple[object, ...]] = [("what failed", "of requests", "outcome", "seconds")]
    for each in report["epochs"]:
        failed = f"{each['num_faults']} of {each['num_requests']}"
        rows.append((", ".join(each["kinds"]), failed, each["outcome"], f"{each['seconds']:.1f}"))
    return table(rows)


def run_faults() -> Report:
    """Reads an epoch under each fault of a store."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.faults"], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
    )
    epochs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [f"{', '.join(each['kinds'])}: {each['outcome']}" for each in epochs if not each["is_good"]]
    return {"epochs": epochs, "violations": wrong}


def fuzz(report: Report) -> str:
    """Renders a run of tools/fuzz."""
    rows = [("reader", "inputs", "of them taken"), *((name, *numbers) for name, numbers in report["targets"].items())]
    return f"{report['seconds']} seconds each.\n\n{table(rows)}\n\n{_verdict(report)}"


def run_fuzz() -> Report:
    """Fuzzes each reader for a while."""
    command = [sys.executable, "-m", "tools.fuzz", "--seconds", str(_FUZZ_S)]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"^(\w+): (\d+) inputs, (\d+) taken", done.stdout, re.MULTILINE)
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    targets = {name: [int(inputs), int(taken)] for name, inputs, taken in found}
    return {"seconds": _FUZZ_S, "targets": targets, "violations": failed}


OTHERS: dict[str, Callable[[], Report]] = {"faults": run_faults, "fuzz": run_fuzz}
RENDERERS: dict[str, Callable[[Report], str]] = {
    "chaos": chaos,
    "chaos-fixed": chaos,
    "two-hosts": two_hosts,
    "soak": soak,
    "soak-workers": soak,
    "faults": faults,
    "fuzz": fuzz,
}


def page(template: str, counts: dict[str, Report]) -> str:
    r"""Fills the places ``<!-- counts: NAME -->`` of the page's text.

    Args:
        template: The page as it is, with or without counts.
        counts: Reports by name.

    Example:
        >>> page("a <!-- counts: none --> b <!-- end --> c", {})
        'a <!-- counts: none -->\n\nNot run yet.\n\n<!-- end --> c'
    """
    begin, end = "<!-- counts: ", "<!-- end -->"
    head, *parts = template.split(begin)
    filled = [head]
    for part in parts:
        name, _, rest = part.partition(" -->")
        _, _, after = rest.partition(end)
        text = RENDERERS[name](counts[name]) if name in counts else "Not run yet."
        filled.append(f"{name} -->\n\n{text}\n\n{end}{after}")
    return begin.join(filled)


def load_counts() -> dict[str, Report]:
    """Reads the reports there are."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(COUNTS.glob("*.json"))}


def run(name: str) -> None:
    """Repeats a trial and writes its report."""
    COUNTS.mkdir(parents=True, exist_ok=True)
    path = COUNTS / f"{name}.json"
    if name in OTHERS:
        path.write_text(json.dumps(OTHERS[name](), indent=1) + "\n")
    else:
        script, *options = TRIALS[name]
        subprocess.run([sys.executable, ROOT / script, *options, "--json", path], cwd=ROOT, check=False)
    report = json.loads(path.read_text("utf-8"))
    report["machine"] = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    path.write_text(json.dumps(report, indent=1) + "\n")


@click.command()
@click.option("--run", "names", multiple=True, type=click.Choice([*TRIALS, *OTHERS]), help="Repeat this trial first.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if the page is not what the counts say.")
def main(names: tuple[str, ...], *, check: bool) -> None:
    """Write the page on reliability from the counts of trials."""
    for name in names:
        run(name)
    now = PAGE.read_text("utf-8")
    new = page(now, load_counts())
    if check and now != new:
        raise click.ClickException("docs/reliability.md is not what its counts say: run python -m tools.reliability")
    if not check:
        PAGE.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
