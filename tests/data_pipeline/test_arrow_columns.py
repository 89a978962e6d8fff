"""Columns equal those of `pa.array`, byte for byte, without importing pandas."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from moebius.data_pipeline.arrow_columns import (
    bool_column,
    bools_of,
    bytes_column,
    list_column,
    number_column,
    text_column,
)

_LENGTHS = [0, 1, 7, 8, 9, 1001]


def _written(column: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 3), use_threads=False)
    batch = pa.RecordBatch.from_arrays([column], names=["x"])
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _columns(length: int) -> dict[str, tuple[pa.Array, Callable[[], pa.Array]]]:
    rng = np.random.default_rng(length)
    numbers = rng.integers(0, 2**32, length, dtype=np.uint64)
    bools = rng.integers(0, 2, length).astype(bool)
    ids = [rng.bytes(16) for _ in range(length)]
    texts = ["né" * int(count) for count in rng.integers(0, 4, length)]
    lists = [list(range(int(count))) for count in rng.integers(0, 4, length)]
    flat = np.array([one for part in lists for one in part], dtype=np.int64)
    cut = list_column(list(map(len, lists)), number_column(flat, np.dtype("<u2")))
    return {
        "numbers": (number_column(numbers, np.dtype("<u8")), lambda: pa.array(numbers)),
        "bools": (bool_column(bools), lambda: pa.array(bools)),
        "bytes": (bytes_column(ids, 16), lambda: pa.array(ids, type=pa.binary(16))),
        "texts": (
            text_column([text.encode() for text in texts]),
            lambda: pa.array(texts, type=pa.string()),
        ),
        "lists": (cut, lambda: pa.array(lists, type=pa.list_(pa.uint16()))),
    }


@pytest.mark.parametrize("length", _LENGTHS)
def test_a_column_is_written_as_that_of_the_library_is(length):
    for name, (column, of_library) in _columns(length).items():
        expected = of_library()
        assert column.type == expected.type, name
        assert column.equals(expected), name
        assert _written(column) == _written(expected), name


@pytest.mark.parametrize(("start", "stop"), [(0, 1001), (3, 900), (8, 9), (5, 5)])
def test_truth_values_come_back_from_any_part_of_a_column(start, stop):
    bools = np.random.default_rng(1).integers(0, 2, 1001).astype(bool)
    assert bools_of(bool_column(bools)[start:stop]).tolist() == bools[start:stop].tolist()


def test_a_value_that_does_not_fit_is_never_cut_off():
    with pytest.raises(OverflowError, match="values from 3 to 65536 do not fit into uint16"):
        number_column(np.array([3, 65536]), np.dtype("<u2"))
    with pytest.raises(ValueError, match="2 values have 31 bytes, not 16 each"):
        bytes_column([bytes(16), bytes(15)], 16)


_WITHOUT_PANDAS = """\
import sys
from pathlib import Path

class Note:  # an error here would not show: a task that fails is tried again
    def find_spec(self, name, path=None, target=None):
        asked.append(name)

asked = []
sys.meta_path.insert(0, Note())
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.data_pipeline.read.corruption import open_fetcher

folder = Path(sys.argv[1])
(folder / "text.jsonl").write_text('{"text": "one two three"}\\n{"text": "four five six"}\\n')
for shuffle in (False, True):
    source = PrepareConfig(
        input=(str(folder / "text.jsonl"),), tokenizer="bytes", shuffle_documents=shuffle
    )
    config = DataConfig(directory=str(folder / str(shuffle)), seq_len=4, packing="best_fit")
    prepare(source, config.directory)
    samples = OrderedSamples(config, open_fetcher(config))
    assert samples.prepare(0, 2) == ""
    samples.read(samples.refs_at(0, 2))
    samples.close()
assert "numpy" in asked
assert "pandas" not in asked
"""


def test_preparing_and_reading_import_no_pandas(tmp_path):
    """Importing pandas would cost each process more than all other imports."""
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PANDAS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
