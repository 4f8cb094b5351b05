"""tools/train.py on packed sequences: a run on two ranks goes on with three, and its logs prove both epochs."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import yaml

from shardstream.audit.ledger import check_ledger
from shardstream.manifest import Manifest
from shardstream.packing import Packed, Packing
from tools.training.config import load_config
from tools.training.launch import ROOT, Torchrun, call
from tools.training.metrics import read_metrics

PACKED = ROOT / "configs" / "packed.yaml"


def test_the_config_is_valid():
    config = load_config(PACKED)
    assert (config.data.packing, config.data.eos_id) == ("tokens", 0)
    assert config.data.micro_batch(2) == 6


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_packed_run_goes_on_with_more_ranks(tmp_path: Path) -> None:
    corpus, path = tmp_path / "corpus", tmp_path / "m.parquet"
    options = ["--num-documents", "96", "--max-document-bytes", "300", "--num-shards", "3"]
    call([ROOT / "tools" / "make_corpus.py", corpus, *options])
    call(["-m", "shardstream", "index", corpus / "parquet", "-o", path, "--tokens-column", "tokens"])
    settings = yaml.safe_load(PACKED.read_text())
    settings["data"] |= {"manifest": str(path), "global_batch": 6}
    settings |= {"model": {"context_length": 64, "width": 16, "num_layers": 1, "num_heads": 2}, "num_epochs": 2}
    config = tmp_path / "packed.yaml"
    config.write_text(yaml.safe_dump(settings))
    run = tmp_path / "run"
    with Torchrun(config, run, 2) as torchrun:
        torchrun.wait_for(step=12)
        torchrun.send(signal.SIGTERM, rank=1)
        torchrun.finish()
    with Torchrun(config, run, 3) as torchrun:
        torchrun.finish()
    manifest = Manifest.load(path)
    num_sequences = Packed.of(manifest, Packing(64, eos_id=0)).num_sequences
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 2 * math.ceil(num_sequences / 6) + 1))
    assert {line["world_size"] for line in lines} == {2, 3}
    report = check_ledger(run / "ledger", manifest)
    assert report.holds, report.violations
    assert [epoch.num_samples for epoch in report.consumed.epochs] == [num_sequences] * 2
