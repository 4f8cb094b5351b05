"""What differs between the docs as GitHub shows them and as a site; mkdocs calls these functions (mkdocs.yml, hooks).

- Pages in the root of the repository (README, CHANGELOG, ...) are pages of the site, too.
- Links to other files of the repository, which a site has no page for, become their names.
- The remark of a fence (``bash no-run REASON``) is for the tests, not for readers.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
ROOT_PAGES = {  # and what they are called on the site, where a README would be the folder's index
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s#:]*)(?P<anchor>#[^)\s]*)?\)")
_REMARK = re.compile(r"^( *```+\w+) .*$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository's root."""
    from mkdocs.structure.files import File

    for name, on_site in ROOT_PAGES.items():
        files.append(File.generated(config, on_site, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites a page before it is rendered."""
    del config
    source = page.file.src_uri
    return _REMARK.sub(r"\1", site_links(markdown, source, frozenset(file.src_uri for file in files)))


def site_links(markdown: str, source: str, pages: frozenset[str]) -> str:
    """Returns a page with its links as the site has them.

    Args:
        markdown: The page's text.
        source: Its path on the site.
        pages: Such paths of all pages of the site.

    Raises:
        FileNotFoundError: If a link leads to a file that is not in the repository.
    """
    place = next((name for name, on_site in ROOT_PAGES.items() if on_site == source), f"{DOCS}/{source}")

    folder = str(PurePosixPath(source).parent)

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link["text"], link["target"], link["anchor"] or ""
        if not target:
            return link[0]
        path = normpath(str(PurePosixPath(place).parent / target))  # below the repository's root
        if path == DOCS:
            path = f"{DOCS}/index.md"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{place} links to {target}, which is not in the repository")
        on_site = ROOT_PAGES.get(path) or path.removeprefix(f"{DOCS}/")
        if on_site in pages:
            return f"[{text}]({relpath(on_site, folder)}{anchor})"
        if (first := next((page for page in sorted(pages) if page.startswith(f"{on_site}/")), None)) is not None:
            return f"[{text}]({relpath(first, folder)})"  # a folder: its first page
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(rewritten, markdown)
