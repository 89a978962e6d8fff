"""Reading returns what was written, and never damaged tokens."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from moebius.data_pipeline.manifest import ShardEntry
from moebius.data_pipeline.read.token_store import TokenStore, shard_schema
from moebius.data_pipeline.shards import ShardWriter, TokenDocument


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
    assert table.to_pylist() == [
        {"tokens": one.tokens.tolist(), "doc_id": one.doc_id, "n_bytes": one.num_text_bytes}
        | {"source": one.source, "source_row": one.source_row}
        for one in documents
    ]
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
