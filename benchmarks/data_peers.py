"""Other people's ways of reading the same tokens, for `benchmarks.data --peers`.

Each gives shuffled rows of seq_len + 1 tokens as int64 batches, as its documentation proposes for
tokens that are prepared already, from files of the same machine. What is not installed is left out.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def ways(tokens: Path, folder: Path, *, seq_len: int, batch: int) -> dict[str, Callable[[], int]]:
    """Returns a function per library that is installed, which reads all rows once.

    Args:
        tokens: all tokens, uint16.
        folder: where a library's own files are made.
        seq_len: rows begin so many tokens apart, and are one longer.
        batch: rows of a batch.
    """
    flat = np.fromfile(tokens, dtype=np.uint16)
    count = (len(flat) - 1) // seq_len // batch * batch
    rows = np.lib.stride_tricks.sliding_window_view(flat, seq_len + 1)[: count * seq_len : seq_len]
    found: dict[str, Callable[[], int]] = {}
    for name, make in (("mosaicml-streaming", _streaming), ("Ray Data", _ray_data)):
        try:
            found[name] = make(rows, folder, batch)
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
    return found


def _streaming(rows: np.ndarray, folder: Path, batch: int) -> Callable[[], int]:
    streaming: Any = importlib.import_module("streaming")  # no dependency of ours

    out = str(folder / "mds")
    columns = {"tokens": f"ndarray:uint16:{rows.shape[1]}"}
    with streaming.MDSWriter(
        out=out, columns=columns, compression="zstd:3", hashes=["xxh64"]
    ) as writer:
        for row in rows:
            writer.write({"tokens": np.ascontiguousarray(row)})

    def read() -> int:
        data = streaming.StreamingDataset(
            local=out, shuffle=True, batch_size=batch, validate_hash="xxh64", keep_zip=True
        )
        pending, found = [], 0
        for sample in data:
            pending.append(sample["tokens"])
            if len(pending) == batch:
                found += np.stack(pending).astype(np.int64)[:, 1:].size
                pending.clear()
        return found

    return read


def _ray_data(rows: np.ndarray, folder: Path, batch: int) -> Callable[[], int]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import ray.data

    out = folder / "parquet"
    out.mkdir()
    for number, part in enumerate(np.array_split(rows, 16)):
        tokens = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), rows.shape[1])
        pq.write_table(pa.table({"tokens": tokens}), out / f"{number:02d}.parquet")
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    def read() -> int:
        found = 0
        data = ray.data.read_parquet(str(out))
        batches = data.iter_batches(
            batch_size=batch, batch_format="numpy", local_shuffle_buffer_size=4 * batch
        )
        for one in batches:
            found += np.stack(list(one["tokens"])).astype(np.int64)[:, 1:].size
        return found

    return read
