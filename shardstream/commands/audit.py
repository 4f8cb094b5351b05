"""``shardstream audit``: shows what a plan deals to whom, and what a run consumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._ledger import audit_ledger, print_counts
from shardstream.commands._mixture import audit_mixture_file
from shardstream.commands._options import print_json, warnings_shown
from shardstream.commands._plan import check_plan_options, manifest_of, plan_of, plan_options
from shardstream.commands._tables import print_verdict, stdout, table

if TYPE_CHECKING:
    from rich.console import Console

    from shardstream.audit import AuditReport, TracedBatch
    from shardstream.audit.consumption import ConsumedReport
    from shardstream.manifest import Manifest
    from shardstream.plan import Plan

_MOST_RANKS_SHOWN = 16


@click.command()
@plan_options
@click.option("--trace", "with_trace", is_flag=True, help="Print who gets which sample at each step (small sets).")
@click.option("--consumed", metavar="DIR", help="Prove exactly-once from a run's logs in DIR, instead of from a plan.")
@click.option("--ledger", metavar="DIR", help="As --consumed; and check targets and collectives of all ranks.")
@click.option(
    "--step", type=click.IntRange(0), metavar="N", help="With --ledger: what happened when in step N (from 0)."
)
@click.option("--plot", metavar="FILE", help="Of a mixture: draw shares over steps (needs matplotlib).")
@click.pass_context
def audit(ctx: click.Context, /, **options: Any) -> None:
    """Prove, before a job starts, that every sample of MANIFEST comes exactly once, and show what reading it costs.

    MANIFEST may be a mixture's YAML file: then of every source, and that each has its share of every window.

    With --consumed, prove it from the logs of a run. Exit code 1 if anything is violated.
    """
    from shardstream.mixing import is_mixture

    check_plan_options(options)
    if options["consumed"] and options["ledger"]:
        raise click.UsageError("give either --consumed or --ledger")
    if options["step"] is not None and not options["ledger"]:
        raise click.UsageError("--step needs --ledger")
    is_mixed = is_mixture(options["manifest_path"])
    if not is_mixed and (options["windows"] is not None or options["plot"] is not None):
        raise click.UsageError("--windows and --plot go with a mixture's YAML file")
    with warnings_shown() as warnings:
        if is_mixed:
            holds = audit_mixture_file(ctx, options, warnings)
        elif options["ledger"] is not None:
            holds = audit_ledger(manifest_of(options), options["ledger"], options["step"], as_json=options["as_json"])
        elif options["consumed"] is not None:
            holds = _audit_run(manifest_of(options), options["consumed"], as_json=options["as_json"])
        else:
            holds = _audit_plan(plan_of(options), options, warnings)
    if not holds:
        ctx.exit(1)


def _audit_plan(plan: Plan, options: dict[str, Any], warnings: list[str]) -> bool:
    from shardstream.audit import audit as audit_plan
    from shardstream.audit import read_labels, trace

    num_workers, epochs = options["num_workers"], options["epochs"]
    label = options["label"]
    labels = read_labels(plan.manifest, label, options["storage_options"]) if label else None
    report = audit_plan(plan, num_workers=num_workers, epochs=epochs, labels=labels)
    traced = list(trace(plan, num_workers=num_workers, epochs=epochs)) if options["with_trace"] else None
    if options["as_json"]:
        more = {} if traced is None else {"trace": [batch.to_dict() for batch in traced]}
        print_json({**report.to_dict(), "warnings": list(warnings), **more})
        return report.holds
    console = stdout()
    if traced is not None:
        _print_trace(console, traced)
    _print_report(console, report)
    return report.holds


def _audit_run(manifest: Manifest, directory: str, *, as_json: bool) -> bool:
    from shardstream.audit.consumption import check_consumed

    report = check_consumed(directory, manifest)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_consumed(stdout(), report)
    return report.holds


# --------------------------------------------------------------------------------------------------------- for people


def _print_report(console: Console, report: AuditReport) -> None:
    about = report.settings
    shown = (
        "num_samples",
        "num_blocks",
        "world_size",
        "num_workers",
        "batch_size",
        "accumulate",
        "global_batch",
        "lanes",
    )
    facts = [(name.removeprefix("num_").replace("_", " "), about[name]) for name in (*shown, "shuffle", "tail", "seed")]
    console.print(table("Plan", ["", ""], facts))
    names = ["epoch", "steps", "samples", "padding", "dropped", "repeated", "of the next epoch"]
    console.print(table("Epochs", names, [list(vars(epoch).values()) for epoch in report.epochs]))
    ranks = [list(vars(rank).values()) for rank in report.ranks]
    cut = ranks if len(ranks) <= _MOST_RANKS_SHOWN else [*ranks[:8], ["..."] * 6, *ranks[-4:]]
    console.print(table("Ranks", ["rank", "steps", "micro-batches", "samples", "padding", "repeated"], cut))
    for line in (
        *_packing(report),
        *_reading(report),
        *_quality(report),
        *(f"Proof: {proof}" for proof in report.proofs),
    ):
        console.print(line, markup=False, soft_wrap=True)
    print_verdict(console, report.violations, "every promise holds: exactly once, disjoint, equal steps")


def _packing(report: AuditReport) -> Iterator[str]:
    figures = report.packing
    if figures is None:
        return
    without = "" if figures.num_without_tokens is None else f", {figures.num_without_tokens:,} rows hold none"
    yield (
        f"Packing: {figures.num_tokens:,} tokens in {figures.num_sequences:,} sequences, "
        f"{figures.padding:.2%} of them padding{without}"
    )
    if figures.padding_best_fit is not None:
        yield (
            f"Packing: best fit leaves {figures.padding_best_fit:.2%} empty, first fit {figures.padding_first_fit:.2%} "
            "(in the shards looked at)"
        )


def _reading(report: AuditReport) -> Iterator[str]:
    cost = report.reading
    if cost is None:
        return
    if cost.amplification is None:
        yield f"Reading: {cost.how}"
        return
    yield f"Reading: each of {cost.num_blocks:,} blocks is opened {cost.amplification:.2f} times ({cost.how})"
    num_bytes = "" if cost.open_num_bytes is None else f", up to {cost.open_num_bytes / 1e6:,.1f} MB compressed"
    yield f"Reading: a reader holds up to {cost.open_runs} runs open{num_bytes}"
    for text in cost.advice:
        yield f"  lower with {text}"
    if report.memory is not None:
        yield f"Memory: a reader needs about {report.memory}"


def _quality(report: AuditReport) -> Iterator[str]:
    quality = report.quality
    if quality is None:
        return
    where = f"{quality.num_windows} of {quality.num_windows_in_epoch} global batches looked at"
    yield (
        f"Shuffle: {quality.neighbours:.4%} of neighbours in a shard meet in one global batch; "
        f"uniform shuffle {quality.uniform_neighbours:.4%} ({where})"
    )
    if quality.num_classes is not None:
        yield (
            f"Shuffle: of {quality.num_classes:,} classes, {quality.classes_per_global_batch:.1f} in a global batch "
            f"(uniform {quality.uniform_classes_per_global_batch:.1f}), {quality.classes_per_micro_batch:.1f} in a "
            f"micro-batch (uniform {quality.uniform_classes_per_micro_batch:.1f})"
        )


def _print_trace(console: Console, traced: Sequence[TracedBatch]) -> None:
    def cell(texts: Sequence[object], is_padding: Sequence[bool]) -> str:
        return " ".join(f"({text})" if padding else str(text) for text, padding in zip(texts, is_padding, strict=False))

    rows = [
        (b.epoch, b.step, b.rank, b.worker, b.micro, cell(b.ids, b.is_padding), cell(b.places, b.is_padding))
        for b in traced
    ]
    names = ["epoch", "step", "rank", "worker", "micro", "samples", "shard:row"]
    console.print(table("Trace; (padding) in parentheses", names, rows))


def _print_consumed(console: Console, report: ConsumedReport) -> None:
    print_counts(console, report)
    print_verdict(console, report.violations, report.verdict())
