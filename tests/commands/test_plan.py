"""The command ``shardstream plan``, as a user runs it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from shardstream.cli import main

EXAMPLE = ("--global-tokens", "16Mi", "--sequence-length", "4Ki", "--num-devices", "8192", "--tp", "8", "--pp", "16")


def run(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["plan", *arguments], prog_name="shardstream")


def test_the_worked_example_as_json():
    done = run(*EXAMPLE, "--resize-to", "32", "--parameters", "7e9", "--json")
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout)
    assert (planned["world_size"], planned["accumulate"], planned["tokens"]) == (64, 64, 16_777_216)
    (resize,) = planned["resizes"]
    assert resize["unchanged"] == {"global_batch": 2048, "tokens": 8_388_608}
    assert (resize["world_size"], resize["accumulate"], resize["tokens"]) == (32, 128, 16_777_216)
    assert planned["training_state"]["num_bytes"] == 112 * 10**9
    assert planned["training_state"]["num_bytes_per_device"]["split_over_tp_pp"] == 112 * 10**9 / 128


def test_the_worked_example_for_people():
    done = run(*EXAMPLE, "--resize-to", "32", "--parameters", "7B")
    assert done.exit_code == 0, done.output
    for text in ("8,388,608 tokens", "16,777,216", "8,192 devices = 64 data-parallel ranks x 128", "112 GB"):
        assert text in done.stdout


def test_a_plan_in_samples_names_its_alternatives():
    done = run("--global-batch", "512", "--world-size", "32", "--max-micro-batch", "8", "--resize-to", "16")
    assert done.exit_code == 0, done.output
    assert "4 x 4, 2 x 8, 1 x 16" in done.stdout
    assert "256 samples" in done.stdout
    done = run("--global-batch", "2036", "--dp", "4", "--max-micro-batch", "8")
    assert "a global batch of 2,016 or 2,048 would use all" in done.stdout


def test_a_resize_that_does_not_fit_is_refused_with_those_that_do():
    done = run("--global-batch", "512", "--world-size", "64", "--resize-to", "48")
    assert done.exit_code == 1
    assert "cannot be shared by 48 ranks" in done.stderr
    assert "use a world size of 32 or 64" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "4"], "give either --global-batch or --global-tokens"),
        (["--world-size", "4", "--global-batch", "8", "--global-tokens", "8"], "give either --global-batch"),
        (["--world-size", "4", "--global-tokens", "8"], "--global-tokens needs --sequence-length"),
        (["--global-batch", "8"], "give --world-size (--dp) or --num-devices"),
        (["--global-batch", "8", "--dp", "2", "--num-devices", "8", "--tp", "2"], "makes 4 data-parallel ranks, not 2"),
        (["--global-batch", "eight", "--dp", "2"], "'eight' is not a whole number such as 512"),
        (["--global-batch", "0", "--dp", "2"], "'0' is not a whole number"),
        (["--global-batch", "1.5", "--dp", "2"], "'1.5' is not a whole number"),
        (["--global-batch", "8", "--dp", "2", "--resize-to", "4x"], "'4x' is not a whole number"),
    ],
)
def test_wrong_usage(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
