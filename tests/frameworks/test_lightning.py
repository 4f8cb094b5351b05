"""PyTorch Lightning, as its page says: exact over ranks, workers, a resume inside an epoch and another world size."""

from __future__ import annotations

import warnings

import pytest
import torch

from shardstream.errors import PlanError
from shardstream.torch import StreamingDataset, StreamingLoader
from shardstream.torch.integrations.lightning import StreamingData
from tests.support.frameworks import (
    DATA,
    GLOBAL_BATCH,
    NUM_SAMPLES,
    accumulate_of,
    as_launched,
    labelled_manifest,
    launch,
    needs,
    once_each,
    real,
    right_weights,
    weights,
)
from tests.support.pages import page_code
from tests.support.streams import joined
from tests.support.training import TokenModel, token_loss

pytestmark = [pytest.mark.rest, pytest.mark.distributed, pytest.mark.timeout(400), needs("lightning")]

# Lightning's advice to users, and what it calls that torch deprecates, are not ours to test.
LIGHTNINGS_ADVICE = pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning")

NUM_STEPS = 8  # of six in an epoch: two in the second one


def _fit(rank, world_size, manifest, folder, checkpoint, options, steps_of=None):
    """One run; returns the ids that this rank trained on, whether validation was whole, its loss, and the weights."""
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    warnings.simplefilter("ignore")  # Lightning's advice to users (loggers, workers, devices) is not ours to test
    if world_size > 1:
        as_launched(rank, world_size)
    page = page_code("lightning")
    trained = []

    class Traced(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trained.append(real(batch))

    class Naive(page.Model):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            mean = self.losses(batch).sum() / batch.valid_tokens["lm"].sum().clamp(min=1)
            self.log("naive", mean, sync_dist=True, batch_size=len(batch))

    page.Model = Naive
    data = page.Data(manifest, 2, accumulate_of(2))
    saving = ModelCheckpoint(folder, filename=str(world_size), every_n_train_steps=NUM_STEPS, save_top_k=-1)
    model = page.fit(
        TokenModel(),
        data,
        checkpoint,
        max_epochs=2,
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        callbacks=[Traced(), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    return trained, _evaluated(model), weights(model.net)


def _evaluated(model):
    if not hasattr(model, "report"):
        return None
    report = model.report
    is_whole = report.is_complete and report.num_samples == NUM_SAMPLES
    return is_whole, report.heads["lm"].mean, float(model.trainer.callback_metrics["naive"])


def test_resumes_in_mid_epoch_on_another_number_of_ranks(tmp_path):
    manifest = labelled_manifest(tmp_path)
    stopped = {"max_steps": NUM_STEPS}
    before = launch(_fit, 2, 2, manifest, tmp_path, None, stopped)
    checkpoint = tmp_path / "2.ckpt"
    state = torch.load(checkpoint, weights_only=True)["Data"]
    assert (state["cursor"]["epoch"], state["cursor"]["position"], state["num_windows"]) == (1, 2 * GLOBAL_BATCH, 2)
    after = launch(_fit, 1, 1, manifest, tmp_path, checkpoint, {})

    assert once_each(joined(ids for trained, *_ in [*before, *after] for ids in trained), num_epochs=2)
    found, expected = after[0][2], right_weights(manifest, num_epochs=2)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12), (found - expected).abs().max()
    assert torch.equal(before[0][2], before[1][2])
    assert before[0][1] == before[1][1], "validation, at the end of the first epoch"
    is_whole, mean, naive = after[0][1]
    assert is_whole
    assert before[0][1][0]
    assert mean == pytest.approx(_mean_loss(manifest, found), rel=1e-10)
    assert abs(naive - mean) > 1e-3, "what the page says of self.log"


def _mean_loss(manifest, found):
    model = TokenModel()
    torch.nn.utils.vector_to_parameters(found, model.parameters())
    [batch] = StreamingDataset(manifest, **DATA | {"batch_size": NUM_SAMPLES, "global_batch": NUM_SAMPLES})
    return float(token_loss(model, batch).detach()) / int(batch.valid_tokens["lm"].sum())


def _alone(data, checkpoint, folder, **options):
    """One run in this process that saves after each step; returns the windows it trained on as (epoch, position)."""
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    trained = []

    class Traced(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trained.append((trainer.current_epoch, batch.position))

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = TokenModel()

        def training_step(self, batch, batch_idx):
            return token_loss(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(callbacks=[Traced(), saving], **silent, **options)
    trainer.fit(Model(), datamodule=data, ckpt_path=checkpoint)
    return trained


def _data_of(manifest, base, **options):
    import lightning.pytorch as lightning

    class Data(*base, lightning.LightningDataModule):
        def train_loader(self):
            return StreamingLoader(StreamingDataset(manifest, **DATA | options))

    Data.__qualname__ = "Data"  # Lightning's key in the checkpoint
    if not base:
        Data.train_dataloader = Data.train_loader
    return Data()


@LIGHTNINGS_ADVICE
def test_without_the_mixin_later_epochs_are_as_short_as_what_was_left(tmp_path):
    """What the page says of a plain loader; if this fails, Lightning has changed, and the page with it."""
    manifest = labelled_manifest(tmp_path)
    for base, num_windows in (((), 2), ((StreamingData,), 6)):
        options = {"batch_size": GLOBAL_BATCH, "max_epochs": 2}
        folder = tmp_path / str(num_windows)
        _alone(_data_of(manifest, base, batch_size=GLOBAL_BATCH), None, folder, max_epochs=2, max_steps=4)
        after = _alone(
            _data_of(manifest, base, batch_size=GLOBAL_BATCH),
            folder / "step=4.ckpt",
            folder,
            max_epochs=options["max_epochs"],
        )
        expected = [(0, 32), (0, 40), *((1, 8 * window) for window in range(num_windows))]
        assert after == expected


@LIGHTNINGS_ADVICE
def test_a_stream_without_end_from_which_lightning_prefetches(tmp_path):
    manifest = labelled_manifest(tmp_path)
    options = {"max_steps": 9, "accumulate_grad_batches": 4}
    data = _data_of(manifest, (StreamingData,), tail="continue")
    whole = _alone(data, None, tmp_path / "whole", **options)
    assert [position for _, position in whole[::4]] == [0, 8, 16, 24, 32, 40, 2, 10, 18]
    other = _data_of(manifest, (StreamingData,), tail="continue", batch_size=4)
    checkpoint = tmp_path / "whole" / "step=3.ckpt"
    assert torch.load(checkpoint, weights_only=True)["Data"]["cursor"]["position"] == 3 * GLOBAL_BATCH
    resumed = _alone(other, checkpoint, tmp_path / "resumed", **options | {"accumulate_grad_batches": 2})
    assert resumed[::2] == whole[12::4]


def test_another_accumulation_is_refused(tmp_path):
    data = _data_of(labelled_manifest(tmp_path), (StreamingData,))
    with pytest.raises(PlanError, match=r"expected Trainer\(accumulate_grad_batches=4\)"):
        _alone(data, None, tmp_path / "saved", max_steps=1)
