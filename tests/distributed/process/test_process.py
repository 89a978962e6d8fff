"""Starting and ending a rank, alone, in a world, and again after a restart on the same store."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from jobs import wait_for
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from world import run_ranks

from moebius.distributed.process import process as process_module
from moebius.distributed.process.agreement import AgreementError
from moebius.distributed.process.process import (
    Process,
    start_process,
    stop_process,
    store_prefix,
)
from moebius.distributed.process.store import bind, is_loopback, loopback_interface


def restart_after(death):
    """Attempt 0 in a child process, attempt 1 here on the same store; the ranks are dealt anew, as
    torchrun may.
    """
    child = os.fork()
    if child == 0:
        start_process("cpu", timeout_s=15)
        with contextlib.suppress(
            RuntimeError
        ):  # a peer that has passed the barrier may be dead before we have
            dist.barrier()
        os._exit(0) if death == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    os.environ["RANK"] = str(int(os.environ["WORLD_SIZE"]) - 1 - int(os.environ["RANK"]))
    with start_process("cpu", timeout_s=15) as process:
        value = torch.tensor([10.0**process.rank])
        dist.all_reduce(value)
        return value.item()


def disagree():
    if os.environ["RANK"] == "1":
        process_module._choose_device = lambda wanted, place: torch.device("cuda", 0)
    try:
        start_process("auto", timeout_s=30)
    except AgreementError as error:
        return str(error)
    return "started"


@pytest.fixture
def alone(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    stop_process()


def test_without_torchrun_it_is_a_world_of_one(alone):
    with start_process("cpu", timeout_s=5) as process:
        assert process == Process(0, 1, 0, torch.device("cpu"), "gloo", 5)
        value = torch.ones(2)
        dist.all_reduce(value)
        assert torch.equal(value, torch.ones(2))
        with pytest.raises(RuntimeError, match="already in a world"):
            start_process("cpu")
    assert not dist.is_initialized()
    stop_process()  # twice is harmless


@pytest.mark.parametrize("death", ["exit", "kill"])
def test_a_restarted_world_does_not_read_its_predecessor(death):
    assert run_ranks(restart_after, 3, death, timeout_s=40) == [111.0] * 3


def test_ranks_that_chose_different_devices_are_told():
    told = run_ranks(disagree, 3)
    assert len(set(told)) == 1
    assert "device: cpu on ranks 0, 2; cuda on rank 1" in told[0]


ALONE = """
import torch.distributed as dist
from moebius.distributed.process.process import start_process

with start_process("cpu", timeout_s=20):
    dist.barrier()
"""


@pytest.mark.slow
def test_ranks_without_an_agent_end_in_good_order():
    """Rank 0 holds the store and may be gone first; nobody's thread may turn that into an abort."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE],
            text=True,
            stderr=subprocess.PIPE,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    ends = [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends


def listening():
    """Addresses on which this rank's process listens, and what it has set."""
    with start_process("cpu", timeout_s=20):
        dist.barrier()
        found = psutil.Process().net_connections("tcp")
        addresses = {entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN}
        inside = os.environ.get("GLOO_SOCKET_IFNAME")
    return addresses, inside, os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_world_on_one_machine_listens_on_the_loopback_alone(num_ranks):
    for addresses, inside, afterwards in run_ranks(listening, num_ranks):
        assert addresses
        assert addresses <= {"127.0.0.1", "::1"}
        assert (inside, afterwards) == (loopback_interface(), None)


def test_an_interface_that_the_user_chose_is_kept(alone):
    alone.setenv("GLOO_SOCKET_IFNAME", loopback_interface())
    with start_process("cpu", timeout_s=5):
        pass
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface()


def place_of(rank: int, local_world_size: int) -> process_module._Place:
    return process_module._Place(rank, 2, rank % local_world_size, local_world_size)


@pytest.mark.parametrize(
    ("environment", "local_world_size", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "example.org"}, 2, True),
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, 1, False),
        ({"MASTER_ADDR": "127.0.0.2"}, 1, True),
        ({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, 1, False),
        ({"MASTER_ADDR": "10.1.1.1"}, 1, False),
    ],
)
def test_which_worlds_are_on_one_machine(environment, local_world_size, expected):
    told = process_module._is_on_one_machine(environment, place_of(0, local_world_size))
    assert told is expected


def free_port(host: str) -> int:
    free = bind(host)
    port = free.getsockname()[1]
    free.close()
    return port


def serve(host: str, port: int) -> TCPStore:
    return process_module._serve_store(host, port, place_of(0, 1), timedelta(seconds=5))


def test_rank_0_serves_the_store_on_the_address_that_it_was_given(caplog):
    port = free_port("127.0.0.5")
    store = serve("127.0.0.5", port)
    store.set("key", "value")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
    assert not caplog.records


def behind_a_service(monkeypatch) -> int:
    """MASTER_ADDR is no address that others reach: a service's, or the loopback by /etc/hosts."""
    port = free_port("127.0.0.1")
    real = process_module.bind
    monkeypatch.setattr(process_module, "bind", lambda host, port: real("127.0.1.1", port))
    monkeypatch.setattr(process_module, "is_loopback", lambda host: host.startswith("127.0.1"))
    return port


def test_a_store_that_cannot_be_bound_to_its_address_is_not_served(monkeypatch):
    port = behind_a_service(monkeypatch)
    with pytest.raises(
        ValueError, match=r"other machines cannot reach\. Set MASTER_ADDR to rank 0's"
    ):
        serve("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_an_address_of_another_machine_is_refused_with_the_system_s_reason(monkeypatch):
    monkeypatch.delenv("MOEBIUS_STORE_ON_ALL_INTERFACES", raising=False)
    with pytest.raises(
        ValueError, match=r"MASTER_ADDR 192\.0\.2\.7 is not an address of this machine"
    ):
        serve("192.0.2.7", 29500)


def test_a_store_on_all_interfaces_must_be_asked_for_and_says_so(caplog, monkeypatch):
    port = behind_a_service(monkeypatch)
    monkeypatch.setenv("MOEBIUS_STORE_ON_ALL_INTERFACES", "1")
    store = serve("127.0.0.1", port)
    store.set("key", "value")
    socket.create_connection(("127.0.0.1", port), timeout=2).close()
    assert "listens on all interfaces and answers anyone" in caplog.text
    assert "which other machines cannot reach" in caplog.text


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, r"LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing.*'RANK': '0'"),
        (
            {"RANK": "2", "LOCAL_RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK 2 is not in a world of WORLD_SIZE 2",
        ),
    ],
)
def test_an_incomplete_or_impossible_environment_is_explained(alone, environment, words):
    for name, value in {"WORLD_SIZE": "2", **environment}.items():
        alone.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        start_process("cpu")


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "local_world_size", "chosen"),
    [
        ("auto", 0, 1, "cpu"),
        ("auto", 1, 1, "cuda:0"),
        ("cpu", 8, 1, "cpu"),
        ("cpu", 1, 4, "cpu"),
        ("cuda", 2, 2, "cuda:0"),
        ("auto", 1, 4, r"rank 0 sees 1 GPUs, but its node has 4 ranks.*train\.device=cpu"),
        ("cuda", 0, 1, r"'cuda' was requested, but rank 0 sees 0 GPUs and its node has 1 ranks"),
    ],
)
def test_the_device_is_chosen_for_the_whole_node_or_refused(
    monkeypatch, wanted, num_gpus, local_world_size, chosen
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    place = process_module._Place(0, 8, 0, local_world_size)
    if chosen in ("cpu", "cuda:0"):
        assert str(process_module._choose_device(wanted, place)) == chosen
        return
    with pytest.raises(ValueError, match=chosen):
        process_module._choose_device(wanted, place)


def never_start(folder: Path):
    if os.environ["RANK"] == "1":
        return "never"
    (folder / os.environ["RANK"]).touch()
    wait_for(lambda: len(list(folder.iterdir())) == 2, what="the other rank")
    try:
        start_process("cpu", timeout_s=3)
    except AgreementError as error:
        return str(error)


def test_the_prefix_tells_generations_and_attempts_apart():
    prefixes = {
        store_prefix({}),
        store_prefix({"MOEBIUS_GENERATION": "1"}),
        store_prefix({"TORCHELASTIC_RESTART_COUNT": "1"}),
        store_prefix({"MOEBIUS_GENERATION": "1", "TORCHELASTIC_RESTART_COUNT": "1"}),
    }
    assert len(prefixes) == 4


def test_a_rank_that_never_starts_is_named(tmp_path: Path):
    first, _, third = run_ranks(never_start, 3, tmp_path)
    assert first == third
    assert first.startswith("rank 1 of 3 did not come within 3 s to compare the start")


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("localhost", False)],
)
def test_which_addresses_only_this_machine_reaches(address, expected):
    assert is_loopback(address) is expected


def test_a_port_that_is_taken_is_no_foreign_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            serve("127.0.0.1", port)
