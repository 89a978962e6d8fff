"""The account of bytes, and what has to go first."""

import os
from dataclasses import astuple

import numpy as np
import pytest

from moebius.data_pipeline.read.chunks import ChunkSize, LoadedChunk
from moebius.data_pipeline.read.packing import ChunkPieces
from moebius.data_pipeline.serve.cache import ChunkCache, ChunkKey
from moebius.data_pipeline.serve.protocol import LostBatch
from moebius.data_pipeline.serve.shared_memory import (
    SharedChunk,
    map_chunk,
    most_bytes,
    write_chunk,
)

PIECES = ChunkPieces(np.array([0, 4, 5, 8]), np.array([4, 1, 3, 2]), np.array([0, 1, 3, 4]))
SIZE = 128 + 3 * 64  # of every chunk here: 64 tokens of uint16, and its pieces


def chunk(first: int = 0) -> LoadedChunk:
    return LoadedChunk(
        width=4,
        pieces=PIECES,
        flat_tokens=np.arange(first, first + 64, dtype=np.uint16),
        flat_counts=None,
        flat_documents=None,
        continued=None,
        damaged=None,
    )


def key(number: int) -> ChunkKey:
    return "text", 0, number


@pytest.fixture
def cache():
    """Room for eight chunks; seven of them may be read ahead."""
    found = ChunkCache(8 * SIZE)
    yield found
    found.close()
    assert found.used_bytes == len(found) == 0


def fill(cache: ChunkCache, last_uses: list[int]) -> None:
    for number, last_use in enumerate(last_uses):
        assert cache.make_room(SIZE, before=0, awaited=True)
        cache.put(key(number), write_chunk(chunk()), last_use)


def there(cache: ChunkCache) -> list[int]:
    return [number for number in range(20) if cache.get(key(number)) is not None]


def test_an_eighth_is_left_for_what_ranks_wait_for(cache):
    fill(cache, [9] * 7)
    assert not cache.make_room(SIZE, before=0, awaited=False)
    assert cache.make_room(SIZE, before=0, awaited=True)
    assert len(cache) == 7
    assert not cache.make_room(9 * SIZE, before=0, awaited=True)


def test_what_was_passed_goes_first_and_then_what_comes_last(cache):
    fill(cache, [40, 10, 20, 30, 50, 60, 70, 80])
    assert cache.make_room(SIZE, before=25, awaited=False)
    assert there(cache) == [0, 3, 4, 5, 6, 7]  # 1 and 2 were passed: an eighth more than asked for
    assert not cache.make_room(3 * SIZE, before=25, awaited=False)
    assert cache.make_room(4 * SIZE, before=25, awaited=True)
    assert there(cache) == [0, 3, 4, 5]


def test_what_a_rank_maps_stays_and_counts_until_it_lets_go(cache):
    fill(cache, [0] * 8)
    for number in range(8):
        entry = cache.get(key(number))
        assert entry is not None
        cache.hold(entry, client=number % 2)
        cache.hold(entry, client=1)
    assert not cache.make_room(SIZE, before=99, awaited=True)
    assert cache.used_bytes == 8 * SIZE
    cache.release(0, client=0)
    cache.release(0, client=7)  # never held it
    cache.release(99, client=0)  # there is no such chunk
    assert not cache.make_room(SIZE, before=99, awaited=True)
    cache.release(0, client=1)
    assert cache.make_room(SIZE, before=99, awaited=True)
    assert there(cache) == list(range(1, 8))
    cache.release_all(1)
    assert cache.make_room(5 * SIZE, before=99, awaited=True)  # 2, 4 and 6 are client 0's
    assert set(there(cache)) >= {2, 4, 6}
    assert cache.most_bytes == 8 * SIZE


def test_no_more_files_than_a_process_may_have():
    cache = ChunkCache(10**6, max_files=3)
    fill(cache, [1, 2, 3])
    assert not cache.make_room(SIZE, before=0, awaited=False)
    assert cache.make_room(SIZE, before=2, awaited=False)
    assert there(cache) == [1, 2]
    cache.close()


# ---- the files themselves


def full_chunk() -> LoadedChunk:
    return LoadedChunk(
        width=4,
        pieces=PIECES,
        flat_tokens=np.arange(10, dtype=np.uint32),
        flat_counts=np.arange(10) % 2 == 0,
        flat_documents=np.arange(10, dtype=np.int32) - 1,
        continued=np.array([False, True, False, False]),
        damaged=np.array([True, False, False]),
    )


def test_a_chunk_comes_back_as_it_was_and_outlives_its_file():
    before = full_chunk()
    shared = write_chunk(before, [LostBatch(batch=7, error="its CRC32 is another")])
    after, _ = map_chunk(shared.as_message(5), shared.file)
    os.close(shared.file)
    for name in ("flat_tokens", "flat_counts", "flat_documents", "continued", "damaged"):
        one, other = getattr(before, name), getattr(after, name)
        assert one.tolist() == other.tolist()
        assert one.dtype == other.dtype
    for one, other in zip(astuple(before.pieces), astuple(after.pieces), strict=True):
        assert one.tolist() == other.tolist()
    assert after.lost_batches == (7,)
    assert shared.as_message(5).number == 5
    with pytest.raises(ValueError, match="read-only"):
        after.flat_tokens[0] = 1


def test_nobody_can_change_what_others_read():
    shared = write_chunk(chunk())
    try:
        with pytest.raises(PermissionError):
            os.pwrite(shared.file, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(shared.file, 1)
    finally:
        os.close(shared.file)


def test_what_a_chunk_may_take_is_known_before_it_is_decoded():
    for one, token_bytes, has_more in ((chunk(), 2, False), (full_chunk(), 4, True)):
        shared: SharedChunk = write_chunk(one)
        os.close(shared.file)
        most = most_bytes(
            ChunkSize(len(one.flat_tokens), one.pieces.num_rows, len(one.pieces.starts)),
            token_bytes=token_bytes,
            counts=has_more,
            documents=has_more,
        )
        assert shared.num_bytes <= most < shared.num_bytes + 600
