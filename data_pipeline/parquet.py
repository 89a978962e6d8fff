"""Tables of columns to Parquet files: the one place that writes them, whatever is told in them.

A file appears whole or not at all. What belongs to all rows (which model, which step) stands in the
file's metadata, as text. Written with zstd: a table of counts takes a byte or two per row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .atomic import atomic_write


def write_parquet(
    path: Path, columns: Mapping[str, np.ndarray], *, metadata: Mapping[str, str]
) -> None:
    """Writes a table of equally long columns, in their order.

    Args:
        path: the file, which is replaced.
        columns: one-dimensional arrays of numbers or strings, by name.
        metadata: text about all rows, by name.

    Raises:
        PrepareError: the file cannot be written.
    """
    arrays: dict[str, Any] = {name: pa.array(values) for name, values in columns.items()}
    table = pa.table(arrays).replace_schema_metadata(dict(metadata))
    with atomic_write(path) as file:
        pq.write_table(table, file, compression="zstd")
