"""Rows as people read them: every token's text, whose it is, what is learned, what is padding."""

import numpy as np
import pytest
from made_folder import Document, MadeFolder, documents

from moebius.data_pipeline.document_order import RunOrder
from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.read.peek import DecodedRow, peek_order, peek_shards, visible
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer

S = 16


def written(text: str, *, prompt: int = 0) -> Document:
    return Document((*text.encode(), 256), prompt=prompt)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "q"), frozenset({"q"}))
    letters = "abcdefghijklmnopqrstuvwxyz"
    folder.seal("a", [written(letters[n:] * 2) for n in range(20)], documents(7, 3))
    folder.seal("q", [written(f"why {n}? so", prompt=len(f"why {n}?")) for n in range(10, 30)])
    return folder.complete()


def text_of(row: DecodedRow) -> str:
    return "".join(segment.text for part in row.parts for segment in part.segments)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_row_is_the_text_of_its_documents(made, packing):
    data = made.config(seq_len=S, packing=packing)
    tokenizer = BytesTokenizer()
    with RunOrder(data, global_batch=4, num_steps=12, skip_folder=None) as order:
        rows = peek_order(order, range(48), tokenizer)
        _, read = order.read(range(48))
    assert any(row.num_padding for row in rows) == (packing == "best_fit")
    for row, tokens in zip(rows, read.tokens, strict=True):
        real = tokens[: S + 1 - row.num_padding]
        assert text_of(row) == tokenizer.decode(real)
        assert sum(part.ends for part in row.parts) == np.count_nonzero(real == 256)
        assert sum(part.part.num_tokens for part in row.parts) == len(real)
        assert row.sample is not None
        for part in row.parts:
            learned = "".join(one.text for one in part.segments if one.learned)
            if row.source == "q" and part.part.is_whole and packing == "best_fit":
                assert learned == " so"
            elif row.source == "a" and packing == "concat":
                assert learned == "".join(one.text for one in part.segments)


def test_rows_of_a_folder_are_from_all_over_it(made):
    data = made.config(seq_len=S)
    rows = peek_shards(data, "train", 8, BytesTokenizer())
    assert len({(row.source, row.row) for row in rows}) == 8
    assert {row.source for row in rows} == {"a", "q"}
    for row in rows:
        stream = made.stream(row.source, row.era)[S * row.row : S * row.row + S + 1]
        assert text_of(row) == BytesTokenizer().decode(stream)
        assert row.sample is None
    assert len(peek_shards(data, "validation", 10**6, BytesTokenizer())) >= 1
    with pytest.raises(ShardError, match=r"has no row of 5001 tokens: lower data.seq_len=5000"):
        peek_shards(made.config(seq_len=5000), "train", 1, BytesTokenizer())


def test_what_would_steer_a_terminal_is_shown():
    assert visible("a\x1b[31mb\r\n\tü\x7f\x9b") == "a␛[31mb␍↵\n␉ü␡<U+009B>"
    assert visible("\u202eabc\u200b\ufeff\ue000\u2028") == (
        "<U+202E>abc<U+200B><U+FEFF><U+E000><U+2028>"
    )
    assert visible("日本語 😀 naïve") == "日本語 😀 naïve"
