"""What the optional stages of making data cost, on one core.

    python -m benchmarks.data_stages [--input FILE.jsonl.zst] [--megabytes 10] [--runs 5]

Documents are those of the file (field "text"), by default those of the embedded corpus, and pieces
of them of 1,000 characters, for calls cost the same however short a document is. Each stage runs
over documents that all rules let pass, several times; the least processor time counts, as MB of
UTF-8 per second of one core. `str.split` stands beside them: Python's own idea of words.
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import zstandard

from benchmarks.report import save
from moebius.data_pipeline.make.decontaminate import build_index
from moebius.data_pipeline.make.filters import reason_to_drop
from moebius.data_pipeline.make.near_duplicates import NearDuplicateIndex, band_keys
from moebius.data_pipeline.make.words import blank_words, plain_words
from moebius.data_pipeline.prepare_config import (
    DecontaminateConfig,
    FilterConfig,
    NearDuplicateConfig,
)
from moebius.data_pipeline.sources.english import embedded_documents

PIECE_CHARS = 1000
GOPHER = FilterConfig(min_words=50, max_words=100_000, quality=True, repetition=True)


def documents(path: Path | None, num_bytes: int) -> list[str]:
    """Returns documents of about `num_bytes` that all rules let pass."""
    found, size = [], 0
    for text in embedded_documents() if path is None else _texts(path):
        if size >= num_bytes:
            break
        size += len(text.encode())
        found.append(text)
    return [text for text in found if reason_to_drop(text, GOPHER) is None]


def _texts(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        lines = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        for line in io.BufferedReader(lines) if path.suffix == ".zst" else file:
            yield json.loads(line)["text"]


def stages(folder: Path) -> dict[str, Callable[[str], object]]:
    """Returns what is measured; `folder` is for an evaluation set of made-up items."""
    rng = np.random.default_rng(0)
    items = folder / "items.jsonl"
    with open(items, "w", encoding="utf-8") as file:
        for _ in range(20_000):
            words = rng.integers(0, 10**6, 60).tolist()
            file.write(json.dumps({"text": " ".join(f"w{word}" for word in words)}) + "\n")
    index = build_index(DecontaminateConfig(evaluation_sets=(str(items),)))
    near = NearDuplicateConfig()
    return {
        "str.split": str.split,
        "words between blanks": blank_words,
        "plain words": plain_words,
        "length in characters": _rule(FilterConfig(min_chars=100, max_chars=10**9)),
        "length in words": _rule(FilterConfig(min_words=50, max_words=100_000)),
        "quality": _rule(FilterConfig(quality=True)),
        "repetition": _rule(FilterConfig(repetition=True)),
        "all Gopher rules": _rule(GOPHER),
        "keys of near duplicates": lambda text: band_keys(text, near),
        "decontamination": index.find,
    }


def _rule(config: FilterConfig) -> Callable[[str], object]:
    return lambda text: reason_to_drop(text, config)


def megabytes_per_second(stage: Callable[[str], object], texts: list[str], runs: int) -> float:
    """Returns the text that a stage sees per second of processor time, at best."""
    num_bytes = sum(len(text.encode()) for text in texts)
    seconds = []
    for _ in range(runs):
        start = time.process_time()
        for text in texts:
            stage(text)
        seconds.append(time.process_time() - start)
    return num_bytes / min(seconds) / 1e6


def index_figures(num_documents: int) -> dict[str, float]:
    """Returns what the index of near duplicates costs, for documents that are all different."""
    rng = np.random.default_rng(0)
    num_bands, _ = NearDuplicateConfig().bands_and_rows
    index, seconds = NearDuplicateIndex(), 0.0
    for _ in range(num_documents // 10_000):
        keys = rng.integers(0, 2**64, (10_000, num_bands), dtype=np.uint64)
        start = time.process_time()
        index.choose(keys)
        seconds += time.process_time() - start
    return {
        "documents": num_documents,
        "documents_per_s": num_documents / seconds,
        "bytes_per_document": index.num_bytes / num_documents,
    }


def main() -> None:
    """Measures, prints a table and saves results/data_stages.json."""
    import tempfile

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--input", type=Path, help=".jsonl or .jsonl.zst with a field 'text'")
    parser.add_argument("--megabytes", type=float, default=10.0, help="of text")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    whole = documents(options.input, int(options.megabytes * 1e6))
    pieces = [
        text[start : start + PIECE_CHARS]
        for text in whole[: len(whole) // 4]
        for start in range(0, len(text) - PIECE_CHARS, PIECE_CHARS)
    ]
    pieces = [text for text in pieces if reason_to_drop(text, GOPHER) is None]
    sets = {"documents": whole, "pieces": pieces}
    sizes = {
        name: {
            "number": len(texts),
            "mean_bytes": sum(len(text.encode()) for text in texts) / len(texts),
        }
        for name, texts in sets.items()
    }
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, stage in stages(Path(folder)).items():
            figures[name] = {
                of: round(megabytes_per_second(stage, texts, options.runs), 1)
                for of, texts in sets.items()
            }
            print(f"{name:26}", *(f"{of} {rate:8.1f} MB/s" for of, rate in figures[name].items()))
    index = index_figures(500_000)
    print("index of near duplicates", index)
    source = "embedded corpus" if options.input is None else options.input.name
    save(
        "data_stages",
        {
            "text": source,
            "sizes": sizes,
            "megabytes_per_s_of_one_core": figures,
            "near_duplicate_index": index,
        },
    )


if __name__ == "__main__":
    main()
