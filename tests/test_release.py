"""What is released: wheel and sdist, what is in them, and the wheel installed into an environment of its own."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from shardstream import __version__

ROOT = Path(__file__).parents[1]
if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
else:
    PROJECT = None

NEEDS_TOML = pytest.mark.skipif(PROJECT is None, reason="tomllib came with Python 3.11")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist, and the wheel that is built from it, as a package index would be given them."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.rest
def test_the_wheel_holds_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"shardstream-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"shardstream-{__version__}.dist-info/METADATA"))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "shardstream").rglob("*.py")}
    assert sources | {"shardstream/py.typed", f"shardstream-{__version__}.dist-info/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {"shardstream", f"shardstream-{__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or "test_" in name]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Version"] == __version__


@pytest.mark.rest
def test_the_sdist_can_be_tested_and_built(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CITATION.cff", "pyproject.toml", "Makefile", "mkdocs.yml", "tools/train.py"):
        assert name in names
    assert {"tests/test_release.py", "docs/index.md", "shardstream/py.typed"} <= names
    assert not [name for name in names if name.startswith(("build/", ".venv/", "dist/")) or name.endswith(".pyc")]


@pytest.mark.rest
@pytest.mark.timeout(240)
def test_the_installed_wheel_runs(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    target = [sys.executable, "-m", "pip", "--python", tmp_path / "venv" / "bin" / "python", "install"]
    subprocess.run([*target, "-qq", "--no-deps", "--no-index", wheel], check=True, timeout=120)
    # What it depends on comes from here. The folder is on the path behind the wheel's files, and its own .pth files,
    # with the working tree's among them, are not read.
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def output_of(*command):
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    binaries = tmp_path / "venv" / "bin"
    assert "index" in output_of(binaries / "shardstream", "--help")
    assert __version__ in output_of(binaries / "shardstream", "--version")
    where = "import shardstream.torch; print(shardstream.__file__)"
    assert output_of(binaries / "python", "-c", where).startswith(str(site))
    audit = [binaries / "shardstream", "audit", "--synthetic", "2x2x10", "--world-size", "2", "--batch-size", "4"]
    assert "exactly once" in output_of(*audit)


def test_all_say_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")


@NEEDS_TOML
def test_the_lowest_versions_are_those_of_the_project():
    required = [re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)$", line) for line in PROJECT["dependencies"]]
    lowest = {match[1].lower(): match[2] for match in required if match[1] != "torch"}  # see the file
    lines = (ROOT / "tools" / "minimum.txt").read_text("utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert lowest.keys() <= pins.keys()
    for name, version in lowest.items():
        parts = version.split(".")
        assert pins[name].split(".")[: len(parts)] == parts, name
        assert set(pins[name].split(".")[len(parts) :]) <= {"0"}, name


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_issue_forms_are_what_they_have_to_be(form):
    fields = yaml.safe_load(form.read_text("utf-8"))
    assert {"name", "description", "body"} <= fields.keys()
    ids = [field["id"] for field in fields["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    assert any(field.get("validations", {}).get("required") for field in fields["body"])
