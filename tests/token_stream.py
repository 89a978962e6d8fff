"""All tokens of a split of a prepared folder, one after the other: what tests compare with."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from moebius.data_pipeline.manifest import DatasetManifest, read_manifest
from moebius.data_pipeline.read.token_store import TokenStore


class TokenStream:
    """Reads the token stream of a split of a prepared folder: all segments of all sources in a row.

    It has the interface of a `TokenStore`.
    """

    def __init__(self, directory: str | Path, split: str, manifest: DatasetManifest | None = None):
        self.directory = Path(directory)
        self.manifest = manifest or read_manifest(directory)
        self._stores = [
            TokenStore(directory, source.name, segment.number, split, self.manifest)
            for source in self.manifest.sources
            for segment in self.manifest.segments(source.name)
        ]
        self.entries = tuple(entry for store in self._stores for entry in store.entries)
        sizes = [np.diff(store.batch_starts) for store in self._stores]
        self.batch_starts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        """int64 [num_batches + 1]: batch b begins with token batch_starts[b] of the stream."""
        self._first_batches = np.cumsum([0, *(store.num_batches for store in self._stores)])

    @property
    def num_batches(self) -> int:
        """Returns the number of record batches."""
        return len(self.batch_starts) - 1

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens, ends of documents included."""
        return int(self.batch_starts[-1])

    def read_tokens(self, batch: int) -> np.ndarray:
        """Returns all tokens of one record batch: see `TokenStore.read_tokens`."""
        store, local = self._place(batch)
        return store.read_tokens(local)

    def read_documents(self, batch: int) -> pa.RecordBatch:
        """Returns one record batch with all its columns: see `TokenStore.read_documents`."""
        store, local = self._place(batch)
        return store.read_documents(local)

    def close(self) -> None:
        """Closes the shards' files; reading opens them again."""
        for store in self._stores:
            store.close()

    def _place(self, batch: int) -> tuple[TokenStore, int]:
        number = int(np.searchsorted(self._first_batches, batch, side="right")) - 1
        return self._stores[number], batch - int(self._first_batches[number])
