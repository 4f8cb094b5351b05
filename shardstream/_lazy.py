"""Packages whose names are loaded when they are first used, so that importing them costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def attributes(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and ``__dir__`` of a package.

    Type checkers must not see them, or they accept any name: put them into the ``else`` of ``if TYPE_CHECKING``.

    Args:
        package: Name of the package.
        modules: Public name → module that defines it. The name must not be that of a module of the package.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
