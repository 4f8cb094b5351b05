"""``shardstream audit`` of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._ledger import audit_ledger, print_counts
from shardstream.commands._options import print_json
from shardstream.commands._plan import SHUFFLES, packing_mode
from shardstream.commands._tables import print_verdict, stdout, table

if TYPE_CHECKING:
    from shardstream.audit import MixtureReport
    from shardstream.mixing import Mixture
    from shardstream.mixture_plan import MixturePlan

_PLAN_OPTIONS = ("world_size", "batch_size", "global_batch", "accumulate", "seed")
_OTHERS = ("lanes", "tail", "epochs", "label", "with_trace")


def audit_mixture_file(ctx: click.Context, options: dict[str, Any], warnings: list[str]) -> bool:
    """Audits a mixture, or the logs of a run on it, and prints what was found.

    Returns:
        Whether everything holds.

    Raises:
        click.UsageError: If an option was given that goes with one data set only.
    """
    from shardstream.audit import audit_mixture

    mixture = mixture_of(ctx, options)
    if options["ledger"] is not None:
        return audit_ledger(mixture, options["ledger"], options["step"], as_json=options["as_json"])
    if options["consumed"] is not None:
        return _audit_logs(mixture, options["consumed"], as_json=options["as_json"])
    plan = mixture_plan_of(mixture, options)
    report = audit_mixture(plan, num_workers=options["num_workers"], num_windows=options["windows"])
    if options["plot"] is not None:
        from shardstream.audit.plots import plot_shares

        num_windows = (report.settings["end"] - report.settings["start"]) // plan.global_batch
        plot_shares(plan, options["plot"], num_windows=max(1, num_windows), first=report.settings["start"])
    if options["as_json"]:
        print_json({**report.to_dict(), "warnings": list(warnings)})
    else:
        _print(report)
    return report.holds


def mixture_of(ctx: click.Context, options: dict[str, Any]) -> Mixture:
    """Loads a mixture.

    Raises:
        click.UsageError: If an option was given that goes with one data set only.
    """
    from shardstream.mixing import Mixture

    for name in _OTHERS:
        if name in options and ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = "--trace" if name == "with_trace" else f"--{name}"
            raise click.UsageError(f"{option} goes with one data set, not with a mixture")
    return Mixture.load(options["manifest_path"], **{name: options[name] for name in ("storage_options", "allow_url")})


def mixture_plan_of(mixture: Mixture, options: dict[str, Any]) -> MixturePlan:
    """Returns the plan of a mixture that is looked at.

    Raises:
        click.UsageError: If its sources are packed and the length of sequences is not given.
    """
    from shardstream.mixture_plan import MixturePlan
    from shardstream.packing import Packing

    packing, length = None, options["sequence_length"]
    if length is not None:
        columns = [manifest.tokens_column or "tokens" for manifest in mixture.manifests]
        common = [Packing(length, column, options["eos_id"], packing_mode(options)) for column in columns]
        packing = list(map(mixture.packed, mixture.names, common))
    elif mixture.packing:
        raise click.UsageError("sources of this mixture say how they are packed: --sequence-length is needed")
    settings = {name: options[name] for name in _PLAN_OPTIONS}
    return MixturePlan.make(mixture, packing=packing, shuffle=SHUFFLES[options["shuffle"]], **settings)  # type: ignore[arg-type]


def _audit_logs(mixture: Mixture, directory: str, *, as_json: bool) -> bool:
    from shardstream.audit import check_mixture_logs

    report = check_mixture_logs(directory, mixture)
    if as_json:
        print_json(report.to_dict())
        return report.holds
    out = stdout()
    print_counts(out, report)
    print_verdict(out, report.violations, report.verdict())
    return report.holds


def _print(report: MixtureReport) -> None:
    out, about = stdout(), report.settings
    facts = [(name.replace("_", " "), about[name]) for name in ("world_size", "num_workers", "batch_size")]
    facts += [(name.replace("_", " "), about[name]) for name in ("accumulate", "global_batch", "lanes", "seed", "stop")]
    out.print(table("Plan", ["", ""], facts))
    rows = [
        (
            each.name,
            " → ".join(f"{w:.4g}" for w in each.weights),
            each.num_samples,
            each.num_given,
            f"{each.num_passes:.2f}",
        )
        for each in report.sources
    ]
    until = f"position {about['end'] if about['stop'] is None else about['stop']}"
    out.print(table(f"Sources, up to {until}", ["source", "share", "samples", "given", "passes"], rows))
    for proof in report.proofs:
        out.print(f"Proof: {proof}", markup=False, soft_wrap=True)
    print_verdict(
        out, report.violations, "every promise holds: quotas met, each source exactly once a pass, equal steps"
    )
