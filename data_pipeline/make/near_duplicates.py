"""Near duplicates by MinHash and locality-sensitive hashing: of documents that nearly agree, the
first one stays.

1. `band_keys`           per document, in any process: the set of its n-grams of plain words is
                         sketched into `num_hashes` minima (MinHash, Broder 1997), which are cut into
                         `num_bands` bands of `num_rows`; each band becomes one 64-bit key.
2. `NearDuplicateIndex`  in the coordinator, in document order: a document that shares a key with an
                         earlier one that stayed is dropped; the keys of the others are entered.

Two documents of Jaccard similarity s share a key with probability 1 - (1 - s**rows)**bands
(Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4). With the default threshold of
0.8: 0.01 at s = 0.5, 0.27 at 0.7, 0.78 at 0.8, 0.998 at 0.9.

The sketch is rensa's R-MinHash (extra `dedup`): on hashes that exist already 26 µs for a document of
8 kB and 240 minima, where datasketch 2.0 takes 600 µs and brings scipy. Its algorithm is numbered;
another number is refused, because it would choose other documents. The index is ours: it keeps
`num_bands` * 8 bytes per document that stayed (160 by default; at most twice that while it merges),
where a Python set of keys takes 2 kB, and its content is a function of the keys alone, so it is
rebuilt from those that were saved.

Cost (`benchmarks/data_stages.py`, on a busy machine): keys 29 MB/s/core for documents of 9 kB, most
of it for the words; the index answers for 38,000 documents a second, in one process.
"""

import importlib
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import PrepareError
from ..prepare_config import NearDuplicateConfig
from .words import ngram_hashes, plain_words, range_hashes

RENSA_ALGORITHM = 2
_SEED = 20210  # of the sketch: any number will do, but always the same


def band_keys(text: str, config: NearDuplicateConfig) -> np.ndarray:
    """Returns the keys of one document: uint64 [num_bands].

    Documents that share one are taken for near duplicates. A document without words has no keys:
    uint64 [0].

    Raises:
        PrepareError: rensa is not installed, or has another algorithm.
    """
    words_W = plain_words(text)
    if not len(words_W):
        return np.empty(0, dtype=np.uint64)
    # a document shorter than an n-gram is one n-gram
    ngrams = ngram_hashes(words_W, min(config.ngram_words, len(words_W)))
    minima = _minima(ngrams, config.num_hashes)
    num_bands, num_rows = config.bands_and_rows
    # the band's number goes in, so that all bands can share one index
    numbered = np.empty((num_bands, num_rows + 1), dtype=np.uint64)
    numbered[:, 0] = np.arange(num_bands)
    numbered[:, 1:] = minima[: num_bands * num_rows].reshape(num_bands, num_rows)
    starts = np.arange(num_bands) * (num_rows + 1)
    return range_hashes(numbered.reshape(-1), starts, starts + num_rows + 1)


def _minima(ngrams: np.ndarray, num_hashes: int) -> np.ndarray:
    bounds = np.array([0, len(ngrams)], dtype=np.uint64)
    matrix = _rensa().digest_matrix_from_flat_token_hashes(ngrams, bounds, num_hashes, _SEED)
    return np.array(matrix.to_rows()[0], dtype=np.uint64)


@lru_cache(maxsize=1)
def _rensa() -> Any:
    try:
        rensa: Any = importlib.import_module("rensa")  # without types
    except ImportError as error:
        raise PrepareError(
            "prepare.near_duplicates needs the package rensa: pip install 'moebius[dedup]', or take "
            "prepare.near_duplicates out of the configuration"
        ) from error
    version = rensa.RMinHash.ALGORITHM_VERSION
    if version != RENSA_ALGORITHM:
        raise PrepareError(
            f"prepare.near_duplicates needs rensa's algorithm {RENSA_ALGORITHM}, and the installed "
            f"rensa has {version}, which would choose other documents: "
            "pip install 'moebius[dedup]'"
        )
    return rensa.RMinHash


class NearDuplicateIndex:
    """Holds the keys of the documents that stayed, and decides about the next ones.

    Keys lie in sorted runs whose sizes at least halve from one to the next (a log-structured merge):
    entering n keys costs O(n log n) altogether, a look-up one binary search per run.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        """Returns the memory of the index."""
        return sum(run.nbytes for run in self._runs)

    def choose(self, keys_DB: np.ndarray) -> np.ndarray:
        """Decides about documents in their order, and enters those that stay.

        Args:
            keys_DB: uint64, one row per document, from `band_keys`. Documents without keys are not
                to be given: they stay.

        Returns:
            bool [D]: True where a document stays.
        """
        values, inverse = np.unique(keys_DB.ravel(), return_inverse=True)
        inverse_DB = inverse.reshape(keys_DB.shape)
        taken = self._contains(values)
        stays_D = np.logical_not(taken[inverse_DB].any(axis=1))
        # Most keys occur once: only documents that share one are looked at one by one, in order.
        shared = np.bincount(inverse, minlength=len(values)) > 1
        for row in np.flatnonzero(stays_D & shared[inverse_DB].any(axis=1)).tolist():
            stays_D[row] = not taken[inverse_DB[row]].any()
            if stays_D[row]:
                taken[inverse_DB[row]] = True
        self._enter(np.unique(keys_DB[stays_D]))
        return stays_D

    def _contains(self, values: np.ndarray) -> np.ndarray:
        """Looks up keys in ascending order: ten times faster than in any order."""
        found = np.zeros(len(values), dtype=bool)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, values), len(run) - 1)
            found |= run[places] == values
        return found

    def _enter(self, run: np.ndarray) -> None:
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        if len(run):
            self._runs.append(run)
