from __future__ import annotations

import gzip
import io
import pickle

import numpy as np
import PIL.Image
import pytest
import torch

from shardstream.errors import DecodeError, PlanError
from shardstream.torch.decode import decode

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def png():
    stream = io.BytesIO()
    PIL.Image.fromarray(PIXELS).save(stream, "png")
    return stream.getvalue()


def npy(array, *, allow_pickle=False):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


class Trap:
    """Unpickling it is noticed."""

    sprung = False

    def __reduce__(self):
        return spring, ()


def spring():
    Trap.sprung = True
    return "sprung"


LABELS = {"__key__": "a/0001", "__url__": "s3://bucket/x.tar", "__id__": 7, "__seed__": 11}


def test_images_in_the_forms_of_webdataset():
    sample = {**LABELS, "png": png()}
    as_torch8 = decode("torchrgb8")(sample)["png"]
    assert (as_torch8.dtype, tuple(as_torch8.shape)) == (torch.uint8, (3, 4, 5))
    assert np.array_equal(as_torch8.permute(1, 2, 0).numpy(), PIXELS)
    as_torch = decode("torchrgb")(sample)["png"]
    assert as_torch.dtype == torch.float32
    assert torch.allclose(as_torch * 255, as_torch8.float())
    assert np.array_equal(decode("rgb8")(sample)["png"], PIXELS)
    image = decode("pil")(sample)["png"]
    assert isinstance(image, PIL.Image.Image)
    assert np.array_equal(np.asarray(image), PIXELS)


def test_common_suffixes_are_decoded_and_labels_kept():
    sample = {
        **LABELS,
        "cls": b"7",
        "seg.txt": "grün".encode(),
        "json": b'{"a": [1]}',
        "npy": npy(np.arange(3)),
        "npz": npz(x=np.ones(2)),
        "txt.gz": gzip.compress(b"packed"),
        "bin": b"\x00raw",
    }
    decoded = decode()(sample)
    assert {name: decoded[name] for name in LABELS} == LABELS
    assert (decoded["cls"], decoded["seg.txt"], decoded["json"]) == (7, "grün", {"a": [1]})
    assert decoded["npy"].tolist() == [0, 1, 2]
    assert decoded["npz"]["x"].tolist() == [1, 1]
    assert (decoded["txt.gz"], decoded["bin"]) == ("packed", b"\x00raw")
    assert sample["cls"] == b"7"


def test_callables_are_asked_first_and_values_that_are_no_bytes_are_kept():
    def shout(suffix, data):
        return data.decode().upper() if suffix == ".txt" else None

    assert decode(shout)({"txt": b"a", "cls": b"1", "n": 3, "none": None}) == {
        "txt": "A",
        "cls": 1,
        "n": 3,
        "none": None,
    }


def test_only_names_what_is_decoded():
    assert decode(only="cls json")({"cls": b"1", "txt": b"a", "json": b"[]"}) == {"cls": 1, "txt": b"a", "json": []}


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "pyd", "pth", "meta.pkl", "pkl.gz"])
def test_nothing_is_unpickled_unless_asked_for(suffix):
    data = pickle.dumps(Trap())
    stored = gzip.compress(data) if suffix.endswith("gz") else data
    Trap.sprung = False
    assert decode()({"__key__": "k", suffix: stored})[suffix] == data
    assert not Trap.sprung


def test_unpickling_when_asked_for():
    Trap.sprung = False
    assert decode(unpickle=True)({"pkl": pickle.dumps(Trap())}) == {"pkl": "sprung"}
    assert Trap.sprung
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2)}, stream)
    assert decode(unpickle=True)({"pth": stream.getvalue()})["pth"]["w"].tolist() == [1, 1]


def test_arrays_of_objects_are_unpickled_only_when_asked_for():
    objects = npy(np.array([Trap(), None], dtype=object), allow_pickle=True)
    packed = npz(x=np.array([None, 1], dtype=object))
    Trap.sprung = False
    for sample in ({"npy": objects}, {"npz": packed}):
        with pytest.raises(DecodeError, match=r"allow_pickle=False.*unpickle=True"):
            decode()(sample)
    assert not Trap.sprung
    assert decode(unpickle=True)({"npy": objects})["npy"].tolist() == ["sprung", None]
    assert decode(unpickle=True)({"npz": packed})["npz"]["x"].tolist() == [None, 1]
    assert decode(unpickle=True)({"npy": npy(np.arange(2))})["npy"].tolist() == [0, 1]


@pytest.mark.parametrize("field", ["png", "json", "cls", "txt", "npy", "txt.gz"])
def test_errors_name_key_field_shard_and_cause(field):
    with pytest.raises(DecodeError) as caught:
        decode("rgb8")({**LABELS, field: b"\xff\x00 not this"})
    text = str(caught.value)
    assert f"field {field!r} of sample 'a/0001'" in text
    assert "s3://bucket/x.tar" in text
    assert type(caught.value.__cause__).__name__ in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_it_pickles():
    transform = pickle.loads(pickle.dumps(decode("torchrgb8", only="png")))
    assert transform({"png": png(), "cls": b"1"})["png"].shape == (3, 4, 5)


def test_wrong_handlers_are_refused_at_once():
    with pytest.raises(PlanError, match=r"unknown image decoder.*torchrgb.*found 'bgr'"):
        decode("bgr")
    with pytest.raises(PlanError, match="name or a callable: found 3"):
        decode(3)
