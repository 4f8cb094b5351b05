"""Every code block of the README and the docs runs, page by page, in order, as if typed in a clone of the repository.

    python          runs in this process; the blocks of a page share their names
    bash            runs as one `bash -e` script
    console         lines after `$ ` run as one script; where other lines follow, they are what it must print (`...` is
                    any text)
    LANGUAGE no-run REASON      is shown only

Other languages (json, text, mermaid, ...) are not code of ours.
"""

from __future__ import annotations

import doctest
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
_DOCS = sorted((ROOT / "docs").rglob("*.md"))
# Pages on frameworks are run on several ranks, after the suite: tests/frameworks.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for page in _DOCS if page.parent.name != "frameworks")]
REST = frozenset({"exercises", "from-webdataset", "from-mosaicml-streaming", "from-litdata", "from-hf-streaming"})
RUNNABLE = frozenset({"python", "bash", "console"})
MISNAMED = frozenset({"py", "python3", "pycon", "sh", "shell", "zsh", "shell-session"})  # would escape unseen
SHELL_TIMEOUT_S = 240

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<info>[^`]*)$")


class Block(NamedTuple):
    """A fenced block: language, what else its info string says, its text and the line in the page where that begins."""

    language: str
    remark: str
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """Finds the fenced blocks of a Markdown page."""
    blocks: list[Block] = []
    opening, info, lines = None, "", []
    for number, line in enumerate(page.splitlines(), 1):
        fence = _FENCE.match(line)
        if opening is None and fence:
            opening, info, lines = fence, fence["info"], []
        elif opening and fence and not fence["info"] and fence["ticks"].startswith(opening["ticks"]):
            language, _, remark = info.strip().partition(" ")
            blocks.append(Block(language, remark.strip(), "\n".join(lines) + "\n", number - len(lines)))
            opening = None
        elif opening:
            lines.append(line.removeprefix(opening["indent"]))
    assert opening is None, f"a block is not closed: ```{info}"
    return blocks


def runs(block: Block) -> bool:
    """Tells whether a block is to run; fails where it says neither yes nor a proper no."""
    assert block.language not in MISNAMED, f"line {block.line}: call it one of {sorted(RUNNABLE)}, so that it runs"
    if block.language not in RUNNABLE:
        return False
    word, _, reason = block.remark.partition(" ")
    assert word in ("", "no-run"), f"line {block.line}: unknown remark {block.remark!r}"
    assert word == "" or reason, f"line {block.line}: no-run needs a reason"
    return word == ""


def run_page(page: Path, folder: Path) -> int:
    """Runs the blocks of a page in ``folder``, the working directory, and returns how many ran."""
    module = ModuleType("docs_page")
    sys.modules[module.__name__] = module  # classes that a page defines can be pickled then
    wanted = [block for block in blocks_of(page.read_text("utf-8")) if runs(block)]
    try:
        for block in wanted:
            _RUN[block.language](block, f"{page.name}:{block.line}", folder, module)
    finally:
        del sys.modules[module.__name__]
    return len(wanted)


def _run_python(block: Block, place: str, _folder: Path, module: ModuleType) -> None:
    source = "\n" * (block.line - 1) + block.text  # so that a traceback names the line in the page
    exec(compile(source, place.rpartition(":")[0], "exec"), module.__dict__)


def _run_bash(block: Block, place: str, folder: Path, _module: ModuleType) -> None:
    _shell(block.text, place, folder)


def _run_console(block: Block, place: str, folder: Path, _module: ModuleType) -> None:
    commands, expected = split_console(block.text)
    output = _shell(commands, place, folder)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if expected and not doctest.OutputChecker().check_output(expected, output, flags):
        pytest.fail(f"{place} prints\n{output}\nbut the page says\n{expected}", pytrace=False)


_RUN = {"python": _run_python, "bash": _run_bash, "console": _run_console}


def split_console(text: str) -> tuple[str, str]:
    """Splits a console block into its commands (with lines continued by a backslash) and what they should print."""
    commands, expected = [], []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            commands.append(line[2:])
        elif not expected and commands and commands[-1].endswith("\\\n"):
            commands.append(line)
        else:
            expected.append(line)
    assert commands, f"a console block without a line that begins with '$ ':\n{text}"
    return "".join(commands), "".join(expected)


def _shell(script: str, place: str, folder: Path) -> str:
    scripts = sysconfig.get_path("scripts")
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SHELL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{place} still ran after {SHELL_TIMEOUT_S} s", pytrace=False)
    if process.returncode:
        pytest.fail(f"{place} exited with {process.returncode}:\n{output}", pytrace=False)
    return output


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A working directory with what a reader in the root of a clone would use."""
    for name in ("tools", "configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.rest] if page.stem in REST else []) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page(page, clone):
    unmarked = re.findall(r"^ *```(?:python|bash|console)$", page.read_text("utf-8"), re.MULTILINE)
    assert run_page(page, clone) == len(unmarked)


def test_blocks_run_in_order_and_share_names_and_folder(clone):
    page = clone / "page.md"
    page.write_text(
        "# Page\n\n```python\nfrom pathlib import Path\nPath('a.txt').write_text('one\\n')\n```\n\n"
        "- in a list\n\n  ```bash\n  cat a.txt > b.txt\n  ```\n\n"
        "```python\nassert Path('b.txt').read_text() == 'one\\n'\n```\n\n"
        "```console\n$ python -c \\\n  'print(1234)'\n$ cat b.txt\n1...4\none\n```\n\n"
        "```bash no-run it would fail\nfalse\n```\n\n```json\n{}\n```\n"
    )
    assert run_page(page, clone) == 4
    assert "docs_page" not in sys.modules


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```bash\nfalse\ntrue\n```\n", "page.md:2 exited with 1"),
        ("```bash\nfalse | true\n```\n", "exited with 1"),
        ("```console\n$ echo one\ntwo\n```\n", "page.md:2 prints\none\n"),
        ("```console\necho one\n```\n", "without a line that begins"),
        ("```python no-run\nx\n```\n", "needs a reason"),
        ("```python norun because\nx\n```\n", "unknown remark"),
        ("```shell\ntrue\n```\n", "so that it runs"),
        ("```python\nx = 1\n", "not closed"),
    ],
)
def test_a_bad_block_fails_and_says_where(block, message, clone):
    page = clone / "page.md"
    page.write_text(block)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(message)):
        run_page(page, clone)


def test_a_traceback_names_the_line_of_the_page(clone):
    page = clone / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page, clone)
    last = caught.traceback[-1]
    assert (last.path.name if isinstance(last.path, Path) else last.path, last.lineno + 1) == ("page.md", 5)
