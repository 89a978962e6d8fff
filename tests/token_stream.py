"""A prepared folder's documents and tokens, read by Arrow through the files' own footers, for
comparison.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moebius.data_pipeline.manifest import read_manifest


def documents_of(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    """Returns all documents of a split, source after source, in shard order."""
    tables = [
        pa.ipc.open_file(str(folder / entry.name)).read_all()
        for entry in read_manifest(folder).of(split)
    ]
    return [row for table in tables for row in table.to_pylist()]


def tokens_of(folder: Path, split: str = "train") -> np.ndarray:
    """Returns all tokens of a split, document after document."""
    return np.array([token for row in documents_of(folder, split) for token in row["tokens"]])
