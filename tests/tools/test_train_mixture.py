"""tools/train.py on a mixture: two sources packed and mixed, trained on two ranks, resumed on three."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from shardstream.audit.ledger import check_ledger
from shardstream.mixture_file import mixture_of
from shardstream.mixture_plan import MixturePlan
from shardstream.packing import Packing
from tools.make_corpus import SOURCES
from tools.training.config import ConfigError, load_config
from tools.training.launch import ROOT, Torchrun, call
from tools.training.metrics import read_metrics

MIXTURE = ROOT / "configs" / "mixture.yaml"


def test_the_config_is_valid():
    config = load_config(MIXTURE)
    assert set(config.data.mixture["sources"]) == {"stdlib", "descriptions"} == set(SOURCES)
    assert (config.data.micro_batch(2), config.data.micro_batch(3)) == (6, 4)


@pytest.mark.parametrize("override", ["data.manifest=x.parquet", "data.mixture=null"])
def test_either_a_manifest_or_a_mixture_is_given(override):
    with pytest.raises(ConfigError, match="give either manifest or mixture"):
        load_config(MIXTURE, [override])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_mixture_is_trained_on_two_ranks_and_resumed_on_three(tmp_path: Path) -> None:
    options = ["--formats", "parquet", "--num-documents", "60", "--max-document-bytes", "300", "--num-shards", "2"]
    for source in SOURCES:
        call([ROOT / "tools" / "make_corpus.py", tmp_path / source, *options, "--source", source])
        paths = [tmp_path / source / "parquet", "-o", tmp_path / f"{source}.parquet"]
        call(["-m", "shardstream", "index", *paths, "--tokens-column", "tokens"])
    settings = yaml.safe_load(MIXTURE.read_text())
    for source, given in settings["data"]["mixture"]["sources"].items():
        given["manifest"] = str(tmp_path / f"{source}.parquet")
    settings["data"] |= {"global_batch": 12, "max_micro_batch": 2}
    settings["data"]["mixture"] |= {
        "stop_after": 480,
        "schedule": [{"at": 240, "weights": {"stdlib": 1, "descriptions": 1}}],
    }
    settings["model"] = {"context_length": 64, "width": 16, "num_layers": 1, "num_heads": 2}
    config, run = tmp_path / "mixture.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(settings))
    with Torchrun(config, run, 2) as torchrun:
        torchrun.wait_for(step=9)
        torchrun.send(signal.SIGTERM, rank=1)
        torchrun.finish()
    with Torchrun(config, run, 3) as torchrun:
        torchrun.finish()
    assert "until position 480 the sources are gone through: descriptions" in torchrun.log.read_text()
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert {line["world_size"] for line in lines} == {2, 3}
    mixture = mixture_of(settings["data"]["mixture"])
    plan = MixturePlan.make(mixture, batch_size=12, seed=7, packing=[Packing(64, eos_id=0)] * 2)
    assert lines[-1]["passes"] == {name: round(times, 4) for name, times in plan.passes(480).items()}
    report = check_ledger(run / "ledger", mixture)
    assert report.holds, report.violations
    assert (report.consumed.num_windows, report.consumed.position, report.consumed.num_attempts) == (40, 480, 2)
    assert report.num_denominators == 40 <= report.num_rounds
    lines = (run / "ledger" / "rank-00000.attempt-0001.jsonl").read_text().splitlines()
    (proved,) = (each for each in map(json.loads, lines) if each["kind"] == "epoch")
    assert proved["position"] + proved["num_samples"] == 480
    cursor = torch.load(max((run / "checkpoints").glob("*.pt")), weights_only=True)["cursor"]
    assert (cursor["epoch"], cursor["position"]) == (0, 480)
    assert Counter(start for start, _, _ in cursor["mixture"]["schedule"]) == {0: 1, 240: 1}
