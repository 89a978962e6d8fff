"""Reads record batches; one that fails its checksum is read again, then from the copies in
`data.replicas`. If none is whole, the error names file, batch and bytes, and ends the run.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ..data_config import DataConfig
from ..errors import ShardError
from ..manifest import is_prepared
from .token_store import TokenBatch, TokenStore

logger = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_S = 0.2  # doubles with every try: a network file system may recover


class BatchFetcher:
    """Reads record batches, and damaged ones again or from copies of the prepared folder."""

    def __init__(self, replicas: Sequence[Path] = ()):
        self.replicas = tuple(replicas)
        self.doing = ""
        """What is being read, for wait messages; "" if nothing."""

    def __call__(self, store: TokenStore, batch: int) -> TokenBatch:
        """Reads a record batch of a segment.

        Raises:
            ShardError: it is damaged here and in all copies.
        """
        self.doing = f"reading record batch {batch} of segment {store.segment} of source {store.source.name!r}"
        try:
            return store.read(batch)
        except ShardError as error:
            found = self._read_elsewhere(store, batch)
            if found is None:
                raise ShardError(
                    f"{error} (read {_TRIES} times and from {len(self.replicas)} replicas)"
                ) from error
            return found
        finally:
            self.doing = ""

    def _read_elsewhere(self, store: TokenStore, batch: int) -> TokenBatch | None:
        """Reads a batch again after pauses, then from the replicas; None if all reads fail."""
        for number, folder in enumerate([*[None] * (_TRIES - 1), *self.replicas]):
            try:
                if folder is None:
                    time.sleep(_PAUSE_S * 2**number)
                    return store.read(batch)
                of_store = (store.source.name, store.segment, store.split, store.manifest)
                return TokenStore(folder, *of_store, check_sizes=False).read(batch)
            except ShardError as error:
                logger.warning("%s", error)
        return None


def open_fetcher(data: DataConfig) -> BatchFetcher:
    """Returns a fetcher that knows the configuration's replicas."""
    for folder in data.replicas:
        if not is_prepared(folder):
            logger.warning(
                "data.replicas: %s holds no prepared data, so it can repair none", folder
            )
    return BatchFetcher([Path(folder) for folder in data.replicas])
