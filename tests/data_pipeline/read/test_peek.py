"""Rows for people: every token's text, whether it is learned, and padding."""

from pathlib import Path

import pytest
from made_folder import Document, MadeFolder, documents

from moebius.data_pipeline.errors import DataError, ShardError
from moebius.data_pipeline.read.loader import Loader
from moebius.data_pipeline.read.peek import DecodedRow, peek_samples, peek_split, visible
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer

S = 16
TOKENIZER = BytesTokenizer()


def written(text: str, *, prompt: int = 0) -> Document:
    return Document((*text.encode(), 256), prompt=prompt)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "q"), frozenset({"q"}))
    letters = "abcdefghijklmnopqrstuvwxyz"
    folder.seal("a", [written(letters[n:] * 2) for n in range(20)], documents(7, 3))
    folder.seal("q", [written(f"why {n}? so", prompt=len(f"why {n}?")) for n in range(10, 30)])
    return folder.complete()


def text_of(row: DecodedRow) -> str:
    return "".join(text for part in row.documents for text, _ in part.segments)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_samples_are_those_of_the_loader(made: MadeFolder, packing: str) -> None:
    data = made.config(seq_len=S, packing=packing)
    rows = peek_samples(data, range(4, 40), TOKENIZER)
    with Loader(data, global_batch=36, micro_batch=36, start_sample=4) as loader:
        tokens = next(loader).tokens[0]
    assert any(row.num_padding for row in rows) == (packing == "best_fit")
    for number, (row, expected) in enumerate(zip(rows, tokens, strict=True)):
        real = expected[: S + 1 - row.num_padding]
        assert row.place.startswith(f"sample {4 + number}: source ")
        assert text_of(row) == TOKENIZER.decode(real)
        assert sum(part.ends for part in row.documents) == sum(real == 256)
        for part in row.documents:
            learned = "".join(text for text, is_learned in part.segments if is_learned)
            if "source q" in row.place and packing == "best_fit":
                assert learned == " so"
            elif "source a" in row.place and packing == "concat":
                assert learned == "".join(text for text, _ in part.segments)


def test_rows_of_a_split_are_from_all_over_it(made: MadeFolder) -> None:
    rows = peek_split(made.config(seq_len=S), "train", 8, TOKENIZER)
    assert len({row.place for row in rows}) == 8
    assert text_of(rows[0]) == TOKENIZER.decode(made.stream("a", 0)[: S + 1])
    assert "why" in text_of(rows[-1])
    assert peek_split(made.config(seq_len=S), "validation", 10**6, TOKENIZER)
    with pytest.raises(ShardError, match="has no row of 5001 tokens"):
        peek_split(made.config(seq_len=5000), "train", 1, TOKENIZER)


def test_samples_that_are_not_sealed_yet_are_refused(tmp_path: Path) -> None:
    growing = MadeFolder(tmp_path / "made").seal("text", documents(0, 3))
    with pytest.raises(DataError, match="samples 5000 to 5003 cannot be read"):
        peek_samples(growing.config(), range(5000, 5004), TOKENIZER)


def test_what_would_steer_a_terminal_is_shown() -> None:
    assert visible("a\x1b[31mb\r\n\tü\x7f\x9b") == "a␛[31mb␍↵\n␉ü␡<U+009B>"
    assert visible("\u202eabc\u200b\ufeff\ue000\u2028") == (
        "<U+202E>abc<U+200B><U+FEFF><U+E000><U+2028>"
    )
    assert visible("日本語 😀 naïve") == "日本語 😀 naïve"
