"""What tokenising costs on one core: tiktoken and `tokenizers` on the same byte-level BPE, raw
bytes, and SentencePiece where it is installed.

    python -m benchmarks.tokenise [--input TEXT ...] [--megabytes 16] [--vocab-size 8000 50304]
                                  [--rounds 5]

Text is the embedded corpus, or what `--input` names. Each tokenizer is trained on the first half of
it and encodes the second; engines take turns in one process, for the machine's speed drifts. Time
is the process's own, one thread. Per engine: tokens and bytes of text per second, fastest and
median round, bytes of text per token, and whether the ids are those of `tokenizers`, document by
document. Then the worst texts, 10 million characters without a boundary each. Prints a table and
writes results/tokenise.json; one minute.
"""

import argparse
import io
import random
import statistics
import string
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.tasks import normalised
from moebius.data_pipeline.sources.reading import read_documents
from moebius.data_pipeline.sources.splits import plan_splits
from moebius.data_pipeline.tokenizers.bpe import train_bpe
from moebius.data_pipeline.tokenizers.huggingface import HuggingFaceTokenizer
from moebius.data_pipeline.tokenizers.interface import TOKENIZER_FILE, Tokenizer
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.sentencepiece import SentencePieceTokenizer

WORST_CHARS = 10**7


@dataclass
class Engine:
    """One way to encode, and what was measured of it."""

    engine: str
    vocab_size: int
    ids_equal: bool | None  # to those of `tokenizers` with the same vocabulary; None: another's
    bytes_per_token: float = 0.0
    fastest_tokens_per_s: float = 0.0
    median_tokens_per_s: float = 0.0
    times_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", nargs="+", default=["embedded"], metavar="TEXT")
    parser.add_argument("--megabytes", type=int, default=16, help="of text, both halves together")
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[8000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = documents(options.input, options.megabytes * 10**6)
    train, test = texts[::2], texts[1::2]
    num_bytes = sum(len(text.encode()) for text in test)
    engines: list[tuple[Engine, Tokenizer]] = []
    for vocab_size in options.vocab_size:
        engines += of_vocabulary(train, test, vocab_size)
    for _ in range(options.rounds):
        for engine, tokenizer in engines:
            engine.times_s.append(timed(tokenizer, test))
    for engine, tokenizer in engines:
        tokens = sum(map(len, tokenizer.encode_batch(test)))
        engine.bytes_per_token = num_bytes / tokens
        engine.fastest_tokens_per_s = tokens / min(engine.times_s)
        engine.median_tokens_per_s = tokens / statistics.median(engine.times_s)
    worst = worst_texts(engines)
    show([engine for engine, _ in engines], worst)
    figures = {"text": {"input": options.input, "documents": len(test), "bytes": num_bytes}}
    engine_figures = [asdict(engine) for engine, _ in engines]
    print(save("tokenise", figures | {"engines": engine_figures, "ten_million_characters": worst}))


def documents(names: Sequence[str], max_bytes: int) -> list[str]:
    """Returns normalised documents of about `max_bytes` in all."""
    config = DataConfig(input=tuple(names))
    found, size = [], 0
    for split in plan_splits(config):
        for document in read_documents(split, config.all_sources[0]):
            found.append(normalised(document.text))
            size += len(found[-1].encode())
            if size >= max_bytes:
                return found
    return found


def of_vocabulary(
    train: list[str], test: list[str], vocab_size: int
) -> list[tuple[Engine, Tokenizer]]:
    """Trains tokenizers of one size, and compares the ids of the two engines of BPE."""
    trained = train_bpe(train, vocab_size=vocab_size)
    text_json = trained.files[TOKENIZER_FILE].decode()
    library = HuggingFaceTokenizer(text_json, engine="tokenizers")
    fast = HuggingFaceTokenizer(text_json, engine="tiktoken")
    pairs = zip(library.encode_batch(test), fast.encode_batch(test), strict=True)
    are_equal = all(np.array_equal(one, other) for one, other in pairs)
    sentencepiece = trained_sentencepiece(train, vocab_size)
    return [
        (Engine("tokenizers", library.vocab_size, ids_equal=True), library),
        (Engine("tiktoken", fast.vocab_size, ids_equal=are_equal), fast),
        *[(Engine("sentencepiece", one.vocab_size, None), one) for one in sentencepiece],
        (Engine("bytes", 257, None), BytesTokenizer()),
    ]


def trained_sentencepiece(train: list[str], vocab_size: int) -> list[SentencePieceTokenizer]:
    """Returns SentencePiece's own BPE, or nothing where the library is missing."""
    try:
        import sentencepiece
    except ImportError:
        return []
    model = io.BytesIO()
    lines = (line for text in train for line in text.splitlines() if len(line) < 4000)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
        input_sentence_size=200_000,
    )
    return [SentencePieceTokenizer(model.getvalue())]


def timed(tokenizer: Tokenizer, texts: list[str]) -> float:
    started = time.process_time()
    for start in range(0, len(texts), 100):
        tokenizer.encode_batch(texts[start : start + 100])
    return time.process_time() - started


def worst_texts(engines: list[tuple[Engine, Tokenizer]]) -> list[dict[str, object]]:
    """Encodes texts without any boundary once with every engine of the first vocabulary."""
    letters = "".join(random.Random(0).choices(string.ascii_lowercase, k=WORST_CHARS))
    texts = {
        "one letter": "a" * WORST_CHARS,
        "random letters": letters,
        "blanks": " " * WORST_CHARS,
    }
    smallest = min(engine.vocab_size for engine, _ in engines if engine.engine == "tokenizers")
    return [
        {"text": name, "engine": engine.engine, "seconds": round(timed(tokenizer, [text]), 2)}
        for name, text in texts.items()
        for engine, tokenizer in engines
        if engine.vocab_size in (smallest, 257)
    ]


def show(engines: list[Engine], worst: list[dict[str, object]]) -> None:
    table = Table("engine", "ids", "M tokens/s", "median", "MB/s", "bytes/token", "as tokenizers")
    for engine in engines:
        table.add_row(
            engine.engine,
            str(engine.vocab_size),
            f"{engine.fastest_tokens_per_s / 1e6:.2f}",
            f"{engine.median_tokens_per_s / 1e6:.2f}",
            f"{engine.fastest_tokens_per_s * engine.bytes_per_token / 1e6:.1f}",
            f"{engine.bytes_per_token:.2f}",
            {None: "", True: "yes", False: "NO"}[engine.ids_equal],
        )
    Console().print(table)
    slow = Table(f"{WORST_CHARS:,} characters", "engine", "seconds")
    for row in worst:
        slow.add_row(*map(str, row.values()))
    Console().print(slow)


if __name__ == "__main__":
    main()
