"""The Hugging Face Trainer, as its page says, with a model of theirs: exact denominators, a resume at another size."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from shardstream.errors import CursorError, PlanError
from shardstream.torch import StreamingDataset, StreamingLoader
from shardstream.torch.integrations.transformers import TrainerLoader, cursor_callback
from tests.support.frameworks import (
    DATA,
    GLOBAL_BATCH,
    accumulate_of,
    as_launched,
    labelled_manifest,
    launch,
    needs,
    right_weights,
    weights,
)
from tests.support.pages import page_code
from tests.support.streams import joined

pytestmark = [pytest.mark.rest, pytest.mark.distributed, pytest.mark.timeout(400), needs("transformers")]

NUM_STEPS, NUM_EPOCHS = 8, 2
ARGUMENTS = {
    "num_train_epochs": NUM_EPOCHS,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "save_steps": NUM_STEPS,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))


def _loss_sum(model, batch):
    logits = model(batch["input_ids"]).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=-100)


def _train(rank, world_size, manifest, folder, resume=None):
    """One run that stops at the first checkpoint, or ends; returns the rows this rank trained on, and the weights."""
    from transformers import TrainerCallback

    as_launched(rank, world_size)
    page = page_code("transformers")
    model, rows = _llama(), []
    model.register_forward_pre_hook(lambda _, __, inputs: rows.append(_rows(inputs)), with_kwargs=True)

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **_):
            control.should_training_stop = resume is None

    page.train(model, manifest, folder, accumulate_of(2), resume, [Stop()], **ARGUMENTS)
    return rows, weights(model)


def _rows(inputs):
    """Rows with targets, as text; a row without any has no influence, padding among them."""
    pairs = zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True)
    return [str(pair) for pair in pairs if set(pair[1]) != {-100}]


def test_resumes_in_mid_epoch_on_another_number_of_ranks(tmp_path):
    manifest, folder = labelled_manifest(tmp_path), tmp_path / "out"
    before = launch(_train, 2, 2, manifest, folder)
    saved = folder / f"checkpoint-{NUM_STEPS}"
    state = json.loads((saved / "trainer_state.json").read_text())["stateful_callbacks"]["CursorCallback"]
    cursor = state["attributes"]["cursor"]
    assert (cursor["epoch"], cursor["position"]) == (1, 2 * GLOBAL_BATCH)
    after = launch(_train, 1, 1, manifest, folder, str(saved))

    trained = joined(joined(rows) for rows, _ in [*before, *after])
    expected_rows = joined(map(_rows, map(_inputs, StreamingDataset(manifest, **DATA | {"shifted": False}))))
    assert sorted(trained) == sorted(expected_rows * NUM_EPOCHS)
    expected = right_weights(manifest, NUM_EPOCHS, _llama(), _loss_sum, shifted=False)
    assert torch.allclose(after[0][1], expected, rtol=1e-4, atol=1e-6), (after[0][1] - expected).abs().max()
    assert torch.equal(before[0][1], before[1][1])


def _inputs(batch):
    return batch.model_inputs()


def test_arguments_that_would_be_wrong_are_refused(tmp_path):
    from transformers import TrainerState, TrainingArguments

    loader = TrainerLoader(StreamingLoader(StreamingDataset(labelled_manifest(tmp_path), **DATA)))
    callback = cursor_callback(loader)
    wrong = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, use_cpu=True)
    with pytest.raises(PlanError, match="expected gradient_accumulation_steps=4, ignore_data_skip=True, found"):
        callback.on_train_begin(wrong, TrainerState(), None)
    right = TrainingArguments(str(tmp_path), gradient_accumulation_steps=4, ignore_data_skip=True, use_cpu=True)
    callback.on_train_begin(right, TrainerState(), None)
    with pytest.raises(CursorError, match="holds no cursor"):
        callback.on_train_begin(right, TrainerState(global_step=3), None)


def test_windows_of_a_loader_are_all_alike(tmp_path):
    dataset = StreamingDataset(labelled_manifest(tmp_path), **DATA)
    loader = TrainerLoader(StreamingLoader(dataset), columns=["labels"])
    batches = list(loader)
    assert len(batches) == len(loader) == 24
    assert (batches[-1]["labels"] == -100).all()
    assert int(sum((batch["labels"] != -100).sum() for batch in batches)) == int(
        sum(batch.valid_tokens["lm"].sum() for batch in StreamingDataset(dataset.manifest, **DATA))
    )
