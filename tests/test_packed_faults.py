"""Packed runs with documents at fault: the others keep their targets."""

import numpy as np
import pytest

from shardstream.columns import Dense, Objects, Rows, Slices
from shardstream.packed_faults import with_faults, without_holes
from shardstream.packed_run import packed_run
from shardstream.packing import Packing

TOKENS = Slices(np.arange(1, 10), np.array([0, 3, 5]), np.array([3, 2, 4]), "list")
MASKS = {
    "lists": Slices(np.array([0, 1, 1, 1, 1, 1, 0, 1]), np.array([0, 3, 4]), np.array([3, 1, 4]), "list"),
    "bytes": Slices(np.array([0, 1, 1, 1, 1, 1, 0, 1], np.uint8), np.array([0, 3, 4]), np.array([3, 1, 4]), "bytes"),
    "objects": Objects([[0, 1, 1], [1], [1, 1, 0, 1]]),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_loss_mask_of_another_length_is_that_documents_own_fault(kind):
    packing = Packing(4, loss_mask_column="mask")
    rows, faults = without_holes(Rows(3, {"tokens": TOKENS, "mask": MASKS[kind]}), 40, packing)
    run = with_faults(packed_run(rows, np.array([2, 1, 0]), 40, packing), faults)
    assert list(faults) == [41]
    assert run.tokens.tolist() == [6, 7, 8, 9, 4, 5, 1, 2, 3]
    assert run.is_target is not None
    assert run.is_target.astype(int).tolist() == [1, 1, 0, 1, 0, 0, 0, 1, 1]


def test_masks_of_one_length_are_looked_at_row_by_row():
    packing = Packing(4, loss_mask_column="mask")
    mask = Dense(np.array([[0, 1, 1], [1, 1, 1], [1, 1, 1]]))
    rows, faults = without_holes(Rows(3, {"tokens": TOKENS, "mask": mask}), 40, packing)
    run = with_faults(packed_run(rows, np.arange(3), 40, packing), faults)
    assert list(faults) == [41, 42]
    assert run.is_target is not None
    assert run.is_target.astype(int).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
