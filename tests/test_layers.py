"""Imports go down only. The table is the design's; every module and every import, lazy ones included, is held to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "shardstream"

# What each part may import directly; what those may import, it may import too. A folder is one part.
BELOW = {
    "cli": "commands",
    "commands": "report prepare torch audit verify index fetch",
    "testing": "index",
    "torch": "audit index fetch quarantine",
    "report": "audit",
    "audit": "memory consumed rounds plan formats manifest_file mixture_plan",
    "prepare": "index formats manifest_file permutation processes",
    "verify": "index permutation checksums",
    "index": "executors formats manifest_file checksums",
    "fetch": "open_runs closing manifest_file",
    "closing": "",
    "open_runs": "block_check faults ahead memory reading mixture_layout formats processes",
    "faults": "layout gathering",
    "ahead": "layout formats",
    "block_check": "formats checksums",
    "reading": "manifest ranges",
    "memory": "reading mixture_layout formats",
    "layout": "plan gathering",
    "packed_layout": "layout packed_faults",
    "packed_faults": "packed_run",
    "tokens": "plan formats",
    "consumed": "mixture_plan ledger_file",
    "rounds": "ledger_file",
    "ledger_file": "",
    "quarantine": "",
    "packed_run": "packing fitting deal gathering",
    "packing": "order fitting manifest permutation",
    "fitting": "permutation",
    "plan": "order deal cursor batching packing",
    "mixing": "packing manifest permutation",
    "mixture_file": "mixing manifest",
    "mixture_past": "mixing plan",
    "mixture_plan": "mixing mixture_past plan",
    "mixture_layout": "packed_layout mixture_plan",
    "deal": "order",
    "order": "manifest permutation grouping",
    "cursor": "permutation",
    "batching": "",
    "formats": "arrow_memory checksums ranges storage manifest fitting",
    "ranges": "cache read_stats storage",
    "cache": "",
    "checksums": "",
    "read_stats": "",
    "manifest_file": "arrow_memory storage manifest",
    "storage": "",
    "executors": "processes",
    "processes": "",
    "manifest": "",
    "permutation": "",
    "grouping": "",
    "columns": "",
    "gathering": "columns grouping",
    "errors": "",
    "_version": "",
    "_lazy": "",
    "arrow_memory": "",
}
EVERYWHERE = frozenset({"errors", "columns", "_version", "_lazy"})
# Imports that go up, inside functions only.
LAZY_UPWARDS = {
    ("mixing", "mixture_file"): "Mixture.load is the front door; what a file may hold is behind it",
    ("manifest", "manifest_file"): "Manifest.load and .save are the front door; the file's details are behind it",
}
PURE = (
    *(
        "errors",
        "columns",
        "gathering",
        "grouping",
        "permutation",
        "manifest",
        "order",
        "deal",
        "cursor",
        "batching",
        "plan",
        "__init__",
    ),
    *("fitting", "packing", "packed_run", "mixing", "mixture_past", "mixture_plan"),
)
HEAVY = frozenset({"torch", "pyarrow", "fsspec"})


class Import(NamedTuple):
    """One imported module: its dotted name, and whether importing the importer runs it."""

    name: str
    at_top: bool
    line: int


def imports_of(source: str, package: str = "shardstream") -> list[Import]:
    """Finds every import of a module of ``package``, inside functions and for type checking too."""
    finder = _Finder(package.split("."))
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, package: list[str]) -> None:
        self.package = package
        self.found: list[Import] = []
        self._at_top = True

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, self._at_top, node.lineno) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.package[: len(self.package) + 1 - node.level] if node.level else []
        base = ".".join([*parents, node.module or ""]).strip(".")
        # `from shardstream import order` names a module, `from shardstream.order import EpochOrder` does not
        names = [f"{base}.{alias.name}" for alias in node.names] if base == "shardstream" else [base]
        self.found += [Import(name, self._at_top, node.lineno) for name in names]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_later(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast names it

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            self._visit_later(node.body)
            node = ast.If(node.test, [], node.orelse)
        self.generic_visit(node)

    def _visit_later(self, body: list[ast.stmt]) -> None:
        """Visits what does not run when the module is imported."""
        at_top, self._at_top = self._at_top, False
        for statement in body:
            self.visit(statement)
        self._at_top = at_top


def part_of(module: str) -> str:
    """Returns the part of the package that a module belongs to: its first name below ``shardstream``."""
    return module.split(".")[1] if "." in module else "__init__"


def reachable(part: str) -> frozenset[str]:
    """Returns every part that ``part`` may import."""
    direct = BELOW[part].split()
    return EVERYWHERE.union(direct, *(reachable(below) for below in direct))


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Lists the imports of a module that the table does not allow."""
    part = part_of(module)
    faults = []
    for name, at_top, line in imports_of(source, module if is_package else module.rpartition(".")[0]):
        below = part_of(name)
        ours = name.split(".")[0] == "shardstream"
        if name.split(".")[0] == "torch" and at_top and part != "torch":
            faults.append(f"{module}:{line} imports torch when it is imported; only shardstream.torch may")
        if not ours or below == part or below in reachable(part):
            continue
        if at_top or (part, below) not in LAZY_UPWARDS:
            faults.append(f"{module}:{line} imports {name}, which is not below {part}")
    return faults


def _modules() -> dict[str, Path]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(("shardstream", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in paths}


MODULES = _modules()


def test_every_module_has_its_place_in_the_table():
    parts = {part_of(module) for module in MODULES} - {"__init__", "__main__"}
    assert parts <= BELOW.keys(), "give the new module a line in BELOW"


def test_the_table_has_no_circles():
    def depth(part: str, above: tuple[str, ...] = ()) -> int:
        assert part not in above, f"{part} is below itself: {above}"
        return 1 + max((depth(below, (*above, part)) for below in BELOW[part].split()), default=0)

    assert max(map(depth, BELOW)) >= 5


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".") > 1 or part_of(name) in BELOW])
def test_imports_go_down(module):
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    name = module.removesuffix(".__init__") if is_package else module
    assert violations(name, path.read_text("utf-8"), is_package=is_package) == []


@pytest.mark.parametrize("part", PURE)
def test_pure_modules_load_nothing_heavy(part):
    source = (PACKAGE / f"{part}.py").read_text("utf-8")
    at_top = {name.split(".")[0] for name, at_top, _ in imports_of(source) if at_top}
    assert not at_top & HEAVY


@pytest.mark.parametrize("statement", ["import shardstream", "import shardstream.cli"])
def test_importing_loads_neither_torch_nor_pyarrow(statement):
    _assert_light(statement)


def test_help_loads_neither_torch_nor_pyarrow():
    _assert_light("from shardstream.cli import main; main(['--help'], standalone_mode=False)")


def _assert_light(statement: str) -> None:
    code = f"import sys; {statement}; print(sorted({{'torch', 'pyarrow'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardstream.order", "from shardstream.deal import Deal"),
        ("shardstream.order", "def f():\n    from shardstream import deal"),
        (
            "shardstream.order",
            "class A:\n  def f(self):\n    try: pass\n    except OSError:\n      from . import audit",
        ),
        ("shardstream.order", "import torch"),
        ("shardstream.order", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("shardstream.order", "from shardstream import EpochOrder"),
        ("shardstream.formats.tar", "from ..index import build_manifest"),
        ("shardstream.formats.tar", "with x:\n    import shardstream.fetch"),
        ("shardstream.audit", "import shardstream.torch.batch"),
        ("shardstream.manifest", "from shardstream.manifest_file import load_manifest"),
        ("shardstream.storage", "if TYPE_CHECKING:\n    from shardstream.index import Index"),
    ],
)
def test_finds(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardstream.order", "from shardstream.permutation import key64\nfrom shardstream import errors, manifest"),
        ("shardstream.order", "def f():\n    import torch"),
        ("shardstream.order", "if TYPE_CHECKING:\n    import torch"),
        ("shardstream.manifest", "def f():\n    from shardstream.manifest_file import load_manifest"),
        ("shardstream.formats.tar", "from . import Shard\nfrom ..storage import open_file"),
        ("shardstream.torch.batch", "import torch\nfrom .dataset import x\nfrom shardstream.storage import y"),
    ],
)
def test_allows(module, source):
    assert violations(module, source) == []
