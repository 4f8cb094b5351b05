"""What `import shardstream` gives, and what it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import shardstream
from shardstream import errors

PUBLIC = [
    "Batch",
    "BatchPlan",
    "Cursor",
    "CursorError",
    "DecodeError",
    "DesyncError",
    "EpochOrder",
    "Manifest",
    "ManifestError",
    "MaskedSample",
    "Mixture",
    "Packing",
    "PlanError",
    "Ragged",
    "ReadError",
    "Reading",
    "ShardChangedError",
    "ShardStreamError",
    "ShardStreamWarning",
    "StreamingDataset",
    "StreamingLoader",
    "Topology",
    "TopologyError",
    "__version__",
    "build_manifest",
    "plan_batch",
    "read_quarantine",
    "replan",
]


def test_public_names_are_these():
    assert shardstream.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(shardstream))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Manifest", "shardstream.manifest"),
        ("EpochOrder", "shardstream.order"),
        ("Cursor", "shardstream.cursor"),
        ("build_manifest", "shardstream.index"),
        ("Batch", "shardstream.torch"),
    ],
)
def test_names_are_those_of_their_modules(name, module):
    assert getattr(shardstream, name) is getattr(importlib.import_module(module), name)


def test_every_error_is_public():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert len(classes) > 5
    assert classes <= set(PUBLIC)


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Manifets'"):
        _ = shardstream.Manifets


@pytest.mark.parametrize(
    "code",
    [
        "import shardstream; shardstream.ManifestError, shardstream.__version__",
        "from shardstream.cli import main; main(['--help'], standalone_mode=False)",
        "from shardstream.cli import main; main(['index', '--help'], standalone_mode=False)",
        "from shardstream.cli import main; main(['--version'], standalone_mode=False)",
    ],
)
def test_light(code):
    code += "; import sys; print(sorted({'torch', 'pyarrow', 'pandas', 'rich', 'fsspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
