"""Every string survives, digits stand alone, training is reproducible, and a wrong tokenizer is refused."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.tokenizers.huggingface import train_bpe
from moebius.data_pipeline.tokenizers.interface import (
    END_OF_DOCUMENT,
    TOKENIZER_FILE,
)
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer, save_tokenizer

TEXTS = [
    "The router chose expert 12 and expert 34.",
    "the expert chose the token in 2023",
    "naïve 日本語 😀 the the",
] * 5
BPE = train_bpe(TEXTS, vocab_size=300)
BOTH = pytest.mark.parametrize("tokenizer", [BPE, BytesTokenizer()], ids=["bpe", "bytes"])

ODD = [
    "",
    " ",
    "\n\r\n\t \x00\x7f",
    f"a {END_OF_DOCUMENT} b{END_OF_DOCUMENT}",
    "e\u0301 \u00e9 \u2028 \ufeff \u200d",
    "👩\u200d👩\u200d👧 𝔘𝔫𝔦 \U0010ffff",
    "مرحبا 123 ٣٤ ½ Ⅷ",
    "x" * 3000,
]


@BOTH
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_string_comes_back_exactly(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


@BOTH
def test_ids_are_below_the_vocabulary_and_the_end_is_left_out_of_text(tokenizer):
    ids = np.concatenate(tokenizer.encode_batch(TEXTS))
    assert ids.dtype == np.uint16
    assert ids.max() < tokenizer.vocab_size
    assert 0 <= tokenizer.end_of_document_id < tokenizer.vocab_size
    (one,) = tokenizer.encode_batch(["oné"])
    assert tokenizer.decode([*one, tokenizer.end_of_document_id]) == "oné"
    assert tokenizer.decode(one[:-1]) in ("on\ufffd", "on"), "half a character"


def test_digits_stand_alone_even_where_training_saw_them_together():
    bpe = train_bpe(["2023 2023 2023 2023"] * 50, vocab_size=400)
    ids = bpe.encode_batch(["in 2023"])[0]
    assert [bpe.decode([i]) for i in ids][-4:] == ["2", "0", "2", "3"]


def test_a_small_corpus_yields_a_smaller_vocabulary():
    assert train_bpe(["ab ab"], vocab_size=8000).vocab_size < 270


def test_training_twice_and_with_other_thread_counts_gives_the_same_bytes():
    program = (
        "from moebius.data_pipeline.tokenizers.huggingface import train_bpe;"
        f"print(train_bpe({TEXTS!r}, vocab_size=300).sha256)"
    )
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "3"}
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert other.stdout.strip() == BPE.sha256 == train_bpe(iter(TEXTS), vocab_size=300).sha256


@BOTH
def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    save_tokenizer(tmp_path, tokenizer)
    loaded = load_tokenizer(tmp_path, sha256=tokenizer.sha256)
    assert type(loaded) is type(tokenizer)
    for text, *ids in zip(ODD, loaded.encode_batch(ODD), tokenizer.encode_batch(ODD), strict=True):
        assert ids[0].tolist() == ids[1].tolist()
        assert tokenizer.end_of_document_id not in ids[0]
        assert tokenizer.decode(ids[0]) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((text, "is not a tokenizer") for text in (b"", b"[]", b"{}", b"\xff", b'{"type": "x"}')),
        (BPE.files[TOKENIZER_FILE][:-40], "is not a tokenizer"),
        (BPE.files[TOKENIZER_FILE], "has sha256 .* were made with"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / TOKENIZER_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=rf"tokenizer.json {message}"):
        load_tokenizer(tmp_path, sha256=BytesTokenizer().sha256)
