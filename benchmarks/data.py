"""Measures the data pipeline on one core: prepare, read, shuffle, random access, first batch,
memory.

    python -m benchmarks.data [--input TEXT ...] [--megabytes 160] [--only prepare read ...]
                              [--rounds 7] [--prepare-rounds 3] [--steady]

The text is `--input`, or documents made of paragraphs drawn with a seed from the embedded corpus.
(That is real English. A record batch holds as many tokens as a quarter of the corpus, so some
paragraphs occur twice in it, which helps zstd.) It is prepared as by `moebius prepare`: BPE with
8,000 ids, seq_len 1,024. These readers then take turns, because the machine's speed drifts; times
are processor seconds of one thread:

memmap    rows of all tokens in one uint16 file, at random places, as int64: the limit of any loader
decode    every record batch in order, checked and decoded, nothing else
floor     minimal reading in Python: windows of record batches, checked and decoded once each, whose
          rows are joined in random order as int64 batches; no order, masks or ids
fitted    the same floor, with each row joined from the pieces of its plan
concat    shuffled, checked int64 batches in training order, rows cut from the stream
best_fit  the same, packed so that no document is cut
random    single rows at random places of the order, from one reader: milliseconds a row

Every round of `concat` and `best_fit` opens the folder again, within its time; `--steady` adds
rounds on a folder that was opened and read once before the clock starts. `first` opens the loader
at g = 0 and g = 10⁹ and waits for a batch. `memory` reports the order and the index: growth with
tokens, from one opened segment to all, and the fixed part, mostly windows and refs of the order.
`many_shards` reports everything for a folder of thousands of such shards, in many small segments
and in few of the usual size. `prepare` compares preparation by two processes, and on a Ray with two
CPUs, with two processes that only read and encode the same text, in turns (data_prepare.py). Prints
a table and writes results/data.json; with `--only` it updates only the named parts, with date and
commit.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import data_prepare
from benchmarks.report import save_parts
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.commit import ManifestWriter
from moebius.data_pipeline.make.pools import LocalPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import (
    Segment,
    ShardEntry,
    manifest_name,
    read_manifest,
    shard_name,
)
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.corruption import open_fetcher
from moebius.data_pipeline.read.packing import WINDOW_BATCHES, PlanKey, fit_chunk, open_plan
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.data_pipeline.read.token_store import TokenStore
from moebius.data_pipeline.sources.embedded import embedded_documents
from moebius.data_pipeline.tokenizers.interface import TOKENIZER_FILE

SEQ_LEN = 1024
BATCH = 256  # rows of a batch
SPLIT_BYTES = 8 * 2**20  # of text for a shard: an eighth of what is usual
SEGMENT_TOKENS = 2**23
PARTS = ("prepare", "read", "random", "first", "memory")
GOALS = {
    "concat": "≥ 60 M tokens/s",
    "best_fit": "≥ 60 M tokens/s",
    "first batch at g = 10⁹": "≤ 1 s",
    "memory": "the index grows by ≤ 1 byte per 1,000 tokens",
    "prepare": "≥ 0.7 × bare tokenisation",
}


@dataclass
class Reading:
    """Holds one way to read and the time of each round."""

    name: str
    tokens: int  # of a round
    times_s: list[float] = field(default_factory=list)  # of this process on a processor
    wall_s: list[float] = field(default_factory=list)  # on the clock
    steady_s: list[float] = field(default_factory=list)  # on a processor, opened before

    @property
    def fastest(self) -> float:
        """Returns tokens per processor second in the fastest round."""
        return self.tokens / min(self.times_s)

    @property
    def steady(self) -> float | None:
        """Returns tokens per processor second in the fastest round on an opened folder, if
        measured.
        """
        return self.tokens / min(self.steady_s) if self.steady_s else None

    @property
    def median(self) -> float:
        """Returns tokens per processor second in the median round."""
        return self.tokens / statistics.median(self.times_s)

    @property
    def on_the_clock(self) -> float:
        """Returns tokens per second of wall time in the fastest round, for readers in other
        processes.
        """
        return self.tokens / min(self.wall_s)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = PrepareConfig(
            input=tuple(options.input or [str(write_text(folder, options.megabytes * 10**6))]),
            split_bytes=SPLIT_BYTES,
            segment_tokens=SEGMENT_TOKENS,
        )
        config = DataConfig(directory=str(folder / "shards"), seq_len=SEQ_LEN, seed=1)
        figures: dict[str, Any] = {}
        rounds = options.prepare_rounds if "prepare" in options.only else 0
        made = prepared(source, Path(config.directory), folder, rounds=rounds)
        if "prepare" in options.only:
            figures["prepare"] = made
        if "read" in options.only:
            readings = read(config, folder, options.rounds, steady=options.steady)
            figures["read"] = [
                asdict(one)
                | {
                    "fastest": one.fastest,
                    "median": one.median,
                    "on_the_clock": one.on_the_clock,
                    "steady": one.steady,
                }
                for one in readings
            ]
        if "random" in options.only:
            figures["random_row_ms"] = random_rows(config)
        if "first" in options.only:
            figures["first_batch_s"] = {str(g): first_batch_s(config, g) for g in (0, 10**9)}
        if "memory" in options.only:
            figures["memory"] = memory(config, folder)
    show(figures)
    text = {"input": options.input or "embedded paragraphs"}
    print(save_parts("data", figures, {"text": text, "goals": GOALS}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", nargs="+", metavar="TEXT")
    parser.add_argument("--megabytes", type=int, default=160, help="of text that is put together")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prepare-rounds", type=int, default=3)
    parser.add_argument("--steady", action="store_true", help="also without opening the folder")
    return parser.parse_args()


def write_text(folder: Path, num_bytes: int) -> Path:
    """Writes documents of 1 to 40 paragraphs drawn from the embedded corpus."""
    paragraphs = [part for text in embedded_documents() for part in text.split("\n\n") if part]
    rng, size = np.random.default_rng(0), 0
    path = folder / "text.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        while size < num_bytes:
            drawn = rng.integers(0, len(paragraphs), int(rng.integers(1, 41)))
            size += file.write(
                json.dumps({"text": "\n\n".join(paragraphs[i] for i in drawn)}) + "\n"
            )
    return path


# Preparing ---------------------------------------------------------------------------------------


def prepared(source: PrepareConfig, shards: Path, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Prepares the folder that all readers use; reports its speed beside bare tokenization."""
    began = time.perf_counter()
    with LocalPool(2) as pool:
        prepare(source, shards, pool=pool)
    manifest = read_manifest(shards)
    tokens = sum(shard.num_tokens for shard in manifest.shards)
    found: dict[str, Any] = {
        "tokens": tokens,
        "text_bytes": sum(shard.num_text_bytes for shard in manifest.shards),
        "shard_bytes_per_token": sum(shard.num_bytes for shard in manifest.shards) / tokens,
        "first_seconds": time.perf_counter() - began,  # with the training of the tokenizer
    }
    if rounds:  # with that tokenizer: what is compared is the way of every document
        again = source.model_copy(update={"tokenizer": str(shards)})
        found |= data_prepare.compare(again, folder, rounds)
    return found


# Reading -----------------------------------------------------------------------------------------


def read(config: DataConfig, folder: Path, rounds: int, *, steady: bool) -> list[Reading]:
    """Reads in every way, all of them in each round."""
    stores = train_stores(config)
    flat = folder / "tokens.bin"
    with open(flat, "wb") as file:
        for store in stores:
            for batch in range(store.num_batches):
                file.write(store.read(batch).tokens.tobytes())
    num_rows = sum(int(store.batch_starts[-1]) for store in stores) // SEQ_LEN // BATCH * BATCH
    fitted = config.model_copy(update={"packing": "best_fit"})
    ways: dict[str, Callable[[], int]] = {
        "memmap": lambda: through_memmap(flat, num_rows),
        "decode": lambda: decoded(train_stores(config)),
        "floor of concat": lambda: floor_of_cut_rows(stores),
        "floor of best_fit": lambda: floor_of_fitted_rows(fitted),
        "concat": lambda: in_order(config, num_rows),
        "best_fit": lambda: in_order(fitted, num_rows),
    }
    found = {name: Reading(name, way()) for name, way in ways.items()}  # once for the caches
    opened: dict[str, OpenFolder] = {}
    if steady:
        opened = {"concat": OpenFolder(config), "best_fit": OpenFolder(fitted)}
        for one in opened.values():
            one.read(num_rows)
    for _ in range(rounds):
        for name, way in ways.items():
            began, began_wall = time.process_time(), time.perf_counter()
            way()
            found[name].times_s.append(time.process_time() - began)
            found[name].wall_s.append(time.perf_counter() - began_wall)
            if name in opened:
                began = time.process_time()
                opened[name].read(num_rows)
                found[name].steady_s.append(time.process_time() - began)
    return list(found.values())


def train_stores(config: DataConfig) -> list[TokenStore]:
    manifest = read_manifest(config.directory)
    return [
        TokenStore(config.directory, source.name, segment.number, "train", manifest)
        for source in manifest.sources
        for segment in manifest.segments(source.name)
    ]


def through_memmap(path: Path, num_rows: int) -> int:
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = np.random.default_rng(0).permutation(num_rows - 1) * SEQ_LEN
    for first in range(0, len(starts) - BATCH + 1, BATCH):
        batch = np.empty((BATCH, SEQ_LEN + 1), dtype=np.int64)
        for row, start in enumerate(starts[first : first + BATCH].tolist()):
            batch[row] = tokens[start : start + SEQ_LEN + 1]
    return (len(starts) // BATCH) * BATCH * SEQ_LEN


def decoded(stores: Sequence[TokenStore]) -> int:
    return sum(len(store.read(i).tokens) for store in stores for i in range(store.num_batches))


def floor_of_cut_rows(stores: Sequence[TokenStore]) -> int:
    """Reads rows cut from the stream with minimal work: the bound of `concat`."""
    rng, read = np.random.default_rng(0), 0
    for store in stores:
        for first in range(0, store.num_batches, WINDOW_BATCHES):
            end = min(first + WINDOW_BATCHES, store.num_batches)
            window, _ = window_of(store, first, end)
            values, step = window.data.cast("B"), SEQ_LEN * window.itemsize
            starts = rng.permutation((len(window) - 1) // SEQ_LEN) * step
            size = step + window.itemsize
            read += as_batches([values[start : start + size] for start in starts.tolist()], window)
    return read


def floor_of_fitted_rows(config: DataConfig) -> int:
    """Reads the rows of plans with minimal work: the bound of `best_fit`."""
    read, samples = 0, OrderedSamples(config, open_fetcher(config))
    prepared = samples.prepared
    for source in prepared.manifest.sources:
        for segment in range(len(prepared.manifest.segments(source.name))):
            store = TokenStore(config.directory, source.name, segment, "train", prepared.manifest)
            key = PlanKey(source.name, segment, SEQ_LEN, prepared.content_of(source.name, segment))
            plan = open_plan(
                Path(config.directory),
                key,
                batch_tokens=prepared.manifest.header.batch_tokens,
                batches=lambda one=store: (
                    one.read(batch).document_ends for batch in range(one.num_batches)
                ),
            )
            for first, end in pairwise(plan.chunk_batches.tolist()):
                window, ends = window_of(store, first, end)
                pieces = fit_chunk(ends, SEQ_LEN)
                values, item = window.data.cast("B"), window.itemsize
                begins = (pieces.starts * item).tolist()
                ends = ((pieces.starts + pieces.lengths) * item).tolist()
                spans = [values[b:e] for b, e in zip(begins, ends, strict=True)]
                row_starts = pieces.row_starts[::BATCH].tolist()
                for here in pairwise([*row_starts, len(spans)]):
                    read += as_batches(spans[slice(*here)], window)
    return read


def window_of(store: TokenStore, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Decodes consecutive record batches; returns their tokens and where documents end in them."""
    batches = [store.read(batch) for batch in range(first, end)]
    starts = store.batch_starts - store.batch_starts[first]
    begins = starts[first:end].tolist()
    ends = [one.document_ends + begin for one, begin in zip(batches, begins, strict=True)]
    return np.concatenate([one.tokens for one in batches]), np.concatenate(ends)


def as_batches(parts: list[memoryview], window: np.ndarray) -> int:
    """Joins parts as int64 batches; returns the number of tokens."""
    read = 0
    for first in range(0, len(parts), BATCH):
        joined = b"".join(parts[first : first + BATCH])
        read += len(np.frombuffer(joined, dtype=window.dtype).astype(np.int64))
    return read


class OpenFolder:
    """Reads the first batches of the order, repeatedly."""

    def __init__(self, config: DataConfig):
        self._samples = OrderedSamples(config, open_fetcher(config))

    def read(self, num_rows: int) -> None:
        for first in range(0, num_rows, BATCH):
            self._samples.prepare(first, BATCH)
            rows = self._samples.read(self._samples.order.refs_at(first, BATCH))
            assert rows.tokens.dtype == np.int64


def in_order(config: DataConfig, num_rows: int) -> int:
    """Opens the folder and reads it once."""
    opened = OpenFolder(config)
    opened.read(num_rows)
    return num_rows * SEQ_LEN


def random_rows(config: DataConfig, count: int = 200) -> dict[str, float]:
    """Reads single rows at random places of the order; milliseconds each."""
    times = []
    samples = OrderedSamples(config, open_fetcher(config))
    for first in np.random.default_rng(0).integers(0, 10**6, count).tolist():
        began = time.process_time()
        samples.prepare(first, 1)
        samples.read(samples.order.refs_at(first, 1))
        times.append(1e3 * (time.process_time() - began))
    return {"median": statistics.median(times), "p90": float(np.quantile(times, 0.9))}


def first_batch_s(config: DataConfig, start: int) -> float:
    """Opens a loader at a run's position and waits for its first batch; seconds of wall time."""
    from moebius.data_pipeline.read.loader import Loader  # and torch: not in a pool's processes

    began = time.perf_counter()
    with Loader(config, global_batch=BATCH, micro_batch=BATCH, start_sample=start) as loader:
        next(loader)
        return time.perf_counter() - began


def memory(config: DataConfig, folder: Path) -> dict[str, Any]:
    """Measures the memory of order and index: per token of the segments, and fixed.

    The other folder holds the first segments of the same chain of manifests.
    """
    first_segment = config.model_copy(update={"directory": str(folder / "first_segment")})
    Path(first_segment.directory).mkdir()
    for path in Path(config.directory).iterdir():
        if not path.name.startswith("manifest-") or path.name <= manifest_name(1):
            (Path(first_segment.directory) / path.name).symlink_to(path.resolve())
    opened_bytes(first_segment, in_use=False)  # what is imported or compiled by the way
    few, many = (opened_bytes(one, in_use=False) for one in (first_segment, config))
    few_tokens, tokens = (num_train_tokens(one) for one in (first_segment, config))
    later = tokens - few_tokens
    if not later:
        raise SystemExit("memory needs text of more than one segment: give more of it")
    arrays, objects = ((many[part] - few[part]) / later for part in range(2))
    used = sum(opened_bytes(config, in_use=True))
    many = [
        many_shards(config, folder / f"many-{tokens}", copies=100, segment_tokens=tokens)
        for tokens in (SEGMENT_TOKENS, 2**28)
    ]
    return {
        "tokens": tokens,
        "tokens_per_shard": tokens / len(read_manifest(config.directory).of("train")),
        "index_bytes_per_1000_tokens": 1000 * (arrays + objects),
        "of_which_arrays": 1000 * arrays,  # the rest is by shard and segment
        "fixed_bytes": used - (arrays + objects) * tokens,
        "many_shards": many,
    }


def many_shards(
    config: DataConfig, folder: Path, *, copies: int, segment_tokens: int
) -> dict[str, float]:
    """Opens a folder that names another one's shards many times; reports its memory.

    These are the same files under other numbers, which makes no difference to the memory.
    """
    manifest = read_manifest(config.directory)
    units: dict[int, list[ShardEntry]] = {}
    for shard in manifest.shards:
        units.setdefault(shard.number, []).append(shard)
    folder.mkdir()
    writer, segment, number = ManifestWriter(folder), list[ShardEntry](), 0
    writer.append(manifest.header.model_copy(update={"segment_tokens": segment_tokens}))
    for unit in range(copies * len(units)):
        for shard in units[sorted(units)[unit % len(units)]]:
            name = shard_name(shard.source, shard.split, unit)
            segment.append(shard.model_copy(update={"name": name, "input": f"text.jsonl [{unit}]"}))
            for old, new in ((shard.name, name), (shard.index_name, segment[-1].index_name)):
                (folder / new).symlink_to(Path(config.directory, old).resolve())
        if sum(one.num_tokens for one in segment if one.split == "train") >= segment_tokens:
            writer.append(Segment(source=segment[0].source, number=number, shards=tuple(segment)))
            segment, number = [], number + 1
    if segment:
        writer.append(Segment(source=segment[0].source, number=number, shards=tuple(segment)))
    (folder / TOKENIZER_FILE).symlink_to(Path(config.directory, TOKENIZER_FILE).resolve())
    opened = config.model_copy(update={"directory": str(folder)})
    manifest = read_manifest(folder)
    tokens = manifest.num_tokens("train")
    return {
        "shards": len(manifest.shards),
        "segments": len(manifest.sealed),
        "tokens": tokens,
        "bytes_per_1000_tokens": 1000 * sum(opened_bytes(opened, in_use=False)) / tokens,
    }


def num_train_tokens(config: DataConfig) -> int:
    return sum(int(store.batch_starts[-1]) for store in train_stores(config))


def opened_bytes(config: DataConfig, *, in_use: bool) -> tuple[int, int]:
    """Opens all segments of a folder and their orders; returns bytes of arrays and of the rest.

    `in_use`: includes windows and refs of the order, kept after reading it once.
    """
    num_rows = num_train_tokens(config) // SEQ_LEN
    gc.collect()
    tracemalloc.start()
    samples = OrderedSamples(config, open_fetcher(config))
    manifest = samples.prepared.manifest
    for number, source in enumerate(samples.mixture.names):
        for segment in range(len(manifest.segments(source))):
            samples.prepared.reader(source, segment)
            samples.order.segment_order(number, 0, segment)
    for first in range(0, num_rows - BATCH, BATCH) if in_use else ():
        samples.prepare(first, BATCH)
        samples.order.refs_at(first, BATCH)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    of_arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([of_arrays]).traces
    tracemalloc.stop()
    arrays = sum(trace.size for trace in traces)
    return arrays, taken - arrays


def show(figures: dict[str, Any]) -> None:
    table = Table(
        *("what", "M tokens/s of processor", "median", "÷ memmap", "without opening"),
        *("on the clock", "goal"),
    )
    limit = None
    for one in figures.get("read", ()):
        limit = limit or one["fastest"]
        table.add_row(
            one["name"],
            f"{one['fastest'] / 1e6:,.0f}",
            f"{one['median'] / 1e6:,.0f}",
            f"{one['fastest'] / limit:.2f}",
            f"{one['steady'] / 1e6:,.0f}" if one["steady"] else "",
            f"{one['on_the_clock'] / 1e6:,.0f}",
            GOALS.get(one["name"], ""),
        )
    console = Console()
    console.print(table)
    for name, value in figures.items():
        if name != "read":
            console.print(name, value)


if __name__ == "__main__":
    main()
