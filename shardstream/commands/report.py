"""``shardstream report``: an audit, and a run's ledger, as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._mixture import mixture_of, mixture_plan_of
from shardstream.commands._options import print_json, warnings_shown
from shardstream.commands._plan import check_plan_options, plan_of, plan_options

if TYPE_CHECKING:
    from shardstream.report import Report


@click.command()
@plan_options
@click.option("--ledger", metavar="DIR", help="Show what a run did, too, from what its ranks logged in DIR.")
@click.option("-o", "--output", metavar="FILE", help="The page to write; replaced if it is there.")
@click.pass_context
def report(ctx: click.Context, /, **options: Any) -> None:
    """Write one HTML page on MANIFEST: its shards, the order, tails, what reading costs; and what a run did.

    MANIFEST may be a mixture's YAML file. The page needs nothing else: no network, no scripts.

    Exit code 1 if anything is violated; the page is written then, too.
    """
    check_plan_options(options)
    if options["output"] is None and not options["as_json"]:
        raise click.UsageError("give -o FILE, or --json")
    with warnings_shown() as warnings:
        made = _report(ctx, options)
    if options["output"] is not None:
        from shardstream.storage import write_atomic

        with write_atomic(options["output"], options["storage_options"]) as file:
            file.write(made.to_html().encode())
    if options["as_json"]:
        print_json({**made.to_dict(), "warnings": list(warnings)})
    else:
        _print(made, options["output"])
    if not made.holds:
        ctx.exit(1)


def _report(ctx: click.Context, options: dict[str, Any]) -> Report:
    from shardstream.mixing import is_mixture
    from shardstream.report import report_on_mixture, report_on_plan

    common = {"num_workers": options["num_workers"], "ledger": options["ledger"]}
    if is_mixture(options["manifest_path"]):
        plan = mixture_plan_of(mixture_of(ctx, options), options)
        return report_on_mixture(plan, num_windows=options["windows"], **common)
    if options["windows"] is not None:
        raise click.UsageError("--windows goes with a mixture's YAML file")
    from shardstream.audit import read_labels

    of_one, label = plan_of(options), options["label"]
    labels = read_labels(of_one.manifest, label, options["storage_options"]) if label else None
    return report_on_plan(of_one, epochs=options["epochs"], labels=labels, **common)


def _print(made: Report, output: str) -> None:
    from shardstream.commands._tables import print_verdict, stdout
    from shardstream.errors import shown_url

    console = stdout()
    num_figures = sum(len(section.figures) for section in made.sections)
    text = f"{num_figures} figures in {len(made.sections)} sections, written to {shown_url(output)}"
    console.print(text, markup=False, soft_wrap=True)
    print_verdict(console, made.violations, made.verdict.removesuffix("."))
