"""The pretended network itself: what is kept back, lost or cut, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from jobs import wait_for

from tests.network.nodes import ROOT, Network
from tests.network.switch import Wires

PORT = 5000
SENT = 2000
LOSS = 0.05
RECEIVE = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)  # SO_RCVBUFFORCE: nothing is lost here
receiver.bind(("", int(sys.argv[1])))
print("bound", flush=True)
told = []
while (datagram := receiver.recv(2000)) != b"end":
    told.append(datagram.decode())
print(*told, flush=True)
"""
SEND = """
import socket, sys
address, port, *words = sys.argv[1:]
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for word in words:
    sender.sendto(word.encode(), (address, int(port)))
"""
ECHO = """
import socket, sys
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(("", int(sys.argv[1])))
print("bound", flush=True)
datagram, peer = echo.recvfrom(2000)
echo.sendto(datagram, peer)
"""
PING = """
import socket, sys, time
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
began = time.monotonic()
ping.sendto(b"?", (sys.argv[1], int(sys.argv[2])))
ping.recv(2000)
print(time.monotonic() - began)
"""
HOLD = """
import subprocess, sys, time
from tests.network.nodes import network
with network(2) as machines:
    sleeper = subprocess.Popen(machines.command(1, "sleep", "1000"))
    print(machines.folder, *machines.pids, sleeper.pid, flush=True)
    time.sleep(1000)
"""


class Receiver:
    """Collects the datagrams that reach a machine until one says "end"."""

    def __init__(self, net: Network, node: int, port: int = PORT) -> None:
        self.net, self.node, self.port = net, node, port
        self._process = listen(net, node, RECEIVE, port)

    def send(self, source: int, *words: str) -> None:
        address = self.net.addresses[self.node]
        sent = self.net.run(source, *python(SEND), address, str(self.port), *words)
        assert sent.returncode == 0, sent.stderr

    def end(self) -> list[str]:
        """Returns what has come; the wires must be whole again."""
        self.send((self.node + 1) % 3, "end")
        told, _ = self._process.communicate(timeout=60)
        return told.split()


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def listen(net: Network, node: int, program: str, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        net.command(node, *python(program), str(port)), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "bound\n"
    return process


def test_a_machine_has_a_name_an_address_processes_and_memory_of_its_own(net, tmp_path):
    look = "hostname; ls /dev/shm; ls -d /proc/[0-9]* | wc -l; ip -brief address"
    net.run(1, "touch", "/dev/shm/mine")
    told = net.run(2, "sh", "-c", look).stdout.split()
    assert told[0] == "node2"
    assert int(told[1]) < 10, "not the processes of this machine"
    assert "10.77.0.3/24" in told
    assert net.run(1, "ls", "/dev/shm").stdout == "mine\n"
    net.run(1, "touch", str(tmp_path / "shared"))
    assert (tmp_path / "shared").exists(), "the file system is everybody's"


def test_a_frame_is_kept_back_both_ways(net):
    net.slow(0.05, 0, 1)
    with listen(net, 1, ECHO, PORT):
        told = net.run(0, *python(PING), net.addresses[1], str(PORT))
    assert float(told.stdout) >= 0.1
    assert net.wire(0, 1) == {"from": 0, "to": 1, "carried": 1, "lost": 0, "refused": 0}


def test_frames_are_lost_by_a_draw_that_the_seed_repeats(net):
    assert lost_of(net) == lost_of(net)


def lost_of(net: Network) -> list[str]:
    """Sends numbers and returns those that are lost."""
    net.reset()
    receiver = Receiver(net, 2)
    net.lose(LOSS)
    numbers = [str(number) for number in range(SENT)]
    receiver.send(0, *numbers)
    wire = wait_for(lambda: all_seen(net), what="the datagrams to pass the switch")
    net.lose(0.0)
    came = receiver.end()
    lost = sorted(set(numbers) - set(came), key=int)
    assert len(lost) == wire["lost"]
    spread = (SENT * LOSS * (1 - LOSS)) ** 0.5
    assert abs(len(lost) - SENT * LOSS) < 5 * spread
    assert came == [number for number in numbers if number not in lost], "in order, none twice"
    return lost


def all_seen(net: Network) -> dict[str, int] | None:
    wire = net.wire(0, 2)
    return wire if wire["carried"] + wire["lost"] + wire["refused"] == SENT else None


def test_a_machine_that_is_cut_off_hears_nobody_until_it_is_healed(net):
    first, second = Receiver(net, 1), Receiver(net, 2)
    net.cut(1)
    first.send(0, "lost")
    second.send(1, "lost-too")
    second.send(0, "heard")
    wait_for(lambda: net.wire(0, 1)["refused"] and net.wire(1, 2)["refused"], what="the datagrams")
    net.heal(1)
    first.send(0, "again")
    assert first.end() == ["again"]
    assert second.end() == ["heard"]


def test_two_machines_may_be_parted_while_a_third_reaches_both(net):
    first, second = Receiver(net, 1), Receiver(net, 2)
    net.cut(1, 2)
    first.send(2, "lost")
    first.send(0, "heard")
    second.send(1, "lost")
    second.send(0, "heard")
    wait_for(lambda: net.wire(2, 1)["refused"] and net.wire(1, 2)["refused"], what="the datagrams")
    net.heal()
    assert first.end() == ["heard"]
    assert second.end() == ["heard"]


@pytest.mark.usefixtures("net")
def test_of_a_test_that_was_killed_nothing_is_left():
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        folder, *pids = holder.stdout.readline().split()
        assert all(psutil.pid_exists(int(pid)) for pid in pids)
        os.kill(holder.pid, signal.SIGKILL)
    wait_for(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), what="their end")
    assert Path(folder).exists()
    from tests.network.nodes import network

    with network(1):
        assert not Path(folder).exists(), "the next one sweeps the folder"


def test_every_wire_draws_for_itself_by_the_seed():
    drawn = {
        (seed, pair): [wire.draw.random() for _ in range(3)]
        for seed in (1, 2)
        for pair, wire in Wires(3, seed).by_pair.items()
    }
    assert len({tuple(draws) for draws in drawn.values()}) == len(drawn)
    again = Wires(3, 1).by_pair[0, 1].draw
    assert [again.random() for _ in range(3)] == drawn[1, (0, 1)]
