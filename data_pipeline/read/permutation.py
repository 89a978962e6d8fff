"""Keyed permutations: the same bijection of [0, n) from the same key on every machine, in numpy.

A permutation is the order in which pseudo-random 64-bit words sort, word i being splitmix64's i-th
output from the key. The low bits of each word are replaced by i itself, so that no two are equal, the
result depends on no sorting algorithm, and a plain (vectorised) sort of the words already *is* the
permutation. Cost: 20-50 ns per element, where a Feistel network takes 500; but all n at once, so it
is for the windows of an order and not for a whole data set.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step: 2**64 divided by the golden ratio


def derive_key(*parts: object) -> int:
    """Derives a 64-bit key from the names and numbers of what it is for."""
    name = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def mixed(values: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finalizer to uint64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permutation(size: int, key: int) -> np.ndarray:
    """Returns a permutation of [0, size), int64; the one that `key` names."""
    return permutations(np.zeros(1, dtype=np.int64), size, key)[0]


def permutations(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns one permutation of [0, size) for each of `numbers`, int64 [len(numbers), size].

    `numbers` are whatever the permutations are counted by (blocks of a mixture); each is another
    permutation of the same key.
    """
    inside = np.arange(size, dtype=np.uint64)
    counters = numbers.astype(np.uint64)[:, None] * np.uint64(size) + inside
    words = mixed(counters * _GOLDEN + np.uint64(key))
    index_bits = np.uint64(max(1, (size - 1).bit_length()))
    words = (words >> index_bits << index_bits) | inside
    words.sort(axis=1)
    return (words & ((np.uint64(1) << index_bits) - np.uint64(1))).astype(np.int64)
