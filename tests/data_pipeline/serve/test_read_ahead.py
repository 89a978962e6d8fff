"""Which chunks are read ahead, how far, and in which order."""

import pytest
from made_folder import MadeFolder, documents
from served_ranks import GLOBAL_BATCH, job_of

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.read.corruption import BatchFetcher
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.data_pipeline.serve import read_ahead as read_ahead_module
from moebius.data_pipeline.serve.cache import ChunkKey
from moebius.data_pipeline.serve.read_ahead import ReadAhead


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b"))
    folder.seal("a", documents(0, 120)).seal("a", documents(1, 60)).seal("b", documents(2, 90))
    return folder.complete()


class Reader:
    """Takes every chunk that is to be read ahead, and knows which samples they were for."""

    def __init__(self, made: MadeFolder, num_ranks: int = 1, **job):
        self.samples = OrderedSamples(made.config(), BatchFetcher())
        self.ahead = ReadAhead(self.samples, job_of(made.config(), num_ranks, **job))
        self.read: dict[ChunkKey, int] = {}

    def touch(self, key: ChunkKey, sample: int) -> bool:
        if key in self.read:
            self.read[key] = sample
        return key in self.read

    def take_all(self, reached: int) -> list[ChunkKey]:
        found = []
        while (key := self.ahead.next(reached, self.touch)) is not None:
            assert self.ahead.next(reached, self.touch) == key  # until it is there
            found.append(key)
            self.read[key] = self.ahead.position
            self.ahead.drop(key)
        return found


def _wanted(samples: OrderedSamples, start: int, count: int) -> list[ChunkKey]:
    """In order of first use, step by step."""
    found: dict[ChunkKey, None] = {}
    for first in range(start, start + count, GLOBAL_BATCH):
        assert not samples.prepare(first, GLOBAL_BATCH)
        found |= dict.fromkeys(samples.chunks_at(first, GLOBAL_BATCH))
    return list(found)


def test_it_goes_two_windows_ahead_and_on_as_the_ranks_do(made, monkeypatch):
    monkeypatch.setattr(read_ahead_module, "_MOST_SAMPLES", 12 * GLOBAL_BATCH)
    reader = Reader(made)
    first = reader.take_all(0)
    assert first == _wanted(reader.samples, 0, 12 * GLOBAL_BATCH)
    assert reader.ahead.position == 12 * GLOBAL_BATCH
    assert reader.take_all(0) == []
    later = reader.take_all(60 * GLOBAL_BATCH)
    assert reader.ahead.position == 72 * GLOBAL_BATCH
    wanted = _wanted(reader.samples, 60 * GLOBAL_BATCH, 12 * GLOBAL_BATCH)
    assert later == [key for key in wanted if key not in first]
    assert all(reader.read[key] >= 60 * GLOBAL_BATCH for key in wanted)  # known to be used there


def test_a_node_looks_at_its_own_slice_from_where_the_run_is(made, monkeypatch):
    monkeypatch.setattr(read_ahead_module, "_MOST_SAMPLES", 4 * GLOBAL_BATCH)
    start = 7 * GLOBAL_BATCH
    reader = Reader(made, 4, first_rank=3, ranks_here=1, start_sample=start)
    expected: dict[ChunkKey, None] = {}
    for step in range(4):
        first = start + step * GLOBAL_BATCH
        assert not reader.samples.prepare(first, GLOBAL_BATCH)
        expected |= dict.fromkeys(reader.samples.chunks_at(first + 6, 2))
    assert reader.take_all(start) == list(expected)


def test_it_stops_where_the_data_does(tmp_path):
    folder = MadeFolder(tmp_path / "d", ("a", "b")).seal("a", documents(0, 30))
    folder.seal("b", documents(1, 30))
    reader = Reader(folder)
    before = reader.take_all(0)
    assert {key[1] for key in before} == {0}
    stopped = reader.ahead.position
    assert reader.take_all(0) == []
    folder.seal("a", documents(2, 30)).seal("b", documents(3, 30))
    assert {key[1] for key in reader.take_all(0)} == {1}
    assert reader.ahead.position > stopped


def test_a_chunk_that_there_is_not_is_refused(made, tmp_path):
    reader = Reader(made)
    assert reader.ahead.most_bytes(("a", 0, 0)) > 0
    for key in (("a", 0, 99), ("a", 9, 0), ("c", 0, 0)):
        with pytest.raises(ShardError, match=r"has no chunk|none of number|no source"):
            reader.ahead.most_bytes(key)
