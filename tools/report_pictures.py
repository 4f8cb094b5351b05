"""Takes the pictures of docs/report.md: ``python -m tools.report_pictures REPORT.html docs/images``. Needs Chromium."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

SHOTS = (
    # name, width, colours, what is in the picture
    ("report-data", 1000, "light", "#data"),
    ("report-order", 1000, "light", "#order"),
    ("report-run", 1000, "light", "#run"),
    ("report-phone", 360, "dark", None),
)


@click.command()
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(page: Path, folder: Path) -> None:
    """Write pictures of PAGE to FOLDER."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise click.UsageError("no Chromium here: make browser")
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"] * (os.geteuid() == 0))
        for name, width, colours, anchor in SHOTS:
            shown = browser.new_page(viewport={"width": width, "height": 720}, color_scheme=colours)  # type: ignore[arg-type]
            shown.goto(page.absolute().as_uri())
            path = folder / f"{name}.png"
            if anchor is None:
                shown.screenshot(path=path)
            else:
                shown.locator(f"section[aria-labelledby='{anchor[1:]}']").screenshot(path=path)
            click.echo(f"{path}: {path.stat().st_size:,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
