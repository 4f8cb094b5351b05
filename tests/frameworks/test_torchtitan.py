"""A loop with a device mesh, as its page says: FSDP2 on two ranks, then DDP with a tensor-parallel peer on two."""

from __future__ import annotations

import pytest
import torch

from tests.support.frameworks import GLOBAL_BATCH, labelled_manifest, launch, once_each, real, right_weights
from tests.support.pages import page_code
from tests.support.streams import joined
from tests.support.training import TokenModel

pytestmark = [pytest.mark.rest, pytest.mark.distributed, pytest.mark.timeout(400)]


def _train(rank, manifest, num_steps, options):
    page = page_code("torchtitan")
    trained, cursors = [], []

    def after_step(window):
        trained.append(joined(map(real, window.batches)))
        cursors.append(window.cursor.state_dict())
        return len(trained) == num_steps

    net = TokenModel()
    if "weights" in options:
        torch.nn.utils.vector_to_parameters(
            options.pop("weights").clone(), net.parameters()
        )  # it came in shared memory
    page.train(net, manifest, 2, after_step=after_step, **options)
    whole = [getattr(each, "full_tensor", lambda each=each: each)().detach().flatten() for each in net.parameters()]
    return trained, cursors[-1], torch.cat(whole)


def test_resumes_in_mid_epoch_with_another_mesh(tmp_path):
    manifest = labelled_manifest(tmp_path)
    before = launch(_train, 2, manifest, 8, {})
    cursor = before[0][1]
    assert (cursor["epoch"], cursor["position"]) == (1, 2 * GLOBAL_BATCH)
    options = {"cursor": cursor, "weights": before[0][2], "how": "ddp", "num_tensor_parallel": 2}
    after = launch(_train, 2, manifest, None, options)
    assert after[0][0] == after[1][0], "tensor-parallel peers read the same"
    assert once_each(joined(ids for trained, *_ in [*before, after[0]] for ids in trained), num_epochs=2)
    expected = right_weights(manifest, num_epochs=2)
    for _, _, found in after:
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
