"""No data becomes code: the sources are looked through, and shards with pickles are left as they are."""

from __future__ import annotations

import ast
import io
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from shardstream.errors import DecodeError, ShardStreamError
from shardstream.torch import decode
from tools.training.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "shardstream").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
UNSAFE = {
    "pickle.load",
    "pickle.loads",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
}
UNSAFE |= {"eval", "exec", "os.system", "os.popen", "dill.load", "joblib.load", "cloudpickle.load", "yaml.full_load"}
# Where data is unpickled only when the user asked for it by name.
ASKED_FOR = {("shardstream/torch/decode.py", "np.load")}
# What a DataLoader worker sent to the process that started it: a part of a message that torch unpickles.
FROM_OUR_WORKERS = {("shardstream/torch/parcel.py", "pickle.loads")}


def called(node):
    return ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""


def said(node, name):
    return next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == name), None)


def unsafe_calls(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, place = called(node), str(path.relative_to(ROOT))
        is_bad = (
            name in UNSAFE
            or (name == "torch.load" and said(node, "weights_only") != "True")
            or (name in ("np.load", "numpy.load") and said(node, "allow_pickle") not in (None, "False"))
            or (said(node, "shell") == "True")
        )
        if is_bad and (place, name) not in ASKED_FOR | FROM_OUR_WORKERS:
            yield f"{place}:{node.lineno} {name}"


def test_no_source_unpickles_or_runs_what_it_read():
    assert [call for path in SOURCES for call in unsafe_calls(path)] == []


def test_the_look_through_finds_what_it_is_for(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("torch.load(f)\ntorch.load(f, weights_only=False)\nnp.load(f, allow_pickle=True)\nyaml.load(f)\n")
    assert len(list(unsafe_calls(path))) == 4


class Trap:
    def __reduce__(self):
        return subprocess.check_call, (["touch", "sprung"],)


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "pyd", "pth", "pkl.gz", "seg.pickle", "PYD"])
def test_pickles_in_samples_stay_bytes(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trap = pickle.dumps(Trap())
    if suffix.endswith(".gz"):
        import gzip

        packed = gzip.compress(trap)
        assert isinstance(decode()({suffix: packed})[suffix], bytes)
    else:
        assert decode()({suffix: trap})[suffix] == trap
    assert not (tmp_path / "sprung").exists()


def test_arrays_of_objects_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = io.BytesIO()
    np.save(sink, np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(DecodeError):
        decode()({"__key__": "a", "npy": sink.getvalue()})
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_that_would_run_code_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(tmp_path / "run", 2)
    path = checkpoints.save(1, {"model": torch.zeros(1)})
    torch.save({"model": Trap()}, path)
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(ShardStreamError, match="no checkpoint"):
        checkpoints.newest()
    assert not (tmp_path / "sprung").exists()
