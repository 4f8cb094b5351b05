"""Pages of the docs on frameworks: their code is what the tests run, on several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from tests.test_docs import blocks_of, runs

FRAMEWORKS = Path(__file__).parents[2] / "docs" / "frameworks"


def page_code(name: str) -> ModuleType:
    """Runs the Python blocks of ``docs/frameworks/NAME.md`` as one module, which DataLoader workers can unpickle."""
    module = ModuleType(f"docs_{name}")
    sys.modules[module.__name__] = module
    for block in blocks_of((FRAMEWORKS / f"{name}.md").read_text("utf-8")):
        if block.language == "python" and runs(block):
            exec(compile("\n" * (block.line - 1) + block.text, f"{name}.md", "exec"), module.__dict__)
    return module
