"""Doctests in docstrings as code on the site: griffe knows the section ``Examples:`` only (mkdocs.yml, extensions)."""

from __future__ import annotations

import re

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Takes ``Example:`` for ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_options: object) -> None:
        """Changes an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
