"""The report: an audit, and a run's ledger, as one HTML page that needs nothing else."""

from __future__ import annotations

import os

from shardstream.audit import AuditReport, Labels, MixtureReport, audit, audit_mixture
from shardstream.audit.ledger import check_ledger
from shardstream.errors import shown_url
from shardstream.mixture_plan import MixturePlan
from shardstream.plan import Plan
from shardstream.report.data import data_section
from shardstream.report.mixture import mixture_section
from shardstream.report.order import order_section, plan_section, reading_section, tail_section
from shardstream.report.page import Bars, Figure, HeatMap, Lines, Report, Section, Table
from shardstream.report.run import coverage_section, run_section

__all__ = [
    "Bars",
    "Figure",
    "HeatMap",
    "Lines",
    "Report",
    "Section",
    "Table",
    "report_on_mixture",
    "report_on_plan",
]

_GOOD = "Every promise holds: exactly once, disjoint, equal steps"
_GOOD_MIXTURE = "Every promise holds: quotas met, each source exactly once a pass, equal steps"


def report_on_plan(
    plan: Plan,
    *,
    num_workers: int = 0,
    epochs: int = 1,
    labels: Labels | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> Report:
    """Audits a plan, checks a run's ledger if there is one, and shows both.

    Args:
        plan: The plan.
        num_workers: DataLoader workers of each rank, 0 for none.
        epochs: How many epochs to audit.
        labels: Class of each sample, to count classes per batch; or None.
        ledger: Folder that a run's ``Ledger`` logged to, or None.

    Raises:
        PlanError: If a number is impossible.
        ReadError: If the ledger is damaged, or not of this manifest.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=4, blocks_per_shard=2, rows_per_block=25)
        >>> report = report_on_plan(Plan.make(manifest, batch_size=3, world_size=8))
        >>> report.holds, [section.title for section in report.sections]
        (True, ['Data', 'Plan', 'Order', 'Epochs and tails', 'Reading'])
        >>> report.to_html().startswith("<!doctype html>")
        True
    """
    audited = audit(plan, num_workers=num_workers, epochs=epochs, labels=labels)
    sections = [
        data_section(plan.manifest),
        plan_section(audited),
        order_section(plan, audited),
        tail_section(plan, audited),
        reading_section(plan, audited),
    ]
    title = shown_url(plan.manifest.path or "a planned data set")
    return _report(title, plan, _GOOD, audited, sections, ledger)


def report_on_mixture(
    plan: MixturePlan,
    *,
    num_workers: int = 0,
    num_windows: int | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> Report:
    """Audits a mixture, checks a run's ledger if there is one, and shows both.

    Args:
        plan: The plan.
        num_workers: DataLoader workers of each rank, 0 for none.
        num_windows: How many windows to audit; as for ``audit_mixture``.
        ledger: Folder that a run's ``Ledger`` logged to, or None.

    Raises:
        PlanError: If a number is impossible.
        ReadError: If the ledger is damaged, or not of this mixture.
    """
    audited = audit_mixture(plan, num_workers=num_workers, num_windows=num_windows)
    sections = [mixture_section(plan, audited)]
    for index, (name, manifest) in enumerate(zip(plan.mixture.names, plan.mixture.manifests, strict=True)):
        sections.append(data_section(manifest, name=f"data-{index}", title=f"Data of {name}"))
    return _report(f"a mixture of {', '.join(plan.names)}", plan, _GOOD_MIXTURE, audited, sections, ledger)


def _report(
    title: str,
    plan: Plan | MixturePlan,
    good: str,
    audited: AuditReport | MixtureReport,
    sections: list[Section],
    ledger: str | os.PathLike[str] | None,
) -> Report:
    """Adds what a run's ledger shows, and the verdict on both."""
    violations, details, verdict = audited.violations, {"audit": audited.to_dict()}, good
    if ledger is not None:
        data = plan.mixture if isinstance(plan, MixturePlan) else plan.manifest
        checked = check_ledger(ledger, data)
        violations, verdict = (*violations, *checked.violations), f"{good}. The run: {checked.verdict()}"
        details["ledger"] = checked.to_dict()
        sections = [*sections, coverage_section(checked)]
        if checked.consumed.holds:  # windows that are foreign or missing have no place on an axis of steps
            sections.append(run_section(ledger, data))
    if violations:
        verdict = f"{len(violations)} violation(s)"
    return Report(title, f"{verdict}.", tuple(violations), tuple(sections), details)
