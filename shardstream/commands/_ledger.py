"""``shardstream audit --ledger``: what a run's ledger shows, of one data set or of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardstream.commands._options import print_json
from shardstream.commands._tables import print_verdict, stdout, table

if TYPE_CHECKING:
    from rich.console import Console

    from shardstream.audit import MixtureLogsReport
    from shardstream.audit.consumption import ConsumedReport
    from shardstream.audit.ledger import LedgerReport, MixtureLedgerReport, StepEvents
    from shardstream.manifest import Manifest
    from shardstream.mixing import Mixture


def audit_ledger(data: Manifest | Mixture, directory: str, step: int | None, *, as_json: bool) -> bool:
    """Checks a run's ledger, and prints what was found and what happened in a step.

    Returns:
        Whether everything holds.
    """
    from shardstream.audit.ledger import check_ledger, step_events

    report = check_ledger(directory, data)
    shown = None if step is None else step_events(directory, data, step)
    if as_json:
        print_json({**report.to_dict(), **({} if shown is None else {"step": shown.to_dict()})})
        return report.holds
    console = stdout()
    if shown is not None:
        _print_step(console, shown)
    _print_ledger(console, report)
    return report.holds


def _print_step(console: Console, step: StepEvents) -> None:
    targets = ", ".join(f"{head} {total:,}" for head, total in step.targets.items())
    title = f"Step {step.step}: epoch {step.epoch}, position {step.position}, attempt {step.attempt}; targets {targets}"
    rows = [
        (f"{1e3 * each.time_s:.3f}", each.rank, each.event, "" if each.ids is None else " ".join(map(str, each.ids)))
        for each in step.events
    ]
    console.print(table(title, ["ms", "rank", "event", "samples"], rows))


def _print_ledger(console: Console, report: LedgerReport | MixtureLedgerReport) -> None:
    print_counts(console, report.consumed)
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    print_verdict(console, report.violations, report.verdict())


def print_counts(console: Console, report: ConsumedReport | MixtureLogsReport) -> None:
    """Prints attempts and epochs, which a mixture has none of, and what is worth knowing."""
    from shardstream.audit.consumption import ConsumedReport

    if isinstance(report, ConsumedReport):
        _print_attempts(console, report)
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)


def _print_attempts(console: Console, report: ConsumedReport) -> None:
    names = ["attempt", "ranks", "global batch", "from epoch", "position", "windows", "rolled back", "ended"]
    console.print(table("Attempts", names, [vars(a).values() for a in report.attempts]))
    names = ["epoch", "finished", "windows", "samples", "padding", "dropped", "missing", "repeated", "foreign"]
    fields = ("epoch", "is_finished", "num_windows", "num_samples", "num_padding", "num_dropped", "num_missing")
    rows = [[getattr(epoch, name) for name in (*fields, "num_extra", "num_foreign")] for epoch in report.epochs]
    console.print(table("Epochs", names, rows))
