"""What feeding the ranks of a node costs in processor time, with and without its data server.

    python -m benchmarks.data_server [--ranks 1,2,4,8] [--mtokens 128]

Data is made up: documents of 900 tokens on average, Zipf-distributed over 8,192 ids (9.8 bits per
token), as zstd shards of the usual record batches. Every rank is a process that opens a loader and
takes its batches, and nothing else; all ranks together read every token once. Counted is the
processor time of all ranks, imports left out, and of the server. Its start is in that, and hides what
it saves on little data; `ns_per_token_once_started` leaves it out.
On a busy machine believe nothing.
"""

import argparse
import hashlib
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier as BarrierType
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.manifest import (
    Completion,
    Era,
    Header,
    ManifestWriter,
    SourceEntry,
    TokenizerEntry,
    index_name,
    shard_name,
)
from moebius.data_pipeline.read.loader import Loader
from moebius.data_pipeline.read.rows import Prepared
from moebius.data_pipeline.serve.job import ServerJob
from moebius.data_pipeline.serve.start import ServerHandle, start_server
from moebius.data_pipeline.shards import ShardWriter, TokenDocument, shard_schema

VOCAB_SIZE = 8192
SEQ_LEN = 2048
GLOBAL_BATCH = 256
SHARD_TOKENS = 2**24
BATCH_TOKENS = 128 * 1024


def make_data(folder: Path, num_tokens: int) -> DataConfig:
    """Writes a prepared folder of made-up documents, one era, and returns how it is read."""
    source = SourceEntry(
        name="text",
        licence="",
        num_splits=1,
        has_loss_mask=False,
        has_record_id=False,
    )
    tokenizer = TokenizerEntry(
        kind="bytes",
        file="tokenizer.json",
        sha256="0" * 64,
        vocab_size=VOCAB_SIZE,
        end_of_document_id=0,
    )
    writer = ManifestWriter(folder)
    writer.append(
        Header(
            spec_hash="0" * 64,
            spec={},
            tokenizer=tokenizer,
            batch_tokens=BATCH_TOKENS,
            era_tokens=num_tokens,
            sources=(source,),
        )
    )
    rng = np.random.default_rng(0)
    shards = [_shard(folder, number, rng) for number in range(-(-num_tokens // SHARD_TOKENS))]
    writer.append(Era(source="text", number=0, shards=tuple(shards)))
    writer.append(
        Completion(num_documents={}, num_tokens={}, dropped={}, quarantined=(), inputs={})
    )
    return DataConfig(directory=str(folder), seq_len=SEQ_LEN)


def _shard(folder: Path, number: int, rng: np.random.Generator):
    name = shard_name("text", "train", number)
    weights = 1.0 / (np.arange(VOCAB_SIZE) + 3.0)
    cumulative = np.cumsum(weights / weights.sum())
    tokens = np.searchsorted(cumulative, rng.random(SHARD_TOKENS)).astype(np.uint16)
    tokens = np.minimum(tokens, VOCAB_SIZE - 1)
    ends = np.cumsum(rng.geometric(1 / 900, SHARD_TOKENS // 450))
    cuts = ends[ends < SHARD_TOKENS]
    with open(folder / name, "wb") as file, open(folder / index_name(name), "wb") as index:
        writer = ShardWriter(file, schema=shard_schema(VOCAB_SIZE), batch_tokens=BATCH_TOKENS)
        for row, document in enumerate(np.split(tokens, cuts)):
            digest = hashlib.blake2b(row.to_bytes(8, "big"), digest_size=16).digest()
            writer.add(TokenDocument(document, digest, len(document), "made up", row))
        return writer.close(name=name, split="train", source="text", label=name, index_file=index)


def measure(data: DataConfig, num_ranks: int, *, served: bool) -> dict[str, float]:
    """Reads all tokens once with so many ranks, and returns what it cost."""
    context = multiprocessing.get_context("spawn")
    steps = _steps(data)
    job = ServerJob(
        data=data,
        global_batch=GLOBAL_BATCH,
        num_ranks=num_ranks,
        first_rank=0,
        ranks_here=num_ranks,
        start_sample=0,
    )
    handle = start_server(job) if served else None
    address = None if handle is None else handle.address
    results = context.SimpleQueue()
    begin, end = context.Barrier(num_ranks), context.Barrier(num_ranks + 1)
    ranks = [
        context.Process(target=_rank, args=(job, rank, address, steps, begin, end, results))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    found = [results.get() for _ in ranks]  # all ranks are done; none has hung up
    server_s = 0.0
    if handle is not None and handle.process is not None:
        times = psutil.Process(handle.process.pid).cpu_times()
        server_s = times.user + times.system
    end.wait()
    for rank in ranks:
        rank.join()
    if handle is not None:
        handle.close()
    return _figures(found, server_s, tokens=steps * GLOBAL_BATCH * SEQ_LEN)


def _figures(
    found: list[tuple[float, float, float]], server_s: float, *, tokens: int
) -> dict[str, float]:
    ranks_s = sum(processor_s for processor_s, _, _ in found)
    return {
        "ranks_s": round(ranks_s, 3),
        "server_s": round(server_s, 3),
        "ns_per_token": round((ranks_s + server_s) / tokens * 1e9, 3),
        "wall_s": round(max(wall_s for _, wall_s, _ in found), 3),
        "private_mib_of_a_rank": round(max(mib for _, _, mib in found), 1),
        "mtokens": round(tokens / 1e6, 1),
    }


def _steps(data: DataConfig) -> int:
    return Prepared(data.directory, seq_len=data.seq_len).num_rows("text", 0) // GLOBAL_BATCH


def _rank(
    job: ServerJob,
    rank: int,
    address: Path | None,
    steps: int,
    begin: BarrierType,
    end: BarrierType,
    results: Any,
) -> None:
    begin.wait()
    processor_s, wall_s = time.process_time(), time.perf_counter()
    loader = Loader(
        job.data,
        global_batch=job.global_batch,
        micro_batch=8,
        rank=rank,
        num_ranks=job.num_ranks,
        server=None if address is None else ServerHandle(address),
    )
    with loader:
        for _ in range(steps):
            next(loader)
        if loader.lost_server:
            raise RuntimeError("the data server has ended: this measures something else")
        memory = psutil.Process().memory_full_info().uss / 2**20
        results.put((time.process_time() - processor_s, time.perf_counter() - wall_s, memory))
        end.wait()


def server_start_s() -> float:
    """Returns the processor time of the server's imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "import moebius.data_pipeline.serve.server"]
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _once_started(figures: dict[str, float], start_s: float) -> dict[str, float]:
    """Returns figures with the cost of a token in a long run beside them."""
    working_s = figures["ranks_s"] + max(0.0, figures["server_s"] - start_s)
    per_token = round(working_s / figures["mtokens"] * 1e3, 3)
    return figures | {"ns_per_token_once_started": per_token}


def main() -> None:
    """Measures, prints a table and saves results/data_server.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks on the node")
    parser.add_argument("--mtokens", type=int, default=128, help="millions of tokens")
    parser.add_argument(
        "--folder", type=Path, help="takes the result; benchmarks/results if not given"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    start_s = server_start_s()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder), options.mtokens * 10**6)
        for num_ranks in map(int, options.ranks.split(",")):
            for served in (False, True):
                name = f"{num_ranks} ranks, {'data server' if served else 'each for itself'}"
                figures[name] = _once_started(measure(data, num_ranks, served=served), start_s)
                print(f"{name:28}", figures[name], flush=True)
    from benchmarks.report import RESULTS, save

    load = os.getloadavg()
    facts = {"server_start_s": round(start_s, 3), "load_average": load}
    print(facts, save("data_server", facts | figures, folder=options.folder or RESULTS))


if __name__ == "__main__":
    main()
