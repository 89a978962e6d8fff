"""Ranks that read through a data server see what they would see without one, whatever becomes of it."""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from made_folder import MadeFolder, documents, flip
from served_ranks import GLOBAL_BATCH, close, job_of, open_ranks, read, seen, serving, take, until

from moebius.data_pipeline.errors import DataError, ShardError
from moebius.data_pipeline.read import corruption
from moebius.data_pipeline.read.corruption import BatchFetcher, SkipList
from moebius.data_pipeline.read.loader import Batch
from moebius.data_pipeline.serve import client as client_module
from moebius.data_pipeline.serve import server as server_module
from moebius.data_pipeline.serve.cache import ChunkKey

STEPS = 24
WAYS: dict[str, dict[str, Any]] = {
    "cut": {},
    "with documents": {"document_attention": True},
    "fitted": {"packing": "best_fit"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    """Two sources with several chunks per segment; one of them has prompts."""
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b"), frozenset({"b"}))
    folder.seal("a", documents(0, 80), shards=2).seal("a", documents(1, 40))
    return folder.seal("b", documents(2, 70, prompts=True)).complete()


@pytest.fixture
def damaged(made, tmp_path) -> MadeFolder:
    """A copy with a record batch that is not as it was written, which some row needs."""
    copy = made.copied(tmp_path / "data")
    flip(copy.folder, "a", 0, 8)  # the first of a chunk: the chunk before ends in it
    return copy


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(corruption, "_PAUSE_S", 0.0)


@pytest.mark.parametrize(
    "way", ["cut", pytest.param("with documents", marks=pytest.mark.slow), "fitted"]
)
def test_any_number_of_ranks_sees_the_same_and_every_chunk_is_decoded_once(made, way, monkeypatch):
    data, decode = made.config(**WAYS[way]), server_module.DataServer._decode
    keys: list[ChunkKey] = []
    monkeypatch.setattr(
        server_module.DataServer,
        "_decode",
        lambda server, key: keys.append(key) or decode(server, key),
    )
    for num_ranks in (1, 2, 4) if way == "cut" else (2,):
        keys.clear()
        expected = read(data, num_ranks, STEPS, None)
        with serving(job_of(data, num_ranks)) as (server, handle):
            assert read(data, num_ranks, STEPS, handle) == expected
        assert server.decoded == len(keys) == len(set(keys)) >= 2
        assert 2 * num_ranks <= server.served <= server.decoded * num_ranks
        assert server.no_room == 0


def test_a_node_serves_its_own_ranks_and_a_resumed_run_its_own_samples(made):
    data = made.config()
    expected = read(data, 4, STEPS, None)
    job = job_of(data, 4, first_rank=2, ranks_here=2, start_sample=11 * GLOBAL_BATCH)
    with serving(job) as (server, handle):
        loaders = open_ranks(data, 4, handle, start_sample=11 * GLOBAL_BATCH, ranks=range(2, 4))
        try:
            assert seen(take(loaders, 12)) == [step[2:] for step in expected[11:23]]
        finally:
            close(loaders)
        assert server.served


def test_a_folder_that_grows_is_served_as_if_it_were_complete(tmp_path):
    segments = [documents(seed, 40) for seed in range(3)]
    whole = MadeFolder(tmp_path / "whole")
    for segment in segments:
        whole.seal("text", segment)
    expected = read(whole.complete().config(), 2, 80, None)
    growing = MadeFolder(tmp_path / "growing").seal("text", segments[0])

    def make_the_rest() -> None:
        for segment in segments[1:]:
            time.sleep(0.2)
            growing.seal("text", segment)
        growing.complete()

    maker = threading.Thread(target=make_the_rest)
    data = growing.config()
    with serving(job_of(data, 2)) as (server, handle):
        maker.start()
        assert read(data, 2, 80, handle) == expected
        assert server.no_room == 0
    maker.join()


# ---- the account of bytes


def test_the_bytes_are_never_exceeded_and_who_finds_no_room_reads_by_itself(made, caplog):
    data = made.config(document_attention=True)
    expected = read(data, 2, STEPS, None)
    with serving(job_of(data, 2)) as (server, handle):
        read(data, 2, STEPS, handle)
        enough = server.cache.most_bytes
    little = data.model_copy(update={"server_bytes": enough // 3})
    with serving(job_of(little, 2)) as (server, handle), caplog.at_level(logging.WARNING):
        loaders = open_ranks(little, 2, handle)
        try:
            found = []
            for _ in range(STEPS):
                found += take(loaders, 1)
                assert _bytes_of_files() <= enough // 3
        finally:
            close(loaders)
    assert seen(found) == expected
    assert server.cache.most_bytes <= enough // 3
    assert server.served > 0
    assert server.no_room > 0
    assert "has no room, so this rank decodes by itself" in caplog.text


def test_less_than_one_chunk_serves_nothing_and_loses_nothing(made):
    data = made.config(server_bytes=1)
    expected = read(data, 2, 5, None)
    with serving(job_of(data, 2)) as (server, handle):
        assert read(data, 2, 5, handle) == expected
    assert (server.cache.most_bytes, server.served, server.decoded) == (0, 0, 0)


def test_a_rank_that_is_gone_holds_nothing(made):
    data = made.config(server_bytes=20_000)
    with serving(job_of(data, 2)) as (server, handle):
        loaders = open_ranks(data, 2, handle)
        take(loaders, 10)
        assert any(entry.holders for entry in server.cache._entries.values())
        close(loaders)
        until(lambda: not server._clients)
        assert not any(entry.holders for entry in server.cache._entries.values())


def test_a_chunk_that_is_let_go_is_given_back(made):
    data = made.config()
    with serving(job_of(data, 1)) as (server, handle):
        served = handle.connect(data, rank=0, skipped=SkipList())
        chunk = served.read("a", 0, 0, alone=_never)
        tokens = chunk.flat_tokens[:17].tolist()
        assert tokens == made.stream("a", 0)[:17]
        (entry,) = [one for one in server.cache._entries.values() if one.key == ("a", 0, 0)]
        assert entry.holders
        del chunk
        served.progress(8)
        until(lambda: not entry.holders)
        served.close()


# ---- damage


@pytest.mark.parametrize("policy", ["fail", "refetch"])
def test_damage_ends_all_ranks_at_the_same_step_with_the_same_words(damaged, policy):
    data = damaged.config(when_corrupt=policy)
    alone = _ends(data, None)
    with serving(job_of(data, 2)) as (_, handle):
        assert _ends(data, handle) == alone
    assert alone[0][1] is ShardError
    assert "CRC32" in alone[0][2]


def test_damage_that_a_replica_heals_is_not_noticed(damaged, made):
    data = damaged.config(when_corrupt="refetch", replicas=(str(made.folder),))
    with serving(job_of(data, 2)) as (_, handle):
        assert read(data, 2, STEPS, handle) == read(made.config(), 2, STEPS, None)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_what_is_passed_over_is_the_same_and_every_rank_writes_it_down(
    damaged, made, tmp_path, packing
):
    if packing == "best_fit":
        read(made.config(packing=packing), 1, 1, None)  # makes the plans
        for plan in made.folder.glob("pack-*"):
            shutil.copy(plan, damaged.folder)
    data = damaged.config(when_corrupt="skip", packing=packing)
    expected = read(data, 2, STEPS, None, skip_folder=tmp_path / "alone")
    with serving(job_of(data, 2)) as (_, handle):
        found = read(data, 2, STEPS, handle, skip_folder=tmp_path / "served")
    assert found == expected
    for rank in range(2):
        alone, served = (_written(tmp_path / name, rank) for name in ("alone", "served"))
        assert served == alone
        assert len(served) > 1


def test_too_much_damage_ends_the_run_with_a_server_too(damaged):
    data = damaged.config(when_corrupt="skip", max_skipped_batches=0)
    alone = _ends(data, None)
    with serving(job_of(data, 2)) as (_, handle):
        assert _ends(data, handle) == alone
    assert alone[0][1] is DataError


def _ends(data, handle) -> list[tuple[int, type, str]]:
    """Of every rank: after how many steps it ended, and with which error."""
    found = []
    loaders = open_ranks(data, 2, handle)
    try:
        for loader in loaders:
            batches: list[Batch] = []
            with pytest.raises(DataError) as caught:
                batches.extend(loader)
            found.append((len(batches), type(caught.value), str(caught.value)))
    finally:
        close(loaders)
    return found


def _written(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has passed over, without what its thread has read beyond the last step."""
    lines = (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    last = STEPS * GLOBAL_BATCH
    return [entry for entry in entries if entry.get("row", {"sample": 0})["sample"] < last]


# ---- waiting, and the end of a server


def test_a_rank_says_what_the_server_waits_for(made, monkeypatch):
    monkeypatch.setattr(server_module, "SAY_EVERY_S", 0.02)
    read_batch, let_go = BatchFetcher.__call__, threading.Event()

    def slow(fetch, store, batch, in_full, into=None):
        fetch.doing = f"reading record batch {batch} of segment {store.segment} from a slow store"
        assert let_go.wait(20)
        return read_batch(fetch, store, batch, in_full, into)

    monkeypatch.setattr(BatchFetcher, "__call__", slow)
    data = made.config()
    with serving(job_of(data, 2)) as (_, handle):
        loaders = open_ranks(data, 2, handle)
        try:
            for loader in loaders:
                assert not loader.wait_until_ready(0.1)
                until(lambda loader=loader: "slow store" in loader.wait_reason)
                assert loader.wait_reason.startswith("the data server is reading record batch")
            let_go.set()
            take(loaders, 3)
        finally:
            let_go.set()
            close(loaders)


@pytest.mark.parametrize("when", ["before", "between", "while a rank waits"])
def test_ranks_read_by_themselves_once_the_server_is_gone(made, caplog, monkeypatch, when):
    data = made.config(server_bytes=5_000)
    expected = read(data, 2, STEPS, None)
    if when == "while a rank waits":
        ended = threading.Event()
        monkeypatch.setattr(
            server_module.DataServer,
            "_decode",
            lambda server, key: (server.stop(), ended.set(), time.sleep(0.1), 1 / 0),
        )
    with caplog.at_level(logging.WARNING):
        with serving(job_of(data, 2)) as (server, handle):
            if when == "before":
                server.stop()
            loaders = open_ranks(data, 2, handle, prefetch=1)
            try:
                found = take(loaders, 5)
                server.stop()
                found += take(loaders, STEPS - 5)
                assert all(loader.lost_server for loader in loaders)
            finally:
                close(loaders)
    assert seen(found) == expected
    assert "reads and decodes by itself from now on" in caplog.text


def test_a_server_that_is_silent_is_given_up(made, monkeypatch):
    monkeypatch.setattr(client_module, "_SILENT_S", 0.05)
    monkeypatch.setattr(server_module.DataServer, "_handle", lambda *_: time.sleep(0.5))
    data = made.config()
    with serving(job_of(data, 1)) as (_, handle):
        assert read(data, 1, 3, handle) == read(data, 1, 3, None)


def test_a_closed_loader_does_not_wait_for_the_server(made, monkeypatch):
    let_go = threading.Event()
    read_batch = BatchFetcher.__call__
    monkeypatch.setattr(
        BatchFetcher,
        "__call__",
        lambda *args: (let_go.wait(20), read_batch(*args))[1],
    )
    data = made.config()
    with serving(job_of(data, 1)) as (_, handle):
        loaders = open_ranks(data, 1, handle)
        loaders[0].close()
        assert not loaders[0]._thread.is_alive()
        let_go.set()


def _bytes_of_files() -> int:
    """What the files of chunks take that server and ranks have open, as Linux tells it.

    A rank's mapping holds the file open (Python's `mmap` copies its descriptor).
    """
    sizes = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "memfd:moebius-chunk" in os.readlink(file):
                sizes[file.stat().st_ino] = file.stat().st_size
    return sum(sizes.values())


def _never(*_: Any) -> Any:
    raise AssertionError("the server has it")
