"""Tests the store of a generation: peers with the secret meet there, and strangers are refused unheard."""

import contextlib
import pickle
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import assert_nothing_left, fake_launch, wait_for
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from moebius.cluster.job import State, begin_submission, read_status
from moebius.cluster.nodes import rendezvous
from moebius.cluster.nodes.agent import interface_of
from moebius.cluster.nodes.assignment import Assignment
from moebius.cluster.nodes.node import Node
from moebius.cluster.nodes.provider import Capacity, ThisMachine
from moebius.cluster.nodes.rendezvous import (
    Meeting,
    NodeRendezvous,
    NotAuthentic,
    StoreGate,
    StoreRelay,
)
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.distributed.process.store import bind, is_loopback, serve_store

SECRET = secrets.token_hex(32)


def own_address() -> str:
    """Returns an address of this machine for other machines."""
    addresses = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family is socket.AF_INET and not is_loopback(entry.address)
    ]
    if not addresses:
        pytest.skip("this machine has no address but the loopback's")
    return addresses[0]


@pytest.fixture
def store():
    return serve_store(bind("127.0.0.1"), timeout_s=60)


@pytest.fixture
def gate(store):
    """Opens a gate in front of the store; yields its port."""
    bound = bind("127.0.0.1")
    port = bound.getsockname()[1]
    opened = StoreGate(bound, store_port=store.port, secret=SECRET)
    yield port
    opened.close()


@pytest.fixture
def relay(gate):
    opened = StoreRelay("127.0.0.1", gate, secret=SECRET)
    yield opened
    opened.close()


def client(port: int, *, timeout_s: float = 60.0) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def test_a_store_is_on_one_address_alone(store):
    assert client(store.port).add("mark", 1) == 1
    for elsewhere in (own_address(), "127.0.0.2"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, store.port), timeout=2)


def test_who_knows_the_secret_uses_the_store_as_if_it_were_here(store, relay):
    relay.await_gate(timeout_s=60)
    far, near = client(relay.port), client(store.port)
    far.set("small", "value")
    near.set("large", "x" * 1_000_000)  # many frames
    assert near.get("small") == b"value"
    assert far.get("large") == b"x" * 1_000_000
    waiting = threading.Timer(0.3, lambda: near.set("later", "now"))
    waiting.start()
    far.wait(["later"], timedelta(seconds=60))
    again: Any = far
    assert again.clone().add("count", 2) == 2


def test_many_connections_at_once(relay):
    relay.await_gate(timeout_s=60)
    with ThreadPoolExecutor(16) as pool:
        counts = pool.map(lambda _: client(relay.port).add("count", 1), range(64))
    assert sorted(counts) == list(range(1, 65))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200,
        b"\x00" * 64,
        b"\x09" + (0x3C85F7CE).to_bytes(4, "little") + b"\x00" * 100,  # as TCPStore's clients begin
        pickle.dumps(print) * 20,
    ],
)
def test_a_stranger_is_hung_up_on_and_the_store_hears_nothing(
    store, gate, relay, said, monkeypatch
):
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.5)
    before = store.num_keys()
    with socket.create_connection(("127.0.0.1", gate), timeout=60) as stranger:
        stranger.sendall(said)
        heard = b""
        try:
            while data := stranger.recv(4096):
                heard += data
        except ConnectionResetError:
            pass
    assert len(heard) == 32, "a random number and not a byte more"
    assert store.num_keys() == before
    relay.await_gate(timeout_s=60)  # others still come in


def test_another_secret_is_refused(gate):
    other = StoreRelay("127.0.0.1", gate, secret=secrets.token_hex(32))
    with pytest.raises(ConnectionError, match="did not open its store"):
        other.await_gate(timeout_s=1)
    other.close()


def test_a_false_gate_is_found_out():
    """A stranger listens in place of node 0; it can only echo."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(4096):
                peer.sendall(data)

    threading.Thread(target=answer, daemon=True).start()
    opened = StoreRelay("127.0.0.1", server.getsockname()[1], secret=SECRET)
    with pytest.raises(NotAuthentic, match="does not know this generation's secret"):
        opened.await_gate(timeout_s=60)
    opened.close()
    server.close()


@pytest.mark.parametrize("harm", ["flip", "repeat", "length"])
def test_frames_that_were_changed_on_the_way_end_the_connection(store, gate, harm):
    """A middleman between relay and gate changes bytes after the proof."""
    between = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket, spare: int) -> None:
        passed = 0
        while data := receive(source):
            if passed >= spare:
                data = {
                    "flip": data[:-1] + bytes([data[-1] ^ 1]),
                    "repeat": data + data,
                    "length": b"\xff\xff\xff\xff" + data[4:],
                }[harm]
            passed += len(data)
            target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def receive(source: socket.socket) -> bytes:
        try:
            return source.recv(65536)
        except OSError:
            return b""

    def meddle():
        while True:
            node, _ = between.accept()
            to_gate = socket.create_connection(("127.0.0.1", gate))
            for pair in ((node, to_gate, 64), (to_gate, node, 1 << 60)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=meddle, daemon=True).start()
    opened = StoreRelay("127.0.0.1", between.getsockname()[1], secret=SECRET)

    def count_three_times() -> None:
        meddled = client(opened.port, timeout_s=2)
        for _ in range(3):
            meddled.add("count", 1)

    with pytest.raises(RuntimeError):
        count_three_times()
    assert not store.check(["count"]) or harm == "repeat"
    if store.check(["count"]):
        assert store.add("count", 0) == 1, "what was repeated must not count twice"
    opened.close()
    between.close()


def test_a_short_secret_is_refused():
    with bind("127.0.0.1") as bound, pytest.raises(ValueError, match="64 random ones"):
        StoreGate(bound, store_port=1, secret="")


def test_agents_meet_and_their_ranks_are_told_a_loopback_address():
    address, port = own_address(), Node(own_address()).free_port()

    def meet(node_rank: int):
        meeting = Meeting("job-g1", node_rank, 3, address, port, SECRET, timeout_s=100)
        assert not meeting.is_on_one_machine
        handler = NodeRendezvous(meeting)
        found = handler.next_rendezvous()
        found.store.set(f"from {node_rank}", str(node_rank))
        seen = [found.store.get(f"from {other}") for other in range(3)]
        assert found.bootstrap_store_info is not None
        return handler, found.bootstrap_store_info.master_addr, seen

    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(meet, range(3)))
    assert [address for _, address, _ in met] == ["127.0.0.1"] * 3
    assert [seen for *_, seen in met] == [[b"0", b"1", b"2"]] * 3
    for handler, *_ in reversed(met):
        assert handler.shutdown()


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == interface_of("127.0.0.7")
    assert interface_of(own_address()) not in (None, interface_of("127.0.0.1"))
    assert interface_of("203.0.113.77") is None


# Real jobs ----------------------------------------------------------------------------------------------------------


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


class Stranger(threading.Thread):
    """Attacks every port of the job at this machine's address: as a store client, a false rank, and with a pickle."""

    def __init__(self, run_dir: Path, mark: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.payload = run_dir, pickle.dumps(Payload(mark))
        self.got_in: list[str] = []
        self.tried: set[int] = set()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            for port in self.listening_ports():
                self.knock(port)

    def listening_ports(self) -> set[int]:
        from moebius.cluster.nodes import processes

        ports = set()
        for pid in processes.find(str(self.run_dir)):
            try:
                found = psutil.Process(pid).net_connections("tcp")
            except psutil.Error:
                continue
            ports |= {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN}
        return ports

    def knock(self, port: int) -> None:
        self.tried.add(port)
        try:
            with socket.create_connection((own_address(), port), timeout=1) as peer:
                # a false rank: Gloo reads the number of a pair first
                peer.sendall((1).to_bytes(8, "little") + self.payload)
            store = TCPStore(
                own_address(), port, timeout=timedelta(seconds=1), wait_for_workers=False
            )
            store.set("moebius/generation_1/attempt_0/agreement/start/1/digest/1", self.payload)  # pyright: ignore[reportArgumentType]  # bytes, too
            self.got_in.append(f"the store at port {port}")
        except (OSError, RuntimeError) as refused:
            if not isinstance(refused, ConnectionRefusedError):
                self.got_in.append(f"port {port} answers: {refused}")


class TwoMachines:
    """Provides two nodes that know each other by this machine's own address, like two machines."""

    def __init__(self) -> None:
        self.nodes = [Node(own_address()), Node(own_address())]

    def capacity(self) -> Capacity:
        return Capacity(2, 2)

    def provide_nodes(self, num_nodes, while_waiting):
        return self.nodes

    def adopt_nodes(self):
        return ()

    def exclude(self, node, why: str) -> None:
        raise AssertionError(why)

    def release(self) -> None:
        for node in self.nodes:
            node.stop()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_stranger_does_not_get_to_the_store(tmp_path, machines):
    """On one machine no port, neither the store's nor Gloo's, can be reached from others; between two the
    gate disconnects him, and the job succeeds. (Gloo's ports accept, and only wait.)
    """
    run_dir, mark = tmp_path / "run", tmp_path / "executed"
    run_dir.mkdir()
    stranger = Stranger(run_dir, mark)
    stranger.start()
    launch = fake_launch(run_dir, "steps=10", "step_s=0.1", num_nodes=machines, ranks_per_node=2)
    begin_submission(launch)
    supervise(launch, ThisMachine() if machines == 1 else TwoMachines())
    stranger.done.set()
    stranger.join()
    status = read_status(run_dir)
    assert (status.state, status.generation) == (State.SUCCEEDED, 1), status
    assert len(stranger.tried) >= 3, "the store and each rank's Gloo"
    assert not mark.exists()
    if machines == 1:
        assert stranger.got_in == []
    else:
        assert not any(found.startswith("the store") for found in stranger.got_in), stranger.got_in
        refusals = (run_dir / "logs/g001/node0/agent.log").read_text()
        assert "refused a connection from" in refusals
    assert_nothing_left(run_dir)


def test_the_secret_is_in_no_file_and_in_no_environment(tmp_path):
    node = Node()
    attempt = Assignment(
        fake_launch(tmp_path, "plain=1", "step_s=0.3"),
        1,
        0,
        "127.0.0.1",
        node.free_port(),
        "127.0.0.1",
        secret=SECRET,
    )
    assert SECRET not in repr(attempt)
    from moebius.cluster.nodes import processes

    node.start(attempt)
    try:
        wait_for(node.running_ranks, what="a rank")
        for pid in processes.find(str(tmp_path)):
            process = psutil.Process(pid)
            assert SECRET not in str(process.environ()) + str(process.cmdline())
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert written
        assert not any(SECRET.encode() in path.read_bytes() for path in written)
    finally:
        node.stop()
