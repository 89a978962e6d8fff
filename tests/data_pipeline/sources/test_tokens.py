"""Token files give the shards of the text that they were made of; damaged ones are one clear error."""

import io
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from small_corpus import sentences, write_jsonl
from token_stream import documents_of

from moebius.data_pipeline.errors import InputError, PrepareError
from moebius.data_pipeline.make.pools import LocalPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import is_prepared
from moebius.data_pipeline.prepare_config import (
    DecontaminateConfig,
    PrepareConfig,
    SourceConfig,
)
from moebius.data_pipeline.sources import tokens as source
from moebius.data_pipeline.sources.formats import plan_splits, read_documents
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer

RECORDED = Path(__file__).parents[2] / "recorded/tokens"
TEXTS = (RECORDED / "texts.txt").read_text().split("\n")[:-1]
STREAM = np.concatenate([[*text.encode(), 256] for text in TEXTS])


def _config(*names: object, **options) -> PrepareConfig:
    inputs = tuple(f"tokens:{name}" for name in names)
    return PrepareConfig(input=inputs, tokenizer="bytes", **options)


def _rows(config: PrepareConfig, folder: Path) -> dict[str, list]:
    prepare(config, folder)
    keys = ("tokens", "doc_id", "n_bytes", "source_row")
    sides = ("train", "validation")
    return {
        side: [[row[key] for key in keys] for row in documents_of(folder, side)] for side in sides
    }


@pytest.fixture
def files(tmp_path) -> Path:
    """The recorded files, those that NumPy writes, and a cache that `datasets` left."""
    folder = Path(shutil.copytree(RECORDED, tmp_path / "files"))
    shutil.copy(folder / "dataset/data-00000-of-00002.arrow", folder / "dataset/cache-1.arrow")
    np.save(folder / "stream.npy", STREAM)
    np.save(folder / "stream32.npy", STREAM.astype(">i4"))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("megatron.bin", "megatron32.bin", "llm_c.bin", "llm_c_llama.bin", "nanogpt.bin"),
        *("dataset", "stream.npy", "stream32.npy"),
    ],
)
def test_recorded_files_give_the_rows_of_their_text(files, tmp_path, name):
    """Tokens, hashes, sizes, order and sides; a repeated and an empty document are dropped."""
    parts = [TEXTS[:5], TEXTS[5:]] if name == "dataset" else [TEXTS]
    texts = tuple(str(write_jsonl(tmp_path / f"{n}.jsonl", part)) for n, part in enumerate(parts))
    options = {"tokenizer": "bytes", "validation_fraction": 0.3}
    expected = _rows(PrepareConfig(input=texts, **options), tmp_path / "text")
    assert len(expected["train"]) + len(expected["validation"]) == 8
    assert _rows(_config(files / name, validation_fraction=0.3), tmp_path / "ids") == expected


@pytest.mark.parametrize("split_bytes", [1, 17, 100, 10**6])
def test_splitting_a_file_changes_nothing(files, split_bytes, monkeypatch):
    monkeypatch.setattr(source, "_BLOCK_IDS", 7)
    rows = [text for text in TEXTS if len(text) > 20]
    np.save(files / "rows.npy", [list(text.encode())[:20] for text in rows])
    expected = {"rows.npy": [text.encode()[:20] for text in rows]}
    for name in ("megatron.bin", "llm_c.bin", "nanogpt.bin", "stream.npy", "dataset", "rows.npy"):
        config = _config(files / name, split_bytes=split_bytes)
        splits = plan_splits(config)
        (fields,), tokenizer = config.all_sources, BytesTokenizer()
        found = [
            one for each in splits for one in read_documents(each, fields, tokenizer=tokenizer)
        ]
        wanted = expected.get(name, [text.encode() for text in TEXTS])
        assert [bytes(np.array(one.tokens, np.uint8)) for one in found] == wanted, name
        assert len(splits) > 2 or split_bytes > 100 or name == "dataset"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mixture_of_ids_and_text_of_bpe_is_that_of_text(prepared, corpus, tmp_path, shuffle):
    """With two processes; some documents are in the other source, or in an evaluation set."""
    tokenizer = load_tokenizer(prepared)
    texts = sentences(5, 30) + sentences(0, 4)
    items = write_jsonl(tmp_path / "items.jsonl", [one for one in texts if len(one) > 150][:2])
    end = np.array([tokenizer.end_of_document_id])
    ids = [part for each in tokenizer.encode_batch(texts) for part in (each, end)]
    np.concatenate(ids).astype(np.uint16).tofile(tmp_path / "train.bin")
    text = str(write_jsonl(tmp_path / "train.jsonl", texts))

    def config(name: str) -> PrepareConfig:
        return PrepareConfig(
            sources=(
                SourceConfig(name="a", input=(name,)),
                SourceConfig(name="b", input=(str(corpus[0]),)),
            ),
            tokenizer=str(prepared),
            decontaminate=DecontaminateConfig(evaluation_sets=(str(items),)),
            validation_fraction=0.2,
            shuffle_documents=shuffle,
        )

    expected = _rows(config(text), tmp_path / "text")
    with LocalPool(2) as pool:
        prepare(config(f"tokens:{tmp_path}/train.bin"), tmp_path / "ids", pool=pool)
    assert _rows(config(f"tokens:{tmp_path}/train.bin"), tmp_path / "ids") == expected


def test_another_index_is_another_input_and_another_name_is_not(files, tmp_path, monkeypatch):
    prepare(_config(files / "megatron.bin"), tmp_path / "d")
    monkeypatch.chdir(files)
    prepare(_config("meg*n.bin"), tmp_path / "d")
    index = bytearray((files / "megatron.idx").read_bytes())
    index[-16] -= 1  # where the last document but one ends
    (files / "megatron.idx").write_bytes(index)
    with pytest.raises(PrepareError, match=r"made of other files .changed: .*megatron.idx"):
        prepare(_config("megatron.bin"), tmp_path / "d")


def _index(*, magic=b"MMIDIDX\0\0", code=8, length=2, offset=0, bounds=(0, 1)):
    """Returns the index of one document of two ids."""
    head = struct.pack("<9sQBQQ", magic, 1, code, 1, len(bounds))
    return head + struct.pack(f"<iq{len(bounds)}q", length, offset, *bounds)


def _llm_c(*header: int) -> bytes:
    return np.pad(np.array(header, "<i4"), (0, 256 - len(header))).tobytes() + b"abcd"


def _npy(values: object, dtype: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(values, dtype), allow_pickle=True)
    return file.getvalue()


def _arrow(**columns: object) -> bytes:
    file, table = io.BytesIO(), pa.table(columns)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


BAD = [
    ("a.bin", b"", "a.bin is empty"),
    ("a.bin", STREAM.astype("<u4").tobytes(), "every second one is 0: .*numpy.save"),
    ("a.bin", b"\1\0\1\1", "a.bin: id 1 is 257, but the tokenizer has the ids 0 to 256"),
    ("a.npy", _npy([[1, 2], [3, -100]], "int64"), "a.npy: id 3 is -100, but"),
    ("a.npy", _npy([2**64 - 1], "uint64"), "a.npy: id 0 is 18446744073709551615, but"),
    ("a.bin", _llm_c(20240520, 1, 3), "1,028 bytes has .* version 1, of 3 ids of uint16"),
    ("a.bin", _llm_c(20240801, 1, 1), "of 1 ids of uint32: it must be version 7"),
    ("a.npy", _npy([1.0], "float32"), "for float32 of shape"),
    ("a.npy", _npy([], "int64"), r"for int64 of shape .0,."),
    ("a.npy", _npy([1, 2], "int64") + b"x", "has 145 bytes for int64"),
    ("a.npy", _npy([1, 2], "int64")[:-1], "no whole .npy file"),
    ("a.idx", _index(magic=b"TNTIDX\0\0"), "does not fit the 4 bytes of its .bin"),
    ("a.idx", _index(code=7), "version 1 with dtype 7, does not fit"),
    ("a.idx", _index()[:-1], "does not fit"),
    ("a.idx", _index(offset=2, length=1), "does not fit"),
    ("a.idx", _index(offset=-4, length=4), "does not fit"),
    ("a.idx", _index(bounds=(0, 0)), "does not fit"),
    ("a.idx", _index(bounds=(0, 1, 0, 1)), "does not fit"),
    ("a.arrow", _arrow(text=["a"]), "no column 'input_ids' .* columns are 'text' .string"),
    ("a.arrow", _arrow(input_ids=[[0.5]]), "columns are 'input_ids' .list<item: double>"),
    ("a.arrow", _arrow(input_ids=[[1], None]), "has nulls"),
    ("a.arrow", _arrow(input_ids=[[1, None]]), "has nulls"),
    ("a.arrow", _arrow(input_ids=[[1], [2, 257]]), r"a.arrow.0:1., row 1: id 1 is 257"),
    ("data-00000-of-00002.arrow", b"", "in lacks data-00001-of-00002.arrow: copy"),
    ("b/b.arrow", b"", "token files in 2 folders: name one, such as tokens:.*/in/b$"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=[words for *_, words in BAD])
def test_a_bad_file_is_one_sentence_and_nothing_is_published(tmp_path, name, content, words):
    (tmp_path / "in/b").mkdir(parents=True)
    (tmp_path / "in/a.bin").write_bytes(b"a\0b\0")
    (tmp_path / "in" / name).write_bytes(content)
    named = tmp_path / "in" / (name.replace(".idx", ".bin") if name[0] == "a" else "")
    with pytest.raises(InputError, match=words):
        prepare(_config(named), tmp_path / "d")
    assert not is_prepared(tmp_path / "d")


def test_padding_of_a_dataset_is_left_out(tmp_path):
    rows = {"input_ids": [[97, 98, 0], [99, 100, 101]], "attention_mask": [[1, 1, 0], [1, 1, 1]]}
    table = pa.table(rows)
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    found = _rows(_config(tmp_path / "a.arrow", validation_fraction=0.0), tmp_path / "d")["train"]
    assert [row[0] for row in found] == [[97, 98, 256], [99, 100, 101, 256]]
