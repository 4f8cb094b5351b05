"""The audit of packed sequences: it shows that tokens are conserved, and finds each way in which they are not."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardstream.audit import audit
from shardstream.audit.tokens import check_tokens
from shardstream.cli import main
from shardstream.errors import ShardStreamWarning
from shardstream.packing import PackedOrder, Packing
from shardstream.plan import Plan
from tests.support.token_files import token_manifest

LENGTHS = [3, 0, None, 17, 1, 2, 40, None, 5, 0, 11, 4, 6, 1, 1, 90, 2, 8, None, 3, 21, 7, 0, 5, 9, 13, 2, 30, 4, 6] * 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return token_manifest(tmp_path_factory.mktemp("corpus"), LENGTHS, pack=[8, 100])


def plan_of(corpus, **options):
    options = {"sequence_length": 8, "eos_id": 0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardStreamWarning)
        return Plan.make(corpus, batch_size=2, world_size=3, seed=4, packing=Packing(**options))


@pytest.mark.parametrize("eos_id", [None, 0])
@pytest.mark.parametrize("mode", ["tokens", "whole", "unpacked"])
def test_tokens_are_conserved(corpus, mode, eos_id):
    report = audit(plan_of(corpus, mode=mode, eos_id=eos_id), num_workers=2, epochs=2)
    assert report.violations == ()
    assert sum(proof.startswith("tokens:") for proof in report.proofs) == 2
    documents = [length + (eos_id is not None) for length in LENGTHS if length is not None]
    assert report.packing.num_tokens == sum(documents)
    assert report.packing.num_without_tokens == sum(not length for length in LENGTHS)
    assert report.settings["packing"]["mode"] == mode


def test_whole_documents_leave_padding_and_first_fit_no_less(corpus):
    for eos_id in (None, 0):
        figures = audit(plan_of(corpus, mode="whole", sequence_length=100, eos_id=eos_id)).packing
        assert 0 < figures.padding_best_fit <= figures.padding_first_fit < 1
        assert figures.padding_best_fit == pytest.approx(figures.padding)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda pieces: pieces._replace(begin=pieces.begin + (pieces.begin > 9)), "lost or come twice"),
        (lambda pieces: pieces._replace(end=np.maximum(pieces.end - 1, pieces.begin)), "lost or come twice"),
        (lambda pieces: pieces._replace(run=pieces.run * 0), "met twice|lost or come twice"),
        (lambda pieces: type(pieces)(*(array[:-2] for array in pieces)), "not every token"),
    ],
)
def test_a_broken_line_is_found(corpus, monkeypatch, broken, message):
    right = PackedOrder.pieces
    monkeypatch.setattr(PackedOrder, "pieces", lambda self, ids: broken(right(self, ids)))
    faults, _ = check_tokens(plan_of(corpus).epoch(1))
    assert any(re.search(message, fault) for fault in faults)
    assert all(fault.startswith("epoch 1: ") for fault in faults)


def test_the_command_audits_sequences(corpus, tmp_path):
    path = str(tmp_path / "m.parquet")
    replace(corpus, root=str(Path(corpus.urls[0]).parent), urls=[Path(url).name for url in corpus.urls]).save(path)
    done = CliRunner().invoke(main, ["audit", path, "--sequence-length", "8", "--eos-id", "0", "--whole", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["holds"]
    assert report["packing"]["num_sequences"] == report["settings"]["num_samples"]
    shown = CliRunner().invoke(main, ["audit", path, "--sequence-length", "100", "--whole"]).output
    assert "best fit leaves" in shown
    assert CliRunner().invoke(main, ["audit", path, "--eos-id", "0"]).exit_code == 2
