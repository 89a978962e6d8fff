"""Reading returns what was written, and never damaged tokens."""

import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.manifest import ShardEntry, read_manifest
from moebius.data_pipeline.read.token_store import TokenStore, shard_schema, verify_shard
from moebius.data_pipeline.shards import ShardWriter, TokenDocument


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def _write(
    path: Path, documents: list[TokenDocument], *, vocab_size: int, batch_tokens: int
) -> ShardEntry:
    with open(path, "wb") as file, open(path.parent / "index", "wb") as index_file:
        writer = ShardWriter(file, schema=shard_schema(vocab_size), batch_tokens=batch_tokens)
        for document in documents:
            writer.add(document)
        return writer.close(
            name=path.name, split="train", source="s", label="a[0:1]", index_file=index_file
        )


def _documents(lengths: list[int], vocab_size: int) -> list[TokenDocument]:
    rng = np.random.default_rng(0)
    return [
        TokenDocument(
            rng.integers(0, vocab_size, length),
            rng.bytes(16),
            3 * length,
            f"source {n % 2}",
            10 + n,
        )
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, pa.uint16()), (65537, pa.uint32())])
def test_any_arrow_reader_finds_the_documents(tmp_path, vocab_size, width):
    documents = _documents([5, 90, 1, 300, 20, 20], vocab_size)
    entry = _write(tmp_path / "a", documents, vocab_size=vocab_size, batch_tokens=64)
    table = pa.ipc.open_file(str(tmp_path / "a")).read_all()
    assert table.schema.field("tokens").type == pa.list_(width)
    assert table["tokens"].to_pylist() == [document.tokens.tolist() for document in documents]
    assert table["doc_id"].to_pylist() == [document.doc_id for document in documents]
    assert table["n_bytes"].to_pylist() == [document.num_text_bytes for document in documents]
    assert table["source"].to_pylist() == [document.source for document in documents]
    assert table["source_row"].to_pylist() == [document.source_row for document in documents]
    assert (entry.num_documents, entry.num_tokens, entry.num_text_bytes) == (6, 436, 3 * 436)
    assert entry.num_bytes == (tmp_path / "a").stat().st_size


def test_batches_hold_whole_documents_of_about_the_asked_size(tmp_path):
    documents = _documents([30, 30, 30, 500, 1], 100)
    _write(tmp_path / "a", documents, vocab_size=100, batch_tokens=60)
    with pa.ipc.open_file(str(tmp_path / "a")) as file:
        sizes = [
            [len(tokens) for tokens in file.get_batch(n)["tokens"]]
            for n in range(file.num_record_batches)
        ]
    assert sizes == [[30, 30], [30, 500], [1]]


def test_a_shard_without_documents_is_a_file_like_any_other(tmp_path):
    entry = _write(tmp_path / "a", [], vocab_size=100, batch_tokens=60)
    assert (entry.num_documents, entry.num_batches) == (0, 0)
    assert pa.ipc.open_file(str(tmp_path / "a")).read_all().num_rows == 0


def test_the_index_addresses_batches_that_decode_alone(prepared):
    store = TokenStore(prepared, "text", 0, "train")
    whole = [pa.ipc.open_file(str(prepared / entry.name)) for entry in store.entries]
    batches = [file.get_batch(n) for file in whole for n in range(file.num_record_batches)]
    assert store.num_batches == len(batches) > 10
    for n in random.Random(0).sample(range(len(batches)), len(batches)):
        tokens = store.read(n).tokens
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == batches[n]["tokens"].flatten().to_pylist()
        assert len(tokens) == store.batch_starts[n + 1] - store.batch_starts[n]
    assert int(store.batch_starts[-1]) == store.manifest.num_tokens("train")


def test_a_truncated_shard_is_found_on_opening(copy):
    path = copy / "text.train-00002.tok.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ShardError,
        match=r"text.train-00002.tok.arrow has \d+ bytes, the manifest says \d+: truncated",
    ):
        TokenStore(copy, "text", 0, "train")


def test_a_shard_truncated_while_it_is_open_is_found(copy):
    store = TokenStore(copy, "text", 0, "train")
    path = copy / store.entries[-1].name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ShardError, match=r"the file ends after \d+ of \d+ bytes"):
        store.read(store.num_batches - 1)


def test_a_flipped_byte_in_an_index_is_found_on_opening_and_on_verification(copy):
    entry = read_manifest(copy).of("train")[1]
    path = copy / entry.index_name
    intact = path.read_bytes()
    for position in range(0, len(intact), len(intact) // 50):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        with pytest.raises(ShardError, match=r"text.train-00001.idx.arrow is damaged"):
            TokenStore(copy, "text", 0, "train")
        with pytest.raises(ShardError, match=r"idx.arrow has blake2b .* the manifest says"):
            verify_shard(copy, entry)
