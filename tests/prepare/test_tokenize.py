from __future__ import annotations

import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream.errors import DecodeError, ManifestError, PlanError
from shardstream.index import build_manifest
from shardstream.prepare import Tokenize
from tests.formats.tars import tar_bytes
from tests.prepare.conftest import bytes_of

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small tokenizer of the standard library, with truncation and padding that must do nothing."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8") for path in sorted(library.glob("a*.py"))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(3)
    made.enable_padding(length=4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    made.no_truncation()
    made.no_padding()
    return str(path), made


def tokens_of(manifest):
    return pa.concat_tables([pq.read_table(manifest.url(k)) for k in range(manifest.num_shards)])


def test_tokens_are_those_of_the_library_and_nothing_is_cut(lines, rows, trained, write, tmp_path):
    path, tokenizer = trained
    done = write(lines, tmp_path / "out", Tokenize.make(path, "text", keep=["id"]))
    table = tokens_of(done.manifest)
    expected = [
        None if row["text"] is None else tokenizer.encode(row["text"], add_special_tokens=False).ids for row in rows
    ]
    assert table.column("tokens").to_pylist() == expected
    assert table.column("num_tokens").to_pylist() == [len(ids or ()) for ids in expected]
    assert table.column("id").to_pylist() == list(range(300))
    assert table.schema.field("tokens").type.value_type == pa.uint16()
    assert done.num_tokens == sum(len(ids or ()) for ids in expected)
    assert done.manifest.tokens_column == "tokens"
    num_documents = done.manifest.lists.read_all(["run_num_documents"])["run_num_documents"].sum()
    assert num_documents == sum(ids is not None for ids in expected)  # an empty text is a document, none is not


def test_ends_and_special_tokens_are_put_where_they_are_asked_for(lines, rows, trained, write, tmp_path):
    path, tokenizer = trained
    step = Tokenize.make(path, "text", eos="<|endoftext|>", dtype="int32", with_special=True)
    table = tokens_of(write(lines, tmp_path / "out", step).manifest)
    assert table.column_names == ["tokens", "num_tokens"]
    assert table.schema.field("tokens").type.value_type == pa.int32()
    assert table.column("tokens").to_pylist() == [
        None if row["text"] is None else [1, *tokenizer.encode(row["text"], add_special_tokens=False).ids, 0]
        for row in rows
    ]


def test_it_shuffles_goes_on_and_streams_packed(lines, trained, write, tmp_path):
    from shardstream import StreamingDataset, Topology

    step = Tokenize.make(trained[0], "text", keep=["id"])
    done = write(lines, tmp_path / "out", step, shuffle=True, seed=3, pack=[16])
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / "00000.parquet").unlink()
    assert write(lines, tmp_path / "out", step, shuffle=True, seed=3, pack=[16]).num_resumed == len(done.parts) - 1
    assert bytes_of(tmp_path / "out") == before
    dataset = StreamingDataset(done.manifest, batch_size=4, sequence_length=16, eos_id=0, topology=Topology(0, 1))
    num_targets = sum(int((batch["labels"] >= 0).sum()) for batch in dataset)
    num_documents = 300 - len([k for k in range(300) if k % 97 == 3])
    assert num_targets == done.num_tokens + num_documents - 1  # with an end each, all but the first are targets


def test_bytes_of_tars_are_text(trained, write, tmp_path):
    path, tokenizer = trained
    (tmp_path / "a.tar").write_bytes(tar_bytes([("x.txt", "größer".encode()), ("y.txt", b"")]))
    done = write(tmp_path / "a.tar", tmp_path / "out", Tokenize.make(path, "txt", keep=["__key__"]))
    assert tokens_of(done.manifest).column("tokens").to_pylist() == [
        tokenizer.encode("größer", add_special_tokens=False).ids,
        [],
    ]
    assert tokens_of(done.manifest).column("__key__").to_pylist() == ["x", "y"]
    (tmp_path / "b.tar").write_bytes(tar_bytes([("x.txt", b"\xff")]))
    with pytest.raises(DecodeError, match="not UTF-8"):
        write(tmp_path / "b.tar", tmp_path / "other", Tokenize.make(path, "txt"))


def test_a_run_goes_on_with_the_same_tokenizer_only(lines, trained, write, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(Path(trained[0]).read_text() + "\n")
    write(lines, tmp_path / "out", Tokenize.make(trained[0], "text"))
    with pytest.raises(PlanError, match="expected step tokenizer"):
        write(lines, tmp_path / "out", Tokenize.make(str(other), "text"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos": "<eos>"}, "no token '<eos>'"),
        ({"keep": ["id", "id"]}, "columns to keep"),
        ({"keep": ["tokens"]}, "columns to keep"),
    ],
)
def test_impossible_tokens_are_refused(options, message, trained):
    with pytest.raises(PlanError, match=message):
        Tokenize.make(trained[0], "text", **options)


def test_other_files_and_columns_are_refused(lines, trained, write, tmp_path):
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(PlanError, match=r"no tokenizer\.json"):
        Tokenize.make(str(tmp_path / "no.json"), "text")
    with pytest.raises(PlanError, match="cannot be read"):
        Tokenize.make(str(tmp_path / "gone.json"), "text")
    with pytest.raises(ManifestError, match=r"no column 'txt': found id, text, n"):
        write(lines, tmp_path / "out", Tokenize.make(trained[0], "txt"))
    with pytest.raises(ManifestError, match="'id' holds no text"):
        write(lines, tmp_path / "out", Tokenize.make(trained[0], "id"))
    with pytest.raises(PlanError, match="written as Parquet"):
        write(lines, tmp_path / "out", Tokenize.make(trained[0], "text"), format="tar")
    assert not (tmp_path / "out").exists()
    assert build_manifest(lines).num_samples == 300
