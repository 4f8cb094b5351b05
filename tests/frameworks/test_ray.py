"""Ray Train, as its page says: two workers of two DataLoader workers each, then one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.frameworks import labelled_manifest, needs, once_each, right_weights
from tests.support.pages import FRAMEWORKS
from tests.support.streams import joined
from tests.test_docs import blocks_of

pytestmark = [pytest.mark.rest, pytest.mark.distributed, pytest.mark.timeout(400), needs("ray")]

DRIVER = """
import json, sys
from tests.support.frameworks import real, weights
from tests.support.streams import joined
from tests.support.training import TokenModel

folder = sys.argv[1]


def run(name, num_workers, **options):
    def after_step(window, net):
        rank = ray.train.get_context().get_world_rank()
        with open(f"{folder}/{name}-{rank}.jsonl", "a") as file:
            line = {"ids": joined(map(real, window.batches)), "weights": weights(net).tolist()}
            print(json.dumps(line), file=file)

    config = {"net": TokenModel, "after_step": after_step, "num_epochs": 1, "manifest": f"{folder}/data.parquet"}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config | options,
        torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name=name, storage_path=f"{folder}/results"),
    )
    return trainer.fit()


with tempfile.TemporaryDirectory() as sockets:  # their paths must be short
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sockets)
    try:
        first = run("before", 2, save_at=24)
        run("after", 1, save_at=None, checkpoint=first.checkpoint)
    finally:
        ray.shutdown()
"""


def test_resumes_in_mid_epoch_on_another_number_of_workers(tmp_path):
    manifest = labelled_manifest(tmp_path)
    manifest.save(tmp_path / "data.parquet")
    code = [block.text for block in blocks_of((FRAMEWORKS / "ray.md").read_text("utf-8")) if block.language == "python"]
    script = tmp_path / "script.py"
    script.write_text("\n\n".join([*code, DRIVER]))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        cwd=root,
        env={**_environment(), "PYTHONPATH": str(root)},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    before = [_lines(tmp_path / f"before-{rank}.jsonl") for rank in range(2)]
    after = _lines(tmp_path / "after-0.jsonl")
    assert once_each(joined(line["ids"] for lines in before for line in lines))
    kept = [line for lines in before for line in lines[:3]]  # up to the checkpoint at position 24
    assert once_each(joined(line["ids"] for line in [*kept, *after]))
    expected = right_weights(manifest, 1).tolist()
    for lines in (*before, after):
        assert lines[-1]["weights"] == pytest.approx(expected, rel=1e-9)


def _environment():
    import os

    return {
        **os.environ,
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
