"""Writes the small data sets under tests/formats/peers with the packages that define their formats.

Run it in an environment of its own, never in the project's:

    python3 -m venv V
    V/bin/pip install datasets litdata mosaicml-streaming wids
    V/bin/python tools/make_peer_shards.py

mosaicml-streaming and litdata ask for torchvision, which writing needs nothing of: without it, an empty module of
its name is enough. What was written with which versions is in the folder's versions.json.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import shutil
import sys
import tarfile
import types
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).parents[1] / "tests" / "formats" / "peers"
NULL_ROW = 5
PACKAGES = ("datasets", "litdata", "mosaicml-streaming", "numpy", "pyarrow", "torch", "wids")


def _stand_in_for_torchvision() -> None:
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def mds_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows with a value of every encoding that needs no image."""
    return [
        {
            "uid": row,
            "small": np.int8(-row),
            "score": row / 3,
            "text": "é" * (row % 4),
            "raw": bytes(range(row % 3)),
            "tokens": np.arange(row, row + 1 + row % 5, dtype=np.int32),
            "vector": np.array([row, -1], np.float32),
            "matrix": np.full((2, 3), row, np.uint8),
            "any": np.full((2, row + 1), row, np.int16),
            "meta": {"row": row, "names": ["a", None]},
            "big": 10**15 + row,
            "ratio": row / 7,
            "thing": {row},
        }
        for row in range(num_rows)
    ]


MDS_COLUMNS = {
    "uid": "int",
    "small": "int8",
    "score": "float64",
    "text": "str",
    "raw": "bytes",
    "tokens": "ndarray:int32",
    "vector": "ndarray:float32:2",
    "matrix": "ndarray:uint8:2,3",
    "any": "ndarray",
    "meta": "json",
    "big": "str_int",
    "ratio": "str_float",
    "thing": "pkl",
}


def write_mds() -> None:
    """Raw and compressed."""
    from streaming import MDSWriter

    for name, compression in (("mds", None), ("mds-zstd", "zstd")):
        with MDSWriter(
            out=str(TARGET / name), columns=MDS_COLUMNS, compression=compression, size_limit=1500, hashes=["xxh64"]
        ) as writer:
            for row in mds_rows(12):
                writer.write(row)


def litdata_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows with a value of every serializer that needs no media."""
    import torch

    return [
        {
            "uid": row,
            "text": "é" * (row % 4),
            "score": row / 3,
            "flag": bool(row % 2),
            "array": np.arange(row % 5, dtype=np.int32),
            "tensor": torch.arange(row % 3),
            "raw": bytes(range(row % 3)),
            "matrix": np.full((2, row % 3), row, np.int16),
            "box": torch.full((2, 2), float(row)),
            "thing": {row},
        }
        for row in range(num_rows)
    ]


def write_litdata() -> None:
    """Plain and compressed chunks, tuples, token streams, and what is refused."""
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    def write(name: str, rows: list[Any], **options: Any) -> None:
        writer = BinaryWriter(str(TARGET / name), **options)
        for place, row in enumerate(rows):
            writer.add_item(place, row)
        writer.done()
        writer.merge()

    write("litdata", litdata_rows(12), chunk_bytes=900)
    write("litdata-zstd", litdata_rows(12), chunk_bytes=900, compression="zstd", compression_level="chunk")
    write("litdata-framed", litdata_rows(3), chunk_bytes=900, compression="zstd")
    write("litdata-tuple", [(row, ("a", {"b": 0.5})) for row in range(5)], chunk_bytes=900)
    write("litdata-rows", [{"uid": row, "tokens": list(range(row))} for row in range(5)], chunk_bytes=900)
    tokens = [torch.arange(row, row + row % 4, dtype=torch.int32) for row in range(1, 10)]
    write("litdata-tokens", tokens, chunk_size=12, item_loader=TokensLoader())


def write_datasets() -> None:
    """``save_to_disk``: two shards, a selection, splits; features that are extensions."""
    import datasets

    features = datasets.Features(
        {
            "uid": datasets.Value("int64"),
            "text": datasets.Value("string"),
            "tokens": datasets.List(datasets.Value("int32")),
            "label": datasets.ClassLabel(names=["a", "b"]),
            "grid": datasets.Array2D((2, 2), "float32"),
        }
    )
    columns = {
        "uid": list(range(12)),
        "text": [None if row == NULL_ROW else "é" * (row % 4) for row in range(12)],
        "tokens": [list(range(row % 5)) for row in range(12)],
        "label": [row % 2 for row in range(12)],
        "grid": [[[row, 1.0], [2.0, 3.0]] for row in range(12)],
    }
    whole = datasets.Dataset.from_dict(columns, features=features)
    whole.save_to_disk(str(TARGET / "datasets"), num_shards=2)
    parts = {"train": whole.select([7, 3, 5]), "test": whole.select([0])}
    datasets.DatasetDict(parts).save_to_disk(str(TARGET / "datasets-splits"))


def write_wids() -> None:
    """Two tars and the index that ``wids`` makes of them."""
    import wids

    folder = TARGET / "wids"
    folder.mkdir()
    shards = []
    for number in range(2):
        path = folder / f"shard-{number}.tar"
        with tarfile.open(path, "w") as tar:
            for row in range(3 - number):
                for suffix, value in (("txt", b"text"), ("cls", b"%d" % row)):
                    member = tarfile.TarInfo(f"{number}{row}.{suffix}")
                    member.size = len(value)
                    tar.addfile(member, BytesIO(value))
        shards.append({"url": path.name, "nsamples": wids.wids.compute_num_samples(str(path))})
    description = {"wids_version": 1, "name": "tiny", "shardlist": shards}
    (folder / "tiny.json").write_text(json.dumps(description, indent=2))


def main() -> None:
    """Writes all of them anew."""
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir()
    _stand_in_for_torchvision()
    write_mds()
    write_litdata()
    write_datasets()
    write_wids()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    (TARGET / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
