"""The server as a process: killed, orphaned, and gone without a trace."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from made_folder import MadeFolder, documents
from served_ranks import GLOBAL_BATCH, close, job_of, open_ranks, read, seen, take, until

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.read.loader import Loader
from moebius.data_pipeline.read.packing import WINDOW_BATCHES
from moebius.data_pipeline.serve import start
from moebius.data_pipeline.serve.start import ServerHandle, start_server, wants_server

STEPS = 24

# A rank that starts the server, reads a step, says where the server is, and waits to be killed.
RANK_0 = """
import sys
from pathlib import Path
from moebius.data_pipeline.read.loader import Loader
from moebius.data_pipeline.serve.protocol import ServerJob
from moebius.data_pipeline.serve.start import start_server
job = ServerJob.model_validate_json(sys.argv[1])
handle = start_server(job)
print(handle.process.pid, handle.address, flush=True)
loader = Loader(job.data, global_batch=job.global_batch, micro_batch=1, rank=0,
                num_ranks=job.num_ranks, server=handle)
next(loader)
print("read", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    return folder.seal("text", documents(0, 150)).complete()


def test_ranks_go_on_when_the_server_is_killed_and_nothing_is_left(made, caplog):
    data = made.config(server_bytes=6000)
    expected = read(data, 2, STEPS, None)
    handle = start_server(job_of(data, 2))
    assert handle.process is not None
    loaders = open_ranks(data, 2, handle, prefetch=1)
    try:
        found = take(loaders, 8)
        assert not any(loader.lost_server for loader in loaders)
        until(lambda: not handle.address.parent.exists())  # all ranks are connected
        os.kill(handle.process.pid, signal.SIGKILL)
        handle.process.wait(20)
        with caplog.at_level(logging.WARNING):
            found += take(loaders, STEPS - 8)
        assert all(loader.lost_server for loader in loaders)
    finally:
        close(loaders)
    assert seen(found) == expected
    assert caplog.text.count("the data server is gone") == 2
    assert handle.process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_the_server_ends_with_the_loaders_or_with_the_rank_that_started_it(made):
    data = made.config()
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_0, job_of(data, 2).model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        pid, address = process.stdout.readline().split()
        server = psutil.Process(int(pid))
        second = Loader(
            data,
            global_batch=GLOBAL_BATCH,
            micro_batch=1,
            rank=1,
            num_ranks=2,
            server=ServerHandle(Path(address)),
        )
        with second:
            assert process.stdout.readline() == "read\n"
            next(second)
            process.kill()
            until(lambda: not server.is_running())
    assert not Path(address).parent.exists()


# A second rank that reads a step, says so, and waits to be killed with what it has mapped.
def test_a_server_that_was_never_asked_ends_with_its_starter(made):
    handle = start_server(job_of(made.config(), 2))
    assert handle.process is not None
    assert handle.address.exists()
    assert "RANK" not in psutil.Process(handle.process.pid).environ()
    handle.close()
    assert handle.process.wait(20) == 0
    assert not handle.address.parent.exists()


def test_a_server_that_cannot_be_started_is_one_error(made, monkeypatch):
    monkeypatch.setattr(start, "_MAX_PATH_BYTES", 10)
    with pytest.raises(start.DataError, match=r"cannot be started \(.*\): set data.server='off'"):
        start_server(job_of(made.config(), 1))


def test_which_nodes_get_a_server(made, tmp_path):
    few = made.config()
    growing = MadeFolder(tmp_path / "growing").seal("text", documents(0, 10)).config()
    large = MadeFolder(tmp_path / "large", batch_tokens=2)
    large.seal("text", documents(0, 2 * WINDOW_BATCHES)).complete()

    def wants(data: DataConfig, ranks: int, server: str = "auto") -> bool:
        return wants_server(data.model_copy(update={"server": server}), ranks)

    assert [wants(few, ranks) for ranks in (1, 3, 4, 8)] == [False] * 4
    assert [wants(growing, ranks) for ranks in (1, 3, 4, 8)] == [False, False, True, True]
    assert [wants(large.config(), ranks) for ranks in (1, 3, 4, 8)] == [False, False, True, True]
    assert wants(few, 1, "on")
    assert not wants(growing, 8, "off")
