from __future__ import annotations

import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from shardstream.torch import parcel
from shardstream.torch.parcel import pack, unpack
from shardstream.torch.ragged import Ragged

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2),
]
needs_files = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files")


def sent(value):
    return unpack(pickle.loads(bytes(ForkingPickler.dumps(pack(value)))))


def way_of(value):
    return parcel._sent(pack(value))[0]


@pytest.fixture
def all_in_files(monkeypatch):
    monkeypatch.setattr(parcel, "_MOST_IN_PIPE", 0)


@pytest.mark.parametrize("most_in_pipe", [0, 1 << 20], ids=["file", "pipe"])
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=6
    )
)
@settings(max_examples=25, deadline=None)
def test_tensors_arrive_as_they_were(most_in_pipe, tensors):
    value = []
    for dtype, shape, is_transposed in tensors:
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.float32).to(dtype)
        value.append(tensor.transpose(0, -1) if is_transposed and shape else tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parcel, "_MOST_IN_PIPE", most_in_pipe)
        arrived = sent({"tensors": value})["tensors"]
    assert len(arrived) == len(value)
    for tensor, expected in zip(arrived, value, strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert tensor.tolist() == expected.tolist()
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % parcel._ALIGNED == 0


@pytest.mark.parametrize("most_in_pipe", [0, 1 << 20], ids=["file", "pipe"])
def test_what_arrives_can_be_written_to_and_is_nobody_elses(monkeypatch, most_in_pipe):
    monkeypatch.setattr(parcel, "_MOST_IN_PIPE", most_in_pipe)
    value = {"x": torch.arange(4), "y": torch.arange(3), "z": np.arange(5), "text": "a"}
    arrived = sent(value)
    arrived["x"] += 10
    arrived["z"] += 10
    assert arrived["x"].tolist() == [10, 11, 12, 13]
    assert arrived["y"].tolist() == [0, 1, 2]
    assert arrived["z"].tolist() == [10, 11, 12, 13, 14]
    assert value["x"].tolist() == [0, 1, 2, 3]
    assert value["z"].tolist() == [0, 1, 2, 3, 4]
    assert arrived["text"] == "a"


def test_ragged_conjugates_and_tensors_of_two_names_arrive():
    ragged = Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    complex_ = torch.tensor([1 + 2j])
    arrived = sent({"ragged": ragged, "conj": complex_.conj(), "neg": complex_.conj().imag, "same": [complex_] * 2})
    assert arrived["ragged"].tolist() == [[1, 2], [3]]
    assert arrived["conj"].tolist() == [1 - 2j]
    assert arrived["neg"].tolist() == [-2]
    assert arrived["same"][0] is arrived["same"][1]


def test_tensors_that_are_not_plain_memory_go_as_torch_sends_them():
    arrived = sent({"meta": torch.empty(2, device="meta"), "leaf": torch.ones(2, requires_grad=True)})
    assert arrived["meta"].device.type == "meta"
    assert arrived["leaf"].requires_grad
    assert arrived["leaf"].tolist() == [1, 1]


@needs_files
def test_only_what_is_large_goes_through_a_file():
    assert way_of(torch.zeros(parcel._MOST_IN_PIPE, dtype=torch.uint8)) is parcel._from_pipe
    assert way_of(torch.zeros(parcel._MOST_IN_PIPE + 1, dtype=torch.uint8)) is parcel._from_file


@needs_files
def test_where_no_descriptor_can_be_had_or_is_wanted_all_goes_through_the_pipe(monkeypatch, all_in_files):
    assert way_of(torch.ones(9)) is parcel._from_file
    with monkeypatch.context() as patch:
        patch.setattr(parcel, "get_sharing_strategy", lambda: "file_system")
        assert way_of(torch.ones(9)) is parcel._from_pipe
    with monkeypatch.context() as patch:

        def refused(name):
            raise OSError(24, "Too many open files")

        patch.setattr(os, "memfd_create", refused)
        assert sent(torch.ones(9)).tolist() == [1] * 9
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", lambda _name: os.open("/dev/full", os.O_WRONLY))
        assert sent(torch.ones(9)).tolist() == [1] * 9
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert sent(torch.ones(9)).tolist() == [1] * 9


@needs_files
def test_a_file_is_closed_with_its_last_tensor(all_in_files):
    def num_open():
        links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return sum("memfd:shardstream" in str(link) for link in links)

    kept = sent([torch.ones(9), torch.zeros(9)])  # the server of descriptors is started, and stays
    del kept
    before = num_open()
    arrived = [sent([torch.full((9,), number), torch.zeros(9)])[0] for number in range(5)]
    assert [tensor.tolist() for tensor in arrived] == [[number] * 9 for number in range(5)]
    assert num_open() == before + 5
    del arrived
    assert num_open() == before


class Large(IterableDataset):
    def __iter__(self):
        yield from (Message(number) for number in range(4))


class Message:
    def __init__(self, number):
        self.tensor = torch.full((parcel._MOST_IN_PIPE // 4 + number,), number)

    def __getstate__(self):
        return pack(self.__dict__)

    def __setstate__(self, state):
        self.__dict__.update(unpack(state))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_large_ones_arrive_from_workers_and_outlive_them(method):
    loader = DataLoader(Large(), batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60)
    messages = list(loader)  # the workers are gone
    numbers = sorted(int(message.tensor[-1]) for message in messages)
    assert numbers == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(bool((message.tensor == message.tensor[0]).all()) for message in messages)
